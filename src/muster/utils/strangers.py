"""Connections to a listening socket that have not shown yet that they may use it."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

MOST = 128  # at the same time


class Strangers:
    """Bounds the connections that have not proved themselves, in number and time. Thread-safe.

    A new connection takes the place of the oldest one. So a peer that proves itself at once gets
    in, however many others say nothing: if new ones were refused instead, these would keep out
    everybody.

    Args:
        keeps_s: seconds for which a connection keeps its place in any case. Peers must try again
            then, since a new one is refused while all others are younger.
    """

    def __init__(self, keeps_s: float = 0.0) -> None:
        self._keeps_s = keeps_s
        self._since: dict[socket.socket, float] = {}  # oldest first
        self._lock = threading.Lock()

    def add(self, connection: socket.socket, most: int = MOST) -> bool:
        """Add a connection; ends the oldest of ``most`` others.

        Returns False if it has to be refused.
        """
        with self._lock:
            if len(self._since) >= most:
                oldest = next(iter(self._since))
                if time.monotonic() - self._since[oldest] < self._keeps_s:
                    return False
                self._end(oldest)
            self._since[connection] = time.monotonic()
            return True

    def remove(self, connection: socket.socket) -> bool:
        """Remove a connection that is no stranger any more, or is closed next.

        Returns False if it was ended.
        """
        with self._lock:
            return self._since.pop(connection, None) is not None

    def end_late(self, within_s: float) -> None:
        """End all that have been strangers for longer than that."""
        with self._lock:
            late = time.monotonic() - within_s
            connections = [each for each, since in self._since.items() if since < late]
            for connection in connections:
                self._end(connection)

    def _end(self, connection: socket.socket) -> None:
        """Wake the thread that serves a connection, which closes it."""
        del self._since[connection]
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
