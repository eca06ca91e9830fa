"""``python -m benchmarks.soak``: every backend in turn for half an hour, with kills, publishes and
recordings.

In every round each backend collects for some seconds: some batches are kept and others dropped,
weights are published, every fourth segment is recorded, and workers are killed. After each segment
the counts must be exact; after each round memory, descriptors, threads and processes are measured.
At the end their slopes over the rounds must be flat.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.envs import VectorCounting
from benchmarks.report import RESULTS, machine
from benchmarks.workers_family import rss_mib
from muster import (
    AsyncCollector,
    Collector,
    DistributedCollector,
    MultiAsyncCollector,
    MultiSyncCollector,
    Restart,
    RPCCollector,
)
from muster.testing import OracleEnv, check_stream
from tests.fakes.adding import Adds
from tests.faults.test_worker_resources import anonymous_bytes, descendants, resources

WORKERS, ENVS, FRAMES = 2, 4, 512
KEPT = 8  # batches that are kept at a time
KILL_EVERY_S, PUBLISH_EVERY = 2.0, 5
LEVEL = 0.05  # growth of memory over the whole run, as a share of its level, that counts as flat
# of a rate over the whole run that counts as flat, if it is more than twice its standard error
DECLINE = 0.1
WARM_UP = (
    2  # rounds that are not judged: imports, the fork server, the allocator's pools
)


MULTI = {"on_failure": Restart(max_restarts=None)}
BACKENDS: dict[
    str, tuple[Callable[..., Any], bool]
] = {  # and whether its workers are killed
    "in process": (Collector, False),
    "processes": (partial(MultiSyncCollector, **MULTI), True),
    "processes, first ready": (partial(MultiAsyncCollector, **MULTI), True),
    "threads": (partial(MultiSyncCollector, backend="threads"), False),
    "server": (partial(MultiSyncCollector, inference="server", **MULTI), True),
    "server, first ready": (
        partial(MultiAsyncCollector, inference="server", **MULTI),
        True,
    ),
    "one worker": (partial(AsyncCollector, **MULTI), True),
    "torch.distributed": (
        partial(DistributedCollector, launcher="mp", sync=True, **MULTI),
        True,
    ),
    "RPC": (partial(RPCCollector, launcher="mp", sync=True, **MULTI), True),
}


class Segment:
    """One backend for some seconds."""

    def __init__(
        self, name: str, seconds: float, rng: random.Random, *, records: bool
    ) -> None:
        self.make, self.kills = BACKENDS[name]
        self.name, self.seconds, self.rng, self.records = name, seconds, rng, records
        self.killed = 0

    def run(self) -> dict[str, Any]:
        folder = Path(tempfile.mkdtemp(prefix="muster-soak-"))
        counts = folder / "counts"
        factories = [partial(OracleEnv, counts, ENVS * n, ENVS) for n in range(WORKERS)]
        if self.name in ("in process", "one worker"):
            factories = factories[:1]
        given: dict[str, Any] = {
            "num_envs": ENVS,
            "frames_per_batch": FRAMES,
            "seed": 1,
            "crash_dir": folder / "crashes",
        }
        if self.name == "in process":
            del given["crash_dir"]
        if self.records:
            given["record"] = folder / "recording"
        policy, kept = Adds(), deque[Any](maxlen=KEPT)
        collector = self.make(factories, policy, **given)
        began, next_kill = time.monotonic(), KILL_EVERY_S
        frames, rows = 0, 0

        def batches() -> Any:
            nonlocal frames, next_kill
            for number, batch in enumerate(collector):
                yield batch
                if number % 3 == 0:
                    kept.append(batch)
                if number % PUBLISH_EVERY == 0:
                    with torch.no_grad():
                        policy.added.add_(1)
                    collector.update_policy_weights_()
                passed = time.monotonic() - began
                if self.kills and passed > next_kill:
                    next_kill += KILL_EVERY_S
                    self._kill(collector)
                if passed > self.seconds:
                    return

        rows = check_stream(batches())
        seconds = time.monotonic() - began
        collector.shutdown()
        stats, truth = collector.stats(), int(OracleEnv.read(counts)[:, 2].sum())
        assert stats.frames == sum(rows.values()), self.name
        assert stats.in_flight == 0, self.name
        assert stats.executed == stats.frames + sum(stats.discarded.values()), self.name
        assert 0 <= truth - stats.executed <= self.killed + stats.unseen, (
            self.name,
            truth,
            stats.executed,
        )
        shutil.rmtree(folder)
        return {
            "frames": stats.frames,
            "frames_per_s": stats.frames / seconds,
            "kills": self.killed,
        }

    def _kill(self, collector: Any) -> None:
        pids = [worker.pid for worker in collector.stats().workers if worker.pid]
        with suppress(ProcessLookupError, IndexError):
            os.kill(self.rng.choice(pids), signal.SIGKILL)
            self.killed += 1


def measured() -> dict[str, float]:
    """Memory in MiB (of this process, and of all below it), and counts."""
    gc.collect()
    with suppress(
        AttributeError
    ):  # glibc has it; what the allocator keeps for later would look like growth
        ctypes.CDLL(None).malloc_trim(0)
    below = descendants()
    mine, others = anonymous_bytes([os.getpid()]), 0
    for pid in below:
        with suppress(OSError, StopIteration):
            others += sum(anonymous_bytes([pid]).values())
    shared = sum(
        int(line.split()[1])
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("Shmem:")
    )
    found = {
        "memory_mib": sum(mine.values()) / 2**20,
        "children_mib": others / 2**20,
        "shared_mib": shared / 2**10,
    }
    return {**found, **resources()}


def slope(values: list[float]) -> float:
    """Change over the whole run by a line through the values (least squares)."""
    return (
        float(np.polyfit(np.arange(len(values)), values, 1)[0] * (len(values) - 1))
        if len(values) > 1
        else 0.0
    )


def pace(rates: list[float]) -> dict[str, Any]:
    """Median of a backend's rates, and their change over the judged rounds with its standard error,
    as shares of it.
    """
    judged, median = rates[WARM_UP:], float(np.median(rates))
    x, changed = np.arange(len(judged)), slope(judged) / median
    error = 0.0
    if len(judged) > 2:
        rest = np.array(judged) - np.polyval(np.polyfit(x, judged, 1), x)
        spread = np.sqrt((rest**2).sum() / (len(x) - 2) / ((x - x.mean()) ** 2).sum())
        error = float(spread * (len(x) - 1) / median)
    flat = changed >= -DECLINE or changed >= -2 * error
    return {
        "median": median,
        "change": round(changed, 3),
        "error": round(error, 3),
        "flat": flat,
        "rates": rates,
    }


def verdict(rounds: list[dict[str, float]]) -> dict[str, Any]:
    """The growth of each number over the judged rounds, and whether it is flat."""
    found: dict[str, Any] = {}
    for name in rounds[0]:
        values = [one[name] for one in rounds[WARM_UP:]] or [rounds[-1][name]]
        grown, level = slope(values), max(float(np.mean(values)), 1.0)
        room = LEVEL * level + (4.0 if name.endswith("mib") else 1.0)
        found[name] = {
            "first": values[0],
            "last": values[-1],
            "growth": round(grown, 2),
            "flat": grown <= room,
        }
    return found


def memory_slope(frames: int) -> dict[str, float]:
    """Memory over many frames of a vectorised NumPy environment, as MiB per 10 million frames.

    The slope is fitted to the second half: the first fills caches and pools.
    """
    B, T = 256, 64
    samples: list[tuple[int, float]] = []
    start = time.perf_counter()
    total = max(1, frames // (B * T))
    with Collector(
        VectorCounting(B), None, frames_per_batch=B * T, seed=0
    ) as collector:
        for i, _ in enumerate(collector, 1):
            if i % max(1, total // 100) == 0:
                gc.collect()
                samples.append((i * B * T, rss_mib()))
            if i >= total:
                break
    half = samples[len(samples) // 2 :]
    slope = (
        float(np.polyfit([f for f, _ in half], [m for _, m in half], 1)[0]) * 1e7
        if len(half) > 2
        else float("nan")
    )
    result = {
        "frames": total * B * T,
        "seconds": time.perf_counter() - start,
        "rss_first_mib": samples[0][1],
        "rss_last_mib": samples[-1][1],
        "slope_mib_per_1e7_frames": slope,
    }
    print(
        f"\nsoak: {result['frames']:,} frames in {result['seconds']:.0f} s, RSS {result['rss_first_mib']:.1f} -> "
        f"{result['rss_last_mib']:.1f} MiB, slope {slope:+.2f} MiB per 10^7 frames"
    )
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument(
        "--segment", type=float, default=8.0, help="seconds of a backend in a round"
    )
    parser.add_argument(
        "--backend",
        action="append",
        choices=[*BACKENDS],
        help="only this one; may be repeated",
    )
    options = parser.parse_args()
    rng, until = random.Random(0), time.monotonic() + 60 * options.minutes
    names = options.backend or [*BACKENDS]
    rounds: list[dict[str, float]] = []
    rates: dict[str, list[float]] = {name: [] for name in names}
    totals = {"frames": 0, "kills": 0, "segments": 0}
    while time.monotonic() < until or len(rounds) <= WARM_UP:
        for number, name in enumerate(names):
            got = Segment(
                name, options.segment, rng, records=(len(rounds) + number) % 4 == 0
            ).run()
            rates[name].append(got["frames_per_s"])
            totals = {
                "segments": totals["segments"] + 1,
                **{key: totals[key] + got[key] for key in ("frames", "kills")},
            }
        rounds.append(measured())
        shown = "  ".join(f"{name} {value:,.0f}" for name, value in rounds[-1].items())
        print(
            f"round {len(rounds)}: {totals['frames']:,} frames, {totals['kills']} kills  {shown}",
            flush=True,
        )
    growth = verdict(rounds)
    rate = {name: pace(one) for name, one in rates.items()}
    result = {
        "machine": machine(),
        "minutes": options.minutes,
        **totals,
        "rounds": len(rounds),
        "memory": [one["memory_mib"] for one in rounds],
        "growth": growth,
        "rate": rate,
    }
    if not options.backend and options.minutes >= 30:
        (RESULTS / "soak.json").write_text(json.dumps(result, indent=2) + "\n")
    print(
        json.dumps(
            {key: result[key] for key in ("segments", "frames", "kills", "growth")},
            indent=2,
        )
    )
    for name, one in rate.items():
        change = f"{one['change']:+.1%} (standard error {one['error']:.1%})"
        print(
            f"{name}: {one['median']:,.0f} frames per second, {change}, {'flat' if one['flat'] else 'NOT FLAT'}"
        )
    print(f"threads at the end: {[thread.name for thread in threading.enumerate()]}")
    return (
        0 if all(entry["flat"] for entry in (*growth.values(), *rate.values())) else 1
    )


if __name__ == "__main__":
    raise SystemExit(main())
