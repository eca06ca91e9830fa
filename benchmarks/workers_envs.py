"""An environment that waits, known to Gymnasium as ``SLEEP``, and one that does nothing, known with
17 floats as ``SEVENTEEN`` and with a step that waits as ``WAIT``.

Workers import this module, so it imports nothing large: that would be counted as the workers' cost.
"""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

FLOATS = 4  # in an observation
SLEEP = f"{__name__}:MusterBench/Sleep-v0"
SEVENTEEN = f"{__name__}:MusterBench/Seventeen-v0"
WAIT = f"{__name__}:MusterBench/Wait-v0"


class SleepEnv(gymnasium.Env[NDArray[np.float32], Any]):
    """Every step waits 0.5 to 5 ms, uniform and drawn from the environment's own generator, and
    uses no CPU time.
    """

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self._obs = np.zeros(4, np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> Any:
        super().reset(seed=seed)
        return self._obs.copy(), {}

    def step(
        self, action: Any
    ) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        time.sleep(self.np_random.uniform(0.5e-3, 5e-3))  # noqa: TID251 (a simulator somewhere else)
        return self._obs.copy(), 1.0, False, False, {}


class PlainEnv(gymnasium.Env[Any, Any]):
    """Returns the same array in every step, so that what is measured is what a collector does with
    it.

    Args:
        floats: in an observation, or in each entry of one.
        leaves: entries of the observation, a dict; 0: an array.
        length: steps per episode; None: no end.
        sleep_s: that a step waits.
    """

    def __init__(
        self,
        floats: int = FLOATS,
        leaves: int = 0,
        length: int | None = None,
        sleep_s: float = 0.0,
    ) -> None:
        box = gymnasium.spaces.Box(-1.0, 1.0, (floats,), np.float32)
        array: NDArray[np.float32] = np.zeros(floats, np.float32)
        names = [f"sensor_{i}" for i in range(leaves)]
        self.observation_space: Any = (
            gymnasium.spaces.Dict(dict.fromkeys(names, box)) if leaves else box
        )
        self.action_space = gymnasium.spaces.Discrete(2)
        self._observation: Any = dict.fromkeys(names, array) if leaves else array
        self._length, self._sleep_s, self._t = length, sleep_s, 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> Any:
        self._t = 0
        return self._observation, {}

    def step(self, action: Any) -> Any:
        self._t += 1
        if self._sleep_s:
            time.sleep(self._sleep_s)  # noqa: TID251 (a simulator somewhere else)
        return self._observation, 1.0, self._t == self._length, False, {}


gymnasium.register(
    SLEEP.partition(":")[2], entry_point=f"{__name__}:SleepEnv", max_episode_steps=200
)
gymnasium.register(
    SEVENTEEN.partition(":")[2],
    entry_point=f"{__name__}:PlainEnv",
    max_episode_steps=1000,
    kwargs={"floats": 17},
)
gymnasium.register(
    WAIT.partition(":")[2],
    entry_point=f"{__name__}:PlainEnv",
    max_episode_steps=1000,
    kwargs={"sleep_s": 0.5e-3},
)
