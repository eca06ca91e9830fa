"""``python -m benchmarks.cluster_kills``: nodes that are killed again and again while the others go
on.

First-ready, four nodes as processes of this machine. Measured: seconds from the kill until the
node's successor has joined, and until its first batch; the longest wait for a batch of any other
node; and what the books say at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import muster
from benchmarks import report, runner
from benchmarks.nets import PlainPolicy
from benchmarks.workloads import Workload
from muster import Restart

WORKLOAD = Workload("kills", "CartPole-v1", 8, 128, "8 CartPoles on each of 4 nodes")
NODES = 4
WITHIN_S = 120.0  # for a node to come back


@dataclass
class Watch:
    """When batches came, and of whom.

    Attributes:
        gaps: seconds between two batches of nodes that were not killed at the time.
        joined, first_batch: seconds from each kill.
    """

    gaps: list[float] = field(default_factory=list)
    calm: list[float] = field(default_factory=list)
    joined: list[float] = field(default_factory=list)
    first_batch: list[float] = field(default_factory=list)
    batches: Counter[int] = field(default_factory=Counter)


def kills(collector: Any, count: int) -> Watch:
    """Kill so many nodes, one after the other."""
    watch = Watch()
    frames = dict.fromkeys(range(NODES), 0)

    def batch() -> int:
        """Take one; of which node it is."""
        collector.next()
        for worker in collector.stats().workers:
            if worker.frames > frames[worker.index]:
                frames[worker.index] = worker.frames
                watch.batches[worker.index] += 1
                return int(worker.index)
        raise AssertionError("a batch of nobody")

    for node in [i % NODES for i in range(count)]:
        watch.calm += _gaps(batch, 8 * NODES)
        before = collector.stats().workers[node]
        at = last = time.monotonic()
        kill(before.pid)
        joined = 0.0
        while True:
            of = batch()
            now = time.monotonic()
            state = collector.stats().workers[node]
            if (
                not joined
                and state.pid not in (0, before.pid)
                and state.state == "working"
            ):
                joined = now - at
            if of != node:
                watch.gaps.append(now - last)
                last = now
            elif state.restarts > before.restarts:
                watch.joined.append(joined or now - at)
                watch.first_batch.append(now - at)
                break
            if now - at > WITHIN_S:
                raise TimeoutError(f"node {node} is not back after {WITHIN_S:g} s")
    return watch


def _gaps(batch: Any, count: int) -> list[float]:
    gaps, last = [], time.monotonic()
    for _ in range(count):
        batch()
        now = time.monotonic()
        gaps.append(now - last)
        last = now
    return gaps


def kill(worker: int) -> None:
    """The process of a node, by one of its workers, which does not outlive it."""
    os.kill(node_of(worker), signal.SIGKILL)


def node_of(worker: int) -> int:
    """The process of a worker's node: this process, its fork server, the node, the node's fork
    server, the worker.
    """
    line = [worker]
    while line[-1] not in (0, os.getpid()):
        line.append(parent(line[-1]))
    if line[-1] != os.getpid() or len(line) < 4:
        raise ProcessLookupError(
            f"worker {worker} is no grandchild of a node of this process: {line}"
        )
    return line[-3]


def parent(pid: int) -> int:
    """Of a process; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def summary(collector: Any, watch: Watch) -> dict[str, Any]:
    """What is asked for: nobody else stops, nothing is lost without being accounted for, back
    within ten seconds.
    """
    stats = collector.stats()
    return {
        "kills": len(watch.first_batch),
        "joined_s": quantiles(watch.joined),
        "first_batch_s": quantiles(watch.first_batch),
        "longest_wait_for_others_s": round(max(watch.gaps, default=0.0), 3),
        "longest_wait_before_kills_s": round(max(watch.calm), 3),
        "batches": {str(node): count for node, count in sorted(watch.batches.items())},
        "executed": stats.executed,
        "delivered": stats.frames,
        "discarded": dict(stats.discarded),
        "unseen_at_most": getattr(stats, "unseen", 0),
        "unaccounted": stats.executed
        - stats.frames
        - sum(stats.discarded.values())
        - stats.in_flight,
    }


def table(found: dict[str, Any]) -> str:
    """What was asked for, and what came out."""
    joined, first = found["joined_s"], found["first_batch_s"]
    return report.aligned(
        [
            [
                f"{found['kills']} kills of a node, one after the other; {WORKLOAD.describe}"
            ],
            ["", "asked", "median", "maximum"],
            [
                "seconds until the node has joined again",
                "<= 10",
                f"{joined['median']:g}",
                f"{joined['max']:g}",
            ],
            [
                "seconds until its first batch",
                "",
                f"{first['median']:g}",
                f"{first['max']:g}",
            ],
            [
                "longest wait for a batch of another node, seconds",
                "",
                "",
                f"{found['longest_wait_for_others_s']:g}",
            ],
            [
                "the same before the kills",
                "",
                "",
                f"{found['longest_wait_before_kills_s']:g}",
            ],
            ["frames unaccounted for", "0", "", f"{found['unaccounted']}"],
            [
                "frames that were lost, and counted as such",
                "",
                "",
                f"{sum(found['discarded'].values()):,}",
            ],
            [
                "frames more that a node may have made unseen, at most",
                "",
                "",
                f"{found['unseen_at_most']:,}",
            ],
        ]
    )


def quantiles(values: list[float]) -> dict[str, float]:
    """Median, IQR and maximum."""
    median, spread = report.median_iqr(values)
    return {
        "median": round(median, 3),
        "iqr": round(spread, 3),
        "max": round(max(values), 3),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cluster_kills", description=__doc__
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument(
        "--output", type=Path, default=report.RESULTS / "cluster_kills.json"
    )
    return parser.parse_args()


def main() -> None:
    options, begin = parse(), time.perf_counter()
    os.environ.update(runner.ONE_THREAD)
    with muster.DistributedCollector(
        [WORKLOAD.make] * NODES,
        PlainPolicy(WORKLOAD.make()).eval(),
        num_envs=WORKLOAD.B,
        frames_per_batch=WORKLOAD.frames,
        launcher="mp",
        sync=False,
        on_failure=Restart(max_restarts=None),
        seed=0,
    ) as collector:
        found = summary(collector, kills(collector, options.kills))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(
        json.dumps({"machine": report.machine(), "distributed": found}, indent=1) + "\n"
    )
    print(
        f"{table(found)}\n\n{time.perf_counter() - begin:.0f} s; written to {options.output}"
    )


if __name__ == "__main__":
    main()
