"""Start a worker process, learn of its end, end it. Nothing of a worker outlives this process."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import select
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from multiprocessing import process
from typing import Any, ClassVar, Protocol

from muster.errors import BadOption, CollectorTimeout, MusterError
from muster.workers.channel import Channel
from muster.workers.forkserver import LIGHT, PRELOADED, STATUS_BYTES, ForkedServer, ForkRequest, is_stopped
from muster.workers.keeper import kill_group
from muster.workers.status_page import StatusPage

UNKNOWN = 1 << 16  # the exit code of a worker whose end nobody has seen: the fork server was killed
SPARE_DESCRIPTORS = 10  # what one more worker must find free
START_S = 300.0  # for the fork server's answer; it may have to import torch on a busy machine
END_S = 2.0

_OWN = ("envs", "memory", "policies", "restore", "rollout", "testing", "utils", "weights", "workers")  # of muster


class Child(Protocol):
    """A worker process."""

    @property
    def pid(self) -> int: ...

    def fileno(self) -> int:
        """A descriptor that is readable as soon as the process has ended."""

    def exit_code(self) -> int | None:
        """As of ``subprocess``: negative is a signal; None while it runs; ``UNKNOWN`` if it ended unseen."""

    def is_stopped(self) -> bool:
        """By SIGSTOP or a debugger, as far as one can see."""

    def send_signal(self, number: int) -> None:
        """To the process alone; nothing if it has ended."""

    def kill(self) -> None:
        """SIGKILL for it and all that it has started; does not wait."""

    def join(self, timeout: float) -> bool:
        """Whether it has ended, after waiting for that for so many seconds."""

    def close(self) -> None:
        """Close the descriptor; idempotent. For a process that has ended: a spawned one ends with it."""


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

    The process has this one's present environment variables, directory, ``sys.path``, ``sys.argv``, umask, standard
    output and error, and a session of its own. It ignores SIGINT. Once its target has returned, it ends.

    Args:
        target: ``"module:function"``, called as ``function(channel)``.
        channel_end: what it is called with; closed here.
        name: for people, in ``ps`` and ``top``.
        method: ``"forkserver"`` (default on Linux: some milliseconds) or ``"spawn"`` (a new interpreter).
        preload: the fork server first imports what this process has imported, which can take seconds, once.
        light: the process has not imported torch.

    Raises:
        BadOption: unknown method, a system without worker processes, or too few descriptors are left.
        CollectorTimeout: the fork server does not answer.
    """
    if sys.platform == "win32":
        raise BadOption("worker processes need Linux or macOS; backend='threads' works everywhere.")
    method = method or ("spawn" if sys.platform == "darwin" else "forkserver")
    starts: dict[str, Callable[[str, Channel, str, bool, bool], Child]] = {"forkserver": _Forked, "spawn": _Spawned}
    if method not in starts:
        raise BadOption(f"start method {method!r} is unknown; there are {sorted(starts)}.")
    _check_descriptors(name)
    with contextlib.closing(channel_end):
        return starts[method](target, channel_end, name, preload, light)


def in_process(method: str | None, *, light: bool = False) -> Callable[[str, bool], tuple[Child, Any, Any]]:
    """Launches workers as processes; ``light`` ones have not imported torch."""

    def start(name: str, preload: bool) -> tuple[Child, Channel, StatusPage]:
        ours, theirs = Channel.pair()
        status_page = StatusPage.create()
        try:
            target = "muster.workers.main:main"
            return launch(target, theirs, name=name, method=method, preload=preload, light=light), ours, status_page
        except BaseException:
            ours.close()
            theirs.close()
            status_page.close()
            raise

    return start


def shutdown_forkserver() -> None:
    """End the fork servers, and all workers they have started; the next ``launch`` starts another. Idempotent."""
    if _ForkServer.lock.acquire(timeout=END_S):  # else a thread is launching, and the servers end with this process
        try:
            for server in list(_ForkServer.current.values()):
                server.end()
        finally:
            _ForkServer.lock.release()


def fork_server_here() -> None:
    """Let this process' fork server be a fork of it, with all that it has imported: for processes with one thread."""
    (channel, theirs), (life, lifeline) = Channel.pair(), socket.socketpair()
    _ForkServer(False, channel, life, ForkedServer(channel, theirs, life, lifeline))


def has_fork_server() -> bool:
    """There is one that has imported torch."""
    return False in _ForkServer.current


class _ForkServer:
    """The parent's side of a fork server: one for light workers, one for the others."""

    lock = threading.Lock()
    current: ClassVar[dict[bool, _ForkServer]] = {}  # by whether it is for light ones

    def __init__(
        self, light: bool, channel: Channel, life: socket.socket, process: subprocess.Popen[bytes] | ForkedServer
    ) -> None:
        self._light, self.channel, self.life, self.process = light, channel, life, process
        self.current[light] = self

    @classmethod
    def start(cls, light: bool) -> None:
        (channel, theirs), (life, lifeline) = Channel.pair(), socket.socketpair()
        with contextlib.closing(theirs), lifeline, _StandardStreams() as streams:
            ends = (theirs.fileno(), lifeline.fileno())
            cls(light, channel, life, _python(lifeline, f"serve{ends}", ends, streams))

    @classmethod
    def request(cls, order: ForkRequest, fds: list[int], light: bool) -> int:
        """The pid of the worker; starts a server if there is none, or a dead one."""
        with cls.lock:
            try:
                try:
                    answer = cls._running(light)._ask(order, fds)
                except EOFError:  # it was killed since the last time
                    answer = cls._running(light)._ask(order, fds)
            except EOFError:
                raise MusterError(
                    f"The fork server ended twice before it had started {order.name}. Standard error may say why."
                ) from None
            except TimeoutError:
                raise CollectorTimeout(f"The fork server has not started {order.name} in {START_S:g} s.") from None
        if not isinstance(answer, int):
            raise MusterError(f"{order.name} could not be started: {answer}.")
        return answer

    @classmethod
    def _running(cls, light: bool) -> _ForkServer:
        if light not in cls.current:
            cls.start(light)
        return cls.current[light]

    def _ask(self, order: ForkRequest, fds: list[int]) -> int | str:
        try:
            self.channel.send(order, fds, timeout=START_S)
            while True:
                (number, answer), _ = self.channel.receive(timeout=START_S)
                if number == order.number:  # else of a launch that was interrupted while it waited
                    return answer  # type: ignore[no-any-return]
        except (EOFError, TimeoutError):
            self.end()
            raise

    @classmethod
    def forget(cls) -> None:
        """In the child of a fork of this process: the server is the parent's."""
        cls.lock = threading.Lock()
        while cls.current:
            _, server = cls.current.popitem()
            server.channel.close()
            server.life.close()  # or the server would not notice the parent's end
            server.process.returncode = 0  # nothing to wait for
        for child in _Spawned.all:
            child._life.close()

    def end(self) -> None:
        _ForkServer.current.pop(self._light, None)
        self.channel.close()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(END_S)
        finally:
            self.life.close()


class _Forked:
    """A child of the fork server, which reaps it and writes its exit code into a pipe."""

    def __init__(self, target: str, channel_end: Channel, name: str, preload: bool, light: bool) -> None:
        self._owner = os.getpid()
        self._code: int | None = None
        self._fd, writer = os.pipe()
        os.set_blocking(self._fd, False)
        self._close = weakref.finalize(self, os.close, self._fd)
        self._close.atexit = False  # whoever ends workers then still looks at it
        here = [*sys.modules] if preload or light not in _ForkServer.current else []
        suits = LIGHT.__contains__ if light else _preloadable
        modules = [module for module in [*here, target.partition(":")[0]] if suits(module)]
        surroundings = (sys.path[:], sys.argv[:], dict(os.environ), _cwd(), _umask(), _authkey())
        order = ForkRequest(next(_numbers), target, name, modules, *surroundings)
        try:
            with _StandardStreams() as streams:
                self.pid = _ForkServer.request(order, [channel_end.fileno(), writer, *streams.fds], light)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(writer)

    def is_stopped(self) -> bool:
        return is_stopped(self.pid)

    def fileno(self) -> int:
        return self._fd

    def exit_code(self) -> int | None:
        if self._owner != os.getpid():  # in a fork of this process, whose worker it is not
            return UNKNOWN
        if self._code is None and self._fd >= 0:
            with contextlib.suppress(BlockingIOError):
                status = os.read(self._fd, STATUS_BYTES)
                self._code = int.from_bytes(status, "little", signed=True) if status else UNKNOWN
                if not status:  # the fork server, which would have done so, was killed
                    kill_group(self.pid, reaped=True)
        return self._code

    def send_signal(self, number: int) -> None:
        if self.exit_code() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        if self.exit_code() is None:
            kill_group(self.pid)

    def join(self, timeout: float) -> bool:
        return self._code is not None or _readable(self._fd, timeout)

    def close(self) -> None:
        self.exit_code()
        self._close()
        self._fd = -1


class _Spawned:
    """A new interpreter. Its lifeline is a socket whose other end it holds until it ends.

    Where a process that it has forked outlives it, the descriptor becomes readable late; ``exit_code`` is not late.
    """

    all: ClassVar[weakref.WeakSet[_Spawned]] = weakref.WeakSet()

    def __init__(self, target: str, channel_end: Channel, name: str, preload: bool, light: bool) -> None:
        self._owner = os.getpid()
        self._swept = False  # what it had started is killed
        (self._life, lifeline), (self._hello, hello) = socket.socketpair(), socket.socketpair()
        self._worker: int | None = None
        with lifeline, hello, _StandardStreams() as streams:
            self._hello.sendall(b"\0" + _authkey())
            ends = (lifeline.fileno(), channel_end.fileno(), hello.fileno())
            self._process = _python(lifeline, f"spawned(*{ends}, {target!r}, {name!r})", ends, streams)
        self.all.add(self)

    @property
    def pid(self) -> int:
        """Of the worker, whose interpreter may have to start first; of that, if it ends before, or has no keeper."""
        return self._told(START_S)

    def _told(self, timeout: float) -> int:
        open_fd = self._hello.fileno()
        if self._worker is None and open_fd >= 0 and _readable(open_fd, timeout):
            told = b""
            with contextlib.suppress(ConnectionResetError):  # it ended before it had read what it was sent
                told = self._hello.recv(32)
            self._worker = int(told) if told else self._process.pid
            self._hello.close()
        return self._process.pid if self._worker is None else self._worker

    def is_stopped(self) -> bool:
        return is_stopped(self._told(0.0))

    def fileno(self) -> int:
        return self._life.fileno()

    def exit_code(self) -> int | None:
        if self._owner != os.getpid():
            return UNKNOWN
        code = self._process.poll()
        if code is not None and not self._swept:
            kill_group(self._process.pid, reaped=True)
            self._swept = True
        return code

    def send_signal(self, number: int) -> None:
        if self.exit_code() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._told(0.0), number)

    def kill(self) -> None:
        if self.exit_code() is None:
            kill_group(self._told(0.0))

    def join(self, timeout: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
        return self.exit_code() is not None

    def close(self) -> None:
        self._life.close()
        self._hello.close()


class _StandardStreams:
    """Standard output and error of this process, as descriptors that are open in any case."""

    def __enter__(self) -> _StandardStreams:
        self._null = os.open(os.devnull, os.O_WRONLY)
        # Where Python began without one, its number may since have been given to any file.
        std = ((1, sys.__stdout__), (2, sys.__stderr__))
        self.fds = [fd if stream is not None and _is_open(fd) else self._null for fd, stream in std]
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._null)


def _interpreter_flags() -> list[str]:
    """This interpreter's -W, -X, -O and the like."""
    known = getattr(subprocess, "_args_from_interpreter_flags", None)
    if known is not None:
        return list(known())
    return ["-" + "O" * sys.flags.optimize] * bool(sys.flags.optimize) + [f"-W{each}" for each in sys.warnoptions]


def _python(
    lifeline: socket.socket, call: str, fds: Sequence[int], streams: _StandardStreams
) -> subprocess.Popen[bytes]:
    """A fresh interpreter that ties its life before all else, and calls a function of the fork server's module."""
    surroundings = f"import sys; sys.path[:] = {sys.path!r}; sys.argv[:] = {sys.argv!r}"
    tied = f"from muster.workers.keeper import tie_life; tie_life({lifeline.fileno()})"
    return subprocess.Popen(
        [
            *(sys.executable, *_interpreter_flags()),
            *("-c", f"{surroundings}; {tied}; from muster.workers.forkserver import *; {call}"),
        ],
        stdin=subprocess.DEVNULL,
        stdout=streams.fds[0],
        stderr=streams.fds[1],
        cwd=None if _cwd() else "/",  # MKL does not load in a directory that was deleted
        pass_fds=fds,
        start_new_session=True,  # Ctrl-C, Ctrl-Z and a closed terminal are the parent's affair
    )


def _preloadable(module: str) -> bool:
    package, _, own = module.partition(".")
    return module in PRELOADED or (package == "muster" and own.startswith(_OWN) and own != "envs.jax")


def _check_descriptors(name: str) -> None:
    free: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while len(free) < SPARE_DESCRIPTORS:
                free.append(os.dup(0 if _is_open(0) else 2))
        if len(free) < SPARE_DESCRIPTORS:
            import resource

            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            raise BadOption(
                f"{name} cannot be started: of the {limit} descriptors that this process may have (RLIMIT_NOFILE), "
                f"{len(free)} are left, and {SPARE_DESCRIPTORS} are needed. Use fewer workers, or allow more with "
                "`ulimit -n 4096` before starting Python."
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


def _readable(fd: int, timeout: float) -> bool:
    poller = select.poll()
    if fd >= 0:
        poller.register(fd, select.POLLIN)
    return bool(poller.poll(max(0.0, timeout) * 1000))


def _cwd() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it was deleted
        return None


def _authkey() -> bytes:
    """With which the parent's ``multiprocessing.Manager`` answers; it goes over private sockets only."""
    return bytes(process.current_process().authkey)


def _umask() -> int | None:
    """Without changing it for a moment, as ``os.umask`` would, for all threads."""
    with contextlib.suppress(OSError), open("/proc/self/status") as status:
        for line in status:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return None


_numbers = itertools.count()  # of orders

atexit.register(shutdown_forkserver)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_ForkServer.forget)
