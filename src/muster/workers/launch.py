"""Starting worker processes, detecting their exits, and ending them.

No worker process outlives this process.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from multiprocessing import process
from pathlib import Path
from typing import Any, ClassVar

from muster.errors import BadOption, CollectorTimeout, MusterError
from muster.utils.interrupts import allowed
from muster.utils.locks import while_held
from muster.workers.channel import Channel, StatusPage
from muster.workers.forkserver import LIGHT, PRELOADED, STATUS_BYTES, ForkRequest, serve
from muster.workers.lifelines import hung_up, kill_group, tie_life

# exit code of a worker whose exit was not observed, because the fork server was killed
UNKNOWN = 1 << 16
SPARE_DESCRIPTORS = 10  # free descriptors required to start a worker
METHODS = ("forkserver", "spawn")
# timeout for the fork server's answer; it may have to import torch on a busy machine
START_S = 300.0
END_S = 2.0

# of muster
_OWN = (
    "envs",
    "memory",
    "policies",
    "restore",
    "rollout",
    "testing",
    "utils",
    "weights",
    "workers",
)


def launch(
    target: str,
    channel_end: Channel,
    *,
    name: str,
    method: str | None = None,
    preload: bool = True,
    light: bool = False,
) -> Child:
    """Start a process that calls ``target``.

    The process has the present environment variables, directory, ``sys.path``, ``sys.argv``, umask,
    standard output and error of this process, and a session of its own. It ignores SIGINT. It exits
    when its target returns.

    Args:
        target: ``"module:function"``, called as ``function(channel)``.
        channel_end: channel end for the target; closed in this process.
        name: name of the process in ``ps`` and ``top``.
        method: ``"forkserver"`` (default on Linux: some milliseconds) or ``"spawn"`` (a new
            interpreter).
        preload: the fork server first imports modules that this process has imported, which can
            take seconds, once.
        light: start the process without torch imported.

    Raises:
        BadOption: the method is unknown, the system has no worker processes, or too few descriptors
            are left.
        CollectorTimeout: the fork server does not answer.
    """
    if sys.platform == "win32":
        raise BadOption(
            "worker processes need Linux or macOS; backend='threads' works everywhere."
        )
    method = method or ("spawn" if sys.platform == "darwin" else "forkserver")
    if method not in METHODS:
        raise BadOption(
            f"start method {method!r} is unknown; there are {sorted(METHODS)}."
        )
    check_descriptors(name)
    alone = method == "spawn" or sys.platform != "linux"
    modules: list[str] = []
    if not alone:
        if preload or light not in _ForkServer.shared:
            modules += sys.modules
        modules.append(target.partition(":")[0])
        suits = LIGHT.__contains__ if light else _preloadable
        modules = [module for module in modules if suits(module)]
    # of managers; it is sent over private sockets only
    authkey = bytes(process.current_process().authkey)
    surroundings = (
        sys.path[:],
        sys.argv[:],
        dict(os.environ),
        _cwd(),
        _umask(),
        authkey,
    )
    order = ForkRequest(next(_numbers), target, name, modules, *surroundings)
    with contextlib.closing(channel_end):
        try:
            return Child(order, channel_end, alone=alone, light=light)
        except EOFError:
            raise MusterError(
                f"The fork server ended before it had started {name}. Standard error may say why."
            ) from None
        except TimeoutError:
            raise CollectorTimeout(
                f"The fork server has not started {name} in {START_S:g} s."
            ) from None


def in_process(
    method: str | None, *, light: bool = False
) -> Callable[[str, bool], tuple[Child, Any, Any]]:
    """Return a function that launches workers as processes, without torch imported if ``light``."""

    def start(name: str, preload: bool) -> tuple[Child, Channel, StatusPage]:
        ours, theirs = Channel.pair()
        status_page = StatusPage.create()
        try:
            target = "muster.workers.main:main"
            return (
                launch(
                    target,
                    theirs,
                    name=name,
                    method=method,
                    preload=preload,
                    light=light,
                ),
                ours,
                status_page,
            )
        except BaseException:
            ours.close()
            theirs.close()
            status_page.close()
            raise

    return start


class Child:
    """A worker process. Its keeper, a child of a fork server, writes its exit code into a pipe.

    With ``alone``, the fork server is for this process only.
    """

    def __init__(
        self, order: ForkRequest, channel_end: Channel, *, alone: bool, light: bool
    ) -> None:
        self._owner = os.getpid()
        self._code: int | None = None
        self._server: _ForkServer | None = None  # with ``alone``
        self._fd, writer = os.pipe()
        os.set_blocking(self._fd, False)
        self._close = weakref.finalize(self, os.close, self._fd)
        self._close.atexit = False  # at exit it is still used to end workers
        try:
            with _standard_streams() as streams:
                fds = [channel_end.fileno(), writer, *streams]
                if alone:
                    self._server = _ForkServer.start()
                    self.pid = self._server.fork(order, fds)
                else:
                    self.pid = _ForkServer.fork_shared(order, fds, light)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(writer)

    def fileno(self) -> int:
        """Return a descriptor that is readable once the process has exited."""
        return self._fd

    def exit_code(self) -> int | None:
        """Return the exit code as in ``subprocess``; None while it runs; ``UNKNOWN`` if its exit
        was not observed.
        """
        if self._owner != os.getpid():  # a fork of this process does not own the worker
            return UNKNOWN
        if self._code is None and self._fd >= 0:
            with contextlib.suppress(BlockingIOError):
                status = os.read(self._fd, STATUS_BYTES)
                self._code = (
                    int.from_bytes(status, "little", signed=True)
                    if status
                    else self._ended_unseen()
                )
        return self._code

    def _ended_unseen(self) -> int:
        """Return the exit code if no keeper has written it: the keeper was killed, or the system
        has no keepers.
        """
        if self._server is not None and sys.platform != "linux":
            code = self._server.wait(END_S)
            return UNKNOWN if code is None else code
        kill_group(self.pid, reaped=True)
        return UNKNOWN

    def is_stopped(self) -> bool:
        """Return whether SIGSTOP or a debugger has stopped the process; False if that is not known."""
        try:
            return (
                Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
                in "tT"
            )
        except OSError:
            return False

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, but not to its process group; do nothing if it has exited."""
        if self.exit_code() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process and its group, without waiting; its keeper kills all else that it has
        started.
        """
        if self.exit_code() is None:
            kill_group(self.pid)

    def join(self, timeout: float) -> bool:
        """Wait for its exit, at most ``timeout`` seconds, and return whether it has exited."""
        if self._code is not None:
            return True
        poller = select.poll()
        if self._fd >= 0:
            poller.register(self._fd, select.POLLIN)
        return bool(poller.poll(max(0.0, timeout) * 1000))

    def close(self) -> None:
        """Close descriptors, after the process has exited; idempotent.

        Ends a process with a fork server of its own.
        """
        self.exit_code()
        self._close()
        self._fd = -1
        if self._server is not None and self._owner == os.getpid():
            self._server.end()


class _ForkServer:
    """The parent's side of a fork server. A spawned worker has a fork server of its own."""

    lock = threading.Lock()
    shared: ClassVar[dict[bool, _ForkServer]] = {}  # by ``light``
    all: ClassVar[weakref.WeakSet[_ForkServer]] = weakref.WeakSet()

    def __init__(self, channel: Channel, life: socket.socket, pid: int) -> None:
        self._channel = channel
        self._life = life
        self.pid = pid
        self._code: int | None = None
        self.all.add(self)

    @classmethod
    def start(cls) -> _ForkServer:
        with contextlib.ExitStack() as ours:
            channel, theirs = Channel.pair()
            ours.callback(channel.close)
            with contextlib.closing(theirs):
                life, lifeline = socket.socketpair()
                ours.callback(life.close)
                with lifeline, _standard_streams() as streams:
                    pid = _python(lifeline, theirs, streams)
            ours.pop_all()
        return cls(channel, life, pid)

    @classmethod
    def fork_shared(cls, order: ForkRequest, fds: list[int], light: bool) -> int:
        """Fork a worker from the shared server for ``light``, and return its pid.

        Starts the server if necessary.
        """

        def forked(held: bool) -> int:
            if not held:  # another thread is launching
                raise TimeoutError
            if light in cls.shared:
                with contextlib.suppress(
                    EOFError
                ):  # the server was killed since the last launch
                    return cls.shared[light].fork(order, fds)
            cls.shared[light] = cls.start()
            return cls.shared[light].fork(order, fds)

        return while_held(cls.lock, 2 * START_S, forked)

    def fork(self, order: ForkRequest, fds: list[int]) -> int:
        """Start a worker, and return its pid.

        Raises:
            EOFError, TimeoutError: the server has ended or does not answer; it is ended.
            MusterError: the system does not allow another process; its error is the cause.
        """
        deadline = time.monotonic() + START_S
        try:
            self._channel.send(order, fds, timeout=START_S)
            number = -1
            answer = None
            while (
                number != order.number
            ):  # else it is the answer to an earlier, interrupted launch
                with allowed():
                    (number, answer), _ = self._channel.receive(
                        timeout=max(0.0, deadline - time.monotonic())
                    )
        except (EOFError, TimeoutError):
            self.end()
            raise
        if isinstance(answer, int):
            return answer
        failed = MusterError(f"{order.name} could not be started: {answer}.")
        raise failed from (answer if isinstance(answer, OSError) else None)

    def forget(self) -> None:
        """In a fork of this process: release the server, which belongs to the parent."""
        self._channel.close()
        self._life.close()  # otherwise the server would outlive the parent

    def wait(self, seconds: float) -> int | None:
        """Wait for the end of the process, and return its exit code; None if it still runs."""
        if self._code is None and hung_up(self._life, seconds):
            self._code = UNKNOWN
            # another part of the program has reaped it
            with contextlib.suppress(ChildProcessError):
                self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code

    def end(self) -> None:
        for light in [light for light, server in self.shared.items() if server is self]:
            del self.shared[light]
        self._channel.close()
        try:
            if self.wait(END_S) is None:
                os.kill(self.pid, signal.SIGKILL)
                self.wait(END_S)
        finally:
            self._life.close()


def shutdown_forkserver() -> None:
    """End the fork servers and all their workers.

    The next ``launch`` starts a new server. Idempotent.
    """
    # else a thread is launching; the servers end with this process
    if _ForkServer.lock.acquire(timeout=END_S):
        try:
            for server in list(_ForkServer.shared.values()):
                server.end()
        finally:
            _ForkServer.lock.release()


def fork_server_here() -> None:
    """Make a fork of this process its fork server, with all imported modules.

    Requires a process with one thread.
    """
    (channel, theirs), (life, lifeline) = Channel.pair(), socket.socketpair()
    with contextlib.closing(theirs), lifeline:
        pid = os.fork()
        if pid == 0:
            try:
                channel.close()
                life.close()
                tie_life(lifeline)
                serve(theirs.fileno(), lifeline.fileno())
            finally:
                os._exit(1)
    _ForkServer.shared[False] = _ForkServer(channel, life, pid)


def has_fork_server() -> bool:
    """Return whether there is a fork server that is not ``light``."""
    return False in _ForkServer.shared


def _forget_servers() -> None:
    _ForkServer.lock = threading.Lock()
    _ForkServer.shared.clear()
    for server in list(_ForkServer.all):
        server.forget()


@contextlib.contextmanager
def _standard_streams() -> Iterator[list[int]]:
    """Standard output and error of this process as open descriptors; ``os.devnull`` for a closed
    one.
    """
    with open(os.devnull, "wb") as null:
        # If Python was started without a stream, its number may be that of any other file now.
        std = ((1, sys.__stdout__), (2, sys.__stderr__))
        yield [
            fd if stream is not None and _is_open(fd) else null.fileno()
            for fd, stream in std
        ]


def _interpreter_flags() -> list[str]:
    """Return the -W, -X, -O and similar flags of this interpreter."""
    known = getattr(subprocess, "_args_from_interpreter_flags", None)
    if known is not None:
        return list(known())
    return ["-" + "O" * sys.flags.optimize] * bool(sys.flags.optimize) + [
        f"-W{each}" for each in sys.warnoptions
    ]


def _python(lifeline: socket.socket, channel: Channel, streams: list[int]) -> int:
    """Start an interpreter that first ties its life to this process, and then becomes a fork
    server. Return its pid.
    """
    ends = (channel.fileno(), lifeline.fileno())
    surroundings = f"import sys; sys.path[:] = {sys.path!r}; sys.argv[:] = {sys.argv!r}"
    tied = (
        f"from muster.workers.lifelines import tie_life; tie_life({lifeline.fileno()})"
    )
    server = subprocess.Popen(
        [
            *(sys.executable, *_interpreter_flags()),
            *(
                "-c",
                f"{surroundings}; {tied}; from muster.workers.forkserver import serve; serve{ends}",
            ),
        ],
        stdin=subprocess.DEVNULL,
        stdout=streams[0],
        stderr=streams[1],
        cwd=None
        if _cwd()
        else "/",  # MKL does not load in a directory that was deleted
        pass_fds=ends,
        start_new_session=True,  # only the parent handles Ctrl-C, Ctrl-Z and a closed terminal
    )
    server.returncode = 0  # ``_ForkServer.wait`` waits for it
    return server.pid


def _preloadable(module: str) -> bool:
    package, _, own = module.partition(".")
    return module in PRELOADED or (
        package == "muster" and own.startswith(_OWN) and own != "envs.jax"
    )


def check_descriptors(name: str, needed: int = SPARE_DESCRIPTORS) -> None:
    """Raise BadOption if this process cannot open so many files, which ``name`` needs to start."""
    free: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while len(free) < needed:
                free.append(os.dup(0 if _is_open(0) else 2))
        if len(free) < needed:
            import resource

            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            raise BadOption(
                f"{name} cannot be started: of the {limit} descriptors that this process may have"
                f" (RLIMIT_NOFILE), {len(free)} are left, and {needed} are needed. Use"
                " fewer workers, or allow more with `ulimit -n 4096` before starting Python."
            )
    finally:
        for fd in free:
            os.close(fd)


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _cwd() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it was deleted
        return None


def _umask() -> int | None:
    """Return the umask without changing it temporarily for all threads, as ``os.umask`` would; None
    if unknown.
    """
    with contextlib.suppress(OSError), open("/proc/self/status") as status:
        for line in status:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return None


_numbers = itertools.count()  # numbers of requests

atexit.register(shutdown_forkserver)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_servers)
