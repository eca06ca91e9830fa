"""Copies of the last observations of episodes, for vector environments that keep them over a reset
without one.
"""

from __future__ import annotations

from typing import Any

import gymnasium

from muster.envs.checks import kept_info
from muster.memory.objects import copied


class OwnMemory(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Returns copies of the last observation and info of an episode.

    With ``SAME_STEP``, Gymnasium's ``SyncVectorEnv`` and SB3's ``DummyVecEnv`` keep them while they
    reset the environment. An environment that uses its memory again would write its first
    observation into them.
    """

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        if terminated or truncated:
            obs = copied(obs)
            info = kept_info(info)
        return obs, reward, terminated, truncated, info

    def reset(self, **arguments: Any) -> tuple[Any, Any]:
        return self.env.reset(**arguments)

    def __getattr__(self, name: str) -> Any:
        if name == "env" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.env, name)


def with_own_memory(batch: Any) -> None:
    """Wrap the environments of ``batch``, the attribute ``envs``, unless they are wrapped already."""
    wrapped = []
    for env in batch.envs:
        wrapped.append(env if isinstance(env, OwnMemory) else OwnMemory(env))
    batch.envs = wrapped
