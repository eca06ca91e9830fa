"""A construction that takes long logs what it waits for."""

from __future__ import annotations

import logging
import re
import threading
import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from muster import DistributedCollector, MultiSyncCollector
from muster.cluster.joining import run_node
from muster.testing import CountingEnv
from muster.workers import slow_construction
from muster.workers.slow_construction import SlowConstruction, listed
from tests.fakes.late_nodes import GatedCarrier, elastic
from tests.fakes.queue_links import QueueCollector
from tests.waits import wait_until

DEADLINE_S = 60.0
TOKEN = b"0123456789abcdef"


class Heard(logging.Handler):
    """Keeps what is logged, and does something at the first of it that has some words."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []
        self._then: dict[str, Callable[[], Any]] = {}

    def once(self, words: str, then: Callable[[], Any]) -> None:
        self._then[words] = then

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())
        for words in [words for words in self._then if words in self.said[-1]]:
            self._then.pop(words)()


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Heard]:
    monkeypatch.setattr(slow_construction, "SLOW_S", 0.01)
    handler, logger = Heard(), logging.getLogger("muster")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def when_there(path: Path) -> CountingEnv:
    wait_until(path.exists, DEADLINE_S)
    return CountingEnv()


def when_set(event: threading.Event) -> CountingEnv:
    assert event.wait(DEADLINE_S)
    return CountingEnv()


def test_of_threads(heard: Heard) -> None:
    first, second = threading.Event(), threading.Event()
    heard.once("workers 0, 1 of 2", first.set)
    heard.once("worker 1 of 2", second.set)
    factories = [partial(when_set, first), partial(when_set, second)]
    with MultiSyncCollector(
        factories, None, frames_per_batch=8, backend="threads"
    ) as collector:
        assert collector.next().numel() == 8
    assert re.match(
        r"Waiting for workers 0, 1 of 2 to construct environments \(\d+ s so far\)\.$",
        heard.said[0],
    )


def test_of_processes(heard: Heard, tmp_path: Path) -> None:
    heard.once("Waiting for worker 0 of 1 to construct", (tmp_path / "go").touch)
    factories = [partial(when_there, tmp_path / "go")]
    with MultiSyncCollector(factories, None, frames_per_batch=8) as collector:
        assert collector.next().numel() == 8
    assert not heard._then


def test_of_nodes_that_have_not_joined(heard: Heard) -> None:
    carrier = GatedCarrier(2, 0)
    heard.once(
        "Waiting for node 1 to join at the memory of this process", carrier.gates[1].set
    )
    with QueueCollector(
        [CountingEnv] * 2, None, carrier=carrier, frames_per_batch=8
    ) as collector:
        assert collector.next().numel() == 16
    assert not heard._then


def test_of_a_node_that_is_started_by_hand(heard: Heard, tmp_path: Path) -> None:
    nodes: list[threading.Thread] = []

    def start() -> None:
        address = heard.said[-1].split("join at ")[1].split()[0]
        nodes.append(threading.Thread(target=run_node, args=(address, 0, TOKEN)))
        nodes[0].start()

    heard.once("Waiting for node 0 to join at 127.0.0.1:", start)
    heard.once("Waiting for node 0 to construct environments", (tmp_path / "go").touch)
    factories = [partial(when_there, tmp_path / "go")]
    with DistributedCollector(
        factories, None, frames_per_batch=8, launcher="manual", token=TOKEN
    ) as collector:
        assert collector.next().numel() == 8
    nodes[0].join(DEADLINE_S)
    assert not heard._then


def test_of_as_many_nodes_as_are_enough(heard: Heard) -> None:
    carrier = GatedCarrier(3)
    heard.once("Waiting for 1 of nodes 0, 1, 2 to join", carrier.gates[2].set)
    with elastic(carrier, CountingEnv) as collector:
        assert collector.next().numel() == 20
    assert not heard._then


def test_is_logged_after_five_seconds_when_it_changes_and_now_and_then(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = types.SimpleNamespace(now=100.0)
    monkeypatch.setattr(
        slow_construction, "time", types.SimpleNamespace(monotonic=lambda: clock.now)
    )
    absent = [0, 1]

    def missing() -> str:
        return listed("worker", absent) if absent else ""

    slow = SlowConstruction(missing)
    said: list[tuple[float, str]] = []
    for _ in range(140):  # 70 s
        clock.now += 0.5
        if clock.now > 117:
            absent[:] = [1]
        if clock.now > 160:
            absent.clear()
        slow.look()
        said += [(clock.now - 100, record.getMessage()) for record in caplog.records]
        caplog.clear()
    assert said == [
        (5, "Waiting for workers 0, 1 (5 s so far)."),
        (20, "Waiting for worker 1 (20 s so far)."),
        (50, "Waiting for worker 1 (50 s so far)."),
    ]


def test_lists_are_short() -> None:
    assert listed("node", [3]) == "node 3"
    assert listed("node", range(12)) == "nodes 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ..."
