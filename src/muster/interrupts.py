"""Ctrl-C where it does no harm: in the user's code and in waits, but not between two lines of the books.

Only the main thread runs signal handlers, and only there does any of this have an effect.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

try:
    import _signal  # type: ignore[import-not-found]  # `signal` tries to make enums of handlers, for 5 us each time
except ImportError:
    import signal as _signal

SIGINT: int = _signal.SIGINT


class _Interrupts:
    """Stands in for the handler of SIGINT while a ``postponed`` context is entered."""

    def __init__(self) -> None:
        self.contexts: list[bool] = []  # that are entered, outermost first: whether Ctrl-C takes effect
        self.usual: Any = None
        self.noted = False
        self._mine = self._handle

    @property
    def here(self) -> bool:
        """This stands in, and for the present thread."""
        return bool(self.contexts) and _in_main() and _signal.getsignal(SIGINT) is self._mine

    def begin(self) -> None:
        before = _signal.getsignal(SIGINT)
        self.usual = self.usual if before is self._mine else before  # else an interruption has left it there
        self.contexts, self.noted = [], False
        _signal.signal(SIGINT, self._mine)

    def end(self) -> None:
        if _signal.getsignal(SIGINT) is self._mine:  # else somebody has set another one meanwhile
            _signal.signal(SIGINT, self.usual)

    def deliver(self) -> None:
        """What was noted."""
        if self.noted:
            self.noted = False
            self.usual(SIGINT, None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.noted or not self.contexts or self.contexts[-1]:
            self.noted = False
            self.usual(number, frame)
        else:
            self.noted = True


_interrupts = _Interrupts()


@contextmanager
def postponed() -> Iterator[None]:
    """Ctrl-C takes effect in the next ``allowed`` context inside, else at the end; the second one does so at once."""
    state = _interrupts
    outermost = not state.here
    if outermost and not (_in_main() and callable(_signal.getsignal(SIGINT))):
        yield
        return
    depth = 0 if outermost else len(state.contexts)
    try:
        if outermost:
            state.begin()
        state.contexts.append(False)
        yield
    finally:  # which a signal may leave at any line
        if outermost:
            state.end()
        del state.contexts[depth:]
        if not depth or state.contexts[-1]:
            state.deliver()


@contextmanager
def allowed() -> Iterator[None]:
    """Ctrl-C takes effect, here at the latest: this waits, or calls code of the user's."""
    state = _interrupts
    if not state.here:
        yield
        return
    depth = len(state.contexts)
    try:
        state.deliver()
        state.contexts.append(True)
        yield
    finally:
        del state.contexts[depth:]


def _in_main() -> bool:
    return threading.get_ident() == threading.main_thread().ident
