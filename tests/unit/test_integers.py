"""What is taken for a whole number, wherever one is asked for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from muster import Collector, Evaluator
from muster.compat.prt_rl import MetricsTracker
from muster.errors import BadOption
from muster.testing import CountingEnv
from muster.utils.integers import integer


@pytest.mark.parametrize(
    "value", [3, np.int64(3), np.uint8(3), np.array(3), torch.tensor(3)]
)
def test_whole_numbers_of_any_library_are_taken_and_become_python_s(value):
    assert type(integer("n", value)) is int
    assert integer("n", value, 3) == 3


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        np.bool_(True),
        1.0,
        np.float32(2),
        "3",
        np.array([3, 4]),
        torch.ones(2),
        torch.tensor(2.0),
        -1,
    ],
)
def test_all_else_is_refused(value):
    with pytest.raises(BadOption, match=r"^n=.*: expected an integer of at least 0$"):
        integer("n", value, 0)


def test_what_the_message_says():
    assert integer("n", -7, None) == -7
    with pytest.raises(BadOption, match=r"^n='x': expected an integer$"):
        integer("n", "x", None)
    with pytest.raises(
        BadOption, match=r"^make\(n=0\): expected an integer of at least 1, or None$"
    ):
        integer("n", 0, of="make", or_else="None")


def test_it_is_asked_wherever_a_user_gives_a_number():
    n = np.int64(2)
    assert MetricsTracker(n).num_envs == 2
    with Collector(lambda: CountingEnv(3), None, num_envs=n) as c:
        assert type(c.collect(n_step=n).n_collected_steps) is int
    with Evaluator(
        lambda: CountingEnv(3),
        None,
        episodes=n,
        num_envs=n,
        num_workers=np.int64(0),
        seed=n,
    ) as evaluator:
        assert len(evaluator.evaluate().returns) == 2
