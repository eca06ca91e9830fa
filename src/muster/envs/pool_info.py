"""The description of an EnvPool: its sizes, spaces and seeds, for its synchronous and its asynchronous adapter."""

from __future__ import annotations

import warnings
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from muster.envs.spaces import observation_codec
from muster.errors import UnsupportedEnv
from muster.memory.specs import Array


class PoolInfo:
    """The sizes, spaces and seeds of an EnvPool.

    Attributes:
        batch_size: number of environments that the pool steps at a time; ``num_envs`` if it is synchronous.
        observation_space, action_space: those of one environment.
        codec: codec of the observations.

    Raises:
        UnsupportedEnv: not a pool of type "gymnasium", or several players.
    """

    def __init__(self, pool: Any) -> None:
        self.pool, self.name, config = pool, type(pool).__name__, pool.config
        self.num_envs = int(config["num_envs"])
        self.batch_size = int(config["batch_size"] or self.num_envs)
        if not isinstance(pool, gymnasium.Env):
            raise UnsupportedEnv(f"{self.name} is not of type 'gymnasium': make it with envpool.make_gymnasium(...)")
        if config.get("max_num_players", 1) > 1:
            raise UnsupportedEnv(
                f"{self.name} has up to {config['max_num_players']} players, whose rows come and go; Muster takes "
                f"pools of one player. Multi-agent environments can be given as PettingZoo ParallelEnv."
            )
        self.observation_space = _unbounded(pool.observation_space)
        self.action_space = _unbounded(pool.action_space)
        self.codec = observation_codec(self.observation_space)
        self._seeds = list(config.get("env_seed") or ()) or [config["seed"] + i for i in range(self.num_envs)]
        self._warned = False

    def leaves(self, obs: Any) -> list[Array]:
        """Return the leaves of an observation, in the dtypes of their spaces where that is lossless."""
        pairs = zip(self.codec.flatten(obs), self.codec.specs.values(), strict=True)
        return [v.astype(s.dtype, copy=False) if np.can_cast(v.dtype, s.dtype) else v for v, s in pairs]

    def check_seed(self, seed: Any, *, running: bool) -> None:
        """Warn once if environments of this pool cannot have this seed, or list of seeds.

        Args:
            running: the pool was reset before, so that its own seeds come too late, too.
        """
        seeds = [seed + i for i in range(self.num_envs)] if np.ndim(seed) == 0 else list(seed)
        if self._warned or (seeds == self._seeds and not running):
            return
        self._warned = True
        warnings.warn(
            f"EnvPool cannot be seeded after it was made: this one was made with the seeds {self._seeds[:3]}..., "
            f"and goes on with them although {seeds[:3]}... were asked for. Pass the seed to envpool.make_gymnasium "
            f"too, and make a new pool to restart.",
            stacklevel=3,
        )


def _unbounded(space: Any) -> Any:
    """Remove the bounds that mean unbounded in EnvPool: low is ``numeric_limits<float>::min()``, which is above 0."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: _unbounded(part) for key, part in space.spaces.items()})
    if not isinstance(space, spaces.Box) or space.dtype.kind != "f":
        return space
    limits = np.finfo(space.dtype)
    free = (space.low == limits.tiny) & (space.high == limits.max)
    low, high = np.where(free, -np.inf, space.low), np.where(free, np.inf, space.high)
    return spaces.Box(low.astype(space.dtype), high.astype(space.dtype), dtype=space.dtype.type)
