"""Whether the thread that serves a node's session still looks at it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from muster.cluster.session import BEAT_S
from muster.errors import MusterError
from muster.workers.failures import node_hung
from muster.workers.worker_pool import STOPPED_S


class Attention:
    """Notices that this thread hangs, for the thread that sends heartbeats.

    Args:
        node: its name, for the error.

    Attributes:
        node: see above.
    """

    def __init__(self, node: str) -> None:
        self.node = node
        self._thread = threading.get_ident()
        self._renewed = time.monotonic()
        self._limit_s: float | None = None  # until ``limit``
        self._asked = time.monotonic()  # time of the last ``failure``

    def limit(self, seconds: Sequence[float | None]) -> None:
        """Set the longest time between two renewals: the longest of these, None: no limit."""
        self._limit_s = None
        finite = [one for one in seconds if one is not None]
        if len(finite) == len(seconds):
            self._limit_s = max(finite)

    @contextmanager
    def at_least(self, seconds: float) -> Iterator[None]:
        """Allow so many seconds without a renewal in this context. It begins and ends with one."""
        limit_s = self._limit_s
        self.renew()
        if limit_s is not None:
            self._limit_s = max(limit_s, seconds)
        try:
            yield
        finally:
            self.renew()
            self._limit_s = limit_s

    def renew(self) -> None:
        """Note that the thread does not hang. Called by the thread."""
        self._renewed = time.monotonic()

    def failure(self) -> MusterError | None:
        """Return the error that the thread hangs; None: it does not. Called by another thread,
        which asks every ``BEAT_S`` while nothing is said: more means that the process was stopped.
        """
        now = time.monotonic()
        late_s = now - self._asked - BEAT_S
        self._asked = now
        if late_s > STOPPED_S:
            self._renewed = min(now, self._renewed + late_s)
        limit_s = self._limit_s
        if limit_s is None:
            return None
        seconds = now - self._renewed
        if seconds <= limit_s:
            return None
        return node_hung(
            self.node,
            self._thread,
            seconds=seconds,
            deadline=limit_s,
        )
