"""The action log of a worker in the user's thread, with as little work per rollout as possible."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from muster.episodes.record import NO_EPISODES
from muster.keys import TRAJ_IDS, Key
from muster.memory.slots import Lane
from muster.memory.specs import Array
from muster.restore.action_log import Anchors
from muster.rollout.group import Group
from muster.workers.crash_notes import CrashNotes
from muster.workers.messages import RolloutResult

MOST_STEPS = 8192  # that are logged as one rollout
MOST_BYTES = 1 << 20


class LocalLog:
    """Adds rollouts to the action logs of their groups. Short rollouts are joined.

    Args:
        notes: action logs of the groups.
        groups: the groups, before their first reset.
    """

    def __init__(self, notes: CrashNotes, groups: Sequence[Group]) -> None:
        self._of = {group.number: _Joined(notes, group) for group in groups}

    def add(self, result: RolloutResult, lane: Lane, begin: int) -> None:
        """Add the rows from ``begin`` on of a rollout."""
        self._of[result.group].add(result, lane, begin)


class _Joined:
    """Rows of a group that are not in its action log yet."""

    def __init__(self, notes: CrashNotes, group: Group) -> None:
        self._notes, self._number, self._B = notes, group.number, group.B
        self._anchors = Anchors(group.env)
        group.before_reset, group.lost_track = self._anchors.before_reset, self._anchors.lose
        self._keys: list[Key] = []  # of actions, and the trajectory ids
        self._columns: list[Array] = []  # [most, B, *shape] of each
        self._most = self._rows = 0

    def add(self, result: RolloutResult, lane: Lane, begin: int) -> None:
        end, arrays = result.done_steps, lane.arrays
        if result.error is not None:
            self._rows = 0
            self._anchors.forget()
            self._notes.forget([self._number])
        elif self._most:
            rows = self._rows + end - begin
            if rows > self._most:
                self._allocate(lane, rows)
            for key, column in zip(self._keys, self._columns, strict=True):
                column[self._rows : rows] = arrays[key][begin:end]
            self._rows = rows
            ended, kept = result.episodes, self._notes.kept
            wanted = {} if kept is None or ended is None or ended is NO_EPISODES else kept.wanted(ended)
            if wanted or rows >= self._full:
                *actions, ids = (column[:rows] for column in self._columns)
                named = dict(zip(self._keys, actions, strict=False))
                self._notes.add(self._number, named, ids, self._anchors.take(), wanted, ended)
                self._rows = 0
        else:
            self._allocate(lane, lane.T)
            self.add(result, lane, begin)
        # The next rollout begins in row 0 of its lane: if an error interrupts this one, its rows are forgotten.
        self._anchors.rows_before = self._rows

    def _allocate(self, lane: Lane, rows: int) -> None:
        """Make columns for at least ``rows`` rows."""
        before, known = self._columns, self._rows
        self._keys = [*self._notes.action_keys(self._number, lane), TRAJ_IDS]
        like = [lane.arrays[key] for key in self._keys]
        self._full = max(1, min(MOST_STEPS // self._B, MOST_BYTES // sum(array[0].nbytes for array in like)))
        self._most = max(rows, self._full)
        self._columns = [np.empty((self._most, *array.shape[1:]), array.dtype) for array in like]
        for column, old in zip(self._columns, before, strict=False):
            column[:known] = old[:known]
