"""No transport: workers keep the weights that they were made with."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from muster.weights.transport import Ticket, chosen

if TYPE_CHECKING:
    from muster.weights.transport import Weights


@dataclass(frozen=True)
class NoSync:
    """For policies that never change, or that fetch their weights themselves; publishing only counts versions."""

    def publisher(self, weights: Weights, workers: int, version: int | str = 0) -> NoPublisher:
        return NoPublisher(workers)


class NoPublisher:
    """Implements ``Publisher``; ``workers`` is their number."""

    def __init__(self, workers: int) -> None:
        self._workers = workers

    def publish(self, weights: Weights, version: int | str, workers: Collection[int] | None = None) -> None:
        chosen(workers, self._workers)

    def catch_up(self) -> None: ...

    def ticket(self, worker: int) -> Ticket:
        chosen([worker], self._workers)
        return Ticket(NoSubscriber)

    def close(self) -> None: ...


class NoSubscriber:
    """Implements ``Subscriber``: there is never anything newer."""

    version: int | str | None = None

    def __init__(self, fds: Sequence[int] = ()) -> None: ...

    def take(self, into: Weights) -> int | str | None:
        return None

    def close(self) -> None: ...
