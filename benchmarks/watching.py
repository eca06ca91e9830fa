"""``python -m benchmarks.watching``: what does ``watch=`` cost?

Collectors with and without ``watch=`` take turns; the page of those with it is served to one
viewer. Every ratio is that of two neighbouring slices, by wall time and by CPU time of the process
(with workers: of the main process). On a machine in use by others, only the CPU time of the thread
that writes snapshots, per second, can be compared with 1 %.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.report import RESULTS, machine, median_iqr
from muster import Collector, MultiSyncCollector, Watch, policies

CASES: dict[str, dict[str, Any]] = {
    "in process, batches of 2048": {"num_envs": 8, "frames_per_batch": 2048},
    "in process, batches of 8": {"num_envs": 8, "frames_per_batch": 8},
    "2 workers, batches of 2048": {
        "num_envs": 8,
        "frames_per_batch": 2048,
        "num_workers": 2,
    },
}
MOST = 0.01
VIEWER = "import sys, urllib.request as u\nfor line in u.urlopen(sys.argv[1] + 'events'): pass"


def collector(options: dict[str, Any], **others: Any) -> Any:
    torch.manual_seed(0)
    policy = policies.categorical(
        nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
    )
    if "num_workers" in options:
        return MultiSyncCollector(
            ["CartPole-v1"] * 2, policy, seed=0, **options, **others
        )
    return Collector("CartPole-v1", policy, seed=0, **options, **others)


def measured(
    options: dict[str, Any], seconds: float, *, watched: bool
) -> dict[str, float]:
    """Frames per second of wall time and of CPU time of this process, and CPU seconds of the thread
    per second.
    """
    with tempfile.TemporaryDirectory() as folder:
        others = {"watch": Watch(folder)} if watched else {}
        with collector(options, **others) as made:
            viewer = (
                subprocess.Popen([sys.executable, "-c", VIEWER, made.watch_url])
                if watched
                else None
            )
            clocks = [
                time.pthread_getcpuclockid(thread.ident)
                for thread in threading.enumerate()
                if thread.name == "muster-watch" and thread.ident is not None
            ]
            batches = iter(made)
            warm = time.perf_counter() + 1.0
            while time.perf_counter() < warm:
                next(batches)
            before = [time.clock_gettime(clock) for clock in clocks]
            frames, began, cpu = (
                made.stats().frames,
                time.perf_counter(),
                time.process_time(),
            )
            while time.perf_counter() - began < seconds:
                next(batches)
            cpu, wall = time.process_time() - cpu, time.perf_counter() - began
            frames = made.stats().frames - frames
            thread = sum(time.clock_gettime(clock) for clock in clocks) - sum(before)
            if viewer is not None:
                viewer.terminate()
                viewer.wait(60)
            return {"wall": frames / wall, "cpu": frames / cpu, "thread": thread / wall}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.watching", description=__doc__
    )
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="per slice (default 5)"
    )
    parser.add_argument("--output", type=Path, default=RESULTS / "watching.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for name in options.case or CASES:
        costs: dict[str, list[float]] = {"wall": [], "cpu": [], "thread": []}
        for turn in range(options.rounds):
            order = (False, True) if turn % 2 else (True, False)
            got = {
                watched: measured(CASES[name], options.seconds, watched=watched)
                for watched in order
            }
            costs["wall"].append(got[False]["wall"] / got[True]["wall"] - 1)
            costs["cpu"].append(got[False]["cpu"] / got[True]["cpu"] - 1)
            costs["thread"].append(got[True]["thread"])
        found[name] = {
            kind: {"median_iqr": median_iqr(rounds), "rounds": rounds}
            for kind, rounds in costs.items()
        }
        told = "  ".join(
            "{} {:+.2%} (IQR {:.2%})".format(kind, *median_iqr(costs[kind]))
            for kind in costs
        )
        print(f"{name:30} {told}  asked: at most {MOST:.0%}", flush=True)
    how = {"rounds": options.rounds, "seconds": options.seconds, "asked": MOST}
    options.output.write_text(
        json.dumps({"machine": machine(), "how": how, "costs": found}, indent=1) + "\n"
    )
    print(f"written to {options.output}")


if __name__ == "__main__":
    main()
