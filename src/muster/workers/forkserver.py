"""The fork server: a process that has imported the workers' modules, and forks a worker in
milliseconds.

One per parent process, started by ``launch``. It runs no code of the user's, initialises no device
and starts no threads. It receives requests over a socket. It forks keepers, each of which forks a
worker. A second socket ties its life to the parent's: when the parent exits for any reason, the
kernel kills the fork server at once; its keepers detect that, and end their workers with all
processes that these have started.

Environments start simulators, often in sessions of their own, where no signal to the worker reaches
them. On Linux the keeper is the worker's parent and a *child subreaper*: it becomes the parent of
all orphans below it. So when the worker has exited for any reason, the descendants of its keeper
are exactly the processes that the worker has started.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import gc
import importlib
import os
import random
import select
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import process
from typing import Any, NoReturn

from muster.utils.attributes import named
from muster.workers.channel import Channel
from muster.workers.lifelines import (
    become_subreaper,
    children,
    hung_up,
    kill_group,
    tie_life,
)

STATUS_BYTES = 8  # size of an exit code in a worker's exit pipe
END_S = 1.5  # timeout for the end of all workers, when the parent has ended
KEEPER = "muster-keeper"
GRACE_S = (
    2.0  # between SIGTERM and SIGKILL, for processes left by a worker with exit code 0
)
KILLED_S = 5.0  # timeout for killed processes to exit; some are blocked in the kernel for longer

# Heavy, and safe to import before a fork: they start no threads that a fork would lose. (Not jax.)
PRELOADED = (
    *(
        "numpy",
        "numpy.random",
        "torch",
        "gymnasium",
        "gymnasium.wrappers",
        "gymnasium.vector",
        "tensordict",
    ),
    *(
        "tensordict.nn",
        "torchrl.data",
        "torchrl.envs",
        "torchrl.modules",
        "cloudpickle",
        "pettingzoo",
        "dm_env",
    ),
    *(
        "gymnasium.envs.classic_control",
        "gymnasium.envs.toy_text",
        "stable_baselines3.common.vec_env",
    ),
)
LIGHT = (  # modules that do not import torch
    *(
        "numpy",
        "numpy.random",
        "gymnasium",
        "gymnasium.wrappers",
        "gymnasium.vector",
        "cloudpickle",
        "dm_env",
    ),
    *(
        "gymnasium.envs.classic_control",
        "gymnasium.envs.toy_text",
        "muster.workers.main",
    ),
)


@dataclass(frozen=True)
class ForkRequest:
    """A request to start a worker in the parent's present environment.

    It is sent with descriptors: the worker's channel, the write end of its exit pipe, standard
    output and error.
    """

    number: int  # also in the answer
    target: str  # "module:function"
    name: str
    preload: Sequence[str]
    path: Sequence[str]
    argv: Sequence[str]
    environ: dict[str, str] = field(repr=False)
    cwd: str | None
    umask: int | None
    authkey: bytes = field(
        repr=False
    )  # of multiprocessing: authenticates at the parent's managers


class _Server:
    def __init__(self, sock: socket.socket, lifeline: socket.socket) -> None:
        self.sock = sock
        self.lifeline = lifeline
        self.orders = Channel(sock)
        self.keepers: dict[
            int, socket.socket
        ] = {}  # by pid: the other end of its lifeline

    def serve(self) -> None:
        """Start workers until the parent exits."""
        if (
            sys.platform != "linux"
        ):  # there are no keepers: this interpreter becomes the worker
            order, (channel, _, *streams) = self.orders.receive()
            self.orders.send((order.number, os.getpid()))
            self.sock.close()
            _in_worker(order, channel, streams, self.lifeline)
        signal.signal(signal.SIGCHLD, lambda *_: self.reap())
        become_subreaper()  # for orphans of killed keepers
        with contextlib.suppress(EOFError):
            while True:
                order, fds = self.orders.receive()
                self.orders.send((order.number, self.start(order, fds)))
        self.end()

    def start(self, order: ForkRequest, fds: list[int]) -> int | OSError | str:
        """Fork a worker, and return its pid; or the reason of the failure."""
        sys.path[:] = order.path
        for module in order.preload:
            # a worker that needs the module gets the error itself
            with contextlib.suppress(Exception):
                if module not in sys.modules:
                    importlib.import_module(module)
                    # garbage collections in workers do not touch these pages, so that they stay
                    # shared
                    gc.freeze()
        told, tell = os.pipe()
        try:
            ours, lifeline = socket.socketpair()
            with lifeline, _uninterrupted(), warnings.catch_warnings():
                # OpenBLAS has threads, which it stops before a fork
                warnings.simplefilter("ignore")
                keeper = os.fork()
                if keeper == 0:
                    ours.close()
                    os.close(told)
                    _keep(self, order, fds, lifeline, tell)
                self.keepers[keeper] = ours
            os.close(tell)
            tell = -1
            answer = os.read(told, 512).decode()  # less than a page arrives as a whole
            if not answer:
                return "its keeper was killed"
            number = int(answer)
            return number if number > 0 else OSError(-number, os.strerror(-number))
        except OSError as error:
            return error
        finally:
            for fd in (*fds, told, *(() if tell < 0 else (tell,))):
                os.close(fd)

    def reap(self) -> None:
        """Reap keepers that have exited, and kill orphans of killed keepers."""
        with _uninterrupted(), contextlib.suppress(ChildProcessError):
            while pid := os.waitpid(-1, os.WNOHANG)[0]:
                if (lifeline := self.keepers.pop(pid, None)) is not None:
                    lifeline.close()
            for pid in set(children()) - self.keepers.keys():
                kill_group(pid)

    def end(self) -> NoReturn:
        """Make keepers end their workers, wait for them, and exit: when the parent sees this, no
        worker is left.
        """
        deadline = time.monotonic() + END_S
        for lifeline in list(self.keepers.values()):
            lifeline.close()
        while self.keepers and time.monotonic() < deadline:  # `reap` removes them
            select.select([], [], [], 0.01)
        os._exit(0)


def serve(fd: int, lifeline_fd: int) -> None:
    """Run the fork server of the process at the other ends of two sockets.

    ``tie_life`` was already called.
    """
    signal.pthread_sigmask(
        signal.SIG_SETMASK, ()
    )  # nothing of what this process has inherited
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the parent handles it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for inherited in (fd, lifeline_fd):
        os.set_inheritable(inherited, False)
    _Server(socket.socket(fileno=fd), socket.socket(fileno=lifeline_fd)).serve()


def run(target: str, channel: Channel) -> NoReturn:
    """Call ``"module:function"`` with the channel, and exit with the code that Python would use."""
    code = 1
    try:
        named(target)(channel)
        code = 0
    except SystemExit as end:
        if isinstance(end.code, int):
            code = end.code & 0xFF
        elif end.code is None:
            code = 0
        else:
            sys.stderr.write(f"{end.code}\n")
    except BaseException:  # noqa: BLE001 (no other process is left to report it)
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def _keep(
    server: _Server,
    order: ForkRequest,
    fds: list[int],
    lifeline: socket.socket,
    tell: int,
) -> NoReturn:
    """In a fork of the server: fork a worker, wait for its exit, and end all processes that it
    leaves behind.

    When the other end of ``lifeline`` is closed, all of them are killed, and no exit code is
    reported. The worker's pid is not reused before its exit code is reported.
    """
    try:
        channel, exit_pipe, out, err = fds
        # leave the server's process group, which the kernel kills when the parent exits
        os.setsid()
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        server.sock.close()
        server.lifeline.close()
        for other in server.keepers.values():
            other.close()
        become_subreaper()
        try:
            woken, wake = os.pipe()
            os.set_blocking(woken, False)
            os.set_blocking(wake, False)
            signal.signal(signal.SIGCHLD, lambda *_: None)
            signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
            ours, theirs = socket.socketpair()
            pid = os.fork()
        except OSError as error:
            os.write(
                tell, str(-(error.errno or errno.EIO)).encode()
            )  # the pid of no process
            os._exit(0)
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for fd in (woken, wake, exit_pipe, tell):
                os.close(fd)
            ours.close()
            lifeline.close()
            _in_worker(order, channel, (out, err), theirs)
        theirs.close()
        os.write(tell, str(pid).encode())
        for fd in (tell, channel, out, err):
            os.close(fd)
        _show(KEEPER)
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
            with contextlib.suppress(BrokenPipeError):
                os.write(exit_pipe, code.to_bytes(STATUS_BYTES, "little", signed=True))
        os.waitpid(pid, 0)
        os._exit(0)
    except BaseException:  # noqa: BLE001 (never return into the server's loop)
        traceback.print_exc()
    finally:
        os._exit(1)


def _reap(worker: int) -> int | None:
    """Return the exit code of the worker, which stays a zombie; None while it runs.

    Reaps other zombies until then.
    """
    while dead := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        if dead.si_pid == worker:
            return dead.si_status if dead.si_code == os.CLD_EXITED else -dead.si_status
        os.waitpid(dead.si_pid, 0)
    return None


def _end_the_rest(worker: int, *, gently: bool, woken: int) -> None:
    """End all processes below this one except the dead worker: children of a killed process become
    our children.
    """
    kill_at = time.monotonic() + (GRACE_S if gently else 0.0)
    asked: set[int] = set()
    poller = select.poll()
    poller.register(woken, select.POLLIN)
    if not gently:
        kill_group(worker)
    while rest := [
        pid
        for pid in children()
        if pid != worker and not os.waitpid(pid, os.WNOHANG)[0]
    ]:
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


def _in_worker(
    order: ForkRequest, channel: int, streams: Sequence[int], lifeline: socket.socket
) -> NoReturn:
    """In a fork of the keeper, or in a spawned server: set up the environment of the parent, and
    run the target.
    """
    try:
        for number, stream in enumerate(streams, 1):
            os.dup2(stream, number)
            os.close(stream)
        tie_life(lifeline)
        faulthandler.disable()
        for text in (sys.stdout, sys.stderr):
            text.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a killed worker flushes nothing
        os.environ.clear()
        os.environ.update(order.environ)
        process.current_process().authkey = order.authkey
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
    run(order.target, Channel(socket.socket(fileno=channel)))


def _show(name: str) -> None:
    with (
        contextlib.suppress(OSError),
        open("/proc/self/comm", "w") as comm,
    ):  # the name in `top`
        comm.write(name)


def _reseed() -> None:
    """Seed the global random generators: all workers have inherited the same states from the
    server.
    """
    random.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        # the CPU's; `torch.seed` would reach for CUDA
        sys.modules["torch"].default_generator.seed()


@contextlib.contextmanager
def _uninterrupted() -> Iterator[Any]:
    """Block SIGCHLD, so that its handler sees no keeper that is half registered."""
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGCHLD,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGCHLD,))
