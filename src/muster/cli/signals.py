"""Stopping: the first signal asks, the second insists."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class StopSignals:
    """While entered, Ctrl-C and SIGTERM set ``received`` and print ``say`` instead of ending the process.

    The next one of either raises KeyboardInterrupt. The one after that has its default effect, for code that does not
    return to the interpreter.
    """

    def __init__(self, say: str = "stopping after this batch; again to stop at once.") -> None:
        self.received: int | None = None
        self._say = say
        self._old: dict[int, Any] = {}

    @property
    def exit_code(self) -> int:
        """As shells count: 128 + the number of the signal."""
        return 0 if self.received is None else 128 + self.received

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # others may not set handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                self._old[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.received is not None:
            for each in self._old:
                signal.signal(each, signal.SIG_DFL)
            raise KeyboardInterrupt
        self.received = number
        # Not print: the signal may have come in the middle of one.
        os.write(2, f"\nmuster: {self._say}\n".encode())
