"""The rollouts that a worker was asked for and that nobody has taken yet, as its proxy keeps them."""

from __future__ import annotations

from collections import deque
from typing import Any

from muster.memory.slots import Lane, Slot
from muster.rollout.progress import ACTING, ORDER, PHASE, STEPPING, Phase, reward_key, stepped_in_row, steps_made
from muster.workers.messages import RolloutRequest, RolloutResult


class UnderWay:
    """Requests of one worker, with their slots, until their results are taken.

    Methods that take ``cells`` read where the worker has got to; see ``Progress``.

    Attributes:
        outstanding: requests that nobody has taken the result of, by number, oldest first.
        results: that have come and nobody has taken.
        unfinished: what it had done of a request when it was terminated from outside; the request is under way.
        fresh: results that the supervisor has not seen.
        entered: requests under way whose steps are in the counters already, from a result that was taken back.
    """

    def __init__(self) -> None:
        self.outstanding: dict[int, RolloutRequest] = {}
        self.results: deque[RolloutResult] = deque()
        self.unfinished: list[RolloutResult] = []
        self.fresh: list[RolloutResult] = []
        self.entered: set[int] = set()
        self._slots: dict[int, Slot] = {}  # of requests under way
        self._reported: dict[int, Slot] = {}  # of those with a result, too

    def __bool__(self) -> bool:
        return bool(self._slots)

    def add(self, request: RolloutRequest, slot: Slot) -> None:
        self.outstanding[request.number], self._slots[request.number] = request, slot

    def finished(self, result: RolloutResult) -> None:
        """A result has come."""
        self.results.append(result)
        self.fresh.append(result)
        self._reported[result.number] = self._slots.pop(result.number)

    def take(self) -> RolloutResult:
        """The oldest result."""
        result = self.results.popleft()
        del self.outstanding[result.number], self._reported[result.number]
        return result

    def take_back(self, result: RolloutResult) -> None:
        """A result, which was entered, is not to be taken; its request is under way again."""
        self.results.remove(result)
        self.entered.add(result.number)
        self._slots = {result.number: self._reported.pop(result.number), **self._slots}

    def give_up(self) -> list[RolloutRequest]:
        """The requests without a result, which this worker will not follow any more."""
        requests = self.requests()
        for request in requests:
            del self.outstanding[request.number], self._slots[request.number]
        return requests

    def requests(self) -> list[RolloutRequest]:
        """Those without a result; oldest first."""
        return [self.outstanding[number] for number in self._slots]

    def slot_of(self, number: int) -> Slot:
        return self._slots.get(number) or self._reported[number]

    def lane_of(self, number: int) -> Lane:
        """Of a request that nobody has taken the result of."""
        return self.slot_of(number).lanes[self.outstanding[number].lane]

    def at_work(self, cells: Any) -> RolloutRequest | None:
        """What the worker is doing."""
        return self.outstanding[cells[ORDER]] if cells[ORDER] in self._slots else None

    def steps_seen(self, cells: Any) -> int:
        """Steps in the lane at work, from its first row on."""
        request = self.at_work(cells)
        if request is None:
            return 0
        lane = self.lane_of(request.number)
        return steps_made(cells, lane, reward_key(lane))

    def row_at_work(self, cells: Any, B: int) -> tuple[int, int | None]:
        """Row of the lane at work (-1: none yet), and which of B environments is being stepped, if that can be seen."""
        request = self.at_work(cells)
        lane = None if request is None else self.lane_of(request.number)
        index = None if lane is None else stepped_in_row(cells, lane, reward_key(lane))
        seen = phase_of(cells) is Phase.STEP and index is not None and index < B
        return int(cells[ACTING]), index if seen else None

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
