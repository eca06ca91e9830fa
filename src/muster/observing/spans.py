"""Spans of time, as timelines record them and pictures show them."""

from __future__ import annotations

from typing import NamedTuple


class TimeSpan(NamedTuple):
    """A span of a timeline.

    Attributes:
        name: what took the time.
        begin_ns, end_ns: by ``time.perf_counter_ns()``.
        track: line of the timeline.
    """

    name: str
    begin_ns: int
    end_ns: int
    track: int
