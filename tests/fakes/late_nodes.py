"""Nodes that come when a test lets them, and environments that wait for a file."""

from __future__ import annotations

import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium

from muster.cluster.link import LinkLost, NotJoined
from tests.fakes.queue_links import JOIN_S, QueueCarrier, QueueCollector, QueueLink
from tests.waits import wait_until


class GatedCarrier(QueueCarrier):
    """A node joins once its gate is open.

    Attributes:
        gates: by node.
        asked: how often each node was asked to come.
    """

    def __init__(self, count: int, *there: int) -> None:
        super().__init__()
        self.gates = [threading.Event() for _ in range(count)]
        self.asked: Counter[int] = Counter()
        for node in there:
            self.gates[node].set()

    def connect(
        self, node: int, epoch: int, within_s: float, given_up: threading.Event
    ) -> QueueLink:
        self.asked[node] += 1
        deadline = time.monotonic() + within_s
        while not self.gates[node].is_set():
            if given_up.wait(0.01):
                raise LinkLost("it was given up")
            if time.monotonic() > deadline:
                raise NotJoined(f"it has not come within {within_s:g} s")
        return super().connect(node, epoch, within_s, given_up)

    def take(self, node: int) -> None:
        """Its machine goes away."""
        self.gates[node].clear()
        self.links[node][-1].cut("a test cuts it")


def elastic(
    carrier: GatedCarrier,
    factories: Any = "CartPole-v1",
    policy: Any = None,
    **options: Any,
) -> QueueCollector:
    """A collector that begins with one node."""
    factories = (
        factories if isinstance(factories, list) else [factories] * len(carrier.gates)
    )
    usual = {
        "sync": False,
        "min_nodes": 1,
        "frames_per_batch": 20,
        "num_envs": 2,
        "total_frames": -1,
        "seed": 0,
    }
    return QueueCollector(factories, policy, carrier=carrier, **usual | options)


def nodes_of(collector: QueueCollector) -> set[int]:
    """Whose the last batch is."""
    return {collector._of_leaf[group] for group in collector._engine.last.contributors}


class Gate(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Its steps wait until there is a file."""

    def __init__(self, path: Path) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        self._path = path

    def step(self, action: Any) -> Any:
        wait_until(self._path.exists, JOIN_S)
        return super().step(action)


def gated(path: Path) -> Any:
    """Makes one."""
    return partial(Gate, path)


def second_waits(folder: Path) -> Any:
    """Makes an environment; the second of them is such a one, with the file "go" in the folder."""
    return partial(_waits_unless_first, folder)


def _waits_unless_first(folder: Path) -> Any:
    try:
        (folder / "first").touch(exist_ok=False)
    except FileExistsError:
        return Gate(folder / "go")
    return gymnasium.make("CartPole-v1")
