"""A collector that runs in a thread of its own, into a replay buffer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from muster.errors import CollectorTimeout

PATIENCE = 600.0  # seconds for one batch, before whoever waits for its end is told


class Background:
    """Calls ``step`` again and again in a daemon thread, until it returns False, raises, or ``stop`` is called.

    Args:
        step: one batch.
        name: of the thread.

    Attributes:
        error: what ``step`` raised, until somebody takes it.
    """

    def __init__(self, step: Callable[[], bool], name: str) -> None:
        self._step, self._stopping = step, threading.Event()
        self._gate = threading.Lock()  # held during a batch
        self._waiting = 0  # who wants the gate; a thread that only released and took it again would starve them
        self._free = threading.Condition()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def is_running(self) -> bool:
        return self._thread.is_alive()

    def here(self) -> bool:
        """The caller is this thread itself."""
        return threading.current_thread() is self._thread

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No batch is being collected inside; waits for the current one to end."""
        if self.here():
            yield
            return
        with self._free:
            self._waiting += 1
        try:
            if not self._gate.acquire(timeout=PATIENCE):
                raise CollectorTimeout(
                    f"the thread {self._thread.name} has been in the middle of one batch for {PATIENCE:.0f} s: an "
                    f"environment or policy may hang"
                )
            try:
                yield
            finally:
                self._gate.release()
        finally:
            with self._free:
                self._waiting -= 1
                self._free.notify_all()

    def stop(self, timeout: float | None) -> None:
        """End after the current batch.

        Raises:
            CollectorTimeout: it did not end in time; it will at the end of its batch.
        """
        self._stopping.set()
        with self._free:
            self._free.notify_all()
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise CollectorTimeout(
                f"the thread {self._thread.name} is still in the middle of a batch after {timeout} s. An environment "
                f"or policy may hang; call async_shutdown again with a longer timeout, or none to wait."
            )

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                with self._free:
                    self._free.wait_for(lambda: not self._waiting or self._stopping.is_set())
                with self._gate:
                    if self._stopping.is_set() or not self._step():
                        return
        except BaseException as error:  # noqa: BLE001 (handed to the user's thread)
            self.error = error
