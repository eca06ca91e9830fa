"""Rows in which no episode ends, of rollouts that stay open: most rows are such."""

from __future__ import annotations

from collections.abc import Callable

from muster.episodes.clock import TrajectoryClock
from muster.episodes.record import NO_EPISODES
from muster.memory.slots import Lane
from muster.rollout.group import Group
from muster.rollout.lane_views import LaneViews
from muster.rollout.request import RolloutOutcome
from muster.rollout.values import quick_row_check


class QuietRows:
    """What follows from the rows of a lane if no episode ends in them; prepared once per lane.

    Args:
        is_fine: see ``quick_row_check``.
        count: number of rows that are settled together.

    Attributes:
        clock: of the group.
        outcome: of quiet rows.
    """

    def __init__(
        self,
        lane: Lane,
        views: LaneViews,
        clock: TrajectoryClock,
        is_fine: Callable[[int], bool],
        count: int,
    ) -> None:
        reward, _, terminated, truncated, ids = views.flags
        self.clock = clock
        self.outcome = RolloutOutcome(count * lane.B, count, NO_EPISODES)
        self._is_fine = is_fine
        self._dtype = reward.dtype
        self._rows = [
            (terminated[t].tobytes, truncated[t].tobytes, ids[t], reward[t].tobytes)
            for t in range(lane.T)
        ]

    def settle(self, begin: int, end: int) -> bool:
        """Complete the columns of rows, and return True; False if one of them is not quiet or has a
        bad value.
        """
        rows = self._rows[begin:end]
        for terminated, truncated, _, _ in rows:
            if 1 in terminated() or 1 in truncated():
                return False
        if not self.are_fine(begin, end):
            return False
        for _, _, ids, reward in rows:
            self.clock.advance_row(ids, reward(), self._dtype)
        return True

    def are_fine(self, begin: int, end: int) -> bool:
        """Whether rows have no bad value; see ``quick_row_check``."""
        is_fine = self._is_fine
        for t in range(begin, end):  # noqa: SIM110 (called after every row)
            if not is_fine(t):
                return False
        return True


def quiet_rows(
    group: Group, lane: Lane, views: LaneViews, count: int
) -> QuietRows | None:
    """Return the quiet rows of a lane, of which so many are settled together; None: something is done
    after every row.
    """
    clock = group.clock
    found: QuietRows | None = lane.cache.get(QuietRows)
    if found is not None and found.clock is clock and found.outcome.rows == count:
        return found
    is_fine = quick_row_check(lane, group.env.spec, group.options.validate)
    counts = group.options.max_frames_per_traj
    if is_fine is None or counts or not isinstance(clock, TrajectoryClock):
        return None
    made = lane.cache[QuietRows] = QuietRows(lane, views, clock, is_fine, count)
    return made
