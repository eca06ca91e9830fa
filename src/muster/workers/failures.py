"""The errors of workers for the user: errors sent between processes, worker deaths and hangs."""

from __future__ import annotations

import errno
import re
import signal
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from muster import errors
from muster.errors import (
    EnvError,
    MusterError,
    PolicyError,
    RemoteError,
    WorkerDied,
    WorkerError,
    WorkerHung,
    WorkerNotStarted,
    described,
    shown,
    text_of,
)
from muster.restore.pickling import by_cloudpickle, unpickle
from muster.utils.tracebacks import (
    MUSTER,
    is_installed,
    is_muster,
    traceback_text,
    trim,
)

if TYPE_CHECKING:
    from muster.restore.crash_report import CrashDirectory

MAX_PICKLE_BYTES = (
    1 << 20
)  # an exception can refer to an environment, or all of its data
CLASSES: dict[str, type[MusterError]] = {  # classes for foreign errors, by phase
    **dict.fromkeys(("construct", "reset", "step", "close"), EnvError),
    "policy": PolicyError,
}
CRASHES = ("SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGABRT")

_MUSTERS = [
    cls
    for cls in vars(errors).values()
    if isinstance(cls, type) and issubclass(cls, MusterError)
]
_CAUSE = vars(BaseException)["__cause__"].__get__  # no overrides

Kind = TypeVar("Kind", bound=MusterError)

_FRAME = re.compile(
    r'^ *File "(?P<file>.+)", line (?P<line>\d+)(?: in (?P<name>.+))?$', re.MULTILINE
)
_WORKING = str(Path("workers", "main.py"))


@dataclass(frozen=True)
class Where:
    """The place of an error in a collector; unknown parts are None."""

    worker: int | None = None
    pid: int | None = None
    generation: int | None = None  # number of earlier starts of the worker
    env_ids: tuple[
        int, ...
    ] = ()  # global numbers of the environments that may have failed
    env_index: int | None = None  # index of the environment in its group
    row: int | None = None  # row of the rollout
    episode: int | None = None  # number of episodes that the environment had completed
    step: int | None = None  # number of its steps since then
    seed: int | None = None  # seed of the environment's last seeded reset
    node: str = ""  # number and host of the worker's node; empty on this machine

    def __str__(self) -> str:
        parts = []
        if self.worker is not None:
            more = [] if self.pid is None else [f"pid {self.pid}"]
            more += [f"node {self.node}"] if self.node else []
            more += [f"restart {self.generation}"] if self.generation else []
            parts.append(
                f"worker {self.worker}" + (f" ({', '.join(more)})" if more else "")
            )
        if self.env_ids:
            ids = ", ".join(map(str, self.env_ids))
            parts.append(
                f"environment {ids}"
                if len(self.env_ids) == 1
                else f"one of the environments {ids}"
            )
        if self.step is not None:
            parts.append(
                f"step {self.step} of its episode"
                + ("" if self.episode is None else f" {self.episode}")
            )
        parts += [
            f"{name} {value}"
            for name in ("row", "seed")
            if (value := getattr(self, name)) is not None
        ]
        return ", ".join(parts) or "a worker"

    def known(self, phase: str) -> dict[str, Any]:
        """Return the attributes of an error at this place."""
        return {
            "worker": self.worker,
            "env_id": self.env_ids[0] if len(self.env_ids) == 1 else None,
            "env_index": self.env_index,
            "seed": self.seed,
            "phase": phase,
        }


@dataclass(frozen=True)
class SentError:
    """An error as plain data, which any process can receive. It is complete for the user."""

    kind: str  # name of the class in ``muster.errors``
    message: str
    known: Mapping[str, Any]  # attributes of the error
    cause: RemoteError | None = (
        None  # text of the original exception; None: there is none
    )
    # the original; None if it does not survive pickling
    pickled: bytes | None = field(default=None, repr=False)
    # name and content of a crash report from another machine
    crash_report: tuple[str, bytes] | None = None

    def here(self, directory: CrashDirectory) -> SentError:
        """Return the error with its crash report saved in a directory of this machine."""
        if self.crash_report is None:
            return self
        there, path = self.known["crash_report"], directory.put(*self.crash_report)
        message = self.message.replace(str(there), str(path))
        command = str(self.known.get("replay_command", "")).replace(
            str(there), str(path)
        )
        known = {**self.known, "crash_report": path, "replay_command": command}
        return replace(self, message=message, known=known, crash_report=None)

    def error(self) -> MusterError:
        """Make the exception; its ``__cause__`` is the original exception or a ``RemoteError``."""
        kind: type[MusterError] = getattr(errors, self.kind)
        error = kind(self.message)
        vars(error).update(self.known)
        error.__cause__ = self.cause
        if self.pickled is not None:
            try:
                error.__cause__ = unpickle(self.pickled)
            except KeyboardInterrupt:
                raise
            except BaseException:  # noqa: BLE001  (its module may be missing here; use the text)
                pass
        return error


def send_error(error: BaseException) -> SentError:
    """Convert an exception of a worker pool to plain data.

    Includes its crash report and deletes that file here.
    """
    nearest = _nearest(error)
    if nearest is None:
        return pack(error, phase="call")
    known = {
        name: value for name, value in vars(error).items() if not name.startswith("_")
    }
    sent = SentError(
        nearest.__name__, text_of(error), known, *_sent_cause(_CAUSE(error))
    )
    if (path := known.get("crash_report")) is not None:
        sent = replace(sent, crash_report=(path.name, path.read_bytes()))
        path.unlink()
    return sent


def pack(error: BaseException, *, phase: str, **where: Any) -> SentError:
    """Convert an exception to plain data, in the process that raised it.

    Args:
        phase: "construct", "reset", "step", "policy", "weights", "call" or "close".
        where: fields of ``Where``. The exception's own ``env_index`` takes precedence.

    Never raises, even if methods of the exception do.
    """
    place, nearest, text = Where(**where), _nearest(error), _text(error)
    if (index := env_index_of(error, phase)) is not None:
        place = replace(
            place,
            env_index=index,
            env_ids=place.env_ids[index : index + 1] or place.env_ids,
        )
    original = error if nearest is None else _CAUSE(error)
    if nearest is None:
        nearest = CLASSES.get(phase, WorkerError)
        text = f"{_type_name(error)} was raised" + (f": {text}" if text else "")
    full = ""
    if original is not None:
        full = _traceback(original)
        trim(original)
    cause, pickled = _sent_cause(original)
    stack = (
        f"Traceback in the worker:\n{cause.traceback}"
        if cause is not None and cause.traceback
        else ""
    )
    sentence = text if text.endswith((".", "!", "?")) else f"{text}."
    message = _sections(f"{sentence} In {place}, phase {phase}.", stack)
    return SentError(
        nearest.__name__,
        message,
        place.known(phase) | {"traceback": full},
        cause,
        pickled,
    )


def env_index_of(error: BaseException, phase: str) -> int | None:
    """Return the index in its group of the environment that an adapter's error names, or None.

    Never raises.

    None for phase "policy" and for user-defined classes: such an error may be that of a nested
    collector.
    """
    if phase == "policy" or type(error) is not _nearest(error):
        return None
    index = vars(error).get("env_index")
    return index if type(index) is int and index >= 0 else None


def died(
    where: Where,
    *,
    phase: str,
    exitcode: int | None,
    oom_kills: int = 0,
    stack: str = "",
) -> WorkerDied:
    """Return the error for a worker process that exited unexpectedly.

    Args:
        exitcode: exit code as in ``subprocess``: negative for signals; None: unknown.
        oom_kills: growth of ``oom_kills()`` since the supervisor was made.
    """
    how = "ended in an unknown way"
    name = ""
    if exitcode is not None and exitcode < 0:
        name = _signal_name(-exitcode)
        how = f"was killed by {name}"
    elif exitcode is not None:
        how = f"ended with exit code {exitcode}"
    message = f"{_capital(where)} {how} during {phase}. {_why_it_died(name, exitcode, oom_kills)}"
    if frame := innermost_user_frame(stack):
        message += f" It was at {frame}."
    error = _at(
        WorkerDied(_sections(message, _stack_of("worker", stack))), where, phase
    )
    error.exitcode = exitcode
    return error


def not_started(where: Where, error: Exception, *, again: bool) -> WorkerNotStarted:
    """Return the error for a worker that could not be started because of ``error``, which becomes
    its cause.

    Args:
        again: the next call of the collector starts it again.
    """
    # of ``launch``
    seen = (
        error.__cause__
        if type(error) is MusterError and error.__cause__ is not None
        else error
    )
    reason = (
        text_of(seen) if isinstance(seen, (MusterError, OSError)) else described(seen)
    )
    sentences = [
        f"{_capital(where)} could not be started: {reason.rstrip('.')}.",
        _remedy(error),
    ]
    if again:
        sentences.append("The next call tries again.")
    lost = WorkerNotStarted(" ".join(filter(None, sentences)))
    lost.__cause__ = error
    return _at(lost, where, "construct")


def node_lost(where: Where, *, phase: str, why: str) -> WorkerDied:
    """Return the error for a worker whose node was lost or did not join; ``why``: reason given by
    its link.
    """
    message = f"{_capital(where)} is lost with its node, during {phase}: {why}"
    return _at(WorkerDied(message), where, phase)


def hung(
    where: Where,
    *,
    phase: str,
    seconds: float,
    deadline: float,
    stack: str = "",
    stopped: bool = False,
) -> WorkerHung:
    """Return the error for a worker that made no progress for longer than its deadline;
    ``stopped``: by SIGSTOP.
    """
    frame = innermost_user_frame(stack)
    at = f" at {frame}" if frame else ""
    message = (
        f"{_capital(where)} has been in {phase} for {seconds:.1f} s{at}; its deadline is"
        f" {deadline:g} s."
    )
    if stopped:
        message += " The process is stopped (SIGSTOP, or a debugger), so its stack could not be taken."
    elif not stack:
        message += (
            " Its stack could not be taken: the process does not answer signals, or has no handler"
            " yet."
        )
    message += " If it may take that long, give this phase a longer deadline (None: no deadline)."
    return _at(WorkerHung(_sections(message, _stack_of("worker", stack))), where, phase)


def on_server(error: Exception, seen: MusterError) -> MusterError:
    """Return the error of a policy on the inference server, with the place of the worker's error
    ``seen``.
    """
    cls = _nearest(error) or PolicyError
    full = _traceback(error)
    trim(error)
    made = cls(
        _sections(text_of(error), f"Traceback on the server:\n{_traceback(error)}")
    )
    vars(made).update(vars(seen) | {"traceback": full})
    made.__cause__ = _CAUSE(error)
    return made


def server_hung(ident: int | None, *, seconds: float, deadline: float) -> WorkerHung:
    """Return the error for an inference server whose policy does not return, in the thread
    ``ident``.
    """
    stack = "" if ident is None else thread_stack(ident)
    frame = innermost_user_frame(stack)
    message = (
        f"The policy on the inference server has not returned for {seconds:.1f}"
        f" s{f' at {frame}' if frame else ''}; its deadline is {deadline:g} s. If it may take that"
        " long, give timeouts={'policy': ...} more (None: no deadline). A thread cannot be"
        " ended: shut this collector down."
    )
    return WorkerHung(_sections(message, _stack_of("server", stack)))


def node_hung(node: str, ident: int, *, seconds: float, deadline: float) -> WorkerHung:
    """Return the error for a node whose own thread ``ident`` looks neither at its workers nor at
    its messages.
    """
    stack = thread_stack(ident)
    frame = innermost_user_frame(stack)
    message = (
        f"The main thread of node {node} has not returned for {seconds:.1f}"
        f" s{f' at {frame}' if frame else ''}; its deadline is {deadline:g} s. If it may take that"
        " long, give timeouts={'construct': ...} more (None: no deadline)."
    )
    return WorkerHung(_sections(message, _stack_of("node", stack)))


def innermost_user_frame(stack: str) -> str | None:
    """Return ``FILE:LINE in NAME`` for the innermost frame of the user's own code in a
    ``faulthandler`` dump.

    This is the innermost frame that is neither Muster's nor of an installed package; else the
    innermost that is not Muster's. Of several threads, the one in the worker's main loop is used,
    else one with frames of Muster.
    """
    threads = re.split(r"\n\s*\n", stack.strip())
    works = [t for t in threads if _WORKING in t]  # not Muster's helper threads
    ours = works or [t for t in threads if MUSTER in t]
    ours = ours or [t for t in threads if t.startswith("Current thread")] or threads
    frames = [found.groupdict() for found in _FRAME.finditer(ours[0])]
    foreign = [frame for frame in frames if not is_muster(frame["file"])]
    own = [f for f in foreign if not is_installed(f["file"])]
    chosen = next(iter(own or foreign or frames), None)
    return (
        None
        if chosen is None
        else f"{chosen['file']}:{chosen['line']} in {chosen['name'] or '?'}"
    )


def thread_stack(ident: int) -> str:
    """Return the stack of a thread of this process in the format of ``faulthandler``; empty for an
    unknown thread.
    """
    frames = (
        traceback.extract_stack(sys._current_frames().get(ident))
        if ident in sys._current_frames()
        else []
    )
    return "\n".join(
        f'  File "{frame.filename}", line {frame.lineno} in {frame.name}'
        for frame in reversed(frames)
    )


def oom_kills() -> int:
    """Return the number of out-of-memory kills in this process's control group; 0 if it is not
    available.
    """
    try:
        groups = Path("/proc/self/cgroup").read_text().splitlines()
        own = next((line[3:] for line in groups if line.startswith("0::")), "/")
        for directory in (Path(f"/sys/fs/cgroup{own}"), Path("/sys/fs/cgroup")):
            if (events := directory / "memory.events").exists():
                counts = dict(line.split() for line in events.read_text().splitlines())
                return int(counts.get("oom_kill", 0))
    except (OSError, ValueError):
        pass
    return 0


# --- parts ----------------------------------------------------------------------------------------


def _remedy(error: BaseException) -> str:
    """Return what to do about an error of the system while a process or thread is started; empty if
    that is unknown.
    """
    while not isinstance(error, OSError) and error.__cause__ is not None:
        error = error.__cause__
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.EMFILE, errno.ENFILE):
        return (
            "Close files, or allow more with `ulimit -n 4096` before starting Python."
        )
    if number == errno.EAGAIN or "new thread" in text_of(error):
        return (
            "This user or container may have no more processes and threads: use fewer workers, or"
            " raise the limit (`ulimit -u`, pids.max of the control group)."
        )
    if number == errno.ENOMEM or isinstance(error, MemoryError):
        return "There is not enough memory: use fewer or smaller workers."
    return ""


def _why_it_died(name: str, exitcode: int | None, oom_kills: int) -> str:
    has_keeper = sys.platform == "linux"
    keeper_died = exitcode is None and has_keeper
    if oom_kills > 0 and (keeper_died or name == "SIGKILL"):
        return (
            f"Probably out of memory: the kernel has killed {oom_kills}"
            f" process{'es' * (oom_kills > 1)} of this control group since the collector was"
            " made. Use fewer or smaller environments, or more memory."
        )
    if keeper_died:
        return (
            "The process that waits for its end and tells the exit code (muster-keeper, its parent)"
            " was killed, and the worker with it: by the out-of-memory killer (see dmesg), a batch"
            " system, or a user."
        )
    if name == "SIGKILL":
        return (
            "Another program sent SIGKILL: the out-of-memory killer (see dmesg), a batch system, or"
            " a user."
        )
    if name in CRASHES:
        return "That is a crash in native code, of the environment or of a library it uses."
    if name:
        return "Muster did not send that signal."
    if exitcode is None:
        return "Another part of this program reaped the process, so its exit code is unknown."
    message = "The process ended by itself (os._exit, or a crash in native code)"
    if exitcode == 1:  # as Python does
        message += (
            ", or the worker could not go on (closed descriptors, for example): see standard error"
            " for a traceback"
        )
    return f"{message}."


def _stack_of(who: str, stack: str) -> str:
    text = stack.strip("\n")
    return f"Stack of the {who} (most recent call first):\n{text}" if text else ""


def _at(error: Kind, where: Where, phase: str) -> Kind:
    vars(error).update(where.known(phase))
    return error


def _sent_cause(cause: BaseException | None) -> tuple[RemoteError | None, bytes | None]:
    """Return an exception as text, and pickled if possible."""
    # ``isinstance`` would run code of a user's exception class
    if cause is None or type(cause) is RemoteError:
        return cause, None
    name = _type_name(cause)
    return RemoteError(f"{name}: {_text(cause)}", name, _traceback(cause)), _pickled(
        cause
    )


def _pickled(error: BaseException) -> bytes | None:
    """Pickle an exception; None if it is too large, or unpickling here does not restore it."""
    try:
        data = by_cloudpickle(error)
        if len(data) > MAX_PICKLE_BYTES:
            return None
        again = unpickle(data)
        return data if type(again) is type(error) and str(again) == str(error) else None
    except BaseException:  # noqa: BLE001  (foreign code; SystemExit here must not end the worker)
        return None


def _traceback(error: BaseException) -> str:
    """Return the formatted traceback, innermost frame last."""
    return shown(lambda: traceback_text(error))


def _text(error: BaseException) -> str:
    """Return the message of an exception with its notes."""
    text, notes = (
        text_of(error),
        shown(lambda: "\n".join(map(str, getattr(error, "__notes__", ())))),
    )
    return f"{text}\n{notes}" if notes else text


def _type_name(error: BaseException) -> str:
    cls = type(error)
    return shown(
        lambda: (
            cls.__qualname__
            if cls.__module__ == "builtins"
            else f"{cls.__module__}.{cls.__qualname__}"
        )
    )


def _nearest(error: BaseException) -> type[MusterError] | None:
    """Return the most derived class of ``muster.errors`` of which this is an instance, or None."""
    # bases are defined first
    return next(
        (cls for cls in reversed(_MUSTERS) if issubclass(type(error), cls)), None
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _capital(where: Where) -> str:
    text = str(where)
    return text[0].upper() + text[1:]


def _sections(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part)
