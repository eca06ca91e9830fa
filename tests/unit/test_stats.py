"""How statistics are shown: a short repr, and a table in notebooks."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from muster import Collector, Evaluator, MultiSyncCollector
from muster.observing.stats import CollectorStats, WorkerStats
from muster.testing import CountingEnv


class Cells(HTMLParser):
    """The rows of all tables, which must be complete."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.rows[-1][-1] += data


def table_of(stats: CollectorStats) -> dict[str, list[str]]:
    return {name: values for name, *values in Cells(stats._repr_html_()).rows}


def test_the_repr_is_one_line():
    with Collector(
        lambda: CountingEnv(3), None, num_envs=2, frames_per_batch=12
    ) as collector:
        assert repr(collector.stats()) == (
            "CollectorStats(0 frames in 0 batches, 0 episodes, 0 frames/s)"
        )
        collector.next()
        assert re.fullmatch(
            r"CollectorStats\(12 frames in 1 batch, 4 episodes, return 6\.0, [\d.]+k? frames/s\)",
            repr(collector.stats()),
        )


def test_the_table_has_the_numbers():
    with Collector(
        lambda: CountingEnv(3),
        None,
        num_envs=2,
        frames_per_batch=12,
        init_random_frames=12,
    ) as collector:
        batch = collector.next()
        shown = table_of(collector.stats())
        del batch
        freed = table_of(collector.stats())
    assert shown["frames"] == ["12 executed = 12 delivered + 0 discarded + 0 in flight"]
    assert shown["batches"] == ["1"]
    assert shown["episodes"] == ["4"]
    assert shown["mean return"] == ["6.0"]
    assert shown["mean length"] == ["3.0"]
    assert shown["policy"] == ["random, version 0"]
    assert shown["policy lag"] == ["0: 1 batch"]
    assert shown["batches that you hold"] == ["1"]
    assert freed["batches that you hold"] == ["0"]
    assert "success rate" not in shown
    assert "engine" not in shown
    shares = [int(share) for share in re.findall(r"(\d+)%", shown["time"][0])]
    assert len(shares) == 4
    assert 98 <= sum(shares) <= 102


def test_workers_have_a_row_each():
    with MultiSyncCollector(
        [lambda: CountingEnv(3)] * 2, None, frames_per_batch=12, backend="threads"
    ) as collector:
        collector.next()
        stats = collector.stats()
        shown = table_of(stats)
    assert repr(stats).endswith("2 workers)")
    assert shown["worker"][:4] == ["state", "phase", "frames", "share"]
    assert shown["0"][2:4] == ["6", "50%"]
    assert shown["1"][2:4] == ["6", "50%"]
    assert "node" not in shown["worker"]


def test_nodes_restarts_and_errors_are_shown_and_escaped():
    worker = WorkerStats(
        0, 1, "working", "step", (0,), 5, 1.0, 1500.0, 1.0, 2, 0, node="<0>"
    )
    with Collector(lambda: CountingEnv(3), None, frames_per_batch=4) as collector:
        plain = collector.stats()
    values = {
        **{name: getattr(plain, name) for name in plain.__dataclass_fields__},
        "workers": (worker,),
        "restarts": 2,
        "discarded": {"crash": 7, "surplus": 0},
        "ended_by": "OSError: <full> & done",
        "engine": "ray",
        "success_rate": 0.25,
    }
    stats = CollectorStats(**values)
    assert "<full>" not in stats._repr_html_()
    shown = table_of(stats)
    assert shown["ended by"] == ["OSError: <full> & done"]
    assert shown["0"][-1] == "<0>"
    assert shown["worker"][-1] == "node"
    assert shown["engine"] == ["ray"]
    assert shown["success rate"] == ["25%"]
    assert "7 discarded (7 crash)" in shown["frames"][0]
    assert "1 worker, 2 restarts" in repr(stats)


def test_the_repr_of_an_evaluation_is_its_text():
    with Evaluator(lambda: CountingEnv(3), None, episodes=2) as evaluator:
        found = evaluator.evaluate()
    assert repr(found) == f"Evaluation({found})"
    assert len(repr(found).splitlines()) == 1
