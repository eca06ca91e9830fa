"""Every error Muster raises on purpose. One class per kind of remedy.

A message says where it happened, what was given, what was expected, and what to do. Errors that
replace another exception have it as ``__cause__``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typing_extensions import Self

MAX_TEXT = 20_000  # characters of a message or traceback of a foreign exception
_NAME: Callable[[type], str] = type.__dict__[
    "__name__"
].__get__  # which no metaclass can change


class MusterError(Exception):
    """Base class of all errors below.

    Errors from workers have the worker, environment and phase as attributes.

    Attributes:
        worker: number of the worker.
        env_id: global number of the environment; None if it is unknown, or for a whole batch of
            environments.
        env_index: number of the environment in its group.
        seed: the last seed of the environment.
        phase: "construct", "reset", "step", "policy", "weights", "call" or "close".
        crash_report: file for ``muster replay``.
        replay_command: the whole command, which the message has, too; "" without a crash report.
        traceback: of what was raised there, with Muster's frames, which the message leaves out.
        aftermath: the end of the message, where it says what follows from the error.
    """

    worker: int | None = None
    env_id: int | None = None
    env_index: int | None = None
    seed: int | None = None
    phase: str | None = None
    crash_report: Path | None = None
    replay_command: str = ""
    traceback: str = ""
    aftermath: str = ""

    def end_with(self, aftermath: str) -> Self:
        """Say at the end of the message what follows, in sentences that replace those it has so far.

        Returns this error.
        """
        text = str(self).removesuffix(f" {self.aftermath}")
        end = "" if text.endswith(".") else "."
        self.args = (f"{text}{end} {aftermath}",)
        self.aftermath = aftermath
        return self


class BadOption(MusterError, ValueError):
    """An option has an impossible value, or contradicts another one."""


class UnknownOption(BadOption, TypeError):
    """A keyword that no collector knows; the message names the nearest known one."""


class UnsupportedSpace(MusterError, TypeError):
    """A Gymnasium space that cannot be stored as an array."""


class UnsupportedEnv(MusterError, TypeError):
    """An environment object that no adapter supports, or that violates its own protocol."""


class EnvError(MusterError, RuntimeError):
    """An environment raised; the original is ``__cause__``."""

    def __init__(self, *args: object, env_index: int | None = None) -> None:
        super().__init__(*args)
        self.env_index = env_index


class BadEnvOutput(MusterError, ValueError):
    """An environment returned a value that does not fit its spaces."""


class PolicyError(MusterError, RuntimeError):
    """A policy raised; the original is ``__cause__``."""


class BadPolicyOutput(MusterError, ValueError):
    """A policy returned a value that does not fit the action space or the batch."""


class CaptureRefused(MusterError, RuntimeError):
    """With ``capture=True``: rollouts cannot be recorded as a graph of the device's operations."""


class BadWeights(MusterError, ValueError):
    """Published weights do not fit the policy, or are not finite. Nothing was changed."""


class WorkerError(MusterError, RuntimeError):
    """Code other than an environment or a policy raised in a worker; the original is ``__cause__``."""


class WorkerDied(MusterError, RuntimeError):
    """A worker process exited unexpectedly.

    Attributes:
        exitcode: of the process; negative: killed by the signal of that number; None: unknown.
    """

    exitcode: int | None = None


class WorkerNotStarted(WorkerDied, OSError):
    """A worker could not be started: descriptors, processes or memory are used up, or what starts
    it was killed.

    The system's error is ``__cause__``. The next call tries again.
    """


class VersionMismatch(MusterError, RuntimeError):
    """A node has another version of Muster than the main process. No restart is tried."""


class WorkerHung(MusterError, TimeoutError):
    """A worker made no progress within its deadline; the message has its stack."""


class HookError(MusterError, RuntimeError):
    """A hook or logger of the user's raised; the original is ``__cause__``. Nothing was lost."""


class RemoteError(MusterError):
    """Replaces an exception of a worker that cannot be pickled; has its type and text.

    Attributes:
        type_name: of the exception, with its module.
        traceback: as text.
    """

    def __init__(self, text: str, type_name: str = "", traceback: str = "") -> None:
        super().__init__(text)
        self.type_name = type_name
        self.traceback = traceback


class CollectorClosed(MusterError, RuntimeError):
    """The collector was shut down."""


class ForkedProcess(MusterError, RuntimeError):
    """An object was used in a fork of the process that made it.

    The fork has none of its workers, threads and files.
    """


class CollectorBusy(MusterError, RuntimeError):
    """A second iterator was requested while the first is still in use."""


class CollectorTimeout(MusterError, TimeoutError):
    """An operation did not end within its deadline."""


class SlotsExhausted(MusterError, MemoryError):
    """Too many batches are still referenced for another one to fit in the memory limit."""


class NothingToSample(MusterError, RuntimeError):
    """A ``ReplayMemory`` has no transition, or no sequence, that could be drawn."""


class BadRecording(MusterError, ValueError):
    """A recording directory is missing, damaged, or of another format."""


class BadCheckpoint(MusterError, ValueError):
    """A checkpoint is missing, damaged, of another kind or format; or a state cannot be stored in a
    checkpoint.
    """


class BadCrashReport(MusterError, ValueError):
    """A crash report is missing, damaged, of another format, or cannot be replayed."""


class FileError(MusterError, OSError):
    """A file or folder cannot be written or read; the original is ``__cause__``.

    What was at the path is unchanged.

    It has ``errno``, ``strerror`` and ``filename``, and is of the kind that Python has for this
    ``errno``: ``FileNotFoundError``, ``PermissionError`` and so on.
    """

    def __str__(self) -> str:  # ``OSError`` would leave out the remedy
        return str(self.args[0]) if self.args else ""

    def __reduce__(self) -> Any:
        return file_error, (str(self), self.errno, self.strerror, self.filename)


def file_error(
    message: str, number: int | None, why: str | None, path: str | None
) -> FileError:
    """Return a ``FileError`` with this ``errno``, ``strerror`` and ``filename``."""
    kind: Any = type(OSError(number or 0, ""))  # Python chooses it by the number
    error: FileError = _file_error_like(kind)(message)
    error.errno, error.strerror, error.filename = number, why, path
    return error


@functools.cache
def _file_error_like(kind: Any) -> Any:
    """Return ``FileError``, derived from a class of Python's, too."""
    if kind is OSError:
        return FileError
    return type(
        "FileError",
        (FileError, kind),
        {"__module__": __name__, "__doc__": FileError.__doc__},
    )


class ImportRefused(MusterError, PermissionError):
    """An env id or a file would run foreign code, which the command line does only with
    ``--allow-import``.
    """


# --- texts of exceptions that are not Muster's ----------------------------------------------------


def described(error: BaseException, where: str = "") -> str:
    """``ValueError: boom``, or ``ValueError at row 3: boom``.

    Never raises, whatever the exception's methods do.
    """
    name, text = _NAME(type(error)) + where, text_of(error)
    return f"{name}: {text}" if text else name


def text_of(error: BaseException) -> str:
    """``str(error)``. Never raises."""
    return shown(lambda: str(error))


def shown(look: Callable[[], str]) -> str:
    """The text that ``look`` makes of a foreign object, shortened to ``MAX_TEXT``; or why there is
    none.

    Never raises: an error that replaces the one at hand would hide it, and where it came from.
    """
    try:
        # A plain string that every stream can write, also of a subclass of str, or with lone
        # surrogates.
        text = str.encode(look(), "utf-8", "backslashreplace").decode()
    except BaseException as problem:  # noqa: BLE001 (foreign code)
        return f"<could not be shown: {_NAME(type(problem))}>"
    return (
        text
        if len(text) <= MAX_TEXT
        else f"{text[: MAX_TEXT // 2]}\n[...]\n{text[-MAX_TEXT // 2 :]}"
    )
