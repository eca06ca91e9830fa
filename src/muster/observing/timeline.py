"""Timeline: spans of the collecting loop in Chrome's trace format."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from muster.errors import BadOption
from muster.observing.plot import plot_spans, png_of
from muster.observing.spans import TimeSpan
from muster.utils.whole_files import make_folder, write_whole

MOST_DRAWN = 5_000  # spans of a picture


class Timeline:
    """The most recent spans that were added while it was running.

    ::

        timeline.start()
        ...  # to measure: if timeline.running: timeline.add("env", begin_ns, time.perf_counter_ns())
        timeline.save("collect.json")  # open it in ui.perfetto.dev

    May be used by several threads. Times are ``time.perf_counter_ns()``, which all processes of a
    Linux machine share. The file's ``metadata`` has the corresponding wall-clock time, so that
    files of several machines can be joined.

    Args:
        limit: maximum number of spans; older ones are dropped and counted.
        name: name of this process in the trace.

    Attributes:
        running: whether ``add`` records spans.
        dropped: number of spans dropped since the last ``clear``.
        tracks: names of the tracks (lines of the trace); "track 0" and so on by default.
    """

    def __init__(self, *, limit: int = 200_000, name: str = "muster") -> None:
        if limit < 1:
            raise BadOption(f"Timeline(limit={limit}): expected at least 1")
        self.name = name
        self.running = False
        self.dropped = 0
        self.tracks: dict[int, str] = {}
        self._spans: deque[TimeSpan] = deque(maxlen=limit)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._spans)

    def start(self) -> None:
        """Record spans from now on, in addition to those already recorded."""
        self.running = True

    def stop(self) -> None:
        """Ignore spans from now on."""
        self.running = False

    def add(self, name: str, begin_ns: int, end_ns: int, track: int = 0) -> None:
        """Record a span. Spans of one track must be nested or disjoint."""
        if self.running:
            with self._lock:
                self.dropped += len(self._spans) == self._spans.maxlen
                self._spans.append(TimeSpan(name, begin_ns, end_ns, track))

    def clear(self) -> None:
        """Remove all spans, and reset ``dropped``."""
        with self._lock:
            self._spans.clear()
            self.dropped = 0

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a Chrome trace (JSON) as a whole or not at all. Folders are created.

        Raises:
            FileError: it cannot be written.
        """
        with self._lock:
            spans = _outer_first(self._spans)
            dropped = self.dropped
        pid = os.getpid()
        events = [_label("process_name", pid, 0, self.name)]
        for track in sorted({span.track for span in spans}):
            events.append(
                _label(
                    "thread_name", pid, track, self.tracks.get(track, f"track {track}")
                )
            )
        events += [
            {
                "ph": "X",
                "name": name,
                "pid": pid,
                "tid": track,
                "ts": begin / 1e3,
                "dur": (end - begin) / 1e3,
            }
            for name, begin, end, track in spans
        ]
        clock = {
            "perf_counter_ns": time.perf_counter_ns(),
            "unix_time_ns": time.time_ns(),
        }
        metadata = {"clock": clock, "dropped_spans": dropped}
        trace = {"traceEvents": events, "displayTimeUnit": "ns", "metadata": metadata}
        path = Path(path)
        make_folder(path.parent)
        write_whole(path, [json.dumps(trace).encode()])

    def plot(self) -> Any:
        """Draw the newest 5,000 spans, a row for each track.

        Needs matplotlib: ``pip install 'muster-rl[plot]'``.

        Returns:
            a ``matplotlib.figure.Figure``, which notebooks show; ``savefig(path)`` writes it.

        Raises:
            BadOption: matplotlib is not installed.
        """
        with self._lock:
            newest = list(self._spans)[-MOST_DRAWN:]
        return plot_spans(_outer_first(newest), self.tracks)

    def _repr_png_(self) -> bytes | None:
        return png_of(self.plot)


def _outer_first(spans: Iterable[TimeSpan]) -> list[TimeSpan]:
    """Sort spans by track and time: viewers nest spans with the same start in their order."""
    return sorted(spans, key=lambda span: (span.track, span.begin_ns, -span.end_ns))


def _label(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
