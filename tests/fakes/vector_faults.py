"""Environments that fail in the workers of a vector environment.

Light to import, since they import it.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Sequence
from pathlib import Path
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


class Gated(CountingEnv):
    """A step, a reset after the first one, and ``wait`` take until a file exists."""

    def __init__(self, gate: str) -> None:
        super().__init__(9)
        self.gate = gate

    def reset(self, **options: Any) -> Any:
        if self.seeds:
            self.wait()
        return super().reset(**options)

    def step(self, action: Any) -> Any:
        self.wait()
        return super().step(action)

    def wait(self) -> int:
        pause = threading.Event()
        while not os.path.exists(self.gate):
            pause.wait(0.005)
        return self.t

    def large(self) -> Any:
        self.wait()
        return np.zeros(1 << 20)

    def take(self, data: Any) -> int:
        self.wait()
        return len(data)


class Telling(CountingEnv):
    """Its infos have names that batches of environments use themselves."""

    def __init__(self, length: int, names: Sequence[str]) -> None:
        super().__init__(length)
        self.names = names
        self.steps = 0

    def reset(self, **options: Any) -> Any:
        obs, _ = super().reset(**options)
        return obs, self.info()

    def step(self, action: Any) -> Any:
        *got, _ = super().step(action)
        return *got, self.info()

    def info(self) -> dict[str, Any]:
        self.steps += 1
        return {name: {"x": self.steps} for name in self.names}


class Closing(CountingEnv):
    """Writes a file when it is closed."""

    def __init__(self, mark: str) -> None:
        super().__init__(9)
        self.mark = mark

    def close(self) -> None:
        Path(self.mark).touch()


class Drawing(gymnasium.Env[Any, Any]):
    """Observes numbers of the global generators: some in each step, as many more as the action
    says.
    """

    action_space = gymnasium.spaces.Discrete(9)

    def __init__(self, length: int = 4, *, from_torch: bool = False) -> None:
        self.observation_space = gymnasium.spaces.Box(
            -99, 99, (2 + from_torch,), np.float64
        )
        self.length, self.t, self.torch = length, 0, None
        if from_torch:
            import torch

            self.torch = torch
        self.made = np.random.rand()

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self._observe(), {"x": random.random()}

    def step(self, action: Any) -> Any:
        self.t += 1
        np.random.rand(int(action))
        return self._observe(), random.gauss(0, 1), self.t >= self.length, False, {}

    def draw(self) -> float:
        return random.random() + np.random.randn()

    def _observe(self) -> Any:
        more = [] if self.torch is None else [self.torch.randn(()).item()]
        return np.array([np.random.randn(), random.random(), *more])


class Locking(CountingEnv):
    """Has an attribute that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__(9)
        self.lock = threading.Lock()

    def is_locked(self) -> bool:
        return self.lock.locked()


class Rendering(CountingEnv):
    """Counts its frames."""

    def __init__(self, mode: str | None) -> None:
        super().__init__(9)
        self.render_mode, self.rendered = mode, 0

    def render(self) -> Any:
        self.rendered += 1
        return np.full((4, 4, 3), self.rendered, np.uint8)
