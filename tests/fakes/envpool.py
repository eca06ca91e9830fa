"""A fake of EnvPool's "gymnasium" type, as of version 1.2.5: Python environments behind its
interface.

``tests/unit/test_envpool.py`` runs the contract on the real package too where it is installed.
Compared with it by hand: the classes it derives from; NEXT_STEP autoreset, and that
``reset(env_id)`` (rows of those only, in that order) takes the place of a pending one;
``info["env_id"]`` and ``info["elapsed_step"]``; float32 rewards; int32 for Discrete and bool for
MultiBinary; seeds from the config alone; that no returned array changes later. ``recv`` returns
``batch_size`` of the environments that were sent an action, in a seeded order. Left out: threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

RESET = object()


class EnvPoolMixin:
    __slots__ = ("pool",)  # as there, not all state is in ``__dict__``
    __module__ = "envpool.python.envpool"


class DMEnvPool(EnvPoolMixin):
    """As ``envpool.make_dm`` makes it."""

    def __init__(self) -> None:
        self.config = {"num_envs": 1, "batch_size": 1}


class GymnasiumEnvPool(EnvPoolMixin, VectorEnv[Any, Any, Any], gymnasium.Env[Any, Any]):
    """As ``envpool.make_gymnasium`` makes it.

    Args:
        make: one environment.
        batch_size: number of environments that ``recv`` returns.
        max_num_players: only shown in ``config``.
        shuffled: rows come in an order of their own, which ``info["env_id"]`` tells.
        foreign: ``info["env_id"]`` names environments that were not asked for.
        order: seed of the order in which environments are ready; environments of low number are
            ready earlier on average.

    Attributes:
        resets: the environments each ``reset`` was called with.
        fails: the next ``recv`` raises an error.
        late: environments that take 50 times as long as others.
    """

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012 (as it is there)

    def __init__(
        self,
        make: Callable[[], Any],
        num_envs: int = 3,
        *,
        seed: int = 42,
        env_seed: Any = (),
        batch_size: int = 0,
        max_num_players: int = 1,
        shuffled: bool = False,
        foreign: bool = False,
        order: int = 0,
    ) -> None:
        self.envs = [make() for _ in range(num_envs)]
        self.observation_space, self.action_space = (
            self.envs[0].observation_space,
            self.envs[0].action_space,
        )
        self.config = {
            "num_envs": num_envs,
            "batch_size": batch_size or num_envs,
            "seed": seed,
            "env_seed": list(env_seed),
            "max_num_players": max_num_players,
        }
        self._unused = list(env_seed) or [seed + i for i in range(num_envs)]
        self._over, self._elapsed = [True] * num_envs, np.zeros(num_envs, np.int32)
        self._order = np.random.default_rng(0) if shuffled else None
        self.foreign = foreign
        self._sent: dict[int, Any] = {}  # by environment: its action, or RESET
        self._ready = np.random.default_rng(order)
        self.fails, self.late = False, set[int]()
        self.batches = 0  # number of calls of ``recv``
        self.resets: list[list[int]] = []
        self.closes = 0

    def reset(
        self, env_id: Any = None, *, seed: Any = None, options: Any = None
    ) -> Any:
        rows = list(range(len(self.envs))) if env_id is None else env_id.tolist()
        self.resets.append(rows)
        obs, *_, info = self._answer(
            {i: (self._begin(i), 0.0, False, False) for i in rows}
        )
        return obs, info

    def step(self, actions: Any) -> Any:
        return self._answer(
            {i: self._stepped(i, actions[i]) for i in range(len(self.envs))}
        )

    def async_reset(self) -> None:
        assert not self._sent, "a reset of environments that are being stepped"
        self._sent = dict.fromkeys(range(len(self.envs)), RESET)
        self.resets.append(list(self._sent))

    def send(self, actions: Any, env_id: Any) -> None:
        for i, action in zip(env_id.tolist(), actions, strict=True):
            assert i not in self._sent, (
                f"a second action for environment {i}, which has not returned the first"
            )
            self._sent[i] = action

    def recv(self) -> Any:
        count = self.config["batch_size"]
        assert len(self._sent) >= count, (
            f"{len(self._sent)} environments were sent an action: this waits forever"
        )
        if self.fails:
            self.fails = False
            raise RuntimeError("the pool failed")
        sent = list(self._sent)
        delays = self._ready.exponential(size=len(sent)) * (
            1 + np.array(sent) / len(self.envs)
        )
        delays[[i in self.late for i in sent]] *= 50
        chosen = [sent[n] for n in np.argsort(delays)[:count]]
        self.batches += 1
        actions = {i: self._sent.pop(i) for i in chosen}
        return self._answer(
            {
                i: (self._begin(i), 0.0, False, False)
                if action is RESET
                else self._stepped(i, action)
                for i, action in actions.items()
            }
        )

    def close(self) -> None:
        self.closes += 1

    def _stepped(self, i: int, action: Any) -> Any:
        if self._over[i]:
            return self._begin(i), 0.0, False, False
        obs, reward, terminated, truncated, _ = self.envs[i].step(action)
        self._elapsed[i] += 1
        self._over[i] = terminated or truncated
        return obs, reward, terminated, truncated

    def _begin(self, i: int) -> Any:
        seed, self._unused[i] = self._unused[i], None
        self._over[i], self._elapsed[i] = False, 0
        return self.envs[i].reset(seed=seed)[0]

    def _answer(self, got: dict[int, Any]) -> Any:
        rows = list(got)
        if self._order is not None:
            self._order.shuffle(rows)
        obs, reward, terminated, truncated = zip(*(got[i] for i in rows), strict=True)
        ids = np.array(rows, np.int32)
        info = {"env_id": ids + self.foreign, "elapsed_step": self._elapsed[ids]}
        columns = (
            np.array(reward, np.float32),
            np.array(terminated),
            np.array(truncated),
        )
        return _batch(self.observation_space, obs), *columns, info


def _batch(space: Any, values: Any) -> Any:
    if isinstance(space, spaces.Dict):
        return {
            key: _batch(part, [value[key] for value in values])
            for key, part in space.spaces.items()
        }
    dtype = {
        spaces.Discrete: np.dtype(np.int32),
        spaces.MultiBinary: np.dtype(bool),
    }.get(type(space), space.dtype)
    return np.array(values).astype(dtype)
