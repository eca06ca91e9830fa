"""The consumers of steps: buffer, statistics and hooks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tianshou
from tianshou.data import Batch, CachedReplayBuffer, PrioritizedReplayBuffer, ReplayBufferManager, to_numpy
from tianshou.data.batch import create_value
from tianshou.data.collector import EpisodeRolloutHookMerged as TianshouMerged
from tianshou.data.collector import get_stddev_from_dist

from muster.compat.tianshou.sampling import Ended, Sampling, Taken
from muster.errors import BadOption
from muster.memory.slots import Lane
from muster.memory.specs import Array

TESTED = "2.0.1"
"""Of Tianshou: whose ``add`` takes several steps of one environment in one call, which is not documented."""

ADDS = ReplayBufferManager.add, PrioritizedReplayBuffer.add

KEYS = frozenset({"obs", "act", "rew", "terminated", "truncated", "done", "obs_next", "info", "policy"})
"""Entries of a step that every buffer stores."""


def takes_many(buffer: Any) -> bool:
    """Whether one ``add`` may get several steps per environment; classes with another ``add`` get single rows."""
    own = isinstance(buffer, ReplayBufferManager) and type(buffer).add in ADDS
    return own and tianshou.__version__ == TESTED


def add(buffer: Any, taken: Taken) -> None:
    """Add steps, with the same result as adding every row separately."""
    for begin, end in _parts(buffer, taken) if takes_many(buffer) else taken.pieces():
        buffer.add(taken.batch[begin:end], buffer_ids=taken.env[begin:end])


def _parts(buffer: Any, taken: Taken) -> Iterator[tuple[int, int]]:
    """Bounds of parts in which no ring overwrites itself; the first row is a part, because it allocates the buffer."""
    most, row = max(1, int(np.diff(buffer.subbuffer_edges).min())), 0
    while row < taken.rows:
        rows = most if hasattr(buffer, "obs") else 1
        begin, end = np.searchsorted(taken.t, [row, row + rows]).tolist()
        yield begin, end
        row += rows


class Tally:
    """Counts the steps and episodes of one call, in a new ``CollectStats``."""

    def __init__(self, stats: Any) -> None:
        self.stats, self.steps, self.episodes = stats, 0, 0
        self._ended: list[Ended] = []
        self._deviations: list[Array] = []

    def count(self, taken: Taken, ended: Sequence[Ended]) -> None:
        self.steps += len(taken.env)
        self.episodes += len(ended)

    def add(self, taken: Taken, ended: Sequence[Ended], dists: Sequence[Any]) -> None:
        """Add steps, and the distributions of each row's actions."""
        self.count(taken, ended)
        self._ended += ended
        self._deviations += [np.atleast_2d(to_numpy(get_stddev_from_dist(dist))) for dist in dists if dist is not None]
        self.stats.n_collected_steps, self.stats.n_collected_episodes = self.steps, self.episodes

    def close(self) -> Any:
        """Return the statistics, complete except for times and summaries."""
        if self._ended:
            self.stats.returns = np.array([episode.total for episode in self._ended], float)
            self.stats.lens = np.array([episode.steps for episode in self._ended], int)
        if self._deviations:
            self.stats.pred_dist_std_array = np.concatenate(self._deviations)
        return self.stats


class StepByStep:
    """Adds every row to the ``owner``'s buffer as soon as it is complete, and calls hooks and statistics with it."""

    def __init__(self, owner: Any, sampling: Sampling, tally: Tally, *, adds_entries: bool) -> None:
        self.owner, self.sampling, self.tally, self.adds_entries = owner, sampling, tally, adds_entries

    def watch(self, lane: Lane, t: int) -> None:
        owner, row = self.owner, self.sampling.envs.rows[t]
        actions, taken = row.actions, self.sampling.taken(lane, t, t + 1)
        step, done = taken.batch, taken.batch.done
        step.dist = actions.dist if np.array_equal(row.ids, actions.ids) else None
        chosen = Batch(
            act=actions.act,
            act_normalized=actions.mapped,
            policy_entry=actions.policy,
            dist=actions.dist,
            hidden_state=actions.state,
        )
        owner.run_on_step_hook(chosen, step)
        self.sampling.going, ended = self.sampling.going.after(taken._replace(batch=Batch(rew=step.rew, done=done)))
        self.tally.count(taken, ended)
        self.tally.stats.update_at_step_batch(step)
        step.pop("dist")
        places, _, _, starts = owner.buffer.add(step, buffer_ids=taken.env)
        _add_entries(owner.buffer, step, places)
        for episode in ended:
            k = int(np.searchsorted(taken.env, episode.env))
            self._end(episode, int(starts[k]), int(places[k]))

    def _end(self, episode: Ended, first: int, last: int) -> None:
        """Process an ended episode, which is in the buffer from position ``first`` to ``last``."""
        owner, stats = self.owner, self.tally.stats
        where = _places(owner.buffer, first, last, episode)
        batch = owner.buffer[where]
        entries = owner.run_on_episode_done(batch)
        if entries is not None and not self.adds_entries:
            raise BadOption(
                f"the on_episode_done_hook returned {sorted(entries)}: these can be stored with n_episode only, as "
                f"with n_step some of an episode's steps can be missing. Collect episodes, or return None"
            )
        for key, values in (entries or {}).items():
            owner.buffer.set_array_at_key(values, key, index=where)
            batch.set_array_at_key(values, key)
        known = len(stats.lens)
        stats.update_at_episode_done(episode_batch=batch, episode_return=episode.total)
        if len(stats.lens) > known:
            stats.lens[-1] = episode.steps  # the buffer may contain only its last steps


def _places(buffer: Any, first: int, last: int, episode: Ended) -> Array:
    """The positions of an episode in the buffer, in order; only its last steps if it is longer than its ring."""
    edges = buffer.subbuffer_edges
    begin = edges[np.searchsorted(edges, last, side="right") - 1]
    size = edges[np.searchsorted(edges, last, side="right")] - begin
    count = (last - first) % size + 1
    if episode.steps >= size and not isinstance(buffer, CachedReplayBuffer):
        count = size
    return np.asarray(begin + (last - begin - np.arange(count)[::-1]) % size)


def _add_entries(buffer: Any, step: Any, places: Array) -> None:
    """Store entries that a hook has added to a row; a single ring has stored them already, others drop them."""
    if not isinstance(buffer, ReplayBufferManager):
        return
    added = [key for key in step.get_keys() if key not in KEYS]
    if added and isinstance(buffer, CachedReplayBuffer):
        raise BadOption(
            f"the on_step_hook added {added}, which a CachedReplayBuffer does not move to its main buffer: use "
            f"another buffer, or put them into rollout_batch.policy"
        )
    for key in added:
        if not hasattr(buffer, key):
            own = isinstance(step[key], np.ndarray | Batch) or hasattr(step[key], "new_zeros")
            made = create_value(step[key], buffer.maxsize, stack=False) if own else np.full(buffer.maxsize, None)
            buffer.set_array_at_key(made, key)
        stored = getattr(buffer, key)
        if isinstance(stored, np.ndarray) and not isinstance(step[key], np.ndarray):
            for k, place in enumerate(places):  # a distribution
                stored[place] = step[[k]][key]
        else:
            stored[places] = step[key]


class EpisodeRolloutHookMerged(TianshouMerged):  # type: ignore[misc] # of a package that mypy skips
    """Merges several episode hooks. Tianshou's own class refuses every entry that the first hook returns.

    Args:
        episode_rollout_hooks: called in this order.
        check_overlapping_keys: raise ``KeyError`` if two hooks return an entry of one name; else the last one is used.
    """

    def __call__(self, episode_batch: Any) -> dict[str, Any] | None:
        merged: dict[str, Any] = {}
        for hook in self.episode_rollout_hooks:
            entries = hook(episode_batch) or {}
            if self.check_overlapping_keys and (twice := sorted(merged.keys() & entries.keys())):
                raise KeyError(f"{hook} returns {twice}, as a hook before it does: give them names of their own")
            merged.update(entries)
        return merged or None
