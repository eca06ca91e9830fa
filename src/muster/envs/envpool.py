"""EnvPool as a ``gymnasium.vector.VectorEnv`` that leaves resets to the caller.

This module does not import ``envpool``: it recognizes pools by their common base class.
"""

from __future__ import annotations

import warnings
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from muster.envs.checks import the_only
from muster.envs.spaces import observation_codec
from muster.envs.vector import VectorEnvBatch
from muster.errors import BadEnvOutput, BadOption, UnsupportedEnv
from muster.memory.specs import Array
from muster.protocols import EnvBatch


def takes(obj: Any) -> bool:
    """Return whether ``obj`` is an EnvPool. Test this first: pools are also gymnasium or dm_env environments."""
    return any(f"{cls.__module__}.{cls.__name__}" == "envpool.python.envpool.EnvPoolMixin" for cls in type(obj).__mro__)


def adapt(envs: list[Any], device: Any) -> EnvBatch:
    """Return the env batch of one EnvPool; ``device`` has no effect."""
    return VectorEnvBatch(EnvPoolVectorEnv(the_only(envs)))


class EnvPoolVectorEnv(VectorEnv[Any, Any, Any]):
    """A synchronous EnvPool behind Gymnasium's interface, in DISABLED mode::

        env = EnvPoolVectorEnv(envpool.make_gymnasium("Pong-v5", num_envs=64, seed=0))

    EnvPool resets an environment in the step after the end of its episode; that step is no transition. Muster resets
    it by mask right after the end, which starts the same new episode without such a step. Rows are in the order of the
    environments. Observations have the dtypes of their spaces (EnvPool returns int32 for Discrete, bool for
    MultiBinary). If the bounds are C++'s smallest positive and largest number, the space is unbounded. Later calls do
    not change returned arrays.

    **Seeds** are fixed when a pool is made: environment i has ``seed + i``. ``reset(seed=s)`` cannot change that, and
    warns once, unless ``s`` is the seed of this pool and this is the first reset. So pass the seed twice:
    ``Collector(lambda: envpool.make_gymnasium(..., seed=3), policy, seed=3, ...)``.

    An episode that ends with step ``max_episode_steps`` is truncated; EnvPool does not report whether it also
    terminated. With Atari's ``episodic_life``, a reset within a life continues the same game.

    Args:
        pool: pool, owned (and closed) by this object.

    Raises:
        UnsupportedEnv: not a pool of type "gymnasium", asynchronous (``batch_size < num_envs``), or several players.
    """

    muster_exact = True

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        config = pool.config
        self.num_envs = int(config["num_envs"])
        who, size = type(pool).__name__, int(config["batch_size"] or self.num_envs)
        if not isinstance(pool, gymnasium.Env):
            raise UnsupportedEnv(f"{who} is not of type 'gymnasium': make it with envpool.make_gymnasium(...)")
        if size != self.num_envs:
            raise UnsupportedEnv(
                f"{who} is asynchronous: it steps batch_size={size} of num_envs={self.num_envs} at a time, and rows "
                f"of a batch would not follow each other. Leave batch_size out, or pass a list of functions that "
                f"make pools of {size}."
            )
        if config.get("max_num_players", 1) > 1:
            raise UnsupportedEnv(
                f"{who} has up to {config['max_num_players']} players, whose rows come and go; Muster takes pools of "
                f"one player. Multi-agent environments can be given as PettingZoo ParallelEnv."
            )
        self.metadata = {**(pool.metadata or {}), "autoreset_mode": AutoresetMode.DISABLED}
        self.single_observation_space = _unbounded(pool.observation_space)
        self.single_action_space = _unbounded(pool.action_space)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._codec = observation_codec(self.single_observation_space)
        self._all = np.arange(self.num_envs)
        self._newest: list[Array] = []  # observations, [B, *shape] per leaf; none before the first reset
        self._seeds = list(config.get("env_seed") or ()) or [config["seed"] + i for i in range(self.num_envs)]
        self._warned = False

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start new episodes in the environments of ``options["reset_mask"]`` (``[B]`` bool, default all).

        Returns:
            the newest observation of each environment, and EnvPool's info, with rows for reset environments only.
        """
        given = dict(options or {})
        mask = given.pop("reset_mask", None)
        if given:
            raise BadOption(f"EnvPool's reset knows the option reset_mask only, not {sorted(given)}; leave them out")
        if seed is not None:
            self._check_seed(seed)
        whole = mask is None or not self._newest
        rows = self._all if whole else np.flatnonzero(mask)
        obs, info = self.pool.reset(rows.astype(np.int32))
        (leaves,) = self._in_order(rows, info, self._flatten(obs))
        if not whole:
            begun, leaves = leaves, [leaf.copy() for leaf in self._newest]  # the caller has the old arrays
            for leaf, part in zip(leaves, begun, strict=True):
                leaf[rows] = part
        self._newest = leaves
        return self._codec.build(leaves), info

    def step(self, actions: Any) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        obs, *columns, info = self.pool.step(actions)
        self._newest, columns = self._in_order(self._all, info, self._flatten(obs), columns)
        return self._codec.build(self._newest), columns[0], columns[1], columns[2], info

    def muster_infos(self, info: dict[str, Any]) -> Any:
        """Return the infos of a call with a row for each environment, in their order."""
        ids = np.asarray(info["env_id"])
        return info if np.array_equal(ids, self._all) else _by_env(info, ids, self.num_envs)

    def close_extras(self, **kwargs: Any) -> None:
        self.pool.close()

    def _flatten(self, obs: Any) -> list[Array]:
        """Return the leaves of an observation, in the dtypes of their spaces where that is lossless."""
        pairs = zip(self._codec.flatten(obs), self._codec.specs.values(), strict=True)
        return [v.astype(s.dtype, copy=False) if np.can_cast(v.dtype, s.dtype) else v for v, s in pairs]

    def _in_order(self, rows: Array, info: Any, *groups: list[Array]) -> list[list[Array]]:
        """Sort arrays with rows for ``info["env_id"]`` into the order of ``rows``."""
        ids = np.asarray(info["env_id"])
        if np.array_equal(ids, rows):
            return list(groups)
        order = np.argsort(ids)
        if not np.array_equal(ids[order], rows):
            raise BadEnvOutput(f"{type(self.pool).__name__} returned the environments {ids}, expected {rows}")
        return [[array[order] for array in group] for group in groups]

    def _check_seed(self, seed: Any) -> None:
        seeds = [seed + i for i in range(self.num_envs)] if np.ndim(seed) == 0 else list(seed)
        if self._warned or (seeds == self._seeds and not self._newest):
            return
        self._warned = True
        warnings.warn(
            f"EnvPool cannot be seeded after it was made: this one was made with the seeds {self._seeds[:3]}..., "
            f"and goes on with them although {seeds[:3]}... were asked for. Pass the seed to envpool.make_gymnasium "
            f"too, and make a new pool to restart.",
            stacklevel=2,
        )


def _by_env(info: Any, ids: Array, num_envs: int) -> Any:
    """Expand arrays with rows for the environments ``ids`` to a row for each environment."""
    if isinstance(info, dict):
        return {name: _by_env(part, ids, num_envs) for name, part in info.items()}
    if np.shape(info)[:1] != ids.shape:
        return info
    rows = np.zeros((num_envs, *np.shape(info)[1:]), np.asarray(info).dtype)
    rows[ids] = info
    return rows


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
