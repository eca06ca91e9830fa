"""Snapshots of a collection: a file of JSON lines, which other processes read while it grows.

The file ``watch.jsonl`` in the directory of a run has lines of five kinds, in the order of their
times::

    {"kind": "run", "time": 1763740000.1, "collector": "Collector", "env": "CartPole-v1", ...}     the first line
    {"kind": "snapshot", "time": ..., "frames": 2048, "totals": {...}, "workers": [...], ...}
    {"kind": "error", "time": ..., "id": 0, "text": "...", "crash_report": "/tmp/..."}              replaces its id
    {"kind": "episode", "time": ..., "which": "best", "episode_return": 200.0, "length": 200, ...}  replaces its which
    {"kind": "end", "time": ..., "error": ""}                                                      the last line

The last line has ``signal`` or ``code`` if the process was killed or has called ``os._exit``: the
process of its page has appended it.

All counts of a snapshot are totals since the start, so that snapshots can be removed: that is how
the file stays small. Only ``metrics``, the user's own, are means since the snapshot before; those
of a removed one become part of the next.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from muster.episodes.curve import EpisodeTotals
from muster.errors import BadOption
from muster.observing.loggers import plain
from muster.observing.own_metrics import joined
from muster.observing.stats import CollectorStats
from muster.utils.whole_files import (
    append_whole,
    explained,
    make_folder,
    open_regular,
    write_whole,
)

NAME = "watch.jsonl"
LIMIT_BYTES = 4 << 20
MOST_WORKERS = 128  # in a snapshot
MOST_ERRORS = 100  # in a file
MOST_TEXT = 2000  # characters of an error
_LONGEST = 1 << 20  # bytes of a line
# folder, and names of files in it that repeat an episode
EPISODES = "episodes"
WHICH = ("newest", "best", "worst")
_COUNTS = (
    *(
        "frames",
        "executed",
        "in_flight",
        "batches",
        "episodes",
        "restarts",
        "unseen",
        "cut_short",
    ),
    *("frames_per_s", "env_s", "policy_s", "copy_s", "rest_s", "wait_s"),
)
_MEANS = ("return_mean", "length_mean", "success_rate")  # may be None
_BY_NAME = ("discarded", "policy_lag", "slots")
# Numbers and texts of every entry, by kind, and of a worker's row; an entry may have more.
_ENTRIES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "run": (("time",), ()),
    "snapshot": (("time", *_COUNTS), ()),
    "error": (("time", "id"), ("text",)),
    "episode": (("time", "episode_return", "length", "env_id"), ("missing",)),
    "end": (("time",), ()),
}
_OF_WORKER = (
    ("index", "pid", "frames", "share", "frames_per_s", "restarts", "policy_lag"),
    ("state", "phase", "node", "lane"),
)


def snapshot(
    stats: CollectorStats,
    totals: EpisodeTotals,
    workers: Sequence[Mapping[str, Any]] = (),
    **others: Any,
) -> dict[str, Any]:
    """Return a snapshot as plain data, with the rows of the workers, and ``others`` as further
    entries.
    """
    known = {name: plain(getattr(stats, name)) for name in _COUNTS}
    means = {
        name: None if (mean := getattr(stats, name)) is None else plain(mean)
        for name in _MEANS
    }
    named = {
        name: {str(key): n for key, n in getattr(stats, name).items()}
        for name in _BY_NAME
    }
    sums = {name: plain(value) for name, value in asdict(totals).items()}
    policy = {
        "policy_path": stats.policy_path,
        "policy_version": stats.policy_version,
        "engine": stats.engine,
        "capture": "" if stats.capture is None else stats.capture.text,
    }
    return {
        **known,
        **means,
        **named,
        **policy,
        "totals": sums,
        "workers": list(workers[:MOST_WORKERS]),
        **others,
    }


class SnapshotFile:
    """Appends lines to the file of a run, each with one write; ``about`` has the entries of the
    first one.

    If the file becomes larger than ``limit_bytes``, every second snapshot is removed. Raises
    ``BadOption`` if the directory has the snapshots of another run.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        about: Mapping[str, Any],
        *,
        limit_bytes: int = LIMIT_BYTES,
    ) -> None:
        self.path, self._limit = Path(os.path.realpath(directory), NAME), limit_bytes
        make_folder(self.path.parent)
        try:
            self._file = open(self.path, "xb", buffering=0)  # noqa: SIM115 (closed by close)
        except FileExistsError as error:
            raise BadOption(
                f"{self.path} has the snapshots of another run. Give another directory."
            ) from error
        except OSError as error:
            raise explained(self.path, "written", error) from error
        try:
            self.append("run", **about)
        except BaseException:
            self._file.close()
            self.path.unlink(
                missing_ok=True
            )  # so that the same directory can be given again
            raise

    def append(self, kind: str, **entries: Any) -> None:
        """Append a line. Raises ``FileError`` if it cannot be written; the file is unchanged."""
        entry = {"kind": kind, "time": time.time(), **entries}
        # NumPy's numbers, too
        line = json.dumps(entry, allow_nan=False, default=plain).encode() + b"\n"
        end = self._file.seek(0, os.SEEK_END)
        if end + len(line) > self._limit and kind == "snapshot":
            self._thin()
            end = self._file.seek(0, os.SEEK_END)
        append_whole(self._file, line, end, self.path)

    def close(self) -> None:
        """Close the file. May be called again."""
        self._file.close()

    def _thin(self) -> None:
        """Remove every second snapshot, and the rows of workers of all but the newest: nothing
        shows them.
        """
        with open_regular(self.path) as file:
            entries = [
                entry
                for line in file.read().splitlines()
                if (entry := parsed(line)) is not None
            ]
        of = _by_kind(entries)
        newest = {entry["which"]: entry for entry in of["episode"]}
        kept = [
            *of["run"],
            *of["error"][-MOST_ERRORS:],
            *newest.values(),
            *of["snapshot"][::-2],
            *of["end"],
        ]
        for entry in of["snapshot"][:-1]:
            entry["workers"] = []
        for later, removed in zip(
            of["snapshot"][::-2], of["snapshot"][-2::-2], strict=False
        ):
            before, after = removed.get("metrics", {}), later.get("metrics", {})
            if names := {**before, **after}:
                later["metrics"] = {
                    n: joined(before.get(n), after.get(n)) for n in names
                }
                later.setdefault("metrics_at", removed.get("metrics_at"))
        place = {id(entry): n for n, entry in enumerate(entries)}
        kept.sort(key=lambda entry: place[id(entry)])
        write_whole(self.path, [json.dumps(entry).encode() + b"\n" for entry in kept])
        self._file.close()
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115


def parsed(line: bytes) -> dict[str, Any] | None:
    """Return a line of the file as a dict whose entries have the expected types; None for any other
    text.
    """
    try:
        entry = json.loads(line, parse_constant=_refuse)
        json.dumps(entry, allow_nan=False)  # 1e999 is read as infinity
    except (ValueError, RecursionError):
        return None
    kind = entry.get("kind") if isinstance(entry, dict) else None
    if not isinstance(kind, str) or kind not in _ENTRIES:
        return None
    fits = _has(entry, *_ENTRIES[kind]) and (
        kind != "episode" or entry.get("which") in WHICH
    )
    return entry if fits and (kind != "snapshot" or _is_snapshot(entry)) else None


def _by_kind(entries: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    return {
        kind: [entry for entry in entries if entry["kind"] == kind] for kind in _ENTRIES
    }


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _is_number(value: Any) -> bool:
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and abs(value) < 1e300
    )


def _are_numbers(values: Any) -> bool:
    return isinstance(values, dict) and all(map(_is_number, values.values()))


def _are_metrics(metrics: Any) -> bool:
    return isinstance(metrics, dict) and all(
        isinstance(one, list)
        and len(one) == 3
        and all(_is_number(count) and count >= 0 for count in one[1:])
        and (one[0] is None or (_is_number(one[0]) and one[1] > 0))
        for one in metrics.values()
    )


def _has(entry: Any, numbers: Sequence[str], texts: Sequence[str] = ()) -> bool:
    """Whether ``entry`` is a dict with these numbers and texts."""
    return (
        isinstance(entry, dict)
        and all(_is_number(entry.get(name)) for name in numbers)
        and all(isinstance(entry.get(name), str) for name in texts)
    )


def _is_snapshot(entry: dict[str, Any]) -> bool:
    totals, workers = entry.get("totals"), entry.get("workers")
    return (
        all(
            name in entry and (entry[name] is None or _is_number(entry[name]))
            for name in _MEANS
        )
        and all(_are_numbers(entry.get(name)) for name in _BY_NAME)
        and all(str(lag).isdecimal() for lag in entry["policy_lag"])
        and isinstance(totals, dict)
        and totals.keys() == EpisodeTotals.__dataclass_fields__.keys()
        and _are_numbers(
            {name: value for name, value in totals.items() if value is not None}
        )
        and isinstance(workers, list)
        and all(_has(worker, *_OF_WORKER) for worker in workers)
        and _are_metrics(entry.get("metrics", {}))
        and ("metrics" not in entry or _is_number(entry.get("metrics_at")))
    )


class SnapshotReader:
    """Reads what was appended to the file of a run since the last call.

    Incomplete lines are left for later.

    ``run`` is the directory of the run, or the file. Raises ``BadOption`` if there are no
    snapshots.
    """

    def __init__(self, run: str | os.PathLike[str]) -> None:
        self.path = _file_of(run)
        if not self.path.is_file():
            raise BadOption(
                f"{run} has no snapshots ({NAME}). Give the directory that a collection with"
                " watch=True or --watch has printed at its start."
            )
        self._file = open_regular(self.path)
        self._rest = b""

    def read(self) -> tuple[bool, list[dict[str, Any]]]:
        """Return whether the file was replaced, and the new entries; if it was, all entries."""
        replaced = self._is_replaced()
        if replaced:
            self._file.close()
            self._file, self._rest = open_regular(self.path), b""
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        if len(self._rest) > _LONGEST:
            self._rest = b""
        return replaced, [
            entry for line in lines if (entry := parsed(line)) is not None
        ]

    def close(self) -> None:
        """Close the file. May be called again."""
        self._file.close()

    def _is_replaced(self) -> bool:
        try:
            there, here = os.stat(self.path), os.fstat(self._file.fileno())
        except OSError:  # removed: what was read stays
            return False
        return not os.path.samestat(there, here) or there.st_size < self._file.tell()


def append_exit(run: str | os.PathLike[str], exited: Mapping[str, Any]) -> None:
    """Append the last line of a run whose process could not do so, with how it has ``exited``.

    Does nothing if there is one, or if it is not known how.
    """
    if not exited:
        return
    path = _file_of(run)
    line = json.dumps(
        {"kind": "end", "time": time.time(), "error": "", **exited}
    ).encode()
    with suppress(OSError, BadOption):  # removed, or the disk is full
        if RunHistory.read(run).end is not None:
            return
        with open(path, "ab", buffering=0) as file:
            # the last line of a process that was killed may be incomplete
            append_whole(file, b"\n" + line + b"\n", file.seek(0, os.SEEK_END), path)


def _file_of(run: str | os.PathLike[str]) -> Path:
    given = Path(run)
    return given / NAME if given.is_dir() else given


@dataclass
class RunHistory:
    """The entries of a file.

    Attributes:
        about: the first line.
        snapshots: all snapshots, in order of their times.
        errors: the newest line of each error.
        end: the last line; None: the run continues, or was killed.
    """

    about: dict[str, Any] = field(default_factory=dict)
    snapshots: list[dict[str, Any]] = field(default_factory=list)
    errors: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] | None = None

    @classmethod
    def read(cls, run: str | os.PathLike[str]) -> RunHistory:
        """Read the file of a run. Raises ``BadOption`` if there is none."""
        reader = SnapshotReader(run)
        try:
            _, entries = reader.read()
        finally:
            reader.close()
        kinds = _by_kind(entries)
        errors = {entry["id"]: entry for entry in kinds["error"]}
        about, end = (
            kinds[kind][-1] if kinds[kind] else None for kind in ("run", "end")
        )
        return cls(about or {}, kinds["snapshot"], list(errors.values()), end)

    def points(self) -> list[tuple[float, EpisodeTotals]]:
        """Return frames and totals of the snapshots whose totals are finite, for ``running_means``."""
        found = [(float(s["frames"]), s["totals"]) for s in self.snapshots]
        return [
            (frames, EpisodeTotals(**totals))
            for frames, totals in found
            if None not in totals.values()
        ]
