"""Threads that have ended when the interpreter is torn down.

When a program ends, Python unwinds the stack of a daemon thread wherever it is. In the middle of
C++ code (an operator of torch, a simulator) this aborts the process: SIGABRT, in place of the
program's own exit status. A thread that is no daemon would keep the program from ending instead. So
these threads are daemons, and an exit handler, which runs while all threads still run, ends them:

1. ``ask`` of each thread, the newest first, tells it to end.
2. They have ``GRACE_S`` to end by themselves.
3. Those that still run get SystemExit at their next line of Python, repeatedly, for the rest of
   ``END_S``.

A thread that is blocked in a single call for longer than that is left alone: the program ends
without it.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
import time
from collections.abc import Callable

GRACE_S = 1.0
END_S = 5.0
AGAIN_S = 0.05  # between two SystemExit: code of the user may have caught the last one


class EndingThread(threading.Thread):
    """A daemon thread that is ended before the interpreter is torn down.

    Args:
        ask: tells the thread to end, at the end of the program. Called in the main thread; may wait
            for at most ``GRACE_S``.
    """

    def __init__(
        self, target: Callable[[], object], name: str, ask: Callable[[], object]
    ) -> None:
        super().__init__(target=target, name=name, daemon=True)
        self.ask = ask

    def start(self) -> None:
        """Start the thread.

        Raises RuntimeError if the system allows no more threads, or the program is ending.
        """
        if _ending.is_set():
            raise RuntimeError("can't start new thread: the program is ending")
        _running[self] = None
        atexit.unregister(_end_all)
        # before the handlers that are registered so far, which end what this thread uses
        atexit.register(_end_all)
        try:
            super().start()
        except BaseException:
            _running.pop(self, None)
            raise

    def run(self) -> None:
        try:
            super().run()
        finally:
            del self.ask
            _running.pop(self, None)


_running: dict[EndingThread, None] = {}  # as an ordered set
_ending = threading.Event()


def _end_all() -> None:
    _ending.set()
    for thread in reversed([*_running]):
        ask = getattr(thread, "ask", None)  # it may have ended meanwhile
        if ask is not None and thread.is_alive():
            ask()
    began = time.monotonic()
    _join_all(began + GRACE_S)
    while _running and time.monotonic() < began + END_S:
        for thread in [*_running]:
            _interrupt(thread)
        _join_all(time.monotonic() + AGAIN_S)


def _join_all(until: float) -> None:
    for thread in [*_running]:
        thread.join(max(0.0, until - time.monotonic()))
        if not thread.is_alive():  # a thread of the parent, in a fork of it
            _running.pop(thread, None)


def _interrupt(thread: threading.Thread) -> None:
    """Raise SystemExit in a thread, which ends it without a message."""
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)
        )
