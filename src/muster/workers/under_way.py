"""The rollouts that a worker was asked for and that were not taken yet, as its proxy keeps them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from muster.memory.slots import Lane, Slot
from muster.rollout.progress import ACTING, ORDER, PHASE, STEPPING, Phase, reward_key, stepped_in_row, steps_made
from muster.workers.messages import RolloutRequest, RolloutResult


@dataclass
class Requested:
    """A request, until its result is taken.

    Attributes:
        entered: its steps are in the counters already, from a result that was taken back.
    """

    request: RolloutRequest
    slot: Slot
    result: RolloutResult | None = None
    entered: bool = False

    @property
    def lane(self) -> Lane:
        return self.slot.lanes[self.request.lane]


@dataclass(frozen=True)
class AtWork:
    """What a worker is doing.

    Attributes:
        row: that the policy was last asked for; -1: none.
        index: of the environment that is being stepped, if that can be seen.
    """

    request: RolloutRequest
    lane: Lane
    row: int
    index: int | None


class UnderWay:
    """Requests of one worker, with their slots, until their results are taken.

    Methods that take ``cells`` read where the worker has got to; see ``Progress``.

    Attributes:
        outstanding: requests whose result was not taken, by number, oldest first.
        results: that have come and were not taken.
        unfinished: what it had done of a request when it was terminated from outside; the request is under way.
        fresh: results that the supervisor has not seen.
    """

    def __init__(self) -> None:
        self.outstanding: dict[int, Requested] = {}
        self.results: deque[RolloutResult] = deque()
        self.unfinished: list[RolloutResult] = []
        self.fresh: list[RolloutResult] = []

    def __bool__(self) -> bool:
        return any(requested.result is None for requested in self.outstanding.values())

    def add(self, request: RolloutRequest, slot: Slot) -> None:
        self.outstanding[request.number] = Requested(request, slot)

    def finished(self, result: RolloutResult) -> None:
        """A result has come."""
        self.outstanding[result.number].result = result
        self.results.append(result)
        self.fresh.append(result)

    def take(self) -> RolloutResult:
        """The oldest result."""
        result = self.results.popleft()
        del self.outstanding[result.number]
        return result

    def take_back(self, result: RolloutResult) -> None:
        """A result, which was entered, is not to be taken; its request is under way again."""
        self.results.remove(result)
        requested = self.outstanding[result.number]
        requested.result, requested.entered = None, True

    def give_up(self) -> list[RolloutRequest]:
        """The requests without a result, which this worker will not follow any more."""
        requests = self.requests()
        for request in requests:
            del self.outstanding[request.number]
        return requests

    def requests(self) -> list[RolloutRequest]:
        """Those without a result; oldest first."""
        return [requested.request for requested in self.outstanding.values() if requested.result is None]

    def at_work(self, cells: Any) -> AtWork | None:
        """What the worker is doing."""
        requested = self.outstanding.get(cells[ORDER])
        if requested is None or requested.result is not None:
            return None
        lane = requested.lane
        index = stepped_in_row(cells, lane, reward_key(lane)) if phase_of(cells) is Phase.STEP else None
        return AtWork(requested.request, lane, int(cells[ACTING]), None if index is None or index >= lane.B else index)

    def steps_seen(self, cells: Any) -> int:
        """Steps in the lane at work, from its first row on."""
        at_work = self.at_work(cells)
        return 0 if at_work is None else steps_made(cells, at_work.lane, reward_key(at_work.lane))

    def signs(self, cells: Any) -> tuple[Any, ...]:
        """They change while the worker gets on."""
        in_row = self.steps_seen(cells) if cells[PHASE] == Phase.STEP else 0
        return (*(cells[i] for i in (PHASE, ORDER, ACTING, STEPPING)), in_row, len(self.outstanding))


def phase_of(cells: Any) -> Phase:
    """What a worker is in the middle of."""
    phase = Phase(cells[PHASE])
    if phase is Phase.STEP and cells[STEPPING] != cells[ACTING]:
        return Phase.POLICY
    return phase
