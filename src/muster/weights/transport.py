"""How weights come from where they are trained to where they act: the seam that every transport implements.

::

    publisher = SharedMemory().publisher(weights, workers=4)  # where they are trained
    ticket = publisher.ticket(2)  # goes to worker 2: a pickle, and descriptors beside it
    ...
    subscriber = ticket.open(descriptors)  # where they act
    publisher.publish(weights, 7)
    assert subscriber.take(into) == 7  # at a rollout boundary, in the thread that runs the policy

Nothing queues up, the latest wins. What was published before a message was sent to a worker is what the worker takes
after it has received that message.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from muster.errors import BadOption

if TYPE_CHECKING:
    import torch

    Weights = Mapping[str, torch.Tensor]  # on the CPU where they are sent, anywhere where they are taken


class Subscriber(Protocol):
    """The end of one worker; not shared between threads.

    Attributes:
        version: of what was taken last; None before.
    """

    version: int | str | None

    def take(self, into: Weights) -> int | str | None:
        """Copy the newest weights into these tensors, all of one version, if they are newer than the last taken.

        Returns:
            their version; None if there is nothing newer. The first time there always is (except with ``NoSync``).

        Raises:
            BadWeights: names, shapes or dtypes differ. Nothing was changed.
            CollectorTimeout: see the transport.
        """

    def close(self) -> None:
        """Release descriptors and memory; may be called again."""


class Ticket:
    """What a worker needs to subscribe. Its pickle does not hold the descriptors: send those along.

    Attributes:
        fds: the publisher's duplicates for this ticket, until ``close``.
    """

    def __init__(self, opener: Callable[[Sequence[int]], Subscriber], fds: Sequence[int] = ()) -> None:
        self._opener, self.fds = opener, list(fds)

    def open(self, fds: Sequence[int]) -> Subscriber:
        """Subscribe, once per ticket.

        Args:
            fds: ``self.fds``, or what has arrived of them in another process. The caller closes them.
        """
        return self._opener(fds)

    def close(self) -> None:
        """Close ``fds``, when they are sent or opened; may be called again."""
        while self.fds:
            os.close(self.fds.pop())

    def __reduce__(self) -> tuple[type[Ticket], tuple[Callable[[Sequence[int]], Subscriber]]]:
        return Ticket, (self._opener,)


class Publisher(Protocol):
    """The end where weights are trained; used by one thread at a time."""

    def publish(self, weights: Weights, version: int | str, workers: Collection[int] | None = None) -> None:
        """Let workers have these weights; they are copied, and free again on return.

        Args:
            weights: with the names, shapes and dtypes that the publisher was made with.
            version: a 64-bit integer, or text of at most 64 bytes.
            workers: None is all; the others keep what they have.

        Raises:
            BadWeights: they are others. Nothing was published.
            SlotsExhausted: there is not enough memory. Nothing was published.
        """

    def catch_up(self) -> None:
        """Send what workers missed that did not read in time; to be called before a worker is given work."""

    def ticket(self, worker: int) -> Ticket:
        """For a worker, or for its successor, who gets what was published last for this number."""

    def close(self) -> None:
        """Release everything; subscribers keep what they have taken. May be called again."""


@runtime_checkable
class Transport(Protocol):
    """A way for weights to get to workers; a small object with its options."""

    def publisher(self, weights: Weights, workers: int, version: int | str = 0) -> Publisher:
        """Begin with these weights for workers ``0 .. workers - 1``."""


def chosen(workers: Collection[int] | None, count: int) -> Collection[int]:
    """The workers that are meant.

    Raises:
        BadOption: there is no such worker.
    """
    if workers is None:
        return range(count)
    for worker in workers:
        if isinstance(worker, bool) or not isinstance(worker, int) or not 0 <= worker < count:
            raise BadOption(f"there is no worker {worker!r}: workers are numbered 0 to {count - 1}")
    return workers


@dataclass(frozen=True)
class NoSync:
    """For policies that never change, or that fetch their weights themselves; publishing only counts versions."""

    def publisher(self, weights: Weights, workers: int, version: int | str = 0) -> NoPublisher:
        return NoPublisher(workers)


class NoPublisher:
    """Publishes to so many workers what none of them gets."""

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
