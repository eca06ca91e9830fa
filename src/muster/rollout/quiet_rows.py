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
    """What follows from each row of a lane if no episode ends in it; prepared once per lane.

    Attributes:
        is_fine: see ``quick_row_check``.
        clock: of the group.
        outcome: of a quiet row.
    """

    def __init__(
        self,
        lane: Lane,
        views: LaneViews,
        clock: TrajectoryClock,
        is_fine: Callable[[int], bool],
    ) -> None:
        reward, _, terminated, truncated, ids = views.flags
        self.clock = clock
        self.outcome = RolloutOutcome(lane.B, 1, NO_EPISODES)
        self.is_fine = is_fine
        self._dtype = reward.dtype
        self._rows = [
            (terminated[t].tobytes, truncated[t].tobytes, ids[t], reward[t].tobytes)
            for t in range(lane.T)
        ]

    def settle(self, t: int) -> bool:
        """Complete the columns of row ``t``, and return True; False if it is not quiet or has a bad
        value.
        """
        terminated, truncated, ids, reward = self._rows[t]
        if 1 in terminated() or 1 in truncated() or not self.is_fine(t):
            return False
        self.clock.advance_row(ids, reward(), self._dtype)
        return True


def quiet_rows(group: Group, lane: Lane, views: LaneViews) -> QuietRows | None:
    """Return the quiet rows of a lane; None: something is done after every row."""
    clock = group.clock
    found: QuietRows | None = lane.cache.get(QuietRows)
    if found is not None and found.clock is clock:
        return found
    is_fine = quick_row_check(lane, group.env.spec, group.options.validate)
    counts = group.options.max_frames_per_traj
    if is_fine is None or counts or not isinstance(clock, TrajectoryClock):
        return None
    made = lane.cache[QuietRows] = QuietRows(lane, views, clock, is_fine)
    return made
