"""The two environments that Gymnasium does not have: camera-like observations, and a step that
costs CPU time.
"""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

FRAMES = "MusterBench/Frames-v0"
BUSY = "MusterBench/Busy-v0"


def burn(seconds: float) -> None:
    """Use ``seconds`` of this thread's CPU time.

    Wall time would pass by itself while another process has the core.
    """
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class FramesEnv(gymnasium.Env[NDArray[np.uint8], Any]):
    """84x84x4 uint8 observations out of a pool, so that a step costs its 20 us and no memory
    traffic of its own.
    """

    def __init__(self, step_s: float = 20e-6) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 255, (84, 84, 4), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(2)
        pool = np.random.default_rng(0).integers(
            0, 256, (16, 84, 84, 4), dtype=np.uint8
        )
        self._pool, self._t, self._step_s = list(pool), 0, step_s

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> Any:
        super().reset(seed=seed)
        return self._pool[0], {}

    def step(
        self, action: Any
    ) -> tuple[NDArray[np.uint8], float, bool, bool, dict[str, Any]]:
        burn(self._step_s)
        self._t += 1
        return self._pool[self._t & 15], 1.0, False, False, {}


class BusyEnv(gymnasium.Env[NDArray[np.float32], Any]):
    """A CartPole-sized environment whose step costs 200 us of CPU time, like a small physics
    engine.
    """

    def __init__(self, step_s: float = 200e-6) -> None:
        self.observation_space = gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self._obs, self._step_s = np.zeros(4, np.float32), step_s

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> Any:
        super().reset(seed=seed)
        return self._obs.copy(), {}

    def step(
        self, action: Any
    ) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        burn(self._step_s)
        return self._obs.copy(), 1.0, False, False, {}


def register() -> None:
    """Make both known to ``gymnasium.make``; harmless when repeated."""
    for name, cls, limit in ((FRAMES, FramesEnv, 500), (BUSY, BusyEnv, 200)):
        if name not in gymnasium.registry:
            gymnasium.register(name, entry_point=cls, max_episode_steps=limit)


class VectorCounting(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """B environments in three NumPy operations: frames so cheap that ten million take seconds.

    Environment i's observation counts its steps; its episodes have 10 + i % 7 steps, reset in the
    same step.
    """

    metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}  # noqa: RUF012 (Gymnasium's way)

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.single_observation_space = gymnasium.spaces.Box(0, 100, (4,), np.float32)
        self.single_action_space = gymnasium.spaces.Discrete(2)
        self.observation_space = gymnasium.vector.utils.batch_space(
            self.single_observation_space, num_envs
        )
        self.action_space = gymnasium.vector.utils.batch_space(
            self.single_action_space, num_envs
        )
        self._length = 10 + np.arange(num_envs) % 7
        self._t = np.zeros(num_envs, np.int64)

    def reset(
        self, *, seed: Any = None, options: Any = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        self._t[:] = 0
        return self._observation(), {}

    def step(self, actions: Any) -> Any:
        self._t += 1
        terminated = self._t >= self._length
        infos: dict[str, Any] = {}
        if terminated.any():
            last = self._observation()
            final = np.empty(self.num_envs, object)
            final[:] = list(last)
            infos = {"final_obs": final, "_final_obs": terminated.copy()}
            self._t[terminated] = 0
        return (
            self._observation(),
            np.ones(self.num_envs),
            terminated,
            np.zeros(self.num_envs, bool),
            infos,
        )

    def _observation(self) -> NDArray[np.float32]:
        return np.repeat(self._t[:, None], 4, 1).astype(np.float32)
