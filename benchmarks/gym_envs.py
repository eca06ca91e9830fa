"""Run a script of CleanRL with Gymnasium's environments: MuJoCo's and Atari's for its gym 0.23 do
not install any more.

    python -m benchmarks.gym_envs SCRIPT --env-id HalfCheetah-v5 ...

``benchmarks.curves`` does so. It needs gym and gymnasium, and no Muster.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

import ale_py
import gym
import gymnasium
import numpy as np
from gym.envs.registration import register
from gym.utils import seeding

IDS = ("HalfCheetah-v5", "Hopper-v5", "BoxingNoFrameskip-v4")


class OldApi(gym.Env):
    """An environment of Gymnasium with gym 0.23's ``reset``, ``step`` and ``seed``; other
    attributes are passed on.
    """

    def __init__(self, env_id: str) -> None:
        self.inner = gymnasium.make(env_id)
        self.inner_seed: int | None = None
        self.observation_space = self._space(self.inner.observation_space)
        self.action_space = self._space(self.inner.action_space)

    @staticmethod
    def _space(space: Any) -> Any:
        if isinstance(space, gymnasium.spaces.Discrete):
            return gym.spaces.Discrete(int(space.n))
        return gym.spaces.Box(space.low, space.high, dtype=space.dtype)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.inner.unwrapped, name)

    def seed(self, seed: int | None = None) -> list[int]:
        """Seed the next reset, and the generator that wrappers draw from."""
        self.inner_seed = seed
        self._np_random, used = seeding.np_random(seed)
        return [used]

    def reset(self, **_: Any) -> np.ndarray:
        """Return the first observation."""
        obs, _ = self.inner.reset(seed=self.inner_seed)
        self.inner_seed = None
        return obs

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, dict[str, Any]]:
        """Return observation, reward, done and info; a time limit shows as gym 0.23's TimeLimit
        shows it.
        """
        obs, reward, terminated, truncated, info = self.inner.step(action)
        if truncated and not terminated:
            info["TimeLimit.truncated"] = True
        return obs, float(reward), terminated or truncated, info


if __name__ == "__main__":
    gymnasium.register_envs(ale_py)
    for env_id in IDS:
        register(env_id, entry_point=OldApi, kwargs={"env_id": env_id})
    sys.argv.pop(0)
    runpy.run_path(sys.argv[0], run_name="__main__")
