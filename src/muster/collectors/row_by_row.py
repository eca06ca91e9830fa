"""Collecting one step at a time into a ``ReplayMemory``, in this process.

Off-policy learners collect a step, and learn. A rollout of one row would begin and end for each: its
rows are carried in and out, its columns filled, its batch made, and none of it is needed. Here, one
rollout stays open (``RolloutRequest.stays_open``), each call makes its next row, and the row goes to
the memory. All other requests to the group end the rollout first (``Group.leave``), so that they find
the group as between two rollouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from muster.collectors.into_memory import LaneRows, MemoryWriter
from muster.collectors.pipeline import PipelineItem
from muster.episodes.record import NO_EPISODES, Episodes
from muster.memory.slots import Lane, Layout, Slot
from muster.rollout.loop import NextRow, next_row_of
from muster.rollout.request import RolloutRequest
from muster.rollout.tally import Tally
from muster.workers.counters import FrameCounters
from muster.workers.messages import RolloutResult
from muster.workers.worker import Worker

# rows of the lane; when it is full, the rollout ends, and the next one begins
MOST_ROWS = 512
LANE_BYTES = 1 << 18  # of a lane with more than FEWEST_ROWS
FEWEST_ROWS = 64


class RowByRow:
    """Collects the next row of a worker's only group.

    1. The first row of a lane is a request like any other, which opens a rollout.
    2. Each further row is made in it, and what was looked up for the rollout is used again. Most rows
       are *usual*: nothing is to be told of them but the episodes that ended. The result of a usual
       row says nothing that the one before it did not say, and is the same object.
    3. When the lane is full, or after an error, the rollout ends.

    Args:
        worker: in this thread.
        writer: writes the rows.
        counters: of the group.
        numbers: of requests.
        lay_out: called with the name of a policy and its version; lets the policy make its first
            call if it did not act last, and returns the layout of rollouts.

    Attributes:
        usual: the result of usual rows, as the result of a batch.
        ended: the episodes that ended in the last usual row.
        item: what the pipeline gets for a usual row in which no episode ends.
    """

    def __init__(
        self,
        worker: Worker,
        writer: MemoryWriter,
        counters: FrameCounters,
        numbers: Iterator[int],
        lay_out: Callable[[str, int | str], Layout],
    ) -> None:
        self._worker = worker
        self._group = worker.groups[0]
        self._writer = writer
        self._counters = counters
        self._numbers = numbers
        self._lay_out = lay_out
        self._lane: Lane | None = None
        self._can_stay_open = worker.groups[0].can_stay_open
        self._request: RolloutRequest | None = None
        self._next_row: NextRow | None = None  # of the open rollout
        self._rows: LaneRows | None = None  # of its lane
        self.usual: list[RolloutResult] = []
        self.ended: Episodes = NO_EPISODES
        self.item = PipelineItem(None, (), worker.groups[0].B, NO_EPISODES)

    @property
    def is_possible(self) -> bool:
        """Whether nothing has to be done only at the ends of rollouts."""
        return (
            self._can_stay_open
            and self._group.carry.resumed is None
            and not self._worker.is_watched
        )

    @property
    def is_open(self) -> bool:
        """Whether a rollout is open, which the next row belongs to."""
        next_row = self._next_row
        return next_row is not None and self._group.open is next_row.running

    def forget(self) -> None:
        """Prepare the lane again before the next row, since layouts and views are not valid any
        more.
        """
        self._lane = None
        self._next_row = None

    def collect(self, policy: str, version: int | str) -> list[RolloutResult]:
        """Make a row, which goes to the memory.

        Returns:
            ``usual``, if the row was; it is counted already, and ``ended`` are its episodes. Else
            the result; after an error the result with the error, and, if the row is complete
            nevertheless (a reset after it has failed, or Ctrl-C came), the result with the row.
        """
        next_row = self._next_row
        request = self._request
        acting = self._worker.policies[policy]
        if next_row is None or not next_row.is_for(acting):
            return self._begin_rollout(policy, version)
        if request is None or request.version != version or request.policy != policy:
            request = self._begin(policy, version)
        lane = next_row.lane
        t = lane.done_steps
        tally = Tally()
        made = self._worker.run_next_row(next_row, request, tally)
        if isinstance(made, RolloutResult):
            return self._noted(made, request, lane)
        self.ended = made
        if t + 1 == lane.T:
            self._group.leave()
        usual = self.usual
        if usual[0].path != acting.path:
            self._begin(policy, version)
            usual = self.usual
        self._write(lane, t, usual[0])
        self._counters.add_row(tally)
        return usual

    def _begin_rollout(self, policy: str, version: int | str) -> list[RolloutResult]:
        """Make the first row of a rollout, or go on after an error."""
        lane = self._lane
        if lane is None or not self._worker.prepared(policy):
            lane = self._prepared(policy, version)
        request = self._request
        if request is None or request.version != version or request.policy != policy:
            request = self._begin(policy, version)
        self._writer.catch_up()  # of the rows that are in the lane
        self._rows = None
        results = self._noted(self._worker.run(request, lane), request, lane)
        self._next_row = next_row_of(self._group, self._worker.policies[policy])
        return results

    def _noted(
        self, result: RolloutResult, request: RolloutRequest, lane: Lane
    ) -> list[RolloutResult]:
        """Write the row of a result, and return what ``collect`` does."""
        results = [result]
        if result.error is not None:
            if self._group.has_unsettled:
                results.append(self._worker.run(request, lane))
            self._group.leave()
        elif lane.done_steps == lane.T:
            self._group.leave()
        for made in results:
            if made.rows:
                self._write(lane, lane.done_steps - 1, made)
        return results

    def _write(self, lane: Lane, t: int, result: RolloutResult) -> None:
        """Write row ``t``."""
        rows = self._rows
        follows = result.steps_before is None and not result.finals
        if follows and rows is not None and rows.end == t:
            rows.add()
            return
        self._writer.write_lane(lane, t, result, goes_on=True)
        self._rows = self._writer.rows_after(lane, t + 1, self._group.number)

    def _begin(self, policy: str, version: int | str) -> RolloutRequest:
        """Return the request for rows of a policy and its version, which is made once."""
        group = self._group
        number = next(self._numbers)
        self._request = RolloutRequest(number, 0, 0, policy, version, stays_open=True)
        usual = RolloutResult(
            number,
            group.number,
            frames=group.B,
            rows=1,
            executed=group.B,
            version=version,
            episodes=NO_EPISODES,
            path=self._worker.policies[policy].path,
        )
        self.usual = [usual]
        return self._request

    def _prepared(self, policy: str, version: int | str) -> Lane:
        """Return a lane for rollouts of a policy."""
        layout = self._lay_out(policy, version)
        self._request = None  # the policy may have another path
        if self._lane is None or self._lane.layout.columns != layout.columns:
            per_row = max(replace(layout, T=FEWEST_ROWS).nbytes // FEWEST_ROWS, 1)
            rows = min(MOST_ROWS, max(FEWEST_ROWS, LANE_BYTES // per_row))
            (self._lane,) = Slot(replace(layout, T=rows)).lanes
        return self._lane
