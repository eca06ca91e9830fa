"""Whether the thread that serves a node's session still looks at it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from muster.errors import MusterError
from muster.workers.failures import node_hung


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

    def limit(self, seconds: Sequence[float | None]) -> None:
        """Set the longest time between two renewals: the longest of these, None: no limit."""
        self._limit_s = None
        finite = [one for one in seconds if one is not None]
        if len(finite) == len(seconds):
            self._limit_s = max(finite)

    def renew(self) -> None:
        """Note that the thread does not hang. Called by the thread."""
        self._renewed = time.monotonic()

    def failure(self) -> MusterError | None:
        """Return the error that the thread hangs; None: it does not. Called by another thread."""
        limit_s = self._limit_s
        if limit_s is None:
            return None
        seconds = time.monotonic() - self._renewed
        if seconds <= limit_s:
            return None
        return node_hung(
            self.node,
            self._thread,
            seconds=seconds,
            deadline=limit_s,
        )
