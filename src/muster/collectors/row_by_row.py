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
from muster.collectors.pipeline import PipelineItem
from muster.episodes.record import NO_EPISODES
from muster.memory.slots import Lane, Layout, Slot
from muster.rollout.request import RolloutRequest
from muster.rollout.tally import Tally
from muster.workers.counters import FrameCounters
from muster.workers.messages import RolloutResult
from muster.workers.worker import Worker

ROWS = (
    64  # rows of the lane; when it is full, the rollout ends, and the next one begins
)


class RowByRow:
    """Collects the next row of a worker's only group.

    1. The first row of a lane is a request like any other, which opens a rollout.
    2. Each further row is made in it, and what was looked up for the rollout is used again. Most rows
       are *quiet*: no episode ends. The result of a quiet row says nothing that the one before it did
       not say, and is the same object.
    3. When the lane is full, or after an error, the rollout ends.

    Args:
        worker: in this thread.
        writer: writes the rows.
        counters: of the group.
        lay_out: called with the name of a policy and its version; lets the policy make its first
            call if it did not act last, and returns the layout of rollouts.

    Attributes:
        quiet: the result of quiet rows, as the result of a batch.
        item: what the pipeline gets for a quiet row.
    """

    def __init__(
        self,
        worker: Worker,
        writer: MemoryWriter,
        counters: FrameCounters,
        lay_out: Callable[[str, int | str], Layout],
    ) -> None:
        self._worker = worker
        self._group = worker.groups[0]
        self._writer = writer
        self._counters = counters
        self._lay_out = lay_out
        self._lane: Lane | None = None
        self._can_stay_open = worker.groups[0].can_stay_open
        self._request: RolloutRequest | None = None
        self.quiet: list[RolloutResult] = []
        self.item = PipelineItem(None, (), worker.groups[0].B, NO_EPISODES)

    @property
    def is_possible(self) -> bool:
        """Whether nothing has to be done only at the ends of rollouts."""
        return (
            self._can_stay_open
            and self._group.carry.resumed is None
            and not self._worker.is_watched
        )

    def forget(self) -> None:
        """Prepare the lane again before the next row, since layouts and views are not valid any
        more.
        """
        self._lane = None

    def collect(
        self, number: int, policy: str, version: int | str
    ) -> list[RolloutResult]:
        """Make a row, and write it to the memory.

        Returns:
            ``quiet``, if the row was; it is counted already. Else the result; after an error the
            result with the error, and, if the row is complete nevertheless (a reset after it has
            failed, or Ctrl-C came), the result with the row.
        """
        lane = self._lane
        if lane is None or not self._worker.prepared(policy):
            lane = self._prepared(policy, version)
        request = self._request
        if request is None or request.version != version or request.policy != policy:
            request = self._begin(number, policy, version)
        if self._group.open is None:
            result: RolloutResult | None = self._worker.run(request, lane)
        else:
            tally = Tally()
            result = self._worker.run_next_row(request, lane, tally)
            if result is None:
                t = lane.done_steps
                if t == lane.T:
                    self._group.leave()
                if self.quiet[0].path != self._worker.policies[policy].path:
                    self._begin(number, policy, version)
                self._writer.write_lane(lane, t - 1, self.quiet[0], goes_on=True)
                self._counters.add_row(tally)
                return self.quiet
        assert result is not None
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

    def _begin(self, number: int, policy: str, version: int | str) -> RolloutRequest:
        """Return the request for rows of a policy and its version, which is made once."""
        group = self._group
        self._request = RolloutRequest(number, 0, 0, policy, version, stays_open=True)
        quiet = RolloutResult(
            number,
            group.number,
            frames=group.B,
            rows=1,
            executed=group.B,
            version=version,
            episodes=NO_EPISODES,
            path=self._worker.policies[policy].path,
        )
        self.quiet = [quiet]
        return self._request

    def _prepared(self, policy: str, version: int | str) -> Lane:
        """Return a lane for rollouts of a policy."""
        layout = self._lay_out(policy, version)
        self._request = None  # the policy may have another path
        if self._lane is None or self._lane.layout.columns != layout.columns:
            (self._lane,) = Slot(replace(layout, T=ROWS)).lanes
        return self._lane
