"""``python -m benchmarks.schedule_simulation``: the main process of up to 256 nodes, which are
played by one process.

One real leaf is recorded: its answers, its lanes, how long its rollouts take. A single process then
plays any number of nodes with these, each behind a socket pair, and so uses the second core; all
else (threads per node, schedules, accounting, lanes in shared memory) is what a collector with
nodes really does. What saturates is the main process.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import envs, report, runner
from benchmarks.nets import PlainPolicy
from benchmarks.simulated_nodes import (
    ONE_WAY_S,
    Pairs,
    Recording,
    RecordingLink,
    SocketLink,
    play,
)
from benchmarks.workers_family import family
from benchmarks.workloads import WORKLOADS, Workload
from muster.collectors.cluster_options import ClusterOptions
from muster.collectors.clusters import ClusterCollector

NODES = (8, 64, 128, 256)
KEEPING_UP = 0.9  # of what the nodes could deliver if the main process took no time
RECORDED = 24  # rollouts
LIMIT_S = 150.0  # for one point

CASES = {
    w.name: w
    for w in (
        Workload(
            "cartpole-1k",
            "CartPole-v1",
            8,
            128,
            "8 CartPoles per node, 1,024 frames per batch",
        ),
        Workload(
            "cartpole-8k",
            "CartPole-v1",
            8,
            1024,
            "8 CartPoles per node, 8,192 frames per batch",
        ),
        Workload("frames-64", envs.FRAMES, 8, 8, "84x84x4 uint8, 64 frames per batch"),
    )
}
WORKLOADS.update(CASES)


# --- a collector of such nodes --------------------------------------------------------------------


def record(workload: Workload) -> Recording:
    """Rollouts of a node with one worker, both on this machine."""
    from muster.cluster import node_main

    here, there = socket.socketpair()
    recording = Recording()
    node = threading.Thread(
        target=node_main.serve, args=(SocketLink(there), 0), daemon=True
    )
    node.start()
    with collector(workload, [RecordingLink(here, recording)], sync=False) as made:
        while len(recording.seconds) < RECORDED:
            made.next()
    node.join(10.0)
    recording.seconds = recording.seconds[4:]  # the first ones are not like the others
    return recording


def collector(workload: Workload, links: list[Any], *, sync: bool) -> Any:
    """A collector whose nodes are at the other ends of these links."""
    return ClusterCollector(
        PairsOptions(
            [workload.make] * len(links),
            PlainPolicy(workload.make()).eval(),
            links=links,
            num_envs=workload.B,
            frames_per_batch=workload.frames,
            collector_class="single",
            sync=sync,
            seed=0,
        )
    )


@dataclass(frozen=True, kw_only=True)
class PairsOptions(ClusterOptions):
    """With links that are there already."""

    links: Any = None

    def carrier(self, nodes: int, workers: int, deadline_s: float) -> Any:
        return Pairs(self.links)


# --- measuring ------------------------------------------------------------------------------------


def ideal(recording: Recording, nodes: int, *, sync: bool) -> float:
    """Batches per second if the main process took no time; those of ``Sync`` have the rollouts of
    all nodes.
    """
    median, sigma = recording.latency
    rng = np.random.default_rng(0)
    rollouts = median * np.exp(sigma * rng.standard_normal((400, nodes)))
    if sync:
        return float(1 / (rollouts.max(1).mean() + 2 * ONE_WAY_S))
    return float(nodes / rollouts.mean())


def point(
    path: str, case: str, nodes: int, seconds: float, *, sync: bool
) -> dict[str, Any]:
    """So many nodes for so long, in this process."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    recording: Recording = pickle.loads(Path(path).read_bytes())
    farm, links = play(recording, nodes)
    begin = time.perf_counter()
    with collector(CASES[case], list(links), sync=sync) as made:
        built = time.perf_counter() - begin
        parts = []
        for _ in range(
            1 if sync else 2 * nodes
        ):  # what was ordered at the beginning comes all at once
            made.next()
        for _ in range(4):
            parts.append(_stretch(made, seconds / 4, farm))
        stats = made.stats()
    best = ideal(recording, nodes, sync=sync)
    rate, spread = report.median_iqr([part["batches_per_s"] for part in parts])
    found = {
        name: round(statistics.median(part[name] for part in parts), 3)
        for name in parts[0]
    }
    return {
        "nodes": nodes,
        **found,
        "iqr": round(spread, 2),
        "of_ideal": round(rate / best, 3),
        "ideal_batches_per_s": round(best, 2),
        "lane_bytes": len(recording.lane),
        "rollout_ms": round(1e3 * recording.latency[0], 2),
        "built_s": round(built, 2),
        "unaccounted": stats.executed
        - stats.frames
        - sum(stats.discarded.values())
        - stats.in_flight,
    }


def _stretch(made: Any, seconds: float, farm: int) -> dict[str, float]:
    cpu, played, begin = time.process_time(), family(farm)[farm], time.perf_counter()
    frames = batches = 0
    while time.perf_counter() - begin < seconds or not batches:
        frames += made.next().numel()
        batches += 1
    wall = time.perf_counter() - begin
    return {
        "batches_per_s": batches / wall,
        "frames_per_s": frames / wall,
        "main_cores": (used := time.process_time() - cpu) / wall,
        "main_us_per_batch": 1e6 * used / batches,
        "players_cores": (family(farm)[farm] - played) / wall,
    }


def run(
    path: Path, case: str, nodes: tuple[int, ...], seconds: float, *, sync: bool
) -> dict[str, Any]:
    """All points of a case, each in a process of its own."""
    points = []
    for count in nodes:
        command = [
            sys.executable,
            "-m",
            "benchmarks.schedule_simulation",
            "--point",
            str(path),
            case,
            str(count),
        ]
        command += ["--seconds", str(seconds), *["--sync"] * sync]
        try:
            ran = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                cwd=runner.ROOT,
                env=runner.environment(),
            )
            points.append(json.loads(ran.stdout.splitlines()[-1]))
        except subprocess.TimeoutExpired:
            points.append({"nodes": count, "error": f"not over after {LIMIT_S:g} s"})
        except (IndexError, ValueError):
            points.append(
                {
                    "nodes": count,
                    "error": (ran.stderr.strip().splitlines() or ["no output"])[-1][
                        :300
                    ],
                }
            )
        print(f"  {count} nodes: {points[-1].get('error', 'measured')}", flush=True)
    kept = [one["nodes"] for one in points if one.get("of_ideal", 0.0) >= KEEPING_UP]
    most = max(
        (one["frames_per_s"] for one in points if "error" not in one), default=0.0
    )
    return {
        "points": points,
        "keeps_up_with": max(kept, default=0),
        "most_frames_per_s": most,
    }


def table(results: dict[str, Any]) -> str:
    """All points."""
    rows = [
        [
            "",
            "nodes",
            "batches/s",
            "of ideal",
            "frames/s",
            "cores of main",
            "us of main per batch",
            "unaccounted",
        ]
    ]
    for name, one in results.items():
        for point in one["points"]:
            if "error" in point:
                rows.append([name, f"{point['nodes']}", point["error"][:60]])
                continue
            cells = [
                f"{point['batches_per_s']:,.0f}",
                f"{point['of_ideal']:.0%}",
                f"{point['frames_per_s']:,.0f}",
            ]
            cells += [
                f"{point['main_cores']:.2f}",
                f"{point['main_us_per_batch']:,.0f}",
                f"{point['unaccounted']}",
            ]
            rows.append([name, f"{point['nodes']}", *cells])
    return report.aligned(rows)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.schedule_simulation", description=__doc__
    )
    parser.add_argument("--quick", action="store_true", help="two points of a case")
    parser.add_argument(
        "--case", action="append", choices=CASES, help="repeatable; default all"
    )
    parser.add_argument(
        "--nodes", action="append", type=int, help=f"repeatable; default {NODES}"
    )
    parser.add_argument("--seconds", type=float, help="per point (default 2; quick 1)")
    parser.add_argument("--point", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--sync", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--output", type=Path, default=report.RESULTS / "schedule_simulation.json"
    )
    return parser.parse_args()


def main() -> None:
    options = parse()
    seconds = options.seconds or (1.0 if options.quick else 2.0)
    if options.point:
        path, case, nodes = options.point
        print(json.dumps(point(path, case, int(nodes), seconds, sync=options.sync)))
        return
    os.environ.update(runner.ONE_THREAD)
    begin = time.perf_counter()
    how = {"machine": report.machine(), "one_way_s": ONE_WAY_S, "seconds": seconds}
    results: dict[str, Any] = {}
    counts = tuple(options.nodes or (NODES[:2] if options.quick else NODES))
    with tempfile.TemporaryDirectory() as folder:
        for case in options.case or (["cartpole-1k"] if options.quick else CASES):
            recorded = Path(folder) / case
            recorded.write_bytes(pickle.dumps(record(CASES[case])))
            for sync in (False, True):
                name = f"{case}, {'Sync' if sync else 'FirstReady'}"
                print(f"{name}: {CASES[case].describe}", flush=True)
                results[name] = run(recorded, case, counts, seconds, sync=sync)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(how | results, indent=1) + "\n")
    print(
        f"\n{table(results)}\n\n{time.perf_counter() - begin:.0f} s; written to {options.output}"
    )


if __name__ == "__main__":
    main()
