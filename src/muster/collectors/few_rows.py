"""Collecting a few steps at a time into a ``ReplayMemory``, in this process.

Off-policy learners collect a step or a few, and learn. A rollout would begin and end for each batch:
its rows are carried in and out, its columns filled, its batch made, and none of it is needed. Here, one
rollout stays open (``RolloutRequest.open_rows``), each call makes its next rows, and they go to the
memory. All other requests to the group end the rollout first (``Group.leave``), so that they find the
group as between two rollouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from muster.collectors.into_memory import LaneRows, MemoryWriter
from muster.collectors.pipeline import PipelineItem
from muster.episodes.record import NO_EPISODES, Episodes
from muster.memory.slots import Lane, Layout, Slot
from muster.rollout.loop import FurtherRows, further_rows_of
from muster.rollout.request import RolloutRequest
from muster.rollout.tally import Tally
from muster.workers.counters import FrameCounters
from muster.workers.messages import RolloutResult
from muster.workers.worker import Worker

# rows of a batch: in longer ones, beginning and ending a rollout is a small part
FEW = 16
# ns that a batch of several rows may take. Ctrl-C takes effect between two batches; those of slow
# environments are rollouts, in which it takes effect between two rows
QUICK_NS = 250_000_000
# rows of the lane; when it is full, the rollout ends, and the next one begins
MOST_ROWS = 512
LANE_BYTES = 1 << 18  # of a lane with more than FEWEST_ROWS
FEWEST_ROWS = 64


class FewRows:
    """Collects the next rows of a worker's only group.

    1. The first batch of a lane is a request like any other, which opens a rollout.
    2. The rows of each further batch are made in it, and what was looked up for the rollout is used
       again. Most batches are *usual*: nothing is to be told of them but the episodes that ended. The
       result of a usual batch says nothing that the one before it did not say, and is the same
       object.
    3. When the lane is full, or after an error, the rollout ends.
    4. Ctrl-C takes effect after the batch. After an error, the rows before it are a batch.

    Args:
        rows: number of rows of a batch.
        worker: in this thread.
        writer: writes the rows.
        counters: of the group.
        numbers: of requests.
        lay_out: called with the name of a policy and its version; lets the policy make its first
            call if it did not act last, and returns the layout of rollouts.

    Attributes:
        usual: the result of usual batches.
        ended: the episodes that ended in the last usual batch.
        item: what the pipeline gets for a usual batch in which no episode ends.
    """

    def __init__(
        self,
        rows: int,
        worker: Worker,
        writer: MemoryWriter,
        counters: FrameCounters,
        numbers: Iterator[int],
        lay_out: Callable[[str, int | str], Layout],
    ) -> None:
        self._count = rows
        self._worker = worker
        self._group = worker.groups[0]
        self._writer = writer
        self._counters = counters
        self._numbers = numbers
        self._lay_out = lay_out
        self._lane: Lane | None = None
        self._can_stay_open = worker.groups[0].can_stay_open  # until a batch is slow
        self._request: RolloutRequest | None = None
        self._further: FurtherRows | None = None  # of the open rollout
        self._rows: LaneRows | None = None  # of its lane
        self.usual: list[RolloutResult] = []
        self.ended: Episodes = NO_EPISODES
        self.item = PipelineItem(None, (), rows * worker.groups[0].B, NO_EPISODES)

    @property
    def is_possible(self) -> bool:
        """Whether nothing has to be done only at the ends of rollouts, and batches are quick."""
        return (
            self._can_stay_open
            and self._group.carry.resumed is None
            and not self._worker.is_watched
        )

    @property
    def is_open(self) -> bool:
        """Whether a rollout is open, which the next rows belong to."""
        further = self._further
        return further is not None and self._group.open is further.running

    def forget(self) -> None:
        """Prepare the lane again before the next rows, since layouts and views are not valid any
        more.
        """
        self._lane = None
        self._further = None

    def collect(self, policy: str, version: int | str) -> list[RolloutResult]:
        """Make the rows of a batch, which go to the memory.

        Returns:
            ``usual``, if the batch was; it is counted already, and ``ended`` are its episodes. Else
            the result; after an error or Ctrl-C the result with the error, and, if rows are complete
            nevertheless, the result with these: all before an error, the whole batch after Ctrl-C.
        """
        further = self._further
        request = self._request
        acting = self._worker.policies[policy]
        if further is None or not further.is_for(acting):
            return self._begin_rollout(policy, version)
        if request is None or request.version != version or request.policy != policy:
            request = self._begin(policy, version)
        lane = further.lane
        t = lane.done_steps
        tally = Tally()
        made = self._worker.run_further_rows(further, request, tally)
        if isinstance(made, RolloutResult):
            return self._noted(made, request, lane)
        self.ended = made
        if self._count > 1 and tally.total_ns > QUICK_NS:
            self._can_stay_open = False
            self._group.leave()
        if not self._has_room(lane):
            self._group.leave()
        usual = self.usual
        if usual[0].path != acting.path:
            self._begin(policy, version)
            usual = self.usual
        self._write(lane, t, usual[0])
        self._counters.add_row(tally)
        return usual

    def _has_room(self, lane: Lane) -> bool:
        """Whether another batch fits into the lane."""
        return lane.done_steps + self._count <= lane.T

    def _begin_rollout(self, policy: str, version: int | str) -> list[RolloutResult]:
        """Make the first rows of a rollout."""
        lane = self._lane
        if lane is None or not self._worker.prepared(policy):
            lane = self._prepared(policy, version)
        request = self._request
        if request is None or request.version != version or request.policy != policy:
            request = self._begin(policy, version)
        self._writer.catch_up()  # of the rows that are in the lane
        self._rows = None
        results = self._noted(self._worker.run(request, lane), request, lane)
        self._further = further_rows_of(self._group, self._worker.policies[policy])
        return results

    def _noted(
        self, result: RolloutResult, request: RolloutRequest, lane: Lane
    ) -> list[RolloutResult]:
        """Write the rows of a result, and return what ``collect`` does."""
        results = [result]
        for _ in range(self._count + 1):  # each makes a row more, or takes one back
            if result.error is None or not self._group.has_unsettled:
                break
            result = self._worker.run(request, lane)
            results.append(result)
        has_failed = len(results) > 1 or result.error is not None
        if has_failed or not self._has_room(lane):
            self._group.leave()
        if result.rows:
            self._write(lane, lane.done_steps - result.rows, result)
        return results

    def _write(self, lane: Lane, t: int, result: RolloutResult) -> None:
        """Write the rows of a result, which begin with row ``t``."""
        rows = self._rows
        follows = result.steps_before is None and not result.finals
        if follows and rows is not None and rows.end == t:
            rows.add(result.rows)
            return
        self._writer.write_lane(lane, t, result, goes_on=True)
        end = t + result.rows
        self._rows = self._writer.rows_after(lane, end, self._group.number)

    def _begin(self, policy: str, version: int | str) -> RolloutRequest:
        """Return the request for rows of a policy and its version, which is made once."""
        group = self._group
        number = next(self._numbers)
        self._request = RolloutRequest(
            number, 0, 0, policy, version, open_rows=self._count
        )
        frames = self._count * group.B
        usual = RolloutResult(
            number,
            group.number,
            frames=frames,
            rows=self._count,
            executed=frames,
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
            whole = rows - rows % self._count
            (self._lane,) = Slot(replace(layout, T=whole)).lanes
        return self._lane
