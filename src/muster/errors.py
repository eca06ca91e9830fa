"""Every error Muster raises on purpose. One class per kind of remedy.

A message says who, what came, what was expected, and what to do. Errors that replace another
exception carry it as ``__cause__``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

MAX_TEXT = 20_000  # characters of a message or traceback of a foreign exception
_NAME: Callable[[type], str] = type.__dict__["__name__"].__get__  # which no metaclass can change


class MusterError(Exception):
    """Base class of all errors below. What came from a worker says from where.

    Attributes:
        worker: its number.
        env_id: global number of the environment; None if it is not known, or all of a batch.
        env_index: number of the environment in its group.
        seed: that the environment was last given.
        phase: "construct", "reset", "step", "policy", "weights", "call" or "close".
        crash_report: file for ``muster replay``.
        traceback: of what was raised there, with Muster's frames, which the message leaves out.
    """

    worker: int | None = None
    env_id: int | None = None
    env_index: int | None = None
    seed: int | None = None
    phase: str | None = None
    crash_report: Path | None = None
    traceback: str = ""


class BadOption(MusterError, ValueError):
    """An option has an impossible value, or contradicts another one."""


class UnknownOption(BadOption, TypeError):
    """A keyword that no collector knows; the message names the nearest known one."""


class UnsupportedSpace(MusterError, TypeError):
    """A Gymnasium space that cannot be stored as it is."""


class UnsupportedEnv(MusterError, TypeError):
    """An environment object that no adapter takes, or that breaks its own protocol."""


class EnvError(MusterError, RuntimeError):
    """An environment raised; the original is ``__cause__``."""

    def __init__(self, *args: object, env_index: int | None = None) -> None:
        super().__init__(*args)
        self.env_index = env_index


class BadEnvOutput(MusterError, ValueError):
    """An environment returned something that its spaces do not allow."""


class PolicyError(MusterError, RuntimeError):
    """A policy raised; the original is ``__cause__``."""


class BadPolicyOutput(MusterError, ValueError):
    """A policy returned something the environment or the batch cannot take."""


class BadWeights(MusterError, ValueError):
    """Published weights do not fit the policy, or are not finite. Nothing was changed."""


class WorkerError(MusterError, RuntimeError):
    """Something else than an environment or a policy raised in a worker; the original is ``__cause__``."""


class WorkerDied(MusterError, RuntimeError):
    """A worker process ended unasked.

    Attributes:
        exitcode: of the process; negative: killed by the signal of that number; None: unknown.
    """

    exitcode: int | None = None


class WorkerHung(MusterError, TimeoutError):
    """A worker got nowhere for longer than its deadline; the message has its stack."""


class HookError(MusterError, RuntimeError):
    """A hook or logger of the user's raised; the original is ``__cause__``. Nothing was lost."""


class RemoteError(MusterError):
    """Stands in for an exception of a worker that could not be carried over; says its type and text.

    Attributes:
        type_name: of the exception, with its module.
        traceback: as text.
    """

    def __init__(self, text: str, type_name: str = "", traceback: str = "") -> None:
        super().__init__(text)
        self.type_name, self.traceback = type_name, traceback


class CollectorClosed(MusterError, RuntimeError):
    """The collector was shut down."""


class ForkedProcess(MusterError, RuntimeError):
    """An object was used in a fork of the process that made it, whose workers, threads and files it has not."""


class CollectorBusy(MusterError, RuntimeError):
    """A second iterator was asked for while the first is still in use."""


class CollectorTimeout(MusterError, TimeoutError):
    """Something did not end within the time it was given."""


class SlotsExhausted(MusterError, MemoryError):
    """Too many batches are still referenced for another one to fit in the memory limit."""


class BadRecording(MusterError, ValueError):
    """A recording directory is missing, damaged, or of another format."""


class BadCheckpoint(MusterError, ValueError):
    """A checkpoint is missing, damaged, of something else, or of another format; or a state that none can hold."""


class BadCrashReport(MusterError, ValueError):
    """A crash report is missing, damaged, of another format, or holds nothing that could be replayed."""


class ImportRefused(MusterError, PermissionError):
    """An env id or a file would run foreign code, which the command line does not do unasked."""


# --- texts of exceptions that are not Muster's ------------------------------------------------------


def described(error: BaseException, where: str = "") -> str:
    """``ValueError: boom``, or ``ValueError at row 3: boom``. Never raises, whatever the exception's methods do."""
    name, text = _NAME(type(error)) + where, text_of(error)
    return f"{name}: {text}" if text else name


def text_of(error: BaseException) -> str:
    """``str(error)``. Never raises."""
    return shown(lambda: str(error))


def shown(look: Callable[[], str]) -> str:
    """The text that ``look`` makes of a foreign object, shortened to ``MAX_TEXT``; or why there is none.

    Never raises: an error that replaces the one at hand would hide it, and where it came from.
    """
    try:
        # A plain string that every stream can write, also of a subclass of str, or with lone surrogates.
        text = str.encode(look(), "utf-8", "backslashreplace").decode()
    except BaseException as problem:  # noqa: BLE001 (foreign code)
        return f"<could not be shown: {_NAME(type(problem))}>"
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT // 2]}\n[...]\n{text[-MAX_TEXT // 2 :]}"
