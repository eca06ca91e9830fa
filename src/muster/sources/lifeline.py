"""A socket that a process holds for as long as it lives, and whose other end ends when that process does.

Imports little: a process ties its life before it does anything that takes time.
"""

from __future__ import annotations

import os
import select
import signal
import socket


def tie_life(lifeline: socket.socket | int) -> None:
    """Have the kernel kill this process and all it starts when the other end of ``lifeline`` is closed.

    It needs no thread, which a C function holding the GIL would keep from running, and, other than PR_SET_PDEATHSIG,
    reaches grandchildren and does not depend on the thread that started this process.
    """
    if os.getsid(0) != os.getpid():
        os.setsid()
    signal_on_change(lifeline, -os.getpid(), signal.SIGKILL)
    if hung_up(lifeline):  # before the kernel was told to look
        os._exit(1)


def untie_life(lifeline: socket.socket | int) -> None:
    """Take ``tie_life`` back."""
    import fcntl

    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) & ~os.O_ASYNC)


def hung_up(sock: socket.socket | int) -> bool:
    """Whether the other end is closed."""
    poller = select.poll()
    poller.register(sock, 0)
    return any(event & select.POLLHUP for _, event in poller.poll(0))


def kill_group(pid: int, *, reaped: bool = False) -> None:
    """Kill a worker (unless it was reaped: its number may be another's) and its process group, if anything is left."""
    for kill in (os.killpg,) if reaped else (os.killpg, os.kill):  # only just forked, it has no group yet
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass


def signal_on_change(sock: socket.socket | int, receiver: int, number: int) -> None:
    """Have the kernel send a signal to a process (or, negative, a group) when something happens at the socket."""
    import fcntl

    fcntl.fcntl(sock, fcntl.F_SETOWN, receiver)
    if hasattr(fcntl, "F_SETSIG"):  # elsewhere it is SIGIO, which ends a process as well unless it is handled
        fcntl.fcntl(sock, fcntl.F_SETSIG, number)
    fcntl.fcntl(sock, fcntl.F_SETFL, fcntl.fcntl(sock, fcntl.F_GETFL) | os.O_ASYNC)
