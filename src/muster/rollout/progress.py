"""What a worker is doing, in memory that others can read, also after its sudden death."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from muster.keys import TERMINATED, TRUNCATED, Key, next_of
from muster.memory.specs import Array

if TYPE_CHECKING:
    from muster.memory.slots import Lane

CELLS = 64
PHASE, ORDER, ACTING, STEPPING, KNOWN, STOP, BEFORE, WAITS = range(8)  # what the cells are for
ALL_ORDERS = 1 << 62  # in STOP: this worker's results are not awaited any more

UNWRITTEN: dict[np.dtype[Any], Array] = {  # rewards that no environment writes: NaNs of our own making
    np.dtype(np.float32): np.array([0x7FC0DEAD], np.uint32),
    np.dtype(np.float64): np.array([0x7FF80000DEADBEEF], np.uint64),
}


class Phase(enum.IntEnum):
    """What a worker is in the middle of."""

    IDLE = 0
    CONSTRUCT = 1
    RESET = 2
    POLICY = 3
    STEP = 4  # a rollout; the cells ACTING and STEPPING say more
    WEIGHTS = 5
    CALL = 6
    CLOSE = 7
    WAIT = 9  # another thread has the policy: it may take as long as that one may


@dataclass
class Timing:
    """Nanoseconds by what they went to; environment and policy are extrapolated from timed steps."""

    env: float = 0.0
    policy: float = 0.0
    copy: float = 0.0
    total: float = 0.0


class Progress:
    """The cells of one worker, and how they are written.

    Which steps of a rollout were made can be read from its rewards: a watched rollout fills them with marks first,
    which costs nothing per step.

    Args:
        cells: 64 integers that other processes read, too; None: they are not shared.

    Attributes:
        cells: ``ORDER`` is the number of the request at work, ``ACTING`` and ``STEPPING`` the last row that the policy
            was asked for and that the environments were given, ``KNOWN`` the steps of a rollout that is over (else
            -1), and ``STOP`` is written from outside: requests up to this number end after their current step.
            ``BEFORE`` are steps before the first row, and ``WAITS`` says that an environment that has ended makes no
            more of them.
    """

    def __init__(self, cells: Any = None) -> None:
        self.watched = cells is not None
        self.cells: Any = [0] * CELLS if cells is None else cells

    def begin(self, phase: int) -> int:
        """Enter a phase; returns the one before."""
        before = self.cells[PHASE]
        self.cells[PHASE] = phase
        return int(before)

    def take_up(self, number: int) -> None:
        """A request begins, with no step until ``count``: what lies in its lane can be of a request before."""
        self.cells[KNOWN] = self.cells[BEFORE] = 0
        self.cells[ACTING] = self.cells[STEPPING] = -1
        self.cells[ORDER] = number

    def mark_unwritten(self, lane: Lane, reward_key: Key, begin: int) -> None:
        """Mark the rewards from row ``begin`` on as not written."""
        mark = UNWRITTEN.get(lane.arrays[reward_key].dtype) if self.watched and not lane.mirrored else None
        if mark is not None:
            lane.arrays[reward_key][begin:].view(mark.dtype)[...] = mark

    def count(self, *, waits: bool = False) -> None:
        """From now on the steps are those that have been written, and ``BEFORE``."""
        self.cells[WAITS] = waits
        self.cells[KNOWN] = -1


def reward_key(lane: Lane) -> Key:
    """Of the column that ``step`` writes."""
    return next(c.key for c in lane.layout.columns if c.key[-1] in ("reward", "team_reward") and c.host)


def steps_made(cells: Any, lane: Lane, reward_key: Key) -> int:
    """Steps of the request that a dead worker was at, in all rows of its lane from the first on."""
    if cells[KNOWN] >= 0:
        return int(cells[KNOWN])
    rewards = lane.arrays[reward_key]
    mark = UNWRITTEN.get(rewards.dtype)
    if mark is None:
        made = np.arange(lane.T)[:, None] < np.full(lane.B, cells[ACTING])  # without those of a row that was begun
    else:
        made = np.ascontiguousarray(rewards).view(mark.dtype) != mark
    if cells[WAITS]:
        ended = lane.arrays[next_of(TERMINATED)] | lane.arrays[next_of(TRUNCATED)]
        made[1:] &= ~np.logical_or.accumulate(ended[:-1].astype(bool), axis=0)
    return int(made.sum()) + int(cells[BEFORE])


def stepped_in_row(cells: Any, lane: Lane, reward_key: Key) -> int | None:
    """How many environments the newest row has got to, also those that are left out; None if that cannot be seen."""
    rewards, row = lane.arrays[reward_key], cells[ACTING]
    mark = UNWRITTEN.get(rewards.dtype)
    if mark is None or cells[KNOWN] >= 0 or not 0 <= row < lane.T:
        return None
    return int((np.ascontiguousarray(rewards[row]).view(mark.dtype) != mark).sum())
