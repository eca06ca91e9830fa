"""An environment that waits, known to Gymnasium as ``SLEEP``."""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

SLEEP = f"{__name__}:MusterBench/Sleep-v0"


class SleepEnv(gymnasium.Env[NDArray[np.float32], Any]):
    """Every step waits 0.5 to 5 ms, uniform and drawn from the environment's own generator, and uses no CPU time."""

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self._obs = np.zeros(4, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return self._obs.copy(), {}

    def step(self, action: Any) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        time.sleep(self.np_random.uniform(0.5e-3, 5e-3))  # noqa: TID251 (a simulator somewhere else)
        return self._obs.copy(), 1.0, False, False, {}


gymnasium.register(SLEEP.partition(":")[2], entry_point=f"{__name__}:SleepEnv", max_episode_steps=200)
