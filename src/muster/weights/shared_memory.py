"""Weights through memory that processes share: one copy in, one out, no message.

The block of a publisher holds several buffers and two cells per worker: the offset of its newest
weights, and of the buffer that it is reading. A publish writes a buffer that no cell names, then
sets the first cells; so a publisher that dies in the middle has changed nothing that is read. A
worker marks the buffer of its first cell as the one that it reads, and looks whether the cell still
names it. If so, the publisher writes elsewhere until the mark is gone, and the worker copies the
weights right to where they act; else it starts again, and has changed nothing. A worker that dies
while it reads keeps one buffer from being used, until its successor reads. Other processors than
x86 need a fence between the weights and the cell or mark that is stored after them (what libc and
torch copy past the caches they fence themselves); a store and a load after it need one everywhere.
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
from muster.memory.specs import Array
from muster.utils.fences import fence, keep_order
from muster.weights.buffer import Buffer, Manifest
from muster.weights.transport import Ticket, chosen

if TYPE_CHECKING:
    from muster.weights.transport import Weights

BUFFERS = (
    3  # with two, a worker has to start again whenever a publish follows on a publish
)
_NOTHING = 0  # is the offset of the cells


@dataclass(frozen=True)
class SharedMemory:
    """The transport for workers on this machine; holds three copies of the weights, more where
    workers have others.

    Args:
        deadline_s: how long ``take`` tries to find weights that are not replaced while it begins to
            copy them; only a publisher that does nothing else makes it start again at all.
    """

    deadline_s: float = 10.0

    def publisher(
        self, weights: Weights, workers: int, version: int | str = 0
    ) -> SharedMemoryPublisher:
        return SharedMemoryPublisher(weights, workers, version, self.deadline_s)


class SharedMemoryPublisher:
    """Implements ``Publisher``.

    Args: see ``SharedMemory.publisher``; ``deadline_s`` is the subscribers'.
    """

    def __init__(
        self, weights: Weights, workers: int, version: int | str, deadline_s: float
    ) -> None:
        self._manifest = Manifest.of(weights)
        self._deadline_s = deadline_s
        self._arena = Arena.create("muster-weights")
        self._workers = workers
        self._published = 0
        self._cells_at = self._arena.allocate(2 * 8 * workers)
        self._cells, self._reading = _cells(self._arena, self._cells_at, workers)
        self._buffers: dict[int, Buffer] = {}
        self._lent: int | None = None
        self.publish(weights, version)

    def publish(
        self,
        weights: Weights,
        version: int | str,
        workers: Collection[int] | None = None,
    ) -> None:
        receiving = chosen(workers, self._workers)
        offset = self._spare()
        self._buffers[offset].write(weights, version, self._published + 1)
        self._show(offset, receiving)

    def lend(self) -> Array:
        """Memory for the next weights, as a ``Buffer`` has them, for a caller that writes or
        receives them there. The same until ``publish_lent``. The sequence number in them has to be
        negative.
        """
        if self._lent is None:
            self._lent = self._spare()
        self._buffers[self._lent].begin_writing()
        return self._buffers[self._lent].memory

    def publish_lent(self) -> None:
        """Let all workers have the weights that are in the memory that was lent; it is not written
        any more.
        """
        assert self._lent is not None, "nothing was lent"
        offset = self._lent
        self._lent = None
        self._buffers[offset].finish_writing(self._published + 1)
        self._show(offset, range(self._workers))

    def _show(self, offset: int, workers: Collection[int]) -> None:
        self._published += 1
        keep_order()  # who sees the cell sees the weights
        for worker in workers:
            self._cells[worker] = offset

    def ticket(self, worker: int) -> Ticket:
        chosen([worker], self._workers)
        place = (self._cells_at, self._workers, worker)
        opener = functools.partial(
            SharedMemorySubscriber, self._manifest, place, self._deadline_s
        )
        return Ticket(opener, [os.dup(self._arena.fd)])

    def close(self) -> None:
        self._arena.close()

    def _spare(self) -> int:
        """The buffer that was written longest ago, of those that are no worker's newest and that no
        worker reads.
        """
        newest = self._cells.tolist()
        fence()  # a reader has seen these cells, or its mark is seen now
        taken = {*newest, *self._reading.tolist(), self._lent}
        spare = [offset for offset in self._buffers if offset not in taken]
        if spare and len(self._buffers) >= BUFFERS:
            return min(spare, key=lambda offset: self._buffers[offset].sequence)
        offset = self._arena.allocate(self._manifest.nbytes)
        memory = self._arena.view(offset, self._manifest.nbytes)
        self._buffers[offset] = Buffer(memory, self._manifest)
        return offset


class SharedMemorySubscriber:
    """Implements ``Subscriber``.

    Args: ``place`` says where the cells are, their number, and which is the worker's.
    """

    def __init__(
        self,
        manifest: Manifest,
        place: tuple[int, int, int],
        deadline_s: float,
        fds: Sequence[int],
    ) -> None:
        self.version: int | str | None = None
        self._manifest = manifest
        self._deadline_s = deadline_s
        self._arena = Arena.attach(os.dup(fds[0]))
        cells_at, workers, self._worker = place
        self._cells, self._reading = _cells(self._arena, cells_at, workers)
        self._buffers: dict[int, Buffer] = {}
        self._taken = 0

    def take(self, into: Weights) -> int | str | None:
        until = time.monotonic() + self._deadline_s
        while True:
            offset = int(self._cells[self._worker])
            sequence = self._buffer(offset).sequence
            if sequence == self._taken:
                return None
            if sequence > 0 and self._read(offset, sequence, into):
                self._taken = sequence
                return self.version
            if time.monotonic() > until:
                raise CollectorTimeout(
                    f"weights were replaced faster than they could be read, for {self._deadline_s}"
                    " s on end. Publish less often."
                )

    def _read(self, offset: int, sequence: int, into: Weights) -> bool:
        """Copy a buffer, unless it has been given up for another, which may be written."""
        shared = self._buffer(offset)
        try:
            self._reading[self._worker] = offset
            fence()  # the publisher sees this, or the cell is seen to be another
            if self._cells[self._worker] != offset or shared.sequence != sequence:
                return False
            self.version = shared.read(into)
            keep_order()  # the weights were read before the mark is gone
            return (
                shared.sequence == sequence
            )  # always, unless another worker has the same number
        finally:
            self._reading[self._worker] = _NOTHING

    def close(self) -> None:
        self._arena.close()

    def _buffer(self, offset: int) -> Buffer:
        found = self._buffers.get(offset)
        if found is None:
            memory = self._arena.view(offset, self._manifest.nbytes)
            found = self._buffers[offset] = Buffer(memory, self._manifest)
        return found


def _cells(arena: Arena, at: int, workers: int) -> tuple[Array, Array]:
    """``int64 [workers]`` each: the offsets of what is newest for them, and of what they read."""
    cells = arena.view(at, 2 * 8 * workers).view(np.int64)
    newest, reading = cells.reshape(2, workers)
    return newest, reading
