"""Weights through memory that processes share: one copy in, one out, no message.

The block of a publisher holds one cell per worker, with the offset of its newest weights, and several buffers. A
publish writes a buffer that no cell names, then sets the cells; so whoever dies in the middle has changed nothing that
is read. A worker copies the buffer of its cell to memory of its own. If its cell still names that buffer then, and
the buffer's sequence number has not changed since before the copy, that is what was published for it; else the buffer
was written again in between, perhaps for others, and the worker begins anew.

This relies on stores of one processor being seen in order by the others, and loads being done in order, as x86 does
(what libc and torch copy past the caches they fence themselves). See ``default_scheme`` for other processors.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from muster.errors import CollectorTimeout
from muster.memory.shared import Arena
from muster.weights.buffer import Buffer, Manifest
from muster.weights.transport import Ticket, chosen

if TYPE_CHECKING:
    from muster.weights.transport import Weights

BUFFERS = 3  # with two, a worker has to begin anew whenever a publish follows on a publish


@dataclass(frozen=True)
class SharedMemory:
    """The scheme for workers on this machine; holds three copies of the weights, more where workers have others.

    Args:
        deadline_s: how long ``take`` tries to find weights that are not replaced while it copies them; only a
            publisher that does nothing else makes it begin anew at all.
    """

    deadline_s: float = 10.0

    def publisher(self, weights: Weights, workers: int, version: int | str = 0) -> SharedMemoryPublisher:
        return SharedMemoryPublisher(weights, workers, version, self.deadline_s)


class SharedMemoryPublisher:
    """Implements ``Publisher``. Args: see ``SharedMemory.publisher``; ``deadline_s`` is the subscribers'."""

    def __init__(self, weights: Weights, workers: int, version: int | str, deadline_s: float) -> None:
        self._manifest, self._deadline_s = Manifest.of(weights), deadline_s
        self._arena = Arena.create("muster-weights")
        self._workers, self._published = workers, 0
        self._cells_at = self._arena.allocate(8 * workers)
        self._cells = self._arena.view(self._cells_at, 8 * workers).view(np.int64)
        self._buffers: dict[int, Buffer] = {}
        self.publish(weights, version)

    def publish(self, weights: Weights, version: int | str, workers: Collection[int] | None = None) -> None:
        receiving = chosen(workers, self._workers)
        offset = self._spare()
        self._buffers[offset].write(weights, version, self._published + 1)
        self._published += 1
        for worker in receiving:
            self._cells[worker] = offset

    def catch_up(self) -> None:
        """Nobody can miss anything."""

    def ticket(self, worker: int) -> Ticket:
        chosen([worker], self._workers)
        place = self._cells_at, self._workers, worker
        opener = functools.partial(SharedMemorySubscriber, self._manifest, place, self._deadline_s)
        return Ticket(opener, [os.dup(self._arena.fd)])

    def close(self) -> None:
        self._arena.close()

    def _spare(self) -> int:
        """The buffer that was written longest ago, of those that are nobody's newest."""
        newest = set(self._cells.tolist())
        spare = [offset for offset in self._buffers if offset not in newest]
        if spare and len(self._buffers) >= BUFFERS:
            return min(spare, key=lambda offset: self._buffers[offset].sequence)
        offset = self._arena.allocate(self._manifest.nbytes)
        self._buffers[offset] = Buffer(self._arena.view(offset, self._manifest.nbytes), self._manifest)
        return offset


class SharedMemorySubscriber:
    """Implements ``Subscriber``. Args: ``place`` says where the cells are, their number, and which is the worker's."""

    def __init__(self, manifest: Manifest, place: tuple[int, int, int], deadline_s: float, fds: Sequence[int]) -> None:
        self.version: int | str | None = None
        self._manifest, self._deadline_s = manifest, deadline_s
        self._arena = Arena.attach(os.dup(fds[0]))
        cells_at, workers, self._worker = place
        self._cells = self._arena.view(cells_at, 8 * workers).view(np.int64)
        self._buffers: dict[int, Buffer] = {}
        self._private = Buffer.private(manifest)
        self._taken = 0

    def take(self, into: Weights) -> int | str | None:
        until = time.monotonic() + self._deadline_s
        while True:
            offset = int(self._cells[self._worker])
            shared = self._buffer(offset)
            sequence = shared.sequence
            if sequence == self._taken:
                return None
            if sequence > 0:
                self._private.memory[:] = shared.memory
                if self._cells[self._worker] == offset and shared.sequence == sequence:  # in this order
                    break
            if time.monotonic() > until:
                raise CollectorTimeout(
                    f"weights were replaced faster than they could be read, for {self._deadline_s} s on end. Publish "
                    f"less often, or use weight_sync_schemes='pipe'."
                )
        self.version = self._private.read(into)
        self._taken = sequence
        return self.version

    def close(self) -> None:
        self._arena.close()

    def _buffer(self, offset: int) -> Buffer:
        found = self._buffers.get(offset)
        if found is None:
            memory = self._arena.view(offset, self._manifest.nbytes)
            found = self._buffers[offset] = Buffer(memory, self._manifest)
        return found
