"""Environments that fail in the workers of a vector environment. Light to import, since they import it."""

from __future__ import annotations

import os
import threading
from typing import Any

import gymnasium
import numpy as np

from muster.testing import CountingEnv
from tests.fakes.faults import first_time

AT = 3  # the failing step of an episode


class FailsOnce(CountingEnv):
    """Does something in step ``AT`` of its first life: until ``mark`` exists."""

    def __init__(self, do: Any, mark: str, *, on_reset: bool = False) -> None:
        super().__init__(9, noise=True)
        self.do, self.mark, self.on_reset = do, mark, on_reset

    def reset(self, **options: Any) -> Any:
        if self.on_reset and self.seeds:
            self._fail()
        return super().reset(**options)

    def step(self, action: Any) -> Any:
        if self.t + 1 == AT and not self.on_reset:
            self._fail()
        return super().step(action)

    def _fail(self) -> None:
        if first_time(self.mark):
            self.do(None)


class AlwaysFails(CountingEnv):
    def step(self, action: Any) -> Any:
        raise ValueError("broken")


class AlwaysDies(CountingEnv):
    def step(self, action: Any) -> Any:
        os._exit(5)


class Locked(CountingEnv):
    def step(self, action: Any) -> Any:
        return (*super().step(action)[:-1], {"lock": threading.Lock()})


class Counted(CountingEnv):
    """Has what tests of ``env_method`` and others look for."""

    render_mode = "rgb_array"
    options: Any = None

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.options = options
        return super().reset(seed=seed)

    def plus(self, a: int, *, b: int) -> int:
        return self.t + a + b

    def fails(self) -> float:
        return 1 / 0

    def render(self) -> Any:
        return np.zeros((4, 4, 3), np.uint8)


def Wrapped() -> Any:  # noqa: N802
    return gymnasium.wrappers.TimeLimit(Counted(), 100)
