"""What goes wrong in workers. Light to import, since they import it."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from tests.waits import wait_until


class TwoArguments(Exception):
    def __init__(self, code: int, why: str) -> None:
        super().__init__(f"{why} ({code})")


class Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__("holds a function")
        self.reason = lambda: None


class OwnBase(BaseException):
    """No Exception."""


class Raising:
    def __init__(self, error: Any) -> None:
        self.error = error

    def __call__(self, _: object) -> NoReturn:
        raise self.error()  # HERE


class Signalled:
    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, _: object) -> None:
        os.kill(os.getpid(), self.number)  # HERE
        signal.pause()


class KilledAndNoted:
    """Kills its process, whose pid is in the file ``path`` before."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, _: object) -> None:
        self.path.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)


class WaitsFor:
    """Waits until a file exists."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, honest: Any) -> Any:
        wait_until(self.path.exists)
        return honest


class WaitsForTheEnd:
    """Waits until the process whose pid is in the file ``path`` has ended."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, honest: Any) -> Any:
        wait_until(lambda: self.path.exists() and self.path.read_text() != "")
        wait_for_the_end(self.path.read_text())
        return honest


def wait_for_the_end(pid: str) -> None:
    """Wait until a process has ended."""

    def has_ended() -> bool:
        try:
            return (
                Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
                in "ZX"
            )
        except OSError:  # there is no such process, or not any more
            return True

    wait_until(has_ended)


def exits_at_once(_: object) -> NoReturn:
    os._exit(0)  # HERE


def waits(_: object) -> None:
    threading.Event().wait()  # HERE


def waits_for_a_signal(honest: Any) -> Any:
    # a simulator's blocking call; the signal that asks for the stack ends it
    ctypes.PyDLL(None).sleep(1000)  # HERE
    return honest


def holds_the_gil(_: object) -> None:
    sum(range(10**15))  # HERE


def stops(_: object) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)  # HERE


class HasChild:
    """Starts a program, as simulators do, and notes its pid in a file; ``detached``: in a session
    of its own.
    """

    def __init__(self, path: str, *, detached: bool = False) -> None:
        self.path, self.detached = path, detached

    def __call__(self, honest: Any) -> Any:
        child = subprocess.Popen(["sleep", "1000"], start_new_session=self.detached)
        with open(self.path, "a") as file:
            file.write(f"{child.pid}\n")
        return honest


class Does:
    """Calls a function, and returns what is right."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.function, self.args = function, args

    def __call__(self, honest: Any) -> Any:
        self.function(*self.args)
        return honest


def starts_threads() -> None:
    """That never end, and that the interpreter waits for."""
    for _ in range(4):
        threading.Thread(target=threading.Event().wait).start()


def closes_descriptors() -> None:
    """All but the three standard ones, whatever they lead to."""
    os.closerange(3, 4096)


def changes_signal_handlers() -> None:
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)


def changes_directory() -> None:
    """To one that does not exist any more."""
    os.chdir(folder := tempfile.mkdtemp())
    os.rmdir(folder)


def removes_modules(package: str) -> None:
    """All of a package, and the paths from which they could be imported again."""
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]
    sys.path.clear()


def chained() -> Exception:
    error = ValueError("outer")
    error.__cause__ = KeyError("inner")
    return error


class Reward:
    """Returns another reward."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, honest: Any) -> Any:
        return honest[0], self.value, *honest[2:]


nan_reward = Reward(float("nan"))


def wrong_shape(honest: Any) -> Any:
    return honest[0][:3], *honest[1:]


def wrong_dtype(honest: Any) -> Any:
    return honest[0].astype(complex), *honest[1:]


def text(honest: Any) -> Any:
    return "observation", *honest[1:]


def nothing(_: object) -> None:
    return None


def line_of(what: Any) -> str:
    """FILE:LINE that a message should have."""
    code = getattr(what, "__code__", None) or type(what).__call__.__code__
    lines = Path(code.co_filename).read_text().splitlines()
    begin = code.co_firstlineno - 1
    here = next(
        number for number in range(begin, len(lines)) if "# HERE" in lines[number]
    )
    return f"{code.co_filename}:{here + 1}"


class FaultyScheme:
    """Sends weights like ``scheme``, but taking them goes wrong, once, after ``at`` times."""

    def __init__(self, scheme: Any, mark: str, do: Any, at: int = 0) -> None:
        self.scheme, self.mark, self.do, self.at = scheme, mark, do, at

    def publisher(self, *args: Any) -> Any:
        publisher = self.scheme.publisher(*args)
        ticket, wrong = publisher.ticket, (self.mark, self.do, self.at)

        def faulty(worker: int) -> Any:
            honest = ticket(worker)
            honest._opener = partial(_open, honest._opener, wrong)
            return honest

        publisher.ticket = faulty
        return publisher


def _open(opener: Any, wrong: tuple[str, Any, int], fds: Any) -> FaultySubscriber:
    return FaultySubscriber(opener(fds), *wrong)


class FaultySubscriber:
    def __init__(self, subscriber: Any, mark: str, do: Any, at: int) -> None:
        self.subscriber, self.mark, self.do, self.at, self.taken = (
            subscriber,
            mark,
            do,
            at,
            0,
        )

    @property
    def version(self) -> Any:
        return self.subscriber.version

    def take(self, into: Any) -> Any:
        self.taken += 1
        if self.taken > self.at and first_time(self.mark):
            self.do(None)
        return self.subscriber.take(into)

    def close(self) -> None:
        self.subscriber.close()


def first_time(mark: str) -> bool:
    """True for the first who asks, in whatever process."""
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
        return True
    except FileExistsError:
        return False


def __getattr__(name: str) -> Any:
    if (
        name == "FaultyPolicy"
    ):  # needs torch, which workers that only step can do without
        from tests.fakes.faulty_policy import FaultyPolicy

        return FaultyPolicy
    raise AttributeError(name)
