"""The protocol of transports: they bring weights from the learner to workers.

::

    publisher = SharedMemory().publisher(weights, workers=4)  # in the learner
    ticket = publisher.ticket(2)  # is sent to worker 2: a pickle, with descriptors
    ...
    subscriber = ticket.open(descriptors)  # in the worker
    publisher.publish(weights, 7)
    assert subscriber.take(into) == 7  # at a rollout boundary, in the thread that runs the policy

Versions do not queue up: the latest wins. A worker that has received a message takes the weights
that were published before that message was sent, or newer ones.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from muster.errors import BadOption

if TYPE_CHECKING:
    import torch

    # on the CPU where they are sent, anywhere where they are taken
    Weights = Mapping[str, torch.Tensor]


class Subscriber(Protocol):
    """The end of one worker; not shared between threads.

    Attributes:
        version: the version taken last; None before the first.
    """

    version: int | str | None

    def take(self, into: Weights) -> int | str | None:
        """Copy the newest weights into these tensors, all of one version, if they are newer than
        the last taken.

        Returns:
            their version; None if there is no newer one. The first call always takes weights
            (except with ``NoSync``).

        Raises:
            BadWeights: names, shapes or dtypes differ. Nothing was changed.
            CollectorTimeout: see the transport.
        """

    def close(self) -> None:
        """Release descriptors and memory; may be called again."""


class Ticket:
    """The data with which a worker subscribes.

    Its pickle does not contain the descriptors: send them with it.

    Attributes:
        fds: the publisher's duplicates for this ticket, until ``close``.
    """

    def __init__(
        self,
        opener: Callable[[Sequence[int]], Subscriber],
        fds: Sequence[int] = (),
    ) -> None:
        self._opener = opener
        self.fds = list(fds)

    def open(self, fds: Sequence[int]) -> Subscriber:
        """Subscribe, once per ticket.

        Args:
            fds: ``self.fds``, or the descriptors received in another process. The caller closes
                them.
        """
        return self._opener(fds)

    def close(self) -> None:
        """Close ``fds``, when they are sent or opened; may be called again."""
        while self.fds:
            os.close(self.fds.pop())

    def __reduce__(
        self,
    ) -> tuple[type[Ticket], tuple[Callable[[Sequence[int]], Subscriber]]]:
        return Ticket, (self._opener,)


class Publisher(Protocol):
    """The end in the learner; used by one thread at a time."""

    def publish(
        self,
        weights: Weights,
        version: int | str,
        workers: Collection[int] | None = None,
    ) -> None:
        """Publish weights to workers. They are copied before this returns.

        Args:
            weights: with the names, shapes and dtypes that the publisher was made with.
            version: a 64-bit integer, or text of at most 64 bytes.
            workers: numbers of workers; None is all. Other workers keep their weights.

        Raises:
            BadWeights: names, shapes or dtypes differ. Nothing was published.
            SlotsExhausted: there is not enough memory. Nothing was published.
        """

    def ticket(self, worker: int) -> Ticket:
        """The ticket of a worker.

        A restarted worker gets the weights that were published last for its number.
        """

    def close(self) -> None:
        """Release everything; subscribers keep the weights they have taken. May be called again."""


@runtime_checkable
class Transport(Protocol):
    """A transport: a small object with its options."""

    def publisher(
        self, weights: Weights, workers: int, version: int | str = 0
    ) -> Publisher:
        """A publisher for workers ``0 .. workers - 1``, which start with these weights."""


def chosen(workers: Collection[int] | None, count: int) -> Collection[int]:
    """The numbers of ``workers``, checked; None is all.

    Raises:
        BadOption: there is no such worker.
    """
    if workers is None:
        return range(count)
    for worker in workers:
        is_number = isinstance(worker, int) and not isinstance(worker, bool)
        if not is_number or not 0 <= worker < count:
            raise BadOption(
                f"there is no worker {worker!r}: workers are numbered 0 to {count - 1}"
            )
    return workers


@dataclass(frozen=True)
class NoSync:
    """For policies that never change, or that fetch their weights themselves; publishing only
    counts versions.
    """

    def publisher(
        self, weights: Weights, workers: int, version: int | str = 0
    ) -> NoPublisher:
        return NoPublisher(workers)


class NoPublisher:
    """Implements ``Publisher`` without sending anything."""

    def __init__(self, workers: int) -> None:
        self._workers = workers

    def publish(
        self,
        weights: Weights,
        version: int | str,
        workers: Collection[int] | None = None,
    ) -> None:
        chosen(workers, self._workers)

    def ticket(self, worker: int) -> Ticket:
        chosen([worker], self._workers)
        return Ticket(NoSubscriber)

    def close(self) -> None: ...


class NoSubscriber:
    """Implements ``Subscriber``; never has newer weights."""

    version: int | str | None = None

    def __init__(self, fds: Sequence[int] = ()) -> None: ...

    def take(self, into: Weights) -> int | str | None:
        return None

    def close(self) -> None: ...
