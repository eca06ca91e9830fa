"""EnvPool as a ``gymnasium.vector.VectorEnv`` that leaves resets to the caller; asynchronous:
``envpool_async``.

This module does not import ``envpool``: it recognizes pools by their common base class.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from muster.envs.checks import the_only
from muster.envs.envpool_async import AsyncPoolEnvs, PoolInfo
from muster.envs.vector import VectorEnvBatch
from muster.errors import BadEnvOutput, BadOption, UnsupportedEnv
from muster.memory.specs import Array
from muster.protocols import EnvBatch


def takes(obj: Any) -> bool:
    """Return whether ``obj`` is an EnvPool.

    Test this first: pools are also gymnasium or dm_env environments.
    """
    names = [f"{cls.__module__}.{cls.__name__}" for cls in type(obj).__mro__]
    return "envpool.python.envpool.EnvPoolMixin" in names


def adapt(envs: list[Any], device: Any) -> EnvBatch:
    """Return the env batch of one EnvPool; ``device`` has no effect."""
    pool = PoolInfo(the_only(envs))
    if pool.batch_size < pool.num_envs:
        return AsyncPoolEnvs(pool)
    return VectorEnvBatch(EnvPoolVectorEnv(pool.pool))


class EnvPoolVectorEnv(VectorEnv[Any, Any, Any]):
    """A synchronous EnvPool behind Gymnasium's interface, in DISABLED mode::

        env = EnvPoolVectorEnv(envpool.make_gymnasium("Pong-v5", num_envs=64, seed=0))

    EnvPool resets an environment in the step after the end of its episode; that step is no
    transition. Muster resets it by mask right after the end, which starts the same new episode
    without such a step. Rows are in the order of the environments. Observations have the dtypes of
    their spaces (EnvPool returns int32 for Discrete, bool for MultiBinary). If the bounds are C++'s
    smallest positive and largest number, the space is unbounded. Later calls do not change returned
    arrays.

    **Seeds** are fixed when a pool is made: environment i has ``seed + i``. ``reset(seed=s)``
    cannot change that, and warns once, unless ``s`` is the seed of this pool and this is the first
    reset. So pass the seed twice: ``Collector(lambda: envpool.make_gymnasium(..., seed=3), policy,
    seed=3, ...)``.

    An episode that ends with step ``max_episode_steps`` is truncated; EnvPool does not report
    whether it also terminated. With Atari's ``episodic_life``, a reset within a life continues the
    same game.

    Args:
        pool: pool, owned (and closed) by this object.

    Raises:
        UnsupportedEnv: see ``PoolInfo``; or the pool is asynchronous (``batch_size < num_envs``).
    """

    muster_exact = True

    def __init__(self, pool: Any) -> None:
        about = PoolInfo(pool)
        self.pool = pool
        self._about = about
        self.num_envs = about.num_envs
        if about.batch_size != self.num_envs:
            raise UnsupportedEnv(
                f"{about.name} is asynchronous: it steps batch_size={about.batch_size} of"
                f" num_envs={self.num_envs} at a time, which a gymnasium.vector.VectorEnv cannot"
                " do. Give a collector the pool itself, or a function that makes it; or leave"
                " batch_size out."
            )
        self.metadata = {
            **(pool.metadata or {}),
            "autoreset_mode": AutoresetMode.DISABLED,
        }
        self.single_observation_space = about.observation_space
        self.single_action_space = about.action_space
        self.observation_space = batch_space(
            self.single_observation_space, self.num_envs
        )
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._all = np.arange(self.num_envs)
        # observations, [B, *shape] per leaf; none before the first reset
        self._newest: list[Array] = []

    def reset(
        self,
        *,
        seed: Any = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Start new episodes in the environments of ``options["reset_mask"]`` (``[B]`` bool,
        default all).

        Returns:
            the newest observation of each environment, and EnvPool's info, with rows for reset
            environments only.
        """
        given = dict(options or {})
        mask = given.pop("reset_mask", None)
        if given:
            raise BadOption(
                f"EnvPool's reset knows the option reset_mask only, not {sorted(given)}; leave"
                " them out"
            )
        if seed is not None:
            self._about.check_seed(seed, running=bool(self._newest))
        whole = mask is None or not self._newest
        rows = self._all if whole else np.flatnonzero(mask)
        # the caller has the old arrays
        newest = [] if whole else [leaf.copy() for leaf in self._newest]
        obs, info = self.pool.reset(rows.astype(np.int32))
        (leaves,) = self._in_order(rows, info, self._about.leaves(obs))
        if not whole:
            begun = leaves
            leaves = newest
            for leaf, part in zip(leaves, begun, strict=True):
                leaf[rows] = part
        self._newest = leaves
        return self._about.codec.build(leaves), info

    def step(self, actions: Any) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        obs, *columns, info = self.pool.step(actions)
        leaves = self._about.leaves(obs)
        self._newest, columns = self._in_order(self._all, info, leaves, columns)
        reward, terminated, truncated = columns
        return (
            self._about.codec.build(self._newest),
            reward,
            terminated,
            truncated,
            info,
        )

    def muster_infos(self, info: dict[str, Any]) -> Any:
        """Return the infos of a call with a row for each environment, in their order."""
        ids = np.asarray(info["env_id"])
        if np.array_equal(ids, self._all):
            return info
        return _by_env(info, ids, self.num_envs)

    def close_extras(self, **kwargs: Any) -> None:
        self.pool.close()

    def _in_order(
        self,
        rows: Array,
        info: Any,
        *groups: list[Array],
    ) -> list[list[Array]]:
        """Sort arrays with rows for ``info["env_id"]`` into the order of ``rows``."""
        ids = np.asarray(info["env_id"])
        if np.array_equal(ids, rows):
            return list(groups)
        order = np.argsort(ids)
        if not np.array_equal(ids[order], rows):
            raise BadEnvOutput(
                f"{type(self.pool).__name__} returned the environments {ids}, expected {rows}"
            )
        return [[array[order] for array in group] for group in groups]


def _by_env(info: Any, ids: Array, num_envs: int) -> Any:
    """Expand arrays with rows for the environments ``ids`` to a row for each environment."""
    if isinstance(info, dict):
        return {name: _by_env(part, ids, num_envs) for name, part in info.items()}
    shape = np.shape(info)
    if shape[:1] != ids.shape:
        return info
    rows = np.zeros((num_envs, *shape[1:]), np.asarray(info).dtype)
    rows[ids] = info
    return rows
