"""Which episode each environment of a group is in: ids, step counts and records from the rows that it makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from muster.episodes.record import NO_EPISODES, Episodes
from muster.errors import BadCheckpoint
from muster.memory.specs import Array


class TrajectoryClock:
    """Which episode each environment of a group is in, how many steps and how much reward so far.

    Ids are ``env_id + total_envs * episode``: unique over all groups without asking anybody, the same
    wherever a group runs, and never reused.

    Args:
        env_ids: ``[B]``, global.
        total_envs: over all groups.
    """

    def __init__(self, env_ids: Array, total_envs: int) -> None:
        self.env_ids = env_ids
        self.total_envs = total_envs
        self.episode = np.zeros(len(env_ids), np.int64)
        self.steps = np.zeros(len(env_ids), np.int64)
        self.returns = np.zeros(len(env_ids), np.float64)

    def state_dict(self) -> dict[str, Any]:
        """Copies of all that changes, and what it belongs to."""
        arrays = {"env_ids": self.env_ids, "episode": self.episode, "steps": self.steps, "returns": self.returns}
        return {name: array.copy() for name, array in arrays.items()} | {"total_envs": self.total_envs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict()``. Raises ``BadCheckpoint`` if it is of other environments."""
        if state["total_envs"] != self.total_envs or not np.array_equal(state["env_ids"], self.env_ids):
            raise BadCheckpoint(
                f"The trajectories are those of environments {state['env_ids'].tolist()} of {state['total_envs']}, and "
                f"these are {self.env_ids.tolist()} of {self.total_envs}. Load into the same number of environments."
            )
        for name in ("episode", "steps", "returns"):
            getattr(self, name)[...] = state[name]

    def abandon(self, which: Sequence[int]) -> None:
        """Begin new trajectories in ``which``; those not begun yet keep their id."""
        index = np.asarray(which, np.int64)
        self.episode[index] += self.steps[index] > 0
        self.steps[index] = 0
        self.returns[index] = 0.0

    def fill_ids(self, ids: Array, done: Array) -> None:
        """Write the trajectory id of every row (``[T, B]`` int64), before ``advance``."""
        ids[...] = self.env_ids + self.total_envs * self.episode
        if len(done) > 1 and done.any():
            ids[1:] += self.total_envs * np.cumsum(done[:-1], axis=0)

    def fill_step_counts(self, counts: Array, done: Array) -> None:
        """Write the steps taken before every row in its episode (``[T, B]`` int64), before ``advance``."""
        rows = np.arange(len(counts), dtype=np.int64)[:, None]
        began = np.broadcast_to(-self.steps, counts.shape).copy()
        np.copyto(began[1:], rows[1:], where=done[:-1])
        np.subtract(rows, np.maximum.accumulate(began, axis=0), out=counts)

    def advance(self, reward: Array, terminated: Array, truncated: Array, done: Array) -> Episodes:
        """Move to the end of the rows (``[T, B]`` each); returns the episodes that ended, in order."""
        T, B = reward.shape
        place = done.reshape(-1).nonzero()[0]  # in order of time
        if not len(place):
            self.steps += T
            self.returns += np.add.reduce(reward, axis=0, dtype=np.float64)
            return NO_EPISODES
        total = np.cumsum(reward, axis=0, dtype=np.float64)
        by_env = np.argsort(place % B, kind="stable")  # from here on by environment, then time
        t, env = np.divmod(place[by_env], B)
        at_end = total[t, env]
        first = np.ones(len(env), bool)
        np.not_equal(env[1:], env[:-1], out=first[1:])
        before, began, nth = np.empty_like(at_end), np.empty_like(t), np.arange(len(env))
        before[1:], began[1:] = at_end[:-1], t[:-1]
        firsts = np.flatnonzero(first)
        before[firsts], began[firsts] = -self.returns[env[firsts]], -1 - self.steps[env[firsts]]
        count = np.append(firsts[1:], len(env)) - firsts
        nth -= np.repeat(firsts, count)  # of its environment, in these rows
        in_time = np.empty_like(by_env)
        in_time[by_env] = np.arange(len(env))
        episodes = Episodes(
            (self.env_ids[env] + self.total_envs * (self.episode[env] + nth))[in_time],
            self.env_ids[env][in_time],
            (at_end - before)[in_time],
            (t - began)[in_time],
            terminated.reshape(-1)[place],
            truncated.reshape(-1)[place],
        )
        ended, lasts = env[firsts], firsts + count - 1
        self.episode[ended] += count
        self.steps += T
        self.steps[ended] = T - 1 - t[lasts]
        self.returns += total[-1]
        self.returns[ended] = total[-1, ended] - at_end[lasts]
        return episodes
