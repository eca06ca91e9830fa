"""Who uses a collector now: one thread at a time collects or changes something, and one iterator at a
time is in use.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any

from muster.errors import CollectorTimeout
from muster.utils.tracebacks import trimmed

PATIENCE = 600.0  # seconds to wait for another thread


class CollectorUse:
    """The use of a collector, as a context that one thread at a time is in; a thread may enter it again.
    Errors leave it without Muster's inner frames.

    The loop over batches uses ``enter_at_once``, ``wait`` and ``leave``, which cost it no call of a
    Python function.

    Raises:
        CollectorTimeout: another thread did not leave it.
    """

    def __init__(self) -> None:
        self._iterator: weakref.ref[Generator[Any, None, None]] | None = None
        self._lock = threading.RLock()
        self.enter_at_once = partial(self._lock.acquire, blocking=False)
        self.leave = self._lock.release

    def __enter__(self) -> None:
        if not self.enter_at_once():
            self.wait()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.leave()
        trimmed.__exit__(kind, error, trace)

    def wait(self, timeout: float | None = None) -> None:
        """Enter when another thread has left. ``timeout``: in seconds; None: ten minutes."""
        patience = PATIENCE if timeout is None else max(0.0, timeout)
        if not self._lock.acquire(timeout=min(patience, threading.TIMEOUT_MAX)):
            raise CollectorTimeout(
                f"another thread has used this collector for {patience:g} s, and one thread at a"
                " time collects or changes something. It waits for something inside pause(), or an"
                " environment or policy hangs"
            )

    @contextmanager
    def within(self, timeout: float | None) -> Iterator[None]:
        """Return a context as this object itself is one, but for the time to wait; see ``wait``."""
        self.wait(timeout)
        try:
            yield
        finally:
            self.leave()

    @property
    def is_iterated(self) -> bool:
        """Whether an iterator is referenced, and has not ended."""
        live = None if self._iterator is None else self._iterator()
        if live is None:
            return False
        return inspect.getgeneratorstate(live) != inspect.GEN_CLOSED

    def begin_iterating(self, batches: Generator[Any, None, None]) -> None:
        """Note an iterator."""
        self._iterator = weakref.ref(batches)
