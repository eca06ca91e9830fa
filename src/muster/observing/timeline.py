"""Where the time goes, as a picture: spans of the collecting loop in Chrome's trace format."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from muster.errors import BadOption
from muster.utils.whole_files import write_whole

Span = tuple[str, int, int, int]  # name, begin and end in ns, track


class Timeline:
    """The last spans that were added while it was running.

    ::

        timeline.start()
        ...  # to measure: if timeline.running: timeline.add("env", begin_ns, time.perf_counter_ns())
        timeline.save("collect.json")  # open it in ui.perfetto.dev

    May be used from several threads. Times are ``time.perf_counter_ns()``, which all processes of a machine share on
    Linux; the file's ``metadata`` says which wall-clock time that was, so that files of several machines can be joined.

    Args:
        limit: spans kept; older ones are dropped and counted.
        name: of this process in the picture.

    Attributes:
        running: whether ``add`` keeps anything.
        dropped: spans lost to ``limit`` since the last ``clear``.
        tracks: names of tracks, the lines of the picture; "track 0" and so on by default.
    """

    def __init__(self, *, limit: int = 200_000, name: str = "muster") -> None:
        if limit < 1:
            raise BadOption(f"Timeline(limit={limit}): expected at least 1")
        self.name = name
        self.running = False
        self.dropped = 0
        self.tracks: dict[int, str] = {}
        self._spans: deque[Span] = deque(maxlen=limit)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._spans)

    def start(self) -> None:
        """Keep what is added from now on, besides what is there already."""
        self.running = True

    def stop(self) -> None:
        """Ignore what is added from now on."""
        self.running = False

    def add(self, name: str, begin_ns: int, end_ns: int, track: int = 0) -> None:
        """Keep a span; spans of one track must lie within each other or apart."""
        if self.running:
            with self._lock:
                self.dropped += len(self._spans) == self._spans.maxlen
                self._spans.append((name, begin_ns, end_ns, track))

    def clear(self) -> None:
        """Forget all spans, and how many were dropped."""
        with self._lock:
            self._spans.clear()
            self.dropped = 0

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a Chrome trace (JSON); the file appears complete or not at all. Folders are made."""
        with self._lock:
            spans, dropped = list(self._spans), self.dropped
        # A span comes before those within it: viewers nest spans that begin together in the order of the file.
        spans.sort(key=lambda span: (span[3], span[1], -span[2]))
        pid = os.getpid()
        events = [_label("process_name", pid, 0, self.name)]
        for track in sorted({span[3] for span in spans}):
            events.append(_label("thread_name", pid, track, self.tracks.get(track, f"track {track}")))
        events += [
            {"ph": "X", "name": name, "pid": pid, "tid": track, "ts": begin / 1e3, "dur": (end - begin) / 1e3}
            for name, begin, end, track in spans
        ]
        clock = {"perf_counter_ns": time.perf_counter_ns(), "unix_time_ns": time.time_ns()}
        metadata = {"clock": clock, "dropped_spans": dropped}
        trace = {"traceEvents": events, "displayTimeUnit": "ns", "metadata": metadata}
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, [json.dumps(trace).encode()])


def _label(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
