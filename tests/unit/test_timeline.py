"""Spans and the file they make."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

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
    return [
        (e["name"], e["tid"], e["ts"], e["dur"])
        for e in trace["traceEvents"]
        if e["ph"] == "X"
    ]


def test_spans_are_complete_events_in_microseconds(tmp_path):
    timeline = running(name="worker 3")
    timeline.tracks[1] = "group 1"
    timeline.add("env", 1_000, 2_500)
    timeline.add("policy", 2_500, 3_001, track=1)
    trace = saved(timeline, tmp_path)
    pid = os.getpid()
    assert trace["traceEvents"] == [
        {
            "ph": "M",
            "name": "process_name",
            "pid": pid,
            "tid": 0,
            "args": {"name": "worker 3"},
        },
        {
            "ph": "M",
            "name": "thread_name",
            "pid": pid,
            "tid": 0,
            "args": {"name": "track 0"},
        },
        {
            "ph": "M",
            "name": "thread_name",
            "pid": pid,
            "tid": 1,
            "args": {"name": "group 1"},
        },
        {"ph": "X", "name": "env", "pid": pid, "tid": 0, "ts": 1.0, "dur": 1.5},
        {"ph": "X", "name": "policy", "pid": pid, "tid": 1, "ts": 2.5, "dur": 0.501},
    ]


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
    assert [name for name, *_ in spans_of(saved(timeline, tmp_path))] == [
        "first",
        "second",
    ]


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


def test_saving_makes_folders_and_leaves_no_other_file(tmp_path):
    path = tmp_path / "a" / "b.json"
    timeline = running()
    timeline.save(path)
    timeline.add("x", 0, 1)
    timeline.save(str(path))
    assert len(spans_of(json.loads(path.read_text()))) == 1
    assert os.listdir(path.parent) == ["b.json"]


def test_a_limit_below_one_is_refused():
    with pytest.raises(BadOption, match="limit=0"):
        Timeline(limit=0)
