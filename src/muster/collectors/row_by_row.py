"""Collecting one step at a time into a ``ReplayMemory``, in this process.

Off-policy learners collect a step, and learn. A rollout of one row would begin and end for each: its
rows are carried in and out, its columns filled, its batch made, and none of it is needed. Here, one
rollout stays open (``RolloutRequest.stays_open``), each call makes its next row, and the row goes to
the memory. All other requests to the group end the rollout first (``Group.leave``), so that they find
the group as between two rollouts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from muster.collectors.into_memory import MemoryWriter
from muster.memory.slots import Lane, Layout, Slot
from muster.rollout.request import RolloutRequest
from muster.workers.messages import RolloutResult
from muster.workers.worker import Worker

ROWS = 64  # rows of the lane; when it is full, the rollout ends, and the next one begins


class RowByRow:
    """Collects the next row of a worker's only group.

    Args:
        worker: in this thread.
        writer: writes the rows.
        lay_out: called with the name of a policy and its version; lets the policy make its first
            call if it did not act last, and returns the layout of rollouts.
    """

    def __init__(
        self,
        worker: Worker,
        writer: MemoryWriter,
        lay_out: Callable[[str, int | str], Layout],
    ) -> None:
        self._worker = worker
        self._group = worker.groups[0]
        self._writer = writer
        self._lay_out = lay_out
        self._lane: Lane | None = None
        self._can_stay_open = worker.groups[0].can_stay_open

    @property
    def is_possible(self) -> bool:
        """Whether nothing has to be done only at the ends of rollouts."""
        return self._can_stay_open and self._group.resumed is None and not self._worker.is_watched

    def forget(self) -> None:
        """Prepare the lane again before the next row, since layouts and views are not valid any
        more.
        """
        self._lane = None

    def collect(self, number: int, policy: str, version: int | str) -> list[RolloutResult]:
        """Make a row, and write it to the memory.

        Returns:
            the result; after an error the result with the error, and, if the row is complete
            nevertheless (a reset after it has failed, or Ctrl-C came), the result with the row.
        """
        lane = self._lane
        if lane is None or not self._worker.prepared(policy):
            lane = self._prepared(policy, version)
        request = RolloutRequest(number, 0, 0, policy, version, stays_open=True)
        result = self._worker.run(request, lane)
        results = [result]
        if result.error is not None:
            if self._group.has_unsettled:
                results.append(self._worker.run(request, lane))
            self._group.leave()
        elif lane.done_steps == lane.T:
            self._group.leave()
        for made in results:
            if made.rows:
                self._writer.write_lane(lane, lane.done_steps - 1, made, goes_on=True)
        return results

    def _prepared(self, policy: str, version: int | str) -> Lane:
        """Return a lane for rollouts of a policy."""
        layout = self._lay_out(policy, version)
        if self._lane is None or self._lane.layout.columns != layout.columns:
            (self._lane,) = Slot(replace(layout, T=ROWS)).lanes
        return self._lane
