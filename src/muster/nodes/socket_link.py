"""A link over a TCP connection, for the few short messages with which a node and the main process meet."""

from __future__ import annotations

import contextlib
import socket
import struct
import time

from muster.memory.specs import Array
from muster.nodes.link import Block, LinkLost, Received

LONGEST = 1 << 16  # bytes of a message; the other end need not be known yet
_LENGTH = struct.Struct("<I")


class SocketLink:
    """One end. It carries messages of at most ``LONGEST`` bytes, and no blocks.

    Args:
        connection: is closed by ``close``.
        deadline_s: seconds within which a whole message must come or go.

    Attributes:
        deadline_s: as above; it may be changed between messages.
    """

    def __init__(self, connection: socket.socket, deadline_s: float) -> None:
        self._socket, self.deadline_s = connection, deadline_s

    def send(self, message: bytes, block: Block | None = None, tag: int = 0) -> None:
        if block is not None or len(message) > LONGEST:
            raise ValueError(f"A message of {len(message)} bytes, where at most {LONGEST} and no block are possible.")
        try:
            self._socket.settimeout(self.deadline_s)
            self._socket.sendall(_LENGTH.pack(len(message)) + message)
        except OSError as error:
            raise self._lost(error) from None

    def expect(self, tag: int, memory: Array) -> None:
        """No block comes."""

    def receive(self) -> Received:
        deadline = time.monotonic() + self.deadline_s
        try:
            (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size, deadline))
            if length > LONGEST:
                raise LinkLost(f"The other end announced {length} bytes, where at most {LONGEST} are possible.")
            return Received(self._exactly(length, deadline))
        except OSError as error:
            raise self._lost(error) from None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in ``receive``
        self._socket.close()

    def _exactly(self, count: int, deadline: float) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            part = self._socket.recv(count - len(parts))
            if not part:
                raise LinkLost("The other end has closed the connection.")
            parts += part
        return bytes(parts)

    def _lost(self, error: OSError) -> LinkLost:
        if isinstance(error, TimeoutError):
            return LinkLost(f"The other end has not answered for {self.deadline_s:g} s.")
        return LinkLost(f"The connection is lost: {error.strerror or error}.")
