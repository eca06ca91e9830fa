"""Forks of this process: they copy objects, but not the workers, threads, files or shared memory
these use.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from types import FrameType
from typing import Any, NoReturn

from muster.errors import ForkedProcess

# environments; code that forks on purpose
_NOT_OURS = ("muster.testing.", "muster.workers.forkserver")


class Owner:
    """The process that made an object (``name``); no other process may use the object's resources
    (``has``).
    """

    __slots__ = ("_has", "_name", "_pid")

    def __init__(self, name: str = "", has: str = "") -> None:
        self._pid = os.getpid()
        self._name = name
        self._has = has

    def is_here(self) -> bool:
        """Whether this process made the object, not a fork of that process."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raise ``ForkedProcess`` in a fork."""
        if os.getpid() != self._pid:
            raise ForkedProcess(
                f"This process (pid {os.getpid()}) is a fork of the one (pid {self._pid}) that made"
                f" this {self._name}, and the {self._has} of it belong to that process. Use it"
                " there only, or make another one here, after the fork."
            )


def end_on_return(of: str) -> None:
    """Called in a fork (from an ``after_in_child`` hook): exit when it returns or raises into
    Muster's code.

    Until then the fork may run another program, or a function and ``os._exit``. The innermost frame
    of Muster's is traced in the fork only, so that this costs nothing without forks. ``of``: name
    of the forked process.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not _is_ours(frame):
        # never returns: needs no tracing
        if frame.f_globals.get("__name__") == "multiprocessing.popen_fork":
            return
        frame = frame.f_back
    if frame is None:
        return

    def end(_: FrameType, event: str, arg: Any) -> NoReturn:
        _end(of, arg[1] if event == "exception" else None)

    frame.f_trace_opcodes = True  # to end before the result is used
    frame.f_trace = end
    sys.settrace(lambda *_: None)


def _is_ours(frame: FrameType) -> bool:
    module = frame.f_globals.get("__name__", "")
    return module.startswith("muster.") and not module.startswith(_NOT_OURS)


def _end(of: str, error: BaseException | None) -> NoReturn:
    """Exit as Python ends a program, but without the exit handlers that the parent has registered."""
    code: Any = 1
    try:
        sys.settrace(None)
        if isinstance(error, SystemExit):
            code = error.code
        elif error is not None:
            traceback.print_exception(error)
        else:
            sys.stderr.write(
                f"Process {os.getpid()}, a fork of {of}, is ended here: the environment or policy"
                " that has forked returned in it, too. Let it end its fork with os._exit().\n"
            )
        if code is not None and not isinstance(code, int):
            sys.stderr.write(f"{code}\n")
            code = 1
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
    finally:
        os._exit((code or 0) & 0xFF)
