"""Every error of docs/recipes/troubleshooting.md is raised here, with the text of its heading."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch
from torch import nn

from muster import Collector, MultiSyncCollector, policies
from muster.errors import MusterError
from muster.testing import CountingEnv
from tests.warned import warnings_are_errors

PAGE = Path(__file__).resolve().parents[2] / "docs" / "recipes" / "troubleshooting.md"
LOCK = threading.Lock()


class Killed(CountingEnv):
    def step(self, action: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


class Waits(CountingEnv):
    def step(self, action: Any) -> Any:
        threading.Event().wait()


def locked() -> gym.Env[Any, Any]:
    with LOCK:
        return CountingEnv()


def one(env: Any, policy: Any, **options: Any) -> None:
    with Collector(
        env, policy, **{"frames_per_batch": 8, "num_envs": 2, **options}
    ) as collector:
        collector.next()


def several(*envs: Any, **options: Any) -> None:
    with MultiSyncCollector(
        list(envs), None, frames_per_batch=8, **options
    ) as collector:
        collector.next()


def hold() -> None:
    options = {"frames_per_batch": 2000, "num_envs": 2, "slot_memory_limit": 300_000}
    with Collector("CartPole-v1", None, **options) as collector:
        kept = [collector.next() for _ in range(3)]
        assert len(kept) < 3


def not_finite() -> None:
    layer = nn.Linear(4, 2)
    nn.init.constant_(layer.weight, float("nan"))
    one("CartPole-v1", policies.categorical(layer))


def warned() -> None:
    with warnings_are_errors():
        one(CountingEnv, None, num_envs=6, frames_per_batch=100)


FLOAT64 = nn.Linear(17, 6)
PROGRAMS: dict[str, Callable[[], None]] = {
    "mat1 and mat2 shapes cannot be multiplied": lambda: one(
        "CartPole-v1", policies.categorical(nn.Linear(5, 2))
    ),
    "Without num_envs= there is no batch dimension": lambda: one(
        "CartPole-v1", lambda obs: (obs[:, 2] > 0).long(), num_envs=None
    ),
    "with shape (2, 2), expected (2,); scores or one-hot vectors need an argmax": lambda: (
        one("CartPole-v1", nn.Linear(4, 2))
    ),
    "mat1 and mat2 must have the same dtype": lambda: one(
        "HalfCheetah-v5", lambda obs: FLOAT64(obs)
    ),
    "is not a multiple of frames_per_batch": lambda: one(
        CountingEnv, None, total_frames=20
    ),
    "cannot be shared equally by": warned,
    "which cannot be pickled": lambda: several(lambda: (LOCK, locked())[1]),
    "is an environment, which lives in this process": lambda: several(CountingEnv()),
    "Register it, or import the package that registers it": lambda: one(
        "Maze-v0", None
    ),
    "was killed by SIGKILL": lambda: several(Killed),
    "has been in step for": lambda: several(Waits, timeouts={"step": 0.5}),
    "batches of 116,352 bytes are still referenced": hold,
    "the network returned NaN or infinity": not_finite,
    "changed its input observation in place": lambda: one(
        "CartPole-v1", lambda obs: (obs.sub_(1)[:, 0] > 0).long()
    ),
}


def test_every_error_of_the_page_is_here() -> None:
    headings = re.findall(r"^## `(.*)`$", PAGE.read_text("utf-8"), re.M)
    assert headings == list(PROGRAMS)
    assert len(headings) >= 10


@pytest.mark.parametrize("text", PROGRAMS)
def test_it_is_raised(text: str) -> None:
    torch.manual_seed(0)
    with pytest.raises((MusterError, UserWarning)) as info:
        PROGRAMS[text]()
    assert text in str(info.value)
