"""Jobs on this machine that end with the process that has submitted them, however it ends.

Imports nothing heavy: a job ties its life to that process before it loads what it is to do.
"""

from __future__ import annotations

import os
import secrets
import signal
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import cloudpickle

from muster.sources.keeper import signal_on_change


class Lifeline:
    """A pipe with a name, which this process alone can write. Nothing is ever written: what counts is its end.

    Args:
        folder: where only this user can make files.
    """

    _all: ClassVar[weakref.WeakSet[Lifeline]] = weakref.WeakSet()

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"alive-{secrets.token_hex(8)}"
        os.mkfifo(self._path, 0o600)
        self._close = weakref.finalize(self, os.close, os.open(self._path, os.O_RDWR | os.O_NONBLOCK))
        self._close.atexit = False  # it ends with the process
        Lifeline._all.add(self)

    def tied(self, function: Callable[..., Any], *args: Any) -> tuple[Any, ...]:
        """What a job calls, and with which arguments, for this call to end with this process."""
        return run_tied, str(self._path), cloudpickle.dumps((function, args))

    @classmethod
    def forget(cls) -> None:
        """In a fork of this process, whose jobs they are not."""
        for one in cls._all:
            one._close()


def run_tied(path: str, call: bytes) -> Any:
    """In the job. The kernel kills it when the process at the other end is gone: no thread has to run for that."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    signal_on_change(fd, os.getpid(), signal.SIGKILL)
    try:
        if not os.read(fd, 1):  # it was gone before the kernel was told to look
            os._exit(1)
    except BlockingIOError:  # it is there, and says nothing
        pass
    function, args = cloudpickle.loads(call)
    return function(*args)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=Lifeline.forget)
