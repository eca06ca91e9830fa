"""The rollout requests of a worker whose results were not taken yet, as kept by its proxy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass
class Requested:
    """A request, until its result is taken."""

    request: RolloutRequest
    slot: Slot
    result: RolloutResult | None = None
    entered: bool = False  # the frame counters include its steps, from a result that was taken back

    @property
    def lane(self) -> Lane:
        return self.slot.lanes[self.request.lane]


@dataclass(frozen=True)
class AtWork:
    """The rollout at which a worker is working."""

    request: RolloutRequest
    lane: Lane
    row: int  # last row for which the policy was called; -1: none
    index: int | None  # index of the environment that is being stepped; None: unknown


class UnderWay:
    """The requests of one worker, with their slots, until their results are taken.

    True while a request has no result. Methods with ``cells`` read the worker's progress; see
    ``Progress``.
    """

    def __init__(self) -> None:
        # requests whose results were not taken, by number, oldest first
        self.outstanding: dict[int, Requested] = {}
        self.fresh: list[RolloutResult] = []  # results that the supervisor has not processed

    def __bool__(self) -> bool:
        return any(requested.result is None for requested in self.outstanding.values())

    @property
    def results(self) -> Sequence[RolloutResult]:
        """The results that have arrived and were not taken, in the order of their requests."""
        return [
            requested.result
            for requested in self.outstanding.values()
            if requested.result is not None
        ]

    def add(self, request: RolloutRequest, slot: Slot) -> None:
        self.outstanding[request.number] = Requested(request, slot)

    def finished(self, result: RolloutResult) -> None:
        """Store a result that has arrived."""
        self.outstanding[result.number].result = result
        self.fresh.append(result)

    def take(self) -> RolloutResult | None:
        """Remove and return the result of the oldest request that has one; None if there is none.

        None also while the supervisor has not processed all that have arrived: it was interrupted.
        """
        if self.fresh:
            return None
        for number, requested in self.outstanding.items():
            if requested.result is not None:
                del self.outstanding[number]
                return requested.result
        return None

    def take_back(self, result: RolloutResult) -> None:
        """Remove a result whose steps are in the counters; its request is under way again."""
        requested = self.outstanding[result.number]
        requested.result, requested.entered = None, True

    def give_up(self) -> list[RolloutRequest]:
        """Remove and return the requests without a result."""
        requests = self.requests()
        for request in requests:
            del self.outstanding[request.number]
        return requests

    def requests(self) -> list[RolloutRequest]:
        """Return the requests without a result, oldest first."""
        return [
            requested.request for requested in self.outstanding.values() if requested.result is None
        ]

    def at_work(self, cells: Any) -> AtWork | None:
        """Return the rollout at which the worker is working, or None."""
        requested = self.outstanding.get(cells[ORDER])
        if requested is None or requested.result is not None:
            return None
        lane = requested.lane
        index = (
            stepped_in_row(cells, lane, reward_key(lane)) if phase_of(cells) is Phase.STEP else None
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
        return steps_made(cells, at_work.lane, reward_key(at_work.lane), at_work.request.rule)

    def signs(self, cells: Any) -> tuple[Any, ...]:
        """Return values that change while the worker makes progress."""
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
