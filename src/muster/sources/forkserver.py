"""A process that has imported what workers need, and forks them: a worker starts in milliseconds.

One per parent process, started by ``launch``. It runs no code of the user's, initialises no device and starts no
threads. It is told what to do over the one socket that it was started with, and ends all workers, with everything they
have started, when that socket ends: when the parent has died, however it has died.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import random
import select
import signal
import socket
import subprocess
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from muster.sources.channel import Channel

STATUS_BYTES = 8  # of an exit code in the pipe that tells the parent of a worker's end
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER

# Heavy, and safe to import before a fork: they start no threads that a fork would lose. (Not jax.)
PRELOADED = (
    *("numpy", "numpy.random", "torch", "gymnasium", "gymnasium.wrappers", "gymnasium.vector", "tensordict"),
    *("tensordict.nn", "torchrl.data", "torchrl.envs", "torchrl.modules", "cloudpickle", "pettingzoo", "dm_env"),
    *("gymnasium.envs.classic_control", "gymnasium.envs.toy_text", "stable_baselines3.common.vec_env"),
)
LIGHT = (  # those that do not import torch
    *("numpy", "numpy.random", "gymnasium", "gymnasium.wrappers", "gymnasium.vector", "cloudpickle", "dm_env"),
    *("gymnasium.envs.classic_control", "gymnasium.envs.toy_text", "muster.sources.server"),
)


@dataclass(frozen=True)
class Order:
    """A worker to start, and what it should find there: the parent's present surroundings.

    Descriptors that go with it: the worker's channel, the write end of its exit pipe, standard output and error.
    """

    number: int  # the answer has it too
    target: str  # "module:function"
    name: str
    preload: Sequence[str]
    path: Sequence[str]
    argv: Sequence[str]
    environ: dict[str, str] = field(repr=False)
    cwd: str | None
    umask: int | None


class _Server:
    def __init__(self, sock: socket.socket, lifeline: socket.socket | None) -> None:
        self.sock, self._lifeline = sock, lifeline
        self.orders = Channel(sock)
        self.workers: dict[int, tuple[int, socket.socket]] = {}  # by pid: exit pipe, lifeline

    def serve(self) -> None:
        """Until the parent ends."""
        signal.signal(signal.SIGCHLD, lambda *_: self.reap())
        # Also in the middle of an import: that can take long, and the parent can die meanwhile.
        signal.signal(signal.SIGIO, lambda *_: self.end() if _hung_up(self.sock) else None)
        signal_on_change(self.sock, os.getpid(), signal.SIGIO)
        if sys.platform == "linux":  # what dead workers leave behind is reaped here, not left to a careless init
            import ctypes

            ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
        with contextlib.suppress(EOFError):
            while True:
                order, fds = self.orders.receive()
                self.orders.send((order.number, self.start(order, fds)))
        self.end()

    def start(self, order: Order, fds: list[int]) -> int | str:
        """The pid of the new worker, or why there is none."""
        sys.path[:] = order.path
        for module in order.preload:
            with contextlib.suppress(Exception):  # the worker will meet the error, if it needs the module
                if module not in sys.modules:
                    importlib.import_module(module)
                    gc.freeze()  # the collector of a worker leaves these pages alone, so that they stay shared
        exit_pipe = fds[1]
        try:
            if self._lifeline is not None:  # from now on there is something to end before this process does
                self._lifeline.close()
            ours, lifeline = socket.socketpair()
            with lifeline, _uninterrupted(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # OpenBLAS has threads, which it stops before a fork
                pid = os.fork()
                if pid == 0:
                    ours.close()
                    _in_worker(self, order, fds, lifeline)
                self.workers[pid] = exit_pipe, ours
            fds.remove(exit_pipe)
            return pid
        except OSError as error:
            return str(error)
        finally:
            for fd in fds:
                os.close(fd)

    def reap(self) -> None:
        """Tell the parent how workers ended, after killing whatever they have started."""
        with _uninterrupted(), contextlib.suppress(ChildProcessError):
            while dead := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                pid = dead.si_pid
                if pid not in self.workers:  # a grandchild that became an orphan
                    os.waitpid(pid, 0)
                    continue
                exit_pipe, lifeline = self.workers.pop(pid)
                kill_group(pid)  # before its number can be given to another process
                _, status = os.waitpid(pid, 0)
                with contextlib.suppress(BrokenPipeError):
                    os.write(exit_pipe, os.waitstatus_to_exitcode(status).to_bytes(STATUS_BYTES, "little", signed=True))
                os.close(exit_pipe)
                lifeline.close()

    def end(self) -> NoReturn:
        # The kernel would do it (see ``tie_life``), but not every sandbox's.
        with _uninterrupted():
            for pid in self.workers:
                kill_group(pid)
            os._exit(0)


class ForkedServer:
    """A fork server that is a fork of its parent, which has one thread; as ``subprocess.Popen`` otherwise.

    Args:
        ours, theirs: the ends of the socket that it is told over; the second one is closed here.
    """

    def __init__(self, ours: Channel, theirs: Channel) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                ours.close()
                serve(theirs.fileno())
            finally:
                os._exit(1)
        theirs.close()

    def wait(self, timeout: float) -> None:
        """Until it has ended. Raises ``subprocess.TimeoutExpired``."""
        fd = os.pidfd_open(self.pid)
        try:
            if self.returncode is None and not select.select([fd], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("fork server", timeout)
            os.waitpid(self.pid, 0)
            self.returncode = 0
        finally:
            os.close(fd)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def serve(fd: int, lifeline_fd: int | None = None) -> None:
    """Be the fork server of the process at the other end of the socket ``fd``.

    As long as it has no workers, the kernel kills it when the other end of the lifeline is closed: loading torch is one
    call of C, in which no handler of a signal runs, and takes seconds on a busy machine.
    """
    lifeline = None if lifeline_fd is None else socket.socket(fileno=lifeline_fd)
    if lifeline is not None:
        signal_on_change(lifeline, os.getpid(), signal.SIGKILL)
        if _hung_up(lifeline):
            os._exit(1)
    _own_signals()
    _Server(socket.socket(fileno=fd), lifeline).serve()


def spawned(lifeline_fd: int, channel_fd: int, target: str, name: str) -> NoReturn:
    """Be a worker in an interpreter of its own."""
    _own_signals()
    os.set_inheritable(lifeline_fd, False)
    os.set_inheritable(channel_fd, False)
    lifeline = socket.socket(fileno=lifeline_fd)
    tie_life(lifeline)
    _show(name)
    run(target, Channel.adopt(channel_fd))


def is_stopped(pid: int) -> bool:
    """By SIGSTOP or a debugger, as far as one can see."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "tT"
    except OSError:
        return False


def kill_group(pid: int, *, reaped: bool = False) -> None:
    """Kill a worker (unless it was reaped: its number may be another's) and all it has started, if anything is left."""
    for kill in (os.killpg,) if reaped else (os.killpg, os.kill):  # only just forked, it has no group yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def tie_life(lifeline: socket.socket) -> None:
    """Have the kernel kill this process and all it starts when the other end of ``lifeline`` is closed.

    It needs no thread, which a C function holding the GIL would keep from running, and, other than PR_SET_PDEATHSIG,
    reaches grandchildren and does not depend on the thread that started this process.
    """
    if os.getsid(0) != os.getpid():
        os.setsid()
    signal_on_change(lifeline, -os.getpid(), signal.SIGKILL)
    if _hung_up(lifeline):  # before the kernel was told to look
        os._exit(1)


def run(target: str, channel: Channel) -> NoReturn:
    """Call ``"module:function"`` with the channel, and end the process as Python would."""
    code = 1
    try:
        module, _, function = target.partition(":")
        getattr(importlib.import_module(module), function)(channel)
        code = 0
    except SystemExit as end:
        if isinstance(end.code, int):
            code = end.code & 0xFF
        elif end.code is None:
            code = 0
        else:
            sys.stderr.write(f"{end.code}\n")
    except BaseException:  # noqa: BLE001 (nobody else is left to report it)
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def _in_worker(server: _Server, order: Order, fds: list[int], lifeline: socket.socket) -> NoReturn:
    """In the fork: become a process of its own, in the surroundings of the parent."""
    try:
        server.sock.close()
        for exit_pipe, ours in server.workers.values():
            os.close(exit_pipe)
            ours.close()
        channel, own_exit_pipe, out, err = fds
        os.close(own_exit_pipe)
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.close(out)
        os.close(err)
        tie_life(lifeline)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGIO, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        faulthandler.disable()
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a killed worker flushes nothing
        os.environ.clear()
        os.environ.update(order.environ)
        if order.cwd is not None:
            os.chdir(order.cwd)
        if order.umask is not None:
            os.umask(order.umask)
        sys.argv[:] = order.argv
        _show(order.name)
        _reseed()
    except BaseException:  # noqa: BLE001 (never return into the server's loop)
        traceback.print_exc()
        os._exit(1)
    run(order.target, Channel.adopt(channel))


def _own_signals() -> None:
    """Whatever the parent has made of them: Ctrl-C is for the parent alone, SIGTERM ends."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _show(name: str) -> None:
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as comm:  # what `top` shows
        comm.write(name)


def _reseed() -> None:
    """Give the global random streams states of their own; all workers were forked with the server's."""
    random.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()  # the CPU's; `torch.seed` would reach for CUDA


def signal_on_change(sock: socket.socket | int, receiver: int, number: int) -> None:
    """Have the kernel send a signal to a process (or, negative, a group) when something happens at a socket or pipe."""
    import fcntl

    fcntl.fcntl(sock, fcntl.F_SETOWN, receiver)
    if hasattr(fcntl, "F_SETSIG"):  # elsewhere it is SIGIO, which ends a process as well unless it is handled
        fcntl.fcntl(sock, fcntl.F_SETSIG, number)
    fcntl.fcntl(sock, fcntl.F_SETFL, fcntl.fcntl(sock, fcntl.F_GETFL) | os.O_ASYNC)


def _hung_up(sock: socket.socket) -> bool:
    poller = select.poll()
    poller.register(sock, 0)
    return any(event & select.POLLHUP for _, event in poller.poll(0))


@contextlib.contextmanager
def _uninterrupted() -> Iterator[Any]:
    """Hold back signals, so that no handler sees a worker that is half registered or half reaped."""
    held = (signal.SIGCHLD, signal.SIGIO)
    signal.pthread_sigmask(signal.SIG_BLOCK, held)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, held)
