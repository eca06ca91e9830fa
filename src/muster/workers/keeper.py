"""A keeper: a process that stays beside a worker, and ends whatever the worker leaves behind.

Environments start simulators, often in sessions of their own, where no signal to the worker reaches them. On Linux the
keeper is the worker's parent and a *child subreaper*: what loses its parent below it becomes its own child. So all that
a worker has started, however, and nothing else, is below its keeper when the worker has ended, whatever ended it.

A lifeline is a socket that a process holds for as long as it lives, and whose other end ends when that process does.
This module imports little: a process ties its life before it does anything that takes time.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import NoReturn

GRACE_S = 2.0  # from SIGTERM to SIGKILL, for what a worker leaves that ended well
KILLED_S = 5.0  # for the end of what was killed; longer takes what the kernel does not let go of
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


def become_subreaper() -> None:
    """Be the parent of every orphan below this process."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def children() -> list[int]:
    """Of this process, which has one thread: running ones, and those that have ended and were not waited for."""
    try:
        return [int(pid) for pid in _text("/proc/thread-self/children").split()]
    except OSError:  # no Linux, or one without CONFIG_PROC_CHILDREN
        return [pid for pid in _processes() if _parent(pid) == os.getpid()]


def keep(
    lifeline: socket.socket,
    begin: Callable[[socket.socket], NoReturn],
    started: Callable[[int], None],
    ended: Callable[[int], None],
) -> None:
    """Fork a worker, wait for its end, and end all that it has left. Returns when nothing of it is left.

    Args:
        lifeline: when its other end is closed, the worker and all else is killed.
        begin: called in the worker, with a lifeline whose other end is this process'.
        started: called with its process id.
        ended: called with its exit code, as of ``subprocess``, when nothing of it is left; not if ``lifeline`` ended.
            Its number is not another process' before that.
    """
    become_subreaper()
    woken, wake = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for fd in (woken, wake):
                os.close(fd)
            ours.close()
            lifeline.close()
            begin(theirs)
        finally:
            os._exit(1)
    theirs.close()
    started(pid)
    poller = select.poll()
    poller.register(woken, select.POLLIN)
    poller.register(lifeline, 0)
    while (code := _reap(pid)) is None:
        if any(fd != woken for fd, _ in poller.poll()):
            kill_group(pid)
            poller.unregister(lifeline)
        _drain(woken)
    wanted = not hung_up(lifeline)
    _end_the_rest(pid, gently=code == 0 and wanted, woken=woken)
    if wanted:
        ended(code)
    os.waitpid(pid, 0)


def _reap(worker: int) -> int | None:
    """The exit code of the worker, which stays a zombie; None while it runs. Others that have ended are gone then."""
    while dead := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        if dead.si_pid == worker:
            return dead.si_status if dead.si_code == os.CLD_EXITED else -dead.si_status
        os.waitpid(dead.si_pid, 0)
    return None


def _end_the_rest(worker: int, *, gently: bool, woken: int) -> None:
    """End what is below this process besides the dead worker: killed parents leave their children to us."""
    kill_at = time.monotonic() + (GRACE_S if gently else 0.0)
    asked: set[int] = set()
    poller = select.poll()
    poller.register(woken, select.POLLIN)
    if not gently:
        kill_group(worker)
    while rest := [pid for pid in children() if pid != worker and not os.waitpid(pid, os.WNOHANG)[0]]:
        late = time.monotonic() - kill_at
        if late > KILLED_S:
            return
        for pid in rest:  # ours, and not waited for: no other process can have the number
            if late >= 0 or pid not in asked:
                asked.add(pid)
                with contextlib.suppress(PermissionError):
                    os.kill(pid, signal.SIGKILL if late >= 0 else signal.SIGTERM)
        poller.poll(1000 * (0.05 if late >= 0 else min(0.05, -late)))
        _drain(woken)


def _drain(woken: int) -> None:
    with contextlib.suppress(BlockingIOError):
        while os.read(woken, 512):
            pass


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


# --- lifelines -------------------------------------------------------------------------------------


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
