"""Links over a TCP connection.

A message is sent as a header (its length, a tag, the length of its block), the message, and the block. Blocks are sent
from their own memory, and received in the memory given to ``expect``.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator

import numpy as np

from muster.cluster.link import Block, LinkLost, Received, allowed_s
from muster.memory.specs import Array

LONGEST = 1 << 16  # bytes of a message before authentication; blocks are refused
LONGEST_KNOWN = 1 << 40  # a peer that announces more speaks another protocol
PART = 64 << 20  # bytes
_HEADER = struct.Struct("<QQQ")


class SocketLink:
    """Implements ``Link``.

    Args:
        connection: closed by ``close``.
        deadline_s: seconds without a message after which the link is lost.
    """

    def __init__(self, connection: socket.socket, deadline_s: float) -> None:
        self._socket, self._deadline_s, self._longest = connection, deadline_s, LONGEST
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # it is no TCP connection
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._expected: dict[int, Array] = {}
        self._lock = threading.Lock()  # held while memory is written
        self._users = 0  # threads that send or receive
        self._cause = ""  # why it is closed

    def know(self, deadline_s: float) -> None:
        """The other end is authenticated: allow messages and blocks of any length, and set the deadline."""
        self._deadline_s, self._longest = deadline_s, LONGEST_KNOWN

    def send(self, message: bytes, block: Block | None = None, tag: int = 0) -> None:
        array = np.empty(0, np.uint8) if block is None else block.array
        if max(len(message), array.size) > self._longest:
            raise ValueError(f"A message of {len(message)} bytes, where at most {self._longest} are possible.")
        parts = [memoryview(_HEADER.pack(len(message), tag, array.size) + message), array.data]
        deadline = time.monotonic() + allowed_s(self._deadline_s, len(message) + array.size)
        with self._used("read"):
            while parts := [part for part in parts if part.nbytes]:
                try:
                    sent = self._socket.sendmsg(parts)
                except BlockingIOError:
                    self._wait(select.POLLOUT, deadline)
                    continue
                for number, part in enumerate(parts):
                    parts[number] = part[sent:]
                    sent -= part.nbytes - parts[number].nbytes

    def expect(self, tag: int, memory: Array) -> None:
        """See ``Link``; does nothing after the link is closed."""
        with self._lock:
            if not self._cause:
                self._expected[tag] = memory

    def receive(self) -> Received:
        with self._used("said anything"):
            deadline = time.monotonic() + self._deadline_s
            header = np.empty(_HEADER.size, np.uint8)
            self._read(header, deadline)
            length, tag, size = _HEADER.unpack_from(header.data)
            if max(length, size) > self._longest or (size and self._longest == LONGEST):
                raise LinkLost(f"The other end announced a message of {length} and a block of {size} bytes.")
            deadline = time.monotonic() + allowed_s(self._deadline_s, length + size)
            message = self._received(length, deadline).tobytes()
            if not tag:
                return Received(message)
            block = self._place(tag, size)
            if block is None:
                block = self._received(size, deadline)
            else:
                self._read(block, deadline)
            return Received(message, tag, block)

    def close(self) -> None:
        self._close("The link was closed here.")

    def _close(self, cause: str) -> None:
        with self._lock:
            if self._cause:
                return
            self._cause = cause
            self._expected.clear()
            with contextlib.suppress(OSError):  # wakes the waiting threads; the last one closes the socket
                self._socket.shutdown(socket.SHUT_RDWR)
            if not self._users:
                self._socket.close()

    @contextlib.contextmanager
    def _used(self, late: str) -> Iterator[None]:
        """A context for a thread that uses the socket. Errors close the link, and are raised as ``LinkLost``."""
        with self._lock:
            if self._cause:
                raise LinkLost(self._cause)
            self._users += 1
        try:
            yield
        except TimeoutError:
            self._close(f"The other end has not {late} for {self._deadline_s:g} s.")
        except LinkLost as error:
            self._close(str(error))
        except OSError as error:
            gone = isinstance(error, ConnectionError)
            self._close("The other end is gone." if gone else f"The connection is lost: {error.strerror or error}.")
        finally:
            with self._lock:
                self._users -= 1
                if self._cause and not self._users:
                    self._socket.close()
                cause = self._cause
        if cause:
            raise LinkLost(cause)

    def _place(self, tag: int, size: int) -> Array | None:
        with self._lock:
            memory = self._expected.pop(tag, None)
        if memory is not None and memory.size != size:
            raise LinkLost(f"Block {tag} has {size} bytes where {memory.size} were expected.")
        return memory

    def _received(self, size: int, deadline: float) -> Array:
        """Read into new memory, allocated part by part: the size that was announced is not authenticated."""
        parts = [np.empty(0, np.uint8)] * (size == 0)
        while size:
            parts.append(np.empty(min(size, PART), np.uint8))
            self._read(parts[-1], deadline)
            size -= parts[-1].size
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _read(self, memory: Array, deadline: float) -> None:
        rest = memory.data
        while rest.nbytes:
            with self._lock:  # not after `close` has returned
                if self._cause:
                    raise LinkLost(self._cause)
                try:
                    count = self._socket.recv_into(rest)
                except BlockingIOError:
                    count = -1
            if count == 0:
                raise LinkLost("The other end has closed the link, or is gone.")
            if count < 0:
                self._wait(select.POLLIN, min(deadline, time.monotonic() + self._deadline_s))
            else:
                rest = rest[count:]

    def _wait(self, event: int, deadline: float) -> None:
        """Wait until the socket is ready, or the link is closed."""
        poller = select.poll()
        poller.register(self._socket, event)
        if not poller.poll(1000 * max(0.0, deadline - time.monotonic())):
            raise TimeoutError
