"""The action log of a worker in the user's thread, with as little work per rollout and reset as possible."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from muster.episodes.record import NO_EPISODES, Episodes, join_episodes
from muster.keys import TRAJ_IDS, Key
from muster.memory.slots import Lane
from muster.memory.specs import Array
from muster.restore.action_log import Anchors
from muster.rollout.group import Group
from muster.workers.crash_notes import CrashNotes
from muster.workers.messages import RolloutResult
from muster.workers.requests import Request

MOST_STEPS = 8192  # that are joined
MOST_BYTES = 1 << 20


class LocalLog:
    """Adds rollouts to the action logs of their groups. Short rollouts are joined, and added as one.

    Args:
        notes: action logs of the groups.
        groups: the groups, before their first reset.

    Attributes:
        add: adds the rows of a rollout, see ``Worker.after_rollout``.
    """

    def __init__(self, notes: CrashNotes, groups: Sequence[Group]) -> None:
        self._notes = notes
        self._of = {group.number: _JoinedRollouts(notes, group) for group in groups}
        self.add = self._add if len(groups) > 1 else self._of[groups[0].number].add

    def _add(self, result: RolloutResult, lane: Lane, begin: int) -> None:
        self._of[result.group].add(result, lane, begin)

    def before_request(self, request: Request, groups: Sequence[int]) -> None:
        """Note a request that these groups will execute, which may reset environments or replace their states."""
        self.flush()
        request.noted(self._notes, groups)

    def flush(self, *, at_end: bool = False) -> None:
        """Add what was joined so far; ``at_end``: the newest episode of it is kept."""
        if at_end and self._notes.kept is not None:
            self._notes.kept.newest_due = not self._notes.kept.missing
        for joined in self._of.values():
            joined.flush()


class _JoinedRollouts:
    """The rollouts of a group that are not in its action log yet."""

    def __init__(self, notes: CrashNotes, group: Group) -> None:
        self._notes, self._number, self._waiting = notes, group.number, group.waiting
        self._num_envs, self._anchors = group.B, Anchors(group.env)
        self._keys: list[Key] = []  # of the actions, then of the trajectory ids
        self._columns: list[Array] = []  # [most, B, *shape] of each
        self._most = self._full = self._rows = 0
        self._forget()
        group.before_reset, group.lost_track = self._before_reset, self._lose

    def add(self, result: RolloutResult, lane: Lane, begin: int) -> None:
        if result.error is not None:
            self._lose()
            return
        rows = self._rows + result.done_steps - begin
        if rows > self._most:
            self._allocate(lane, rows)
        for key, column in zip(self._keys, self._columns, strict=True):
            column[self._rows : rows] = lane.arrays[key][begin : result.done_steps]
        self._rows = rows
        if result.episodes is not NO_EPISODES and result.episodes is not None:
            self._ended.append(result.episodes)
        newest_due = self._ended and self._notes.kept is not None and self._notes.kept.newest_due
        if rows >= self._full or newest_due or not self._waiting.idle:  # bypassed rows have to be the last ones
            self.flush()

    def flush(self) -> None:
        if not self._rows:
            return
        *actions, ids = (column[: self._rows] for column in self._columns)
        named = dict(zip(self._keys, actions, strict=False))
        self._notes.add(self._number, named, ids, self._anchors.take(), join_episodes(self._ended))
        self._forget()

    def _forget(self) -> None:
        self._rows = 0
        self._ended: list[Episodes] = []

    def _lose(self, which: Iterable[int] = ()) -> None:
        """Forget all actions: the next ones do not follow them."""
        self._forget()
        self._anchors.forget()
        self._notes.forget([self._number])

    def _before_reset(self, row: int, which: Sequence[int], seeds: Sequence[int] | None) -> None:
        # A rollout begins in row 0 of its lane, or continues after an error, which has forgotten all earlier rows.
        self._anchors.before_reset(self._rows + row, which, seeds)

    def _allocate(self, lane: Lane, rows: int) -> None:
        """Make columns for at least ``rows`` rows."""
        before, known = self._columns, self._rows
        self._keys = [*self._notes.action_keys(self._number, lane), TRAJ_IDS]
        like = [lane.arrays[key] for key in self._keys]
        row_bytes = sum(array[0].nbytes for array in like)
        self._full = max(1, min(MOST_STEPS // self._num_envs, MOST_BYTES // row_bytes))
        self._most = self._full + rows
        self._columns = [np.empty((self._most, *array.shape[1:]), array.dtype) for array in like]
        for column, old in zip(self._columns, before, strict=False):
            column[:known] = old[:known]
