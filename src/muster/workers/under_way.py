"""The rollout requests of a worker whose results were not taken yet, as kept by its proxy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from muster.memory.slots import Lane, Slot
from muster.rollout.progress import (
    ACTING,
    LOOKED,
    ORDER,
    PHASE,
    STEPPING,
    Phase,
    reward_key,
    stepped_in_row,
    steps_made,
)
from muster.rollout.request import RolloutRequest
from muster.workers.messages import RolloutResult


class Requested:
    """A request, until its result is taken.

    Attributes:
        result: what came of it; None: it is under way.
        has_ended: its worker has reported the end of the rollout, which is not its result: the
            worker ends, and its successor gets the request.
    """

    def __init__(self, request: RolloutRequest, slot: Slot) -> None:
        self.request = request
        self.slot = slot
        self.result: RolloutResult | None = None
        self.has_ended = False

    @property
    def lane(self) -> Lane:
        return self.slot.lanes[self.request.lane]

    def complete(self, result: RolloutResult) -> None:
        """Add the result."""
        self.result = result

    def forget_error(self, is_raised: Callable[[Exception], bool]) -> None:
        """Replace the result by one without its error, if the error ``is_raised`` already."""
        result = self.result
        if result is not None and result.error is not None and is_raised(result.error):
            self.result = replace(result, error=None)

    def end(self) -> None:
        """Note that the rollout has ended without a result."""
        self.has_ended = True

    def begin_again(self) -> None:
        """Note that a successor has got the request."""
        self.has_ended = False


@dataclass(frozen=True)
class AtWork:
    """The rollout at which a worker is working."""

    request: RolloutRequest
    lane: Lane
    row: int  # last row for which the policy was called; -1: none
    index: int | None  # index of the environment that is being stepped; None: unknown


class UnderWay:
    """The requests of one worker, with their slots, until their results are taken.

    1. ``add``: a request is under way.
    2. ``report``: its worker has reported. The pool decides the fate of reports in their order.
    3. ``complete``: the report is the result; or ``end``: it is not, the worker ends, and the
       request stays under way. Nothing else is done with a report, and nothing is put back.
    4. ``take``: the schedule takes the result. Or ``give_up``: no worker has the request any more.

    True while a request is under way. Methods with ``cells`` read the worker's progress; see
    ``Progress``.
    """

    def __init__(self) -> None:
        # requests whose results were not taken, by number, oldest first
        self.outstanding: dict[int, Requested] = {}
        self.reports: list[RolloutResult] = []  # whose fate is not decided

    def __bool__(self) -> bool:
        return any(requested.result is None for requested in self.outstanding.values())

    @property
    def results(self) -> Sequence[RolloutResult]:
        """The results that were not taken, in the order of their requests."""
        return [
            requested.result
            for requested in self.outstanding.values()
            if requested.result is not None
        ]

    def add(self, request: RolloutRequest, slot: Slot) -> None:
        self.outstanding[request.number] = Requested(request, slot)

    def report(self, result: RolloutResult) -> None:
        """Store what a worker has reported of a rollout."""
        self.reports.append(result)

    def complete(self, result: RolloutResult) -> None:
        """Store the result of a request, which was the first of the reports."""
        self.outstanding[result.number].complete(result)
        del self.reports[:1]

    def end(self, result: RolloutResult) -> None:
        """Remove the first report: its request stays under way, without a worker."""
        self.outstanding[result.number].end()
        del self.reports[:1]

    def begin_again(self) -> None:
        """Note that a successor has got the requests that are under way."""
        for requested in self.outstanding.values():
            requested.begin_again()

    def forget_errors(self, is_raised: Callable[[Exception], bool]) -> None:
        """Replace results by ones without the error, if the error ``is_raised`` already."""
        for requested in self.outstanding.values():
            requested.forget_error(is_raised)

    def take(self) -> RolloutResult | None:
        """Remove and return the result of the oldest request that has one; None if there is none.

        None also while there are reports: the pool was interrupted.
        """
        if self.reports:
            return None
        for number, requested in self.outstanding.items():
            if requested.result is not None:
                del self.outstanding[number]
                return requested.result
        return None

    def give_up(self) -> list[RolloutRequest]:
        """Remove and return the requests without a result."""
        requests = self.requests()
        for request in requests:
            del self.outstanding[request.number]
        return requests

    def requests(self) -> list[RolloutRequest]:
        """Return the requests without a result, oldest first."""
        return [
            requested.request
            for requested in self.outstanding.values()
            if requested.result is None
        ]

    def at_work(self, cells: Any) -> AtWork | None:
        """Return the rollout at which the worker is working, or None."""
        requested = self.outstanding.get(cells[ORDER])
        if requested is None or requested.result is not None:
            return None
        lane = requested.lane
        index = (
            stepped_in_row(cells, lane, reward_key(lane))
            if phase_of(cells) is Phase.STEP
            else None
        )
        return AtWork(
            requested.request,
            lane,
            int(cells[ACTING]),
            None if index is None or index >= lane.B else index,
        )

    def steps_seen(self, cells: Any) -> int:
        """Return the number of steps in the lane of the current rollout, counted from its first
        row.
        """
        at_work = self.at_work(cells)
        if at_work is None:
            return 0
        return steps_made(
            cells, at_work.lane, reward_key(at_work.lane), at_work.request.rule
        )

    def signs(self, cells: Any) -> tuple[Any, ...]:
        """Return values that change while the worker makes progress, the phase among them."""
        in_row = self.steps_seen(cells) if cells[PHASE] == Phase.STEP else 0
        return (
            *(cells[i] for i in (PHASE, ORDER, ACTING, STEPPING, LOOKED)),
            in_row,
            len(self.outstanding),
        )


def phase_of(cells: Any) -> Phase:
    """Return the phase of a worker; POLICY instead of STEP while the policy acts during a rollout."""
    phase = Phase(cells[PHASE])
    if phase is Phase.STEP and cells[STEPPING] != cells[ACTING]:
        return Phase.POLICY
    return phase
