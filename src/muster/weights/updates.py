"""Publishes that are not visible yet."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from muster.errors import BadWeights
from muster.weights.names import Weights, copy_tensor
from muster.weights.transport import Publisher, Ticket, Transport

Pairs = dict[
    Any, tuple[torch.Tensor, torch.Tensor]
]  # new and old, by ``place_of`` the old one


@dataclass(frozen=True)
class Update:
    """A publish that is not visible yet, and the workers that it is for."""

    pairs: Pairs
    version: int | str
    workers: frozenset[int]


class Updates:
    """Publishes, from their check until they are visible. Callers hold a lock.

    1. ``open`` connects workers, if there are any.
    2. ``queue`` adds a publish, whose tensors stay where they are.
    3. ``apply`` copies the tensors of all that wait into the policy, and publishes the policy to
       the workers. What fails is repeated by the next call.
    4. ``close`` releases the transport.

    Attributes:
        waiting: publishes that are not visible, the oldest first.
    """

    def __init__(self) -> None:
        self.waiting: list[Update] = []
        self._publisher: Publisher | None = None
        self._tensors: Weights = {}

    def open(
        self, transport: Transport, tensors: Weights, workers: int, version: int | str
    ) -> None:
        """Connect workers, which start with ``tensors``, those of the policy."""
        self._tensors = tensors
        self._publisher = transport.publisher(tensors, workers, version)

    def check_open(self) -> None:
        """Raise ``BadWeights`` before ``open``."""
        if self._publisher is None:
            raise BadWeights(
                "the policy has lazy layers, which get their weights with its first call in a"
                " worker"
            )

    def queue(self, update: Update) -> None:
        """Add a publish.

        No worker waits for two of them: one that has no receivers left becomes part of the one
        after it.
        """
        kept: list[Update] = []
        pairs = Pairs()
        for earlier in self.waiting:
            pairs |= earlier.pairs
            receivers = earlier.workers - update.workers
            if receivers:
                kept.append(replace(earlier, pairs=pairs, workers=receivers))
                pairs = Pairs()
        kept.append(replace(update, pairs=pairs | update.pairs))
        self.waiting = kept

    def apply(self) -> None:
        """Make visible what is waiting."""
        while self.waiting:
            update = self.waiting[0]
            for new, old in update.pairs.values():
                copy_tensor(old, new)
            # should the rest fail and be repeated: the user's tensors may be others by then
            self.waiting[0] = replace(update, pairs={})
            if self._publisher is not None:
                self._publisher.publish(self._tensors, update.version, update.workers)
            del self.waiting[0]

    def ticket(self, worker: int) -> Ticket:
        """Return the ticket of a worker for what was published last for it."""
        self.check_open()
        assert self._publisher is not None
        return self._publisher.ticket(worker)

    def close(self) -> None:
        """Release what the transport holds; may be called again."""
        if self._publisher is not None:
            self._publisher.close()
