"""Defers Ctrl-C to points where all counters are consistent, and where no row is half made.

The life of one Ctrl-C in the main thread, while a ``postponed`` context is active:

1. It is noted. Muster's code, and environments and policies that are called in a row, run on.
2. It takes effect in the next ``allowed`` context (waits, hooks), at the next ``checkpoint`` (the
   loop has one after each row), or at the end of the outermost context. The user's handler is
   called, which raises KeyboardInterrupt unless the user has set another.
3. A second Ctrl-C takes effect at once if it interrupts an environment, a policy or other code of
   the user. Between two lines of Muster's own it changes nothing: these write rows and their
   counters, and take microseconds.
4. ``GRACE_S`` seconds after the first one was noted, it takes effect wherever the program is, unless
   the outermost context is the user's (``delayed_interrupt``): an environment that hangs does not
   keep the program.

Other threads never handle signals: there, nothing of this has an effect.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from _thread import start_new_thread
from contextlib import ContextDecorator
from threading import get_ident
from types import FrameType
from typing import Any, TypeAlias

try:
    import _signal  # type: ignore[import-not-found]  # `signal` tries to make enums of handlers, for 5 us each time
except ImportError:
    import signal as _signal

SIGINT: int = _signal.SIGINT
GRACE_S = 3.0  # seconds for which a row that is being made may delay Ctrl-C
# Packages whose code runs on behalf of the code that calls it.
_LIBRARIES = sys.stdlib_module_names | {
    "cloudpickle",
    "numpy",
    "safetensors",
    "tensordict",
    "torch",
}


class _Interrupts:
    """Replaces the handler of SIGINT while a ``postponed`` context is active.

    Attributes:
        contexts: active contexts, outermost first: whether Ctrl-C takes effect.
        patient: number of outermost contexts that are the user's: 0 or 1.
        usual: the user's handler.
        noted: a Ctrl-C has not taken effect yet.
        count: number of those that were noted so far.
        deadline: when the noted one takes effect anywhere, in seconds of ``time.monotonic``; None:
            it may wait for as long as the user's outermost context.
    """

    def __init__(self) -> None:
        self.contexts: list[bool] = []
        self.patient = 0
        self.usual: Any = None
        self.noted = False
        self.count = 0
        self.deadline: float | None = None
        self.handler = self._handle

    def begin(self, before: Any) -> None:
        if before is not self.handler:  # else an interrupt left the handler installed
            self.usual = before
        self.contexts = []
        self.patient = 0
        self.noted = False
        _signal.signal(SIGINT, self.handler)

    def deliver(self) -> None:
        """Let a noted Ctrl-C take effect."""
        if self.noted:
            self._take_effect(SIGINT, None)

    def limit_delay(self) -> None:
        """Start the grace period of the noted Ctrl-C."""
        self.deadline = time.monotonic() + GRACE_S
        # Not ``threading.Thread``: the handler may have interrupted code that holds the lock of
        # that module.
        start_new_thread(self._repeat, (self.count,))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.contexts or self.contexts[-1]:
            self._take_effect(number, frame)
            return
        if self.noted:
            if not self._keeps_waiting(frame):
                self._take_effect(number, frame)
            return
        self.noted = True
        self.count += 1
        self.deadline = None
        if len(self.contexts) > self.patient:
            self.limit_delay()

    def _keeps_waiting(self, frame: FrameType | None) -> bool:
        """Return whether another Ctrl-C, which comes while one is noted, waits as well."""
        if len(self.contexts) == self.patient or not _is_ours(frame):
            return False
        if self.deadline is None:
            self.limit_delay()
            return True
        return time.monotonic() < self.deadline

    def _take_effect(self, number: int, frame: FrameType | None) -> None:
        self.noted = False
        self.usual(number, frame)

    def begin_patient(self) -> None:
        """Note that the outermost context is the user's."""
        self.patient = 1

    def _repeat(self, count: int) -> None:
        """Send the noted Ctrl-C again after the grace period, unless it has taken effect."""
        time.sleep(GRACE_S)  # noqa: TID251 (the delay is the purpose)
        thread = _main_thread
        if self.noted and self.count == count and thread is not None:
            signal.pthread_kill(thread, SIGINT)


def _is_ours(frame: FrameType | None) -> bool:
    """Return whether a line of Muster is executed, by itself or by a library that it calls."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        package = name.partition(".")[0]
        if package == "muster":
            return not name.startswith("muster.testing")  # environments
        # a constructor that ``NamedTuple`` has written belongs to no module
        if package not in _LIBRARIES and not package.startswith("namedtuple_"):
            return False
        frame = frame.f_back
    return False


_interrupts = _Interrupts()


class _Never:
    """Takes the place of ``_Interrupts`` in threads that handle no signals."""

    noted = False

    def deliver(self) -> None:
        """Do nothing."""


NEVER = _Never()
Signals: TypeAlias = "_Interrupts | _Never"


class postponed(ContextDecorator):  # noqa: N801 (used as a function)
    """Defers Ctrl-C to the next ``allowed`` context or ``checkpoint`` inside, else to the end."""

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
        state = _interrupts
        depth = self._depth
        if depth < 0:
            return
        try:
            # else another handler was set
            if self._outermost and _signal.getsignal(SIGINT) is state.handler:
                _signal.signal(SIGINT, state.usual)
        finally:  # a signal handler can raise at any line
            del state.contexts[depth:]
        if state.noted and (not depth or state.contexts[-1]):
            state.deliver()


class delayed_interrupt(postponed):  # noqa: N801 (used as a function)
    """Context manager: Ctrl-C takes effect while a collector collects or waits, and not between two
    of its calls.

    ::

        with muster.delayed_interrupt():
            try:
                for batch in collector:
                    train(batch)  # Ctrl-C is noted here, and raised when the next batch is collected
            except KeyboardInterrupt:
                muster.save_state("checkpoint", collector.state_dict())

    So every batch is used completely or not collected, and a state that is saved after the
    ``KeyboardInterrupt`` continues with the next row. A second Ctrl-C takes effect at once. A
    Ctrl-C that is left at the end of the context is raised there. In other threads than the main
    thread, and where SIGINT has no Python handler, the context has no effect.
    """

    def _recreate_cm(self) -> delayed_interrupt:
        return delayed_interrupt()

    def __enter__(self) -> None:
        super().__enter__()
        if self._depth == 0:
            _interrupts.begin_patient()


class allowed:  # noqa: N801 (used as a function)
    """Lets a deferred or new Ctrl-C take effect: in waits, and in calls of the user's hooks."""

    _depth = -1  # number of outer contexts; -1: this has no effect

    def __enter__(self) -> None:
        state = _interrupts
        if not (
            state.contexts
            and get_ident() == _main_thread
            and _signal.getsignal(SIGINT) is state.handler
        ):
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


def here() -> Signals:
    """Return the object whose ``noted`` says that a Ctrl-C waits in this thread, and whose
    ``deliver`` raises it.

    Call this inside of a ``postponed`` context, when everything that this context protects is
    consistent. If another one of Muster's is around it (a collector in an environment of another
    one), it is not: then nothing is noted.
    """
    state = _interrupts
    if get_ident() != _main_thread:
        return NEVER
    around = state.contexts[state.patient : -1]
    if around and not around[-1]:
        return NEVER
    return state


def checkpoint() -> None:
    """Let a noted Ctrl-C take effect here; see ``here``."""
    if _interrupts.noted:
        here().deliver()


def _note_main_thread() -> None:
    global _main_thread
    _main_thread = get_ident()


_main_thread = threading.main_thread().ident
# in a fork, the forking thread is the main thread
os.register_at_fork(after_in_child=_note_main_thread)
