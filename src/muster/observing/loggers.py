"""Loggers: the adapter for loggers of any kind, two loggers of Muster's, and the metrics that a
collector logs.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from typing_extensions import Self

from muster.episodes.record import Episodes
from muster.episodes.summary import SequenceSummaryStats, successes
from muster.errors import BadOption, HookError, described
from muster.observing.stats import CollectorStats
from muster.utils.whole_files import (
    append_whole,
    check_writable,
    explained,
    file_errors,
    make_folder,
    read_json,
    try_lock,
)

Log = Callable[[Mapping[str, float], int], None]


class _Way(NamedTuple):
    """The calling convention of a kind of logger."""

    method: str | None  # None: the object is called itself
    keyword: str | None  # name of the step's parameter; None: the last positional one
    # True: a call for each metric, with name and value; False: one call with all metrics
    each: bool

    def calls(
        self, metrics: Mapping[str, float], step: int
    ) -> list[tuple[tuple[Any, ...], dict[str, int]]]:
        """Return the arguments of all calls that log these metrics."""
        given: list[tuple[Any, ...]] = (
            list(metrics.items()) if self.each else [(dict(metrics),)]
        )
        if self.keyword is None:
            return [((*arguments, step), {}) for arguments in given]
        return [(arguments, {self.keyword: step}) for arguments in given]


# The first match is used. prt_rl's loggers also have a log_metrics without step=; Lightning's have
# other methods too.
_WAYS = (
    _Way("add_scalar", None, True),  # TensorBoard
    _Way("log_scalar", "iteration", True),  # prt_rl
    _Way("log_scalar", "step", True),  # TorchRL
    _Way("log_metrics", "step", False),  # MLflow, Lightning
    _Way("log", "step", False),  # Weights & Biases
    _Way(None, None, False),
)


def as_logger(given: Any) -> Log:
    """Return a logger as a function ``(metrics, step)``, where ``metrics`` is a mapping of numbers
    by name.

    Args:
        given: an object with ``add_scalar(tag, value, step)``, ``log_scalar(name, value,
            iteration=)`` (or ``step=``), ``log_metrics(dict, step=)`` or ``log(dict, step=)``, or a
            function ``(dict, step)``. If it has ``should_log(step)``, this is called once for every
            step, and only steps for which it is true are logged.

    Returns:
        a function that raises ``HookError`` for any error of the logger.

    Raises:
        BadOption: the object has none of these methods.
    """
    if isinstance(given, _Log):
        return given
    for way in _WAYS if not isinstance(given, type) else ():
        function = given if way.method is None else getattr(given, way.method, None)
        if callable(function) and _takes(function, way):
            return _Log(given, way)
    hint = (
        "This is a class: give an instance."
        if isinstance(given, type)
        else "Or wrap it in such a function."
    )
    raise BadOption(
        f"logger={given!r}: expected an object with add_scalar(tag, value, step), log_scalar(name,"
        " value, iteration=), log_metrics(dict, step=) or log(dict, step=), or a function (dict,"
        f" step). {hint}"
    )


def _takes(function: Callable[..., Any], way: _Way) -> bool:
    [(arguments, keywords)] = way.calls({"name": 0.0}, 0)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function in C: the first call will check it
        return True
    try:
        signature.bind(*arguments, **keywords)
    except TypeError:
        return False
    return True


class _Log:
    """A logger as a function, see ``as_logger``."""

    def __init__(self, given: Any, way: _Way) -> None:
        self._given = given
        self._way = way
        self._should_log = getattr(given, "should_log", None)
        # the last step, and the result of ``should_log``
        self._asked: tuple[int | None, bool] = (None, True)

    def __call__(self, metrics: Mapping[str, float], step: int) -> None:
        try:
            if self._wants(step):
                # Looked up every time: `wandb.init()` replaces `wandb.log`.
                write = (
                    self._given
                    if self._way.method is None
                    else getattr(self._given, self._way.method)
                )
                for arguments, keywords in self._way.calls(metrics, step):
                    write(*arguments, **keywords)
        except Exception as error:  # loggers may raise anything
            name = getattr(self._given, "__qualname__", type(self._given).__qualname__)
            raise HookError(
                f"the logger {name} raised {described(error, f' at step {step}')}. No data was"
                " lost. Fix the logger, or remove it with logger=None."
            ) from error

    def _wants(self, step: int) -> bool:
        """Call ``should_log`` once per step: prt_rl's is True only once, and several episodes may
        end at one step.
        """
        if self._should_log is None:
            return True
        if step != self._asked[0]:
            self._asked = (step, bool(self._should_log(step)))
        return self._asked[1]


class JsonlLogger:
    """Appends records to a file, one JSON object per line.

    ::

        {"step": 2048, "time": 1763740000.1, "metrics": {"collect/return_mean": 21.3}}

    ``time`` is Unix time. NaN and infinite values, which JSON does not have, are null. When the
    call returns, the operating system has the record; partial records are never written. The
    incomplete line of a crash is removed when the file is opened. Threads may share a logger.
    Processes may not share a file: the second one is refused.

    Args:
        path: path of the file. Its folders are created. Existing records are kept.

    Raises:
        BadOption: the file ends with an incomplete line of another format, or another process
            appends to it.
        FileError: the file cannot be opened, or is not an ordinary file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        make_folder(self.path.parent)
        check_writable(self.path)
        with file_errors(self.path, "written"):
            self._file = open(self.path, "ab+", buffering=0)  # noqa: SIM115 (closed by close)
        try:
            self._claim: _Claim | None = _Claim.on(self._file.fileno(), self.path)
            self._mend()
        except BaseException:
            self._file.close()
            raise

    def __call__(self, metrics: Mapping[str, float], step: int) -> None:
        """Append a record.

        Raises:
            BadOption: the logger is closed.
            FileError: the record cannot be written; the file is unchanged.
        """
        numbers = {name: plain(value) for name, value in metrics.items()}
        line = (
            json.dumps(
                {"step": int(step), "time": time.time(), "metrics": numbers},
                allow_nan=False,
            )
            + "\n"
        )
        with self._lock:
            if self._file.closed:
                raise BadOption(
                    f"{self.path}: this JsonlLogger is closed; make another one to append more"
                )
            end, data = self._file.seek(0, os.SEEK_END), line.encode()
            append_whole(self._file, data, end, self.path)

    def close(self) -> None:
        """Close the file. May be called again."""
        with self._lock:
            self._file.close()
            self._claim = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _mend(self) -> None:
        """Remove an incomplete record from the end of the file."""
        size = self._file.seek(0, os.SEEK_END)
        self._file.seek(max(0, size - _LONGEST))
        half = self._file.read().rpartition(b"\n")[2]
        if not half:
            return
        if half[: len(_HEAD)] != _HEAD[: len(half)]:
            raise BadOption(
                f"{self.path} does not end with a record of a JsonlLogger; give another path"
            )
        try:
            read_json(half)
        except ValueError:
            self._file.truncate(size - len(half))
        else:
            self._file.write(b"\n")  # a complete record without its newline


class _Claim:
    """The exclusive right of this process to append to a file; shared by its loggers."""

    _all: ClassVar[weakref.WeakValueDictionary[tuple[int, int, int], _Claim]] = (
        weakref.WeakValueDictionary()
    )

    def __init__(self, fd: int) -> None:
        weakref.finalize(self, os.close, fd)

    @classmethod
    def on(cls, fd: int, path: Path) -> _Claim:
        status = os.fstat(fd)
        key = (os.getpid(), status.st_dev, status.st_ino)
        if (claim := cls._all.get(key)) is None:
            with suppress(OSError):  # the file system may not support locks
                if not try_lock(fd):
                    raise BadOption(
                        f"{path}: another process appends to this file. Give each process its own"
                        " path."
                    )
            claim = cls._all[key] = cls(os.dup(fd))
        return claim


_HEAD = b'{"step": '  # start of every record
_LONGEST = 1 << 20


def plain(value: Any) -> float | None:
    """Return ``value`` as a number of Python's (also from NumPy and torch); None for values that
    JSON does not have.
    """
    number = value if isinstance(value, int) else float(value)
    return number if math.isfinite(number) else None


class TensorBoardLogger:
    """Writes scalars for TensorBoard. Needs the extra ``muster-rl[tensorboard]``.

    A thread of TensorBoard writes them, some time later. After an error of it the next call begins
    another file.

    Args:
        folder: folder of the run, created if necessary.

    Raises:
        BadOption: TensorBoard is not installed.
        FileError: the folder cannot be used.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = os.fspath(folder)
        self._closed = False
        self._writer: Any = self._begin()

    def __call__(self, metrics: Mapping[str, float], step: int) -> None:
        """Write scalars.

        Raises:
            BadOption: the logger is closed.
            FileError: these or earlier scalars cannot be written, for example because the disk is
                full.
        """
        if self._closed:  # the writer would start another file
            raise BadOption(
                f"{self.folder}: this TensorBoardLogger is closed; make another one"
            )
        if self._writer is None:
            self._writer = self._begin()
        with self._ends_with_errors():
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write buffered scalars and close. May be called again.

        Raises:
            FileError: buffered scalars cannot be written. The logger is closed.
        """
        self._closed = True
        writer, self._writer = self._writer, None
        if writer is not None:
            with self._ends_with_errors():
                writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _begin(self) -> Any:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise BadOption(
                "TensorBoardLogger writes with TensorBoard: pip install 'muster-rl[tensorboard]'"
            ) from error
        with file_errors(self.folder, "used as a folder"):
            return SummaryWriter(self.folder)

    @contextmanager
    def _ends_with_errors(self) -> Iterator[None]:
        """Context in which an error of the writer ends it: its thread has ended, too."""
        try:
            yield
        except OSError as error:
            self._writer = None
            raise explained(self.folder, "written", error) from error


class CollectionLog:
    """Logs the metrics of a collector after every delivered batch, at the step ``stats.frames``."""

    def __init__(self, logger: Any, prefix: str = "collect/") -> None:
        self._log, self._prefix = as_logger(logger), prefix
        self._lags: Mapping[int, int] = {}

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log metrics of the user's under their own names. Raises ``HookError``."""
        self._log(metrics, step)

    def wrote(self, stats: CollectorStats, episodes: Episodes) -> None:
        """Log a batch that ``stats`` include, and in which ``episodes`` ended.

        Raises ``HookError``.
        """
        record: dict[str, float] = {
            "frames_per_s": stats.frames_per_s,
            "episodes": stats.episodes,
            "discarded": sum(stats.discarded.values()),
            "in_flight": stats.in_flight,
            "restarts": stats.restarts,
        }
        parts = {"env": stats.env_s, "policy": stats.policy_s, "copy": stats.copy_s}
        if total := sum(parts.values()) + stats.rest_s:
            record |= {
                f"{name}_share": seconds / total for name, seconds in parts.items()
            }
        if isinstance(stats.policy_version, int):
            record["policy_version"] = stats.policy_version
        if newest := [
            lag
            for lag, batches in stats.policy_lag.items()
            if batches != self._lags.get(lag)
        ]:
            record["policy_lag"] = max(newest)
        self._lags = stats.policy_lag
        if len(episodes):
            record |= _summary(episodes)
        record |= {
            f"worker_{worker.index}/frames_per_s": worker.frames_per_s
            for worker in stats.workers
        }
        self._log(
            {self._prefix + name: value for name, value in record.items()}, stats.frames
        )


def _summary(episodes: Episodes) -> dict[str, float]:
    record = {}
    for name, column in (
        ("return", episodes.episode_return),
        ("length", episodes.length),
    ):
        if stat := SequenceSummaryStats.from_sequence(column):
            record[f"{name}_mean"], record[f"{name}_std"] = stat.mean, stat.std
            record[f"{name}_max"], record[f"{name}_min"] = stat.max, stat.min
    if succeeded := successes(episodes):
        record["success_rate"] = sum(succeeded) / len(succeeded)
    return record
