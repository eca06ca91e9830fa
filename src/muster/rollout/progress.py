"""The state of a worker, in memory that other processes can read, even after the worker has died."""

from __future__ import annotations

import copy
import enum
from typing import TYPE_CHECKING, Any

import numpy as np

from muster.keys import TERMINATED, TRAJ_DONE, TRUNCATED, Key, next_of
from muster.memory.specs import Array

if TYPE_CHECKING:
    from muster.episodes.rules import Rule
    from muster.memory.slots import Lane

CELLS = 64
# indices of the cells
PHASE = 0
ORDER = 1
ACTING = 2
STEPPING = 3
KNOWN = 4
STOP = 5
BEFORE = 6
WAITS = 7
LOOKED = 8
ALL_ORDERS = 1 << 62  # value of STOP: no result of this worker is awaited any more

# marks of unwritten rewards: NaNs that no environment writes
UNWRITTEN: dict[np.dtype[Any], Array] = {
    np.dtype(np.float32): np.array([0x7FC0DEAD], np.uint32),
    np.dtype(np.float64): np.array([0x7FF80000DEADBEEF], np.uint64),
}


class Phase(enum.IntEnum):
    """The phases of a worker."""

    IDLE = 0
    CONSTRUCT = 1
    RESET = 2
    POLICY = 3
    STEP = 4  # a rollout; see the cells ACTING and STEPPING
    WEIGHTS = 5
    CALL = 6
    CLOSE = 7
    WAIT = 9  # another thread uses the policy; that thread's deadline applies


class Progress:
    """Writes the cells of one worker.

    The rewards of a rollout show which steps were made: a watched rollout first fills them with
    marks, which costs nothing per step.

    Args:
        cells: 64 integers that other processes read, too; None: not shared.

    Attributes:
        cells: ``ORDER``: number of the current request. ``ACTING`` and ``STEPPING``: last row for
            which the policy and the environments were called. ``KNOWN``: number of steps of a
            complete rollout; -1: see the rewards. ``STOP``: written by other threads and processes;
            requests up to this number end after their current step. ``BEFORE``: number of steps
            before the first row. ``WAITS``: environments make no steps after the end of an episode,
            or after the last one that the rule of the request needs. ``LOOKED``: number of calls of
            ``look``.
    """

    def __init__(self, cells: Any = None) -> None:
        self.watched = cells is not None
        self.cells: Any = [0] * CELLS if cells is None else cells

    def begin(self, phase: int) -> int:
        """Enter a phase, and return the previous one."""
        before = self.cells[PHASE]
        self.cells[PHASE] = phase
        return int(before)

    def take_up(self, number: int) -> None:
        """Start a request, with 0 steps until ``count``: its lane may hold rewards of an earlier
        request.
        """
        self.cells[KNOWN] = 0
        self.cells[BEFORE] = 0
        self.cells[ACTING] = -1
        self.cells[STEPPING] = -1
        self.cells[ORDER] = number

    def mark_unwritten(self, lane: Lane, reward_key: Key, begin: int) -> None:
        """Mark the rewards from row ``begin`` on as not written."""
        if not self.watched or lane.mirrored:
            return
        rewards = lane.arrays[reward_key]
        mark = UNWRITTEN.get(rewards.dtype)
        if mark is not None:
            rewards[begin:].view(mark.dtype)[...] = mark

    def look(self) -> bool:
        """Show that the worker waits with a deadline of its own, and return whether it was ended."""
        self.cells[LOOKED] += 1
        return bool(self.cells[STOP] >= ALL_ORDERS)

    def count(self, *, waits: bool = False) -> None:
        """From now on, the written rewards (and ``BEFORE``) show the number of steps."""
        self.cells[WAITS] = waits
        self.cells[KNOWN] = -1


def reward_key(lane: Lane) -> Key:
    """Return the key of the reward column that ``step`` writes."""
    names = ("reward", "team_reward")
    return next(c.key for c in lane.layout.columns if c.key[-1] in names and c.host)


def steps_made(
    cells: Any, lane: Lane, reward_key: Key, rule: Rule | None = None
) -> int:
    """Return the number of steps of a dead worker's current request, in all rows of its lane.

    ``rule`` is that of the request: see ``Group.rule``.
    """
    if cells[KNOWN] >= 0:
        return int(cells[KNOWN])
    rewards = lane.arrays[reward_key]
    mark = UNWRITTEN.get(rewards.dtype)
    if mark is None:
        # without an incomplete row
        made = np.arange(lane.T)[:, None] < np.full(lane.B, cells[ACTING])
    else:
        made = np.ascontiguousarray(rewards).view(mark.dtype) != mark
    if cells[WAITS]:
        ends = lane.arrays[next_of(TERMINATED)] | lane.arrays[next_of(TRUNCATED)]
        ended = ends.astype(bool)
        if rule is None:
            made[1:] &= ~np.logical_or.accumulate(ended[:-1], axis=0)
        else:
            made &= ~_let_go(lane, ended, copy.deepcopy(rule))
    return int(made.sum()) + int(cells[BEFORE])


def _let_go(lane: Lane, ended: Array, rule: Rule) -> Array:
    """Return a mask of the cells, ``[T, B]``, in which environments make no step because the rule
    needs none.

    Args:
        ended: mask of the steps that end an episode, ``[T, B]``.
        rule: the rule as it was before the first row.
    """
    if TRAJ_DONE in lane.arrays:
        ended = ended & lane.arrays[TRAJ_DONE].astype(bool)
    without = np.zeros_like(ended)
    unneeded = [i for i in range(lane.B) if not rule.awaits(i)]
    without[:, unneeded] = True
    for t in np.flatnonzero(ended.any(axis=1)).tolist():
        over = np.flatnonzero(ended[t] & ~without[t]).tolist()
        rule.ended(over)
        let_go = [i for i in over if rule.complete or not rule.awaits(i)]
        without[t + 1 :, let_go] = True
    return without


def stepped_in_row(cells: Any, lane: Lane, reward_key: Key) -> int | None:
    """Return the number of rewards in the newest row, including bypassed environments; None if
    unknown.
    """
    rewards = lane.arrays[reward_key]
    row = cells[ACTING]
    mark = UNWRITTEN.get(rewards.dtype)
    if mark is None or cells[KNOWN] >= 0 or not 0 <= row < lane.T:
        return None
    written = np.ascontiguousarray(rewards[row]).view(mark.dtype) != mark
    return int(written.sum())
