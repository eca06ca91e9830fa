"""The operations that a device executes for one time step: at most 5 % more than those of a loop
that a user writes by hand, which stores the same columns. On a GPU their number is what eager
loops wait for, whatever the number of environments.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from gymnasium.vector import AutoresetMode

from benchmarks.on_device import Loop, Sampling, network, td_policy
from muster import Collector, policies
from muster.testing import TorchCartPole
from tests.fakes.device_rows import on_device
from tests.fakes.waiting import Waits

B = 8
FIXED = 75  # operations per rollout, whatever its length


def launches(run: Callable[[], Any]) -> int:
    """The number of operations of a rollout after the first two."""
    run()
    run()
    with Waits() as mode:
        run()
    return mode.launches.total()


def per_step(make: Callable[[int], Callable[[], Any]]) -> tuple[float, float]:
    """The number of operations per time step, and of those per rollout."""
    short, long = (launches(make(T)) for T in (10, 30))
    step = (long - short) / 20
    return step, short - 10 * step


def hand(T: int) -> Callable[[], Any]:
    return Loop(B, T, "cpu").batch


def collecting(
    policy: Callable[[], Any], **options: Any
) -> Callable[[int], Callable[[], Any]]:
    def make(T: int) -> Callable[[], Any]:
        env = on_device(partial(TorchCartPole, B, **options))
        return Collector(env, policy(), frames_per_batch=T * B, seed=0).next

    return make


@pytest.mark.parametrize(
    "make",
    [
        collecting(lambda: policies.categorical(network("cpu"))),
        collecting(lambda: Sampling(network("cpu"))),
        collecting(lambda: td_policy("cpu")),
        collecting(
            lambda: policies.categorical(network("cpu")),
            autoreset=AutoresetMode.DISABLED,
        ),
    ],
    ids=["head", "plain module", "TensorDictModule", "head, resets by mask"],
)
def test_a_step_launches_at_most_one_in_twenty_more_than_a_loop_by_hand(make):
    by_hand, _ = per_step(hand)
    step, fixed = per_step(make)
    assert by_hand > 50
    assert step <= 1.05 * by_hand
    assert fixed <= FIXED
