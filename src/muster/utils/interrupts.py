"""Defers Ctrl-C to points where all counters are consistent: to the user's code and to waits.

Only the main thread runs signal handlers. In other threads this has no effect.
"""

from __future__ import annotations

import os
import threading
from contextlib import ContextDecorator
from threading import get_ident
from types import FrameType
from typing import Any

try:
    import _signal  # type: ignore[import-not-found]  # `signal` tries to make enums of handlers, for 5 us each time
except ImportError:
    import signal as _signal

SIGINT: int = _signal.SIGINT


class _Interrupts:
    """Replaces the handler of SIGINT while a ``postponed`` context is active."""

    def __init__(self) -> None:
        self.contexts: list[bool] = []  # active contexts, outermost first: whether Ctrl-C takes effect
        self.usual: Any = None
        self.noted = False
        self.handler = self._handle

    def begin(self, before: Any) -> None:
        self.usual = self.usual if before is self.handler else before  # else an interrupt left the handler installed
        self.contexts, self.noted = [], False
        _signal.signal(SIGINT, self.handler)

    def deliver(self) -> None:
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


class postponed(ContextDecorator):  # noqa: N801 (used as a function)
    """Defers Ctrl-C to the next ``allowed`` context inside, else to the end; a second Ctrl-C takes effect at once."""

    _depth = -1  # number of outer contexts; -1: this has no effect
    _outermost = False

    def _recreate_cm(self) -> postponed:
        return postponed()

    def __enter__(self) -> None:
        state = _interrupts
        if get_ident() != _main_thread:
            return
        before = _signal.getsignal(SIGINT)
        self._outermost = before is not state.handler or not state.contexts
        if self._outermost and not callable(before):
            return
        try:
            self._depth = 0 if self._outermost else len(state.contexts)
            if self._outermost:
                state.begin(before)
            state.contexts.append(False)
        except BaseException:  # raised by a signal handler meanwhile
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        state, depth = _interrupts, self._depth
        if depth < 0:
            return
        try:
            if self._outermost and _signal.getsignal(SIGINT) is state.handler:  # else another handler was set
                _signal.signal(SIGINT, state.usual)
        finally:  # a signal handler can raise at any line
            del state.contexts[depth:]
        if state.noted and (not depth or state.contexts[-1]):
            state.deliver()


class allowed:  # noqa: N801 (used as a function)
    """Lets a deferred or new Ctrl-C take effect: in waits, and in calls of the user's code."""

    _depth = -1  # number of outer contexts; -1: this has no effect

    def __enter__(self) -> None:
        state = _interrupts
        if not (state.contexts and get_ident() == _main_thread and _signal.getsignal(SIGINT) is state.handler):
            return
        self._depth = len(state.contexts)
        try:
            if state.noted:
                state.deliver()
            state.contexts.append(True)
        except BaseException:
            del state.contexts[self._depth :]
            raise

    def __exit__(self, *_: object) -> None:
        if self._depth >= 0:
            del _interrupts.contexts[self._depth :]


def _note_main_thread() -> None:
    global _main_thread
    _main_thread = get_ident()


_main_thread = threading.main_thread().ident
os.register_at_fork(after_in_child=_note_main_thread)  # in a fork, the forking thread is the main thread
