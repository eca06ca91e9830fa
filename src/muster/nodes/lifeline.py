"""Jobs on this machine that end with the process that has submitted them, however it ends.

Imports nothing heavy: a job ties its life to that process before it loads what it is to do.
"""

from __future__ import annotations

import os
import secrets
import shlex
import signal
import sys
import weakref
from pathlib import Path
from typing import ClassVar

from muster.sources.lifeline import signal_on_change


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

    def python(self) -> str:
        """A command that is this interpreter, but for its end: that of this process at the latest."""
        return shlex.join([sys.executable, "-m", __name__, str(self._path)])

    @classmethod
    def forget(cls) -> None:
        """In a fork of this process, whose jobs they are not."""
        for one in cls._all:
            one._close()


def main(path: str, *args: str) -> None:
    """In the job, before it waits for anything. The kernel kills it when the process at the other end is gone: no
    thread has to run for that, and it holds for the interpreter that takes the place of this one.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    signal_on_change(fd, os.getpid(), signal.SIGKILL)
    try:
        if not os.read(fd, 1):  # it was gone before the kernel was told to look
            os._exit(1)
    except BlockingIOError:  # it is there, and says nothing
        pass
    os.set_inheritable(fd, True)
    os.execv(sys.executable, [sys.executable, *args])


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=Lifeline.forget)

if __name__ == "__main__":
    main(*sys.argv[1:])
