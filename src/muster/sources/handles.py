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
        outstanding: orders that nobody has taken the report of, by number, oldest first.
        untaken: reports that have come and nobody has taken.
        alive: it has a process or thread.
        reviving: it has none, and will be started again by whoever watches over it.
        absent: its node is not there, so that nothing is ordered from it.
    """

    @property
    def index(self) -> int: ...
    @property
    def groups(self) -> Sequence[int]: ...
    @property
    def outstanding(self) -> dict[int, Order]: ...
    @property
    def untaken(self) -> Sequence[Report]: ...
    @property
    def alive(self) -> bool: ...
    @property
    def reviving(self) -> bool: ...
    @property
    def absent(self) -> bool: ...

    def start(self) -> None:
        """Start it again."""

    def end(self) -> None:
        """End it by force; not its environments in this thread. May be called again."""

    def kill(self) -> None:
        """Let its process end; from another thread."""

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

    def close(self, *, wait: bool = True) -> None:
        """End it, with its environments, by force if need be. Nothing can be asked of it any more. May be called again.

        Args:
            wait: False lets it begin to.

        Raises:
            Exception: what closing an environment raised; it is closed all the same.
        """


class LocalWorker:
    """A worker in the caller's own thread: what is ordered is done at once."""

    alive, reviving, absent = True, False, False
    untaken: Sequence[Report] = ()

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

    def start(self) -> None:
        """It is always there."""

    def end(self) -> None:
        """Its environments are left to the user."""

    def kill(self) -> None:
        """There is no process of its own."""

    def close(self, *, wait: bool = True) -> None:
        if wait:
            self.worker.close()
        else:
            self.worker.profile(None, 0)
