"""Spans and the file they make."""

from __future__ import annotations

import json
import os
import threading
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.errors import BadOption
from muster.observing.timeline import Timeline


def running(**options: Any) -> Timeline:
    timeline = Timeline(**options)
    timeline.start()
    return timeline


def saved(timeline: Timeline, folder: Any) -> dict[str, Any]:
    timeline.save(folder / "trace.json")
    return json.loads((folder / "trace.json").read_text())


def spans_of(trace: dict[str, Any]) -> list[tuple[str, int, float, float]]:
    return [(e["name"], e["tid"], e["ts"], e["dur"]) for e in trace["traceEvents"] if e["ph"] == "X"]


def test_spans_are_complete_events_in_microseconds(tmp_path):
    timeline = running(name="worker 3")
    timeline.tracks[1] = "group 1"
    timeline.add("env", 1_000, 2_500)
    timeline.add("policy", 2_500, 3_001, track=1)
    trace = saved(timeline, tmp_path)
    pid = os.getpid()
    assert trace["traceEvents"] == [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": "worker 3"}},
        {"ph": "M", "name": "thread_name", "pid": pid, "tid": 0, "args": {"name": "track 0"}},
        {"ph": "M", "name": "thread_name", "pid": pid, "tid": 1, "args": {"name": "group 1"}},
        {"ph": "X", "name": "env", "pid": pid, "tid": 0, "ts": 1.0, "dur": 1.5},
        {"ph": "X", "name": "policy", "pid": pid, "tid": 1, "ts": 2.5, "dur": 0.501},
    ]


def test_outer_spans_come_before_inner_ones(tmp_path):
    timeline = running()
    for name, begin, end in [("env", 10, 20), ("policy", 20, 30), ("rollout", 10, 40), ("batch", 0, 40)]:
        timeline.add(name, begin, end)
    assert [name for name, *_ in spans_of(saved(timeline, tmp_path))] == ["batch", "rollout", "env", "policy"]


@st.composite
def trees(draw):
    """Spans that lie within each other or apart, on two tracks, in the order of their ends or any other."""

    def within(begin: int, end: int, depth: int) -> list[tuple[int, int]]:
        cuts = sorted(draw(st.lists(st.integers(begin, end), max_size=6)))
        pairs = list(zip(cuts[::2], cuts[1::2], strict=False))
        return [s for b, e in pairs for s in [*(within(b, e, depth - 1) if depth else []), (b, e)]]

    origin = draw(st.integers(0, 10**16))
    spans = [(b, e, track) for track in range(2) for b, e in within(origin, origin + 10_000, 2)]
    return draw(st.permutations(spans)) if draw(st.booleans()) else spans


@given(trees())
def test_spans_nest_as_they_were_added(tmp_path_factory, spans):
    timeline = running()
    for begin, end, track in spans:
        timeline.add("x", begin, end, track)
    got = spans_of(saved(timeline, tmp_path_factory.mktemp("trace")))
    for track in range(2):
        expected = sorted(((b, e) for b, e, t in spans if t == track), key=lambda s: (s[0], -s[1]))
        mine = [(ts, dur) for _, tid, ts, dur in got if tid == track]
        assert [dur for _, dur in mine] == [pytest.approx((e - b) / 1e3) for b, e in expected]
        assert [ts for ts, _ in mine] == [pytest.approx(b / 1e3, abs=2e-3) for b, _ in expected]


def test_only_what_is_added_while_running_is_kept(tmp_path):
    timeline = Timeline()
    timeline.add("before", 0, 1)
    assert not timeline.running
    timeline.start()
    timeline.start()
    assert timeline.running
    timeline.add("first", 0, 1)
    timeline.stop()
    timeline.stop()
    timeline.add("between", 1, 2)
    timeline.start()
    timeline.add("second", 2, 3)
    timeline.stop()
    assert [name for name, *_ in spans_of(saved(timeline, tmp_path))] == ["first", "second"]


def test_the_oldest_spans_go_and_are_counted(tmp_path):
    timeline = running(limit=3)
    for i in range(5):
        timeline.add(str(i), i, i + 1)
    assert (len(timeline), timeline.dropped) == (3, 2)
    trace = saved(timeline, tmp_path)
    assert [name for name, *_ in spans_of(trace)] == ["2", "3", "4"]
    assert trace["metadata"]["dropped_spans"] == 2
    timeline.clear()
    assert (len(timeline), timeline.dropped) == (0, 0)
    assert timeline.running
    assert spans_of(saved(timeline, tmp_path)) == []


def test_two_hundred_thousand_spans_are_kept():
    timeline = running()
    for i in range(200_001):
        timeline.add("x", i, i)
    assert (len(timeline), timeline.dropped) == (200_000, 1)


def test_threads_may_add_at_the_same_time():
    timeline = running(limit=100)
    add = lambda: [timeline.add("x", i, i) for i in range(5_000)]  # noqa: E731
    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(timeline) + timeline.dropped == 20_000


def test_the_clock_is_tied_to_the_wall(tmp_path):
    before = time.time_ns() - time.perf_counter_ns()
    clock = saved(running(), tmp_path)["metadata"]["clock"]
    after = time.time_ns() - time.perf_counter_ns()
    offset = clock["unix_time_ns"] - clock["perf_counter_ns"]
    assert min(before, after) - 10**9 < offset < max(before, after) + 10**9


def test_saving_makes_folders_and_leaves_no_other_file(tmp_path):
    path = tmp_path / "a" / "b.json"
    timeline = running()
    timeline.save(path)
    timeline.add("x", 0, 1)
    timeline.save(str(path))
    assert len(spans_of(json.loads(path.read_text()))) == 1
    assert os.listdir(path.parent) == ["b.json"]


def test_saving_to_where_nothing_can_be_saved_leaves_nothing(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(OSError, match="folder"):
        running().save(folder)
    assert os.listdir(tmp_path) == ["folder"]


def test_a_limit_below_one_is_refused():
    with pytest.raises(BadOption, match="limit=0"):
        Timeline(limit=0)
