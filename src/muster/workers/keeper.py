"""A keeper: a process beside a worker that ends all processes that the worker leaves behind.

Environments start simulators, often in sessions of their own, where no signal to the worker reaches them. On Linux the
keeper is the worker's parent and a *child subreaper*: it becomes the parent of all orphans below it. So when the worker
has exited for any reason, the descendants of its keeper are exactly the processes that the worker has started.

A lifeline is a socket that a process holds until it exits; the other end then reports a hang-up.
This module imports little, because a process ties its life before it does anything that takes time.
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

GRACE_S = 2.0  # between SIGTERM and SIGKILL, for processes left by a worker with exit code 0
KILLED_S = 5.0  # timeout for killed processes to exit; some are blocked in the kernel for longer
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


def become_subreaper() -> None:
    """Make this process the parent of all orphans below it."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def children() -> list[int]:
    """Return the pids of this process's children, zombies included. This process must have one thread."""
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
    """Fork a worker, wait for its exit, and end all processes that it leaves; waits for their exits, see ``KILLED_S``.

    Args:
        lifeline: when its other end is closed, the worker and all its processes are killed.
        begin: called in the worker, with a lifeline whose other end this process holds.
        started: called with the worker's pid.
        ended: called with the worker's exit code (as in ``subprocess``) after these exits; not if ``lifeline`` was
            closed. The worker's pid is not reused before that.
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
    """Return the exit code of the worker, which stays a zombie; None while it runs. Reaps other zombies until then."""
    while dead := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        if dead.si_pid == worker:
            return dead.si_status if dead.si_code == os.CLD_EXITED else -dead.si_status
        os.waitpid(dead.si_pid, 0)
    return None


def _end_the_rest(worker: int, *, gently: bool, woken: int) -> None:
    """End all processes below this one except the dead worker: children of a killed process become our children."""
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
        for pid in rest:  # unreaped children: no other process can have their pids
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
    """Have the kernel kill this process and its process group when the other end of ``lifeline`` is closed.

    This needs no thread, which a C function holding the GIL would keep from running. Unlike PR_SET_PDEATHSIG, it
    reaches grandchildren and does not depend on the thread that started this process.
    """
    if os.getsid(0) != os.getpid():
        os.setsid()
    import fcntl

    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpid())  # from now on, every event of the socket is a signal
    if hasattr(fcntl, "F_SETSIG"):  # elsewhere it is SIGIO, which also ends a process unless it is handled
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if hung_up(lifeline):  # closed before the signal was set up
        os._exit(1)


def hung_up(sock: socket.socket | int) -> bool:
    """Return whether the other end is closed."""
    poller = select.poll()
    poller.register(sock, 0)
    return any(event & select.POLLHUP for _, event in poller.poll(0))


def kill_group(pid: int, *, reaped: bool = False) -> None:
    """Kill the process group of a worker, and the worker itself unless it was reaped: its pid may have been reused."""
    for kill in (os.killpg,) if reaped else (os.killpg, os.kill):  # just forked, it has no group yet
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
