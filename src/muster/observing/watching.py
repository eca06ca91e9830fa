"""``watch=``: a thread that writes snapshots of a collection, and a process that shows them on a
page.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from muster.episodes.curve import EpisodeTotals
from muster.errors import BadOption, MusterError, described
from muster.observing.own_metrics import MetricMeans
from muster.observing.page_server import PageAddress
from muster.observing.progress import in_notebook
from muster.observing.run_process import identity
from muster.observing.snapshots import MOST_TEXT, SnapshotFile, snapshot
from muster.observing.stats import CollectorStats, WorkerStats
from muster.utils.forks import Owner
from muster.utils.programs import program

EVERY_S = 1.0  # between two snapshots
SAMPLES = 10  # of each worker's phase, in this time
MOST_SAMPLED = 32  # workers whose phase is sampled more often than once per snapshot
END_S = 10.0  # to wait for the thread and the process
PHASES = {
    "idle": ".",
    "construct": "c",
    "reset": "r",
    "step": "s",
    "policy": "p",
    "weights": "w",
    "call": "q",
    "close": "x",
    "wait": "-",
    "join": "j",
    "dead": "D",
    "dropped": "X",
}
"""Phases of a worker as letters of its lane."""
_OF_ROW = (
    "index",
    "pid",
    "state",
    "phase",
    "frames",
    "share",
    "frames_per_s",
    "restarts",
    "policy_lag",
    "node",
)
_log = logging.getLogger(__name__)


class WatchedRun:
    """Writes snapshots of a collection once per second, from a thread of its own.

    Counters are those after the newest batch, so that their sum is exact. States and phases of
    workers are the present ones, also in the middle of a long batch. If the disk is full, snapshots
    are missing, and the collection continues.

    Args:
        about: entries of the file's first line.
        workers: returns the present statistics of the workers.
        causes: returns the error with which each worker was lost last, by its number.
        address: ``host:port`` of a page that another process serves until ``close``; None: no page.
        save_episodes: writes the episodes of which ``film`` can make films; yields their numbers.

    Attributes:
        url: address of the page, with the token if one is needed; None: no page.
        due: whether the next snapshot needs new counters: ``wrote`` is to be called.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        about: Mapping[str, Any],
        stats: CollectorStats,
        *,
        workers: Callable[[], Sequence[WorkerStats]],
        causes: Callable[[], Mapping[int, BaseException | None]],
        address: str | None,
        save_episodes: Callable[
            [Path], Iterable[Mapping[str, Any]]
        ] = lambda directory: (),
        film: Sequence[str] = (),
        every_s: float = EVERY_S,
    ) -> None:
        self._workers = workers
        self._causes = causes
        self._every_s = every_s
        self._save_episodes = save_episodes
        self._stats, self._totals = stats, EpisodeTotals()
        self._began = time.monotonic()
        self._metrics = MetricMeans()
        self._known: Sequence[WorkerStats] = ()
        self._lanes: dict[int, str] = {}
        self._restarts: dict[int, int] = {}
        # by worker: id, error, last line
        self._told: dict[int, tuple[int, BaseException, dict[str, Any]]] = {}
        self._errors = 0
        self._failed = False
        self._owner, self._stop = Owner("collector", "thread"), threading.Event()
        self._page: subprocess.Popen[bytes] | None = None
        self.url: str | None = None
        self.due = True
        page = None if address is None else PageAddress(address)
        try:
            self.directory = Path(os.path.realpath(directory))
            self._file = SnapshotFile(
                self.directory, {**about, "every_s": every_s, **identity()}
            )
            with ExitStack() as made:
                made.callback(self._file.close)
                if page is not None:
                    self.url, self._page = page.url, _serve(self.directory, page, film)
                    made.callback(self._end_page)
                self._thread = threading.Thread(
                    target=self._run, name="muster-watch", daemon=True
                )
                self._thread.start()
                made.pop_all()
        finally:
            if page is not None:
                page.close()

    def wrote(self, stats: CollectorStats, totals: EpisodeTotals) -> None:
        """Take the counters for the next snapshot."""
        self._stats = stats
        self._totals = totals
        self.due = False

    def log(self, metrics: Mapping[str, float], frames: int) -> None:
        """Take metrics of the user's for the next snapshot, after so many delivered frames."""
        self._metrics.add(metrics, frames)

    def close_unattended(self) -> None:
        """Close at the end of the program, or after the collector was garbage-collected.

        An error that has ended the program is that of the collection.
        """
        error = getattr(sys, "last_value", None)
        is_a_program = not (hasattr(sys, "ps1") or in_notebook())
        self.close(described(error) if is_a_program and error is not None else "")

    def close(self, error: str = "") -> None:
        """Write the last snapshot and the ``error`` of the collection, and end thread and page.

        May be called again.
        """
        if self._stop.is_set() or not self._owner.is_here():
            return
        self._stop.set()
        # in which the collector was garbage-collected
        here = threading.current_thread() is self._thread
        if not here:
            self._thread.join(END_S)
        if here or not self._thread.is_alive():  # otherwise the disk does not answer
            self._write(at_end=True)
            self._append("end", error=error[:MOST_TEXT])
            self._file.close()
        self._end_page()

    def _end_page(self) -> None:
        if self._page is None:
            return
        self._page.terminate()
        try:
            self._page.wait(END_S)
        except subprocess.TimeoutExpired:
            self._page.kill()
            # it is blocked in the kernel, and exits later
            with suppress(subprocess.TimeoutExpired):
                self._page.wait(END_S)

    # --- in the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        self._write()
        count = 0
        while not self._stop.wait(
            self._every_s / SAMPLES if self._samples() else self._every_s
        ):
            count += 1
            if count % SAMPLES == 0 or not self._lanes:
                self._write()
                self.due = True

    def _samples(self) -> bool:
        """Sample the phases of workers. Returns whether there are workers to sample."""
        workers = self._present()
        if not 0 < len(workers) <= MOST_SAMPLED:
            return False
        for worker in workers:
            self._lanes[worker.index] = self._lanes.get(worker.index, "") + PHASES.get(
                worker.phase, "?"
            )
        return True

    def _present(self) -> Sequence[WorkerStats]:
        # workers may end or restart meanwhile, in another thread: show the last ones
        with suppress(Exception):
            self._known = self._workers()
        return self._known

    def _write(self, *, at_end: bool = False) -> None:
        rows = [self._row(worker) for worker in self._present()]
        self._lanes.clear()
        others = self._metrics.take()
        others["elapsed"] = time.monotonic() - self._began
        others["memory"] = _memory(os.getpid())
        self._append("snapshot", **snapshot(self._stats, self._totals, rows, **others))
        self._tell_errors(at_end=at_end)
        try:
            for numbers in self._save_episodes(self.directory):
                self._append("episode", **numbers)
        except OSError as error:
            self._warn(error)

    def _row(self, worker: WorkerStats) -> dict[str, Any]:
        """Return the row of a worker.

        Until it has made its environments again, a restarted one is "restarting".
        """
        row = {name: getattr(worker, name) for name in _OF_ROW} | {
            "lane": self._lanes.get(worker.index, "")[-SAMPLES:]
        }
        before = self._restarts.setdefault(worker.index, worker.restarts)
        if worker.state == "working" and (
            worker.restarts > before
            or (worker.restarts and worker.phase in ("construct", "close"))
        ):
            row["state"] = "restarting"
        self._restarts[worker.index] = worker.restarts
        row["memory"] = (
            None
            if worker.node or worker.pid in (0, os.getpid())
            else _memory(worker.pid)
        )
        return row

    def _tell_errors(self, *, at_end: bool) -> None:
        """Append the errors of workers.

        The crash report of an error may be written after the worker was lost.
        """
        for index, error in self._causes().items():
            if error is None:
                continue
            number, known, line = self._told.get(index, (-1, None, {}))
            if error is not known:
                number, self._errors = self._errors, self._errors + 1
            report = error.crash_report if isinstance(error, MusterError) else None
            replay = error.replay_command if isinstance(error, MusterError) else ""
            told = {
                "id": number,
                "worker": index,
                "text": _without(replay, described(error))[:MOST_TEXT],
                "crash_report": None if report is None else str(report),
                "replay": replay,
            }
            if told != line:
                self._told[index] = number, error, told
                self._append("error", **told)

    def _append(self, kind: str, **entries: Any) -> None:
        try:
            self._file.append(kind, **entries)
        except (OSError, ValueError) as error:
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        if not self._failed:
            _log.warning(
                "Snapshots for muster watch are missing: %s: %s", self._file.path, error
            )
        self._failed = True


def _without(command: str, text: str) -> str:
    """Return the text of an error without its last paragraph, if this tells the command, which has
    its own entry.
    """
    return text.rpartition("\n\n")[0] if command and text.endswith(command) else text


def _memory(pid: int) -> int | None:
    """Return the resident memory of a process in bytes; None: unknown."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def _serve(
    directory: Path, page: PageAddress, film: Sequence[str]
) -> subprocess.Popen[bytes]:
    """Start the process that serves the page.

    It exits when this process has exited. ``BadOption`` if it cannot.
    """
    fd = page.socket.fileno()
    command = program(
        "muster.observing.page_server", str(fd), str(directory), str(os.getpid()), *film
    )
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the collection
            pass_fds=[fd],
            env={**os.environ, "MUSTER_WATCH_TOKEN": page.token},
        )
    except OSError as error:
        raise BadOption(
            f"watch: the process of the page cannot be started: {error.strerror or error}. Without"
            " address= in Watch, there is no such process; `muster watch` shows the page later."
        ) from error
