"""Lifelines: a process holds one end of a socket until it exits; the other end then reports a
hang-up.

This module imports little, because a process ties its life before it does anything that takes time.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
from collections.abc import Callable

_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


def tie_life(lifeline: socket.socket | int) -> None:
    """Have the kernel kill this process and its process group when the other end of ``lifeline`` is
    closed.

    This needs no thread, which a C function holding the GIL would keep from running. Unlike
    PR_SET_PDEATHSIG, it reaches grandchildren and does not depend on the thread that started this
    process.
    """
    if os.getsid(0) != os.getpid():
        os.setsid()
    import fcntl

    # from now on, every event of the socket is a signal
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpid())
    # elsewhere it is SIGIO, which also ends a process unless it is handled
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    flags = fcntl.fcntl(lifeline, fcntl.F_GETFL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, flags | os.O_ASYNC)
    if hung_up(lifeline):  # closed before the signal was set up
        os._exit(1)


def hung_up(sock: socket.socket | int, seconds: float = 0.0) -> bool:
    """Return whether the other end is closed, after waiting up to ``seconds`` for it."""
    poller = select.poll()
    poller.register(sock, 0)
    return any(event & select.POLLHUP for _, event in poller.poll(seconds * 1000))


def kill_group(pid: int, *, reaped: bool = False) -> None:
    """Kill the process group of a worker, and the worker itself unless it was reaped: its pid may
    have been reused.
    """
    ways: list[Callable[[int, int], None]] = [os.killpg]
    if not reaped:
        ways.append(os.kill)  # just forked, it has no group yet
    for kill in ways:
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass


def become_subreaper() -> None:
    """Make this process the parent of all orphans below it."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def children() -> list[int]:
    """Return the pids of this process's children, zombies included.

    This process must have one thread.
    """
    try:
        return [int(pid) for pid in _text("/proc/thread-self/children").split()]
    except OSError:  # no Linux, or one without CONFIG_PROC_CHILDREN
        return [pid for pid in _processes() if _parent(pid) == os.getpid()]


def _processes() -> list[int]:
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return []


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(_text(f"/proc/{pid}/stat").rpartition(")")[2].split()[1])
    return 0


def _text(path: str) -> str:
    with open(path) as file:
        return file.read()
