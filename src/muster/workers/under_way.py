"""The rollouts that a worker was asked for and that nobody has taken yet, as its proxy keeps them."""

from __future__ import annotations

from collections import deque
from typing import Any

from muster.memory.slots import Lane, Slot
from muster.rollout.progress import ACTING, ORDER, PHASE, STEPPING, Phase, reward_key, stepped_in_row, steps_made
from muster.workers.messages import Order, Report


class UnderWay:
    """Orders of one worker, with their slots, until their reports are taken.

    Methods that take ``cells`` read where the worker has got to; see ``Progress``.

    Attributes:
        outstanding: orders that nobody has taken the report of, by number, oldest first.
        reports: that have come and nobody has taken.
        unfinished: what it had done of an order when it was terminated from outside; the order is under way.
        fresh: reports that the supervisor has not seen.
        entered: orders under way whose steps are in the account already, from a report that was taken back.
    """

    def __init__(self) -> None:
        self.outstanding: dict[int, Order] = {}
        self.reports: deque[Report] = deque()
        self.unfinished: list[Report] = []
        self.fresh: list[Report] = []
        self.entered: set[int] = set()
        self._slots: dict[int, Slot] = {}  # of orders under way
        self._reported: dict[int, Slot] = {}  # of those with a report, too

    def __bool__(self) -> bool:
        return bool(self._slots)

    def add(self, order: Order, slot: Slot) -> None:
        self.outstanding[order.number], self._slots[order.number] = order, slot

    def finished(self, report: Report) -> None:
        """A report has come."""
        self.reports.append(report)
        self.fresh.append(report)
        self._reported[report.number] = self._slots.pop(report.number)

    def take(self) -> Report:
        """The oldest report."""
        report = self.reports.popleft()
        del self.outstanding[report.number], self._reported[report.number]
        return report

    def take_back(self, report: Report) -> None:
        """A report, which was entered, is not to be taken; its order is under way again."""
        self.reports.remove(report)
        self.entered.add(report.number)
        self._slots = {report.number: self._reported.pop(report.number), **self._slots}

    def give_up(self) -> list[Order]:
        """The orders without a report, which this worker will not follow any more."""
        orders = self.orders()
        for order in orders:
            del self.outstanding[order.number], self._slots[order.number]
        return orders

    def orders(self) -> list[Order]:
        """Those without a report; oldest first."""
        return [self.outstanding[number] for number in self._slots]

    def slot_of(self, number: int) -> Slot:
        return self._slots.get(number) or self._reported[number]

    def lane_of(self, number: int) -> Lane:
        """Of an order that nobody has taken the report of."""
        return self.slot_of(number).lanes[self.outstanding[number].lane]

    def at_work(self, cells: Any) -> Order | None:
        """What the worker is doing."""
        return self.outstanding[cells[ORDER]] if cells[ORDER] in self._slots else None

    def steps_seen(self, cells: Any) -> int:
        """Steps in the lane at work, from its first row on."""
        order = self.at_work(cells)
        if order is None:
            return 0
        lane = self.lane_of(order.number)
        return steps_made(cells, lane, reward_key(lane))

    def row_at_work(self, cells: Any, B: int) -> tuple[int, int | None]:
        """Row of the lane at work (-1: none yet), and which of B environments is being stepped, if that can be seen."""
        order = self.at_work(cells)
        lane = None if order is None else self.lane_of(order.number)
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
