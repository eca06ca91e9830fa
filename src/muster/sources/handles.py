"""How a crew talks to a worker, wherever that runs; and the worker that runs right here."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from muster.interrupts import allowed
from muster.memory.slots import Slot
from muster.sources.messages import Order, Report
from muster.sources.worker import Worker, phase_ended_by


class Handle(Protocol):
    """A worker as its crew sees it. Orders and calls are followed one after another, in the order in which they came.

    Attributes:
        index: number of the worker.
        groups: numbers of its groups.
        outstanding: orders that it has not reported on, by number, oldest first.
    """

    @property
    def index(self) -> int: ...
    @property
    def groups(self) -> Sequence[int]: ...
    @property
    def outstanding(self) -> dict[int, Order]: ...

    def prepared(self, policy: str) -> bool:
        """``layouts`` would say the same as before."""

    def submit(self, order: Order, slot: Slot) -> None:
        """Let it follow an order. Does not wait."""

    def take(self) -> Report | None:
        """The next report that is there."""

    def stop(self, number: int) -> None:
        """Let orders up to this number end after their current step."""

    def withdraw(self) -> list[Order]:
        """Take back orders that it has not seen yet."""

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of its ``Worker``, and wait for what it returns or raises."""

    def begin_close(self) -> None:
        """Let it give up what it has not done. Nothing can be asked of it any more."""

    def close(self) -> None:
        """End it, with its environments, by force if need be. May be called again.

        Raises:
            Exception: what closing an environment raised; it is closed all the same.
        """


class LocalWorker:
    """A worker in the caller's own thread: what is ordered is done at once."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.index = worker, 0
        self.groups = [group.number for group in worker.groups]
        self.outstanding: dict[int, Order] = {}
        self._reports: deque[Report] = deque()

    def prepared(self, policy: str) -> bool:
        return self.worker.prepared(policy)

    def submit(self, order: Order, slot: Slot) -> None:
        self._reports.append(self.worker.run(order, slot.lanes[order.lane]))

    def take(self) -> Report | None:
        return self._reports.popleft() if self._reports else None

    def stop(self, number: int) -> None:
        """Nothing is under way while somebody else can act."""

    def withdraw(self) -> list[Order]:
        """Nothing waits to be seen."""
        return []

    def call(self, method: str, *args: Any) -> Any:
        try:
            with allowed():
                return getattr(self.worker, method)(*args)
        except BaseException as error:
            phase_ended_by(error, self.worker.progress)
            raise

    def begin_close(self) -> None:
        self.worker.profile(None, 0)

    def close(self) -> None:
        self.worker.close()
