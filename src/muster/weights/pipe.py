"""Weights as bytes through a socket per worker.

A message is a block of fixed length (``buffer.Buffer``); nothing is pickled. A thread of the worker reads all the time
and keeps the latest complete message, so that a publisher does not wait for a busy worker. All bytes are in
the worker's socket when the publisher's call returns; ``take`` reads those that the thread has not read yet.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import functools
import os
import selectors
import socket
import struct
import termios
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from muster.memory.shared import Arena
from muster.weights.buffer import Buffer, Manifest
from muster.weights.transport import Ticket, chosen

if TYPE_CHECKING:
    from muster.weights.transport import Weights


SOCKET_BYTES = 4 << 20  # wanted; the system allows less
PART_S = 0.2  # how long a worker waits for the rest of a message while it keeps ``take`` waiting


@dataclass(frozen=True)
class Pipe:
    """The transport that needs no shared memory.

    Args:
        deadline_s: seconds that ``publish`` waits for a worker that does not read, because it is stopped or holds the
            GIL. Later publishes do not wait for that worker until it reads again.
    """

    deadline_s: float = 1.0

    def publisher(self, weights: Weights, workers: int, version: int | str = 0) -> PipePublisher:
        return PipePublisher(weights, workers, version, self.deadline_s)


class PipePublisher:
    """Implements ``Publisher``. Args: see ``Pipe.publisher``."""

    def __init__(self, weights: Weights, workers: int, version: int | str, deadline_s: float) -> None:
        self._manifest, self._deadline_s = Manifest.of(weights), deadline_s
        self._published = 0
        first = self._message(weights, version)
        self._lines = [_WorkerSocket(first) for _ in range(workers)]

    def publish(self, weights: Weights, version: int | str, workers: Collection[int] | None = None) -> None:
        receiving = chosen(workers, len(self._lines))
        message = self._message(weights, version)
        for worker in receiving:
            self._lines[worker].newest = message
        self.catch_up()

    def catch_up(self) -> None:
        waiting = [line for line in self._lines if not line.send() and line.reads]
        if not waiting:
            return
        with selectors.DefaultSelector() as selector:
            for line in waiting:
                selector.register(line.fileno(), selectors.EVENT_WRITE, line)
            while selector.get_map() and (writable := selector.select(self._deadline_s)):
                for key, _ in writable:
                    if key.data.send():
                        selector.unregister(key.fd)
            for key in selector.get_map().values():
                key.data.reads = False

    def ticket(self, worker: int) -> Ticket:
        chosen([worker], len(self._lines))
        line = self._lines[worker]
        here, there = socket.socketpair()
        here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        line.connect(here)
        arena = Arena.create("muster-weights")  # the first weights need not wait for a reader
        offset = arena.allocate(self._manifest.nbytes)
        arena.view(offset, self._manifest.nbytes)[:] = line.newest.memory
        fds = [there.detach(), os.dup(arena.fd)]
        arena.close()
        return Ticket(functools.partial(PipeSubscriber, self._manifest, offset), fds)

    def close(self) -> None:
        for line in self._lines:
            line.close()

    def _message(self, weights: Weights, version: int | str) -> Buffer:
        message = Buffer.private(self._manifest)
        message.write(weights, version, self._published + 1)
        self._published += 1
        return message


class _WorkerSocket:
    """The connection to one worker.

    Attributes:
        newest: the newest weights for the worker.
        reads: the worker has read everything so far.
    """

    def __init__(self, newest: Buffer) -> None:
        self.newest = newest
        self.reads = False
        self._begun, self._rest = newest, memoryview(b"")
        self._socket: socket.socket | None = None

    def connect(self, to: socket.socket) -> None:
        """Connect to a worker that has ``newest``."""
        self.close()
        to.setblocking(False)
        self._socket, self.reads = to, False
        self._begun, self._rest = self.newest, memoryview(b"")

    def fileno(self) -> int:
        return -1 if self._socket is None else self._socket.fileno()

    def send(self) -> bool:
        """Send what fits without waiting. True: there is nothing left to be sent, or no worker to send it to."""
        was_full = bool(self._rest)
        try:
            while self._socket is not None:
                if not self._rest:
                    if self._begun is self.newest:
                        return True
                    self._begun, self._rest = self.newest, self.newest.memory.data
                self._look_for_greeting()
                sent = self._socket.send(self._rest)
                self._rest = self._rest[sent:]
                self.reads |= was_full
        except BlockingIOError:
            return False
        except OSError:  # the worker is gone
            self.close()
        return True

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _look_for_greeting(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self.reads = self.reads or (self._socket is not None and bool(self._socket.recv(1)))


class PipeSubscriber:
    """Implements ``Subscriber``. Args: ``first_at`` says where the first weights are in the memory of ``fds[1]``."""

    def __init__(self, manifest: Manifest, first_at: int, fds: Sequence[int]) -> None:
        self.version: int | str | None = None
        arena = Arena.attach(os.dup(fds[1]))
        self._complete, self._coming = Buffer.private(manifest), Buffer.private(manifest)
        self._complete.memory[:] = arena.view(first_at, manifest.nbytes)
        arena.close()
        self._rest = self._coming.memory.data  # what is still to come of a message
        self._taken = 0
        self._socket = socket.socket(fileno=os.dup(fds[0]))
        self._socket.setblocking(True)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, int(PART_S * 1e6)))
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._read_on, name="muster-weights", daemon=True)
        self._thread.start()
        with contextlib.suppress(OSError):  # if the publisher is gone, this worker keeps its first weights
            self._socket.send(b"\0")

    def take(self, into: Weights) -> int | str | None:
        with self._lock:
            pending = array.array("i", [0])
            fcntl.ioctl(self._socket.fileno(), termios.FIONREAD, pending)
            with contextlib.suppress(OSError):  # the publisher is gone; what came from it stays
                while pending[0] > 0:
                    pending[0] -= self._receive(pending[0], socket.MSG_DONTWAIT)
            if self._complete.sequence == self._taken:
                return None
            self.version = self._complete.read(into)
            self._taken = self._complete.sequence
            return self.version

    def close(self) -> None:
        with contextlib.suppress(OSError):  # closed here already, or on the other side
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        self._socket.close()

    def _read_on(self) -> None:
        """Receive until the publisher is gone."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            while True:
                selector.select()
                with self._lock:
                    try:
                        if not self._receive(len(self._rest), socket.MSG_DONTWAIT):
                            return
                        if len(self._rest) < self._coming.memory.nbytes:  # giving up the GIL once, not for every piece
                            self._receive(len(self._rest), socket.MSG_WAITALL)
                    except BlockingIOError:  # ``take`` was faster, or the publisher has stopped in the middle
                        continue
                    except OSError:
                        return

    def _receive(self, limit: int, flags: int) -> int:
        """Read once; gives the number of bytes, 0 at the end."""
        received = self._socket.recv_into(self._rest[:limit], 0, flags)
        self._rest = self._rest[received:]
        if not self._rest:
            self._complete, self._coming = self._coming, self._complete
            self._rest = self._coming.memory.data
        return received
