"""Errors of the workers of TorchRL's collectors, raised in the main process as they were raised in
the worker.

TorchRL's workers print what they raise, and exit; the main process then knows no more than that one
of them has exited. Here a worker also writes its first error into a file, before it exits:

1. ``ErrorFolder`` makes the folder of the files, in the main process.
2. TorchRL gets a ``WatchedClass`` as ``collector_class``, and each of its workers makes its
   collector with it.
3. The worker writes the errors that its collector raises, with their place, as other workers of
   Muster send theirs. The last one stays: TorchRL's worker survives some, and sends them itself.
4. When TorchRL notices the end of a worker, ``ErrorFolder.first`` returns its error.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import shutil
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, NoReturn

from muster.compat.torchrl.progress import SharedProgress
from muster.errors import MusterError, RemoteError
from muster.restore.pickling import by_cloudpickle, unpickle
from muster.workers.failures import MAX_PICKLE_BYTES, SentError, pack

# methods that TorchRL's worker calls, besides the iterator, and the phases of their errors
PHASES = {
    "register_scheme_receiver": "construct",
    "reset": "reset",
    **dict.fromkeys(("set_seed", "state_dict", "load_state_dict"), "call"),
}
FIRST = 100  # priority of a function at the exit of a process: before those that wait for threads


class ErrorFolder:
    """The folder into which workers write their errors, each a file that is named by its process
    id.

    Attributes:
        path: path of the folder. Only its user may enter it.
    """

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp(prefix="muster-errors-")  # mode 0700
        self._end = weakref.finalize(self, _remove, os.getpid(), self.path)

    def first(self) -> tuple[int, MusterError] | None:
        """Return the process id and the last error of the worker that was the first to raise; None
        if none has raised.

        The original exception is the error's ``__cause__``; None if it is an error of Muster's.
        """
        with contextlib.suppress(FileNotFoundError):  # the folder was closed
            files = [
                file for file in Path(self.path).iterdir() if file.name.isdecimal()
            ]
            for file in sorted(files, key=lambda file: file.stat().st_mtime_ns):
                sent, parts = pickle.loads(
                    file.read_bytes()
                )  # of a process of the same user
                return int(file.name), _restored(sent, parts)
        return None

    def close(self) -> None:
        """Remove the folder. May be called again."""
        self._end()


class WatchedClass:
    """Makes the collector of a worker, and writes what the worker raises into an ``ErrorFolder``.

    Args:
        collector_class: class or function that makes the collector.
        folder: path of the folder.
        progress: where the worker shows its progress; None: nowhere.
    """

    _ignore_rb = False  # TorchRL's worker sets it here, for the class of its collector

    def __init__(
        self, collector_class: Any, folder: str, progress: SharedProgress | None = None
    ) -> None:
        self.collector_class = collector_class
        self._folder = folder
        self._progress = progress

    def __call__(self, *args: Any, **options: Any) -> Any:
        report = Report(self._folder, options.get("worker_idx"))
        self.collector_class._ignore_rb = self._ignore_rb
        with report.errors("construct"):
            collector = self.collector_class(*args, **options)
        if self._progress is not None and hasattr(collector, "show_progress_in"):
            collector.show_progress_in(self._progress)
        # TorchRL's worker takes an EOFError or BrokenPipeError, of a simulator's pipe for instance,
        # for the end of its own pipe. So errors of the collector are written before it sees them.
        collector.iterator = report.watched(collector.iterator)
        for method, phase in PHASES.items():
            setattr(
                collector, method, report.reported(getattr(collector, method), phase)
            )
        if multiprocessing.parent_process() is not None:
            Finalize(None, report.at_exit, exitpriority=FIRST)
        return collector


class WatchedFunction:
    """Calls a function in a worker, before there is a collector, and writes what it raises.

    Args:
        function: function without arguments.
        folder: path of the folder.
    """

    def __init__(self, function: Callable[[], Any], folder: str) -> None:
        self._function = function
        self._folder = folder

    def __call__(self) -> Any:
        return Report(self._folder, None).reported(self._function, "construct")()


class Report:
    """The last error of this process, written into the folder.

    Args:
        folder: path of the folder.
        worker: number of the worker; None if it is unknown here.
    """

    def __init__(self, folder: str, worker: int | None) -> None:
        self._folder, self._worker = Path(folder), worker
        self._written: BaseException | None = None

    @contextlib.contextmanager
    def errors(self, phase: str) -> Iterator[None]:
        """Return a context whose errors are written."""
        try:
            yield
        except BaseException as error:
            self.write(error, phase)
            raise

    def reported(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        """Return a function that writes errors of a phase."""

        def reported(*args: Any, **options: Any) -> Any:
            with self.errors(phase):
                return function(*args, **options)

        return reported

    def watched(
        self, iterator: Callable[[], Iterator[Any]]
    ) -> Callable[[], Iterator[Any]]:
        """Return a function whose iterators write errors."""

        def watched() -> Iterator[Any]:
            with self.errors("call"):
                yield from iterator()

        return watched

    def at_exit(self) -> None:
        """Write the error that ends this process."""
        error = sys.exc_info()[1]
        if error is not None:
            self.write(error, "call")

    def write(self, error: BaseException, phase: str) -> None:
        """Write an error of a phase, unless it was written before. Ctrl-C is not an error."""
        if error is self._written or isinstance(
            error, (GeneratorExit, KeyboardInterrupt)
        ):
            return
        self._written = error
        sent = _located(error, phase, self._worker)
        content = pickle.dumps(
            (sent, None if sent.pickled is not None else _parts(error))
        )
        complete, name = self._folder / str(os.getpid()), f"{os.getpid()}.part"
        with contextlib.suppress(
            OSError
        ):  # the main process has removed the folder: it has ended
            (self._folder / name).write_bytes(content)
            (self._folder / name).rename(complete)


def raise_original(error: MusterError) -> NoReturn:
    """Raise the exception that ``error`` has replaced, with ``error``, which has the place, as its
    cause.

    An exception that exists as text only, and SystemExit, which would end this process, stay the
    cause of ``error``.
    """
    original = error.__cause__
    if not isinstance(original, Exception) or isinstance(original, RemoteError):
        raise error
    error.__cause__ = None
    raise original from error


def _located(error: BaseException, phase: str, worker: int | None) -> SentError:
    """Return an error of this process with its place.

    The collector has raised it from Muster's error, if possible.
    """
    place = error.__cause__
    if not isinstance(place, MusterError) or place.__cause__ is not None:
        return pack(error, phase=phase, worker=worker, pid=os.getpid())
    try:
        error.__cause__, place.__cause__ = None, error
        return pack(place, phase=place.phase or phase, worker=worker, pid=os.getpid())
    finally:
        error.__cause__, place.__cause__ = place, None


def _parts(error: BaseException) -> bytes | None:
    """Pickle class, arguments and attributes of an exception that does not survive pickling itself.

    Most of these have a constructor with other arguments than those that they pass on.
    """
    try:
        data = by_cloudpickle((type(error), error.args, vars(error)))
    except Exception:  # noqa: BLE001 (foreign code)
        return None
    return data if len(data) <= MAX_PICKLE_BYTES else None


def _restored(sent: SentError, parts: bytes | None) -> MusterError:
    """Return the error of a worker with the original exception as its cause, or what is known of
    it.
    """
    error = sent.error()
    if parts is None or not isinstance(error.__cause__, RemoteError):
        return error
    try:
        kind, args, attributes = unpickle(parts)
        original = kind.__new__(kind, *args)
        original.args = args
        vars(original).update(attributes)
    except Exception:  # noqa: BLE001 (foreign code, or a module that is missing here: its text is the cause)
        return error
    error.__cause__ = original
    return error


def _remove(pid: int, path: str) -> None:
    if os.getpid() == pid:  # else in a fork: the folder is its parent's
        shutil.rmtree(path, ignore_errors=True)
