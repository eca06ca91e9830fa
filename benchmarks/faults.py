"""``python -m benchmarks.faults``: workers that are killed, hang, or lose their parent; ``--quick``
for a look.

Environments that count their own steps in memory that no kill can take say what was executed; the
data says by itself if anything is lost or doubled (``muster.testing.OracleEnv``).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, machine
from muster import MultiAsyncCollector, MultiSyncCollector, Restart
from muster.errors import WorkerDied, WorkerHung
from muster.testing import CountingEnv, Fault, OracleEnv, TorchCartPole, check_stream
from tests.fakes import faults
from tests.fakes.fault_runs import all_gone, family
from tests.fakes.killers import Killer
from tests.faults.test_worker_resources import (
    anonymous_bytes,
    descendants,
    processor_time,
    resources,
)

ROOT = Path(__file__).resolve().parents[1]
KINDS = {
    "MultiSyncCollector": MultiSyncCollector,
    "MultiAsyncCollector": MultiAsyncCollector,
}
PLACES = ("idle", "stepping", "waiting", "hung", "grandchildren", "starting", "spawned")
EVERY_S = 0.2  # between two kills, at most


class Recoveries:
    """How long it takes from the kill of a worker to its successor's first batch."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._since: dict[
            int, list[Any]
        ] = {}  # by worker: when it was killed, the run seen before, it was only once
        self._runs: dict[int, int] = {}

    def kill(self, collector: Any, rng: random.Random) -> bool:
        """Kill a worker; see ``Killer``."""
        worker = rng.choice(collector.stats().workers)
        at = time.monotonic()
        try:
            os.kill(worker.pid, signal.SIGKILL)
        except ProcessLookupError:  # not started again yet
            return False
        # One that is hit again while it starts waits for its back-off besides, and is not measured.
        first = worker.index not in self._since
        since = self._since.setdefault(
            worker.index, [at, self._runs.get(worker.index, 0), True]
        )
        since[2] &= first
        return True

    def seen(self, batch: Any) -> Any:
        """Look who has made a batch, and return it."""
        now = time.monotonic()
        for env, run in batch["observation"][..., -1, :2].reshape(-1, 2).tolist():
            worker = env // 3
            self._runs[worker] = run
            at, known, once = self._since.get(worker, (now, run, False))
            if run > known:
                del self._since[worker]
                self.seconds += [now - at] if once else []
        return batch


def kills(kind: str, count: int) -> dict[str, Any]:
    """So many kills of two workers with three environments each."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "counts"
        factories = [partial(OracleEnv, path, 3 * i, 3) for i in range(2)]
        options = {
            "num_envs": 3,
            "frames_per_batch": 600,
            "seed": 1,
            "on_failure": Restart(max_restarts=None),
        }
        collector = KINDS[kind](factories, None, **options)
        recoveries = Recoveries()
        killer = Killer(count, random.Random(count), EVERY_S, recoveries.kill)
        begun = time.monotonic()
        rows = check_stream(
            map(recoveries.seen, killer.until_done(collector))
        )  # raises if anything is lost, doubled or shifted
        seconds = time.monotonic() - begun
        collector.shutdown()
        stats, counts = collector.stats(), OracleEnv.read(path)
    own = int(counts[:, 2].sum())
    discarded = dict(stats.discarded)
    times = sorted(recoveries.seconds)
    return {
        "kills": killer.done,
        "seconds": round(seconds, 1),
        "restarts": stats.restarts,
        "executed_by_own_count": own,
        "executed": stats.executed,
        "delivered": stats.frames,
        "discarded": discarded,
        "unaccounted": stats.executed
        - stats.frames
        - sum(discarded.values())
        - stats.in_flight,
        "in_the_middle_of_a_step": own
        - stats.executed,  # made, and killed before its reward was stored
        "lost": stats.frames - sum(rows.values()),
        "doubled": 0,  # else check_stream had raised
        "recovery_ms": {"n": len(times), **quantiles(times)},
    }


def detection(trials: int) -> dict[str, Any]:
    """From the kill of a worker in a step to the exception in the user's loop; and what it says."""
    times, said = [], 0
    for _ in range(trials):
        with tempfile.TemporaryDirectory() as folder:
            path, at = Path(folder) / "counts", list[float]()
            factories = [
                partial(OracleEnv, path, 0, 1, Fault(faults.waits, at=30)),
                partial(OracleEnv, path, 1),
            ]
            with MultiSyncCollector(factories, None, frames_per_batch=40) as collector:
                collector.next()
                pid = collector.stats().workers[0].pid

                def kill(
                    pid: int = pid, path: Path = path, at: list[float] = at
                ) -> None:
                    while OracleEnv.read(path)[0, 1] < 31:
                        select.select([], [], [], 0.01)
                    at.append(time.monotonic())
                    os.kill(pid, signal.SIGKILL)

                thread = threading.Thread(target=kill)
                thread.start()
                try:
                    collector.next()
                except WorkerDied as error:
                    times.append(time.monotonic() - at[0])
                    said += "killed by SIGKILL during step" in str(
                        error
                    ) and f"pid {pid}" in str(error)
                thread.join()
    return {"trials": trials, "with_cause": said, "ms": quantiles(times)}


def hangs(trials: int, deadline: float = 1.0) -> dict[str, Any]:
    """From the beginning of a step that hangs to the exception, with a deadline of 1 s."""
    found: dict[str, Any] = {}
    for way in (faults.waits, faults.holds_the_gil, faults.stops):
        times, said = [], 0
        for _ in range(trials):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "counts"
                factories = [
                    partial(OracleEnv, path, 0, 1, Fault(way, at=20)),
                    partial(OracleEnv, path, 1),
                ]
                with MultiSyncCollector(
                    factories, None, frames_per_batch=40, timeouts={"step": deadline}
                ) as collector:
                    collector.next()
                    begun = time.monotonic()
                    try:
                        collector.next()
                    except WorkerHung as error:
                        times.append(time.monotonic() - begun)
                        where = (
                            "The process is stopped"
                            if way is faults.stops
                            else faults.line_of(way)
                        )
                        said += where in str(error)
        found[way.__name__] = {
            "trials": trials,
            "with_place": said,
            "s": quantiles(times, 1),
        }
    return found


def parents(trials: int) -> dict[str, Any]:
    """SIGKILL for programs at different places: processes that are left after 5 s, and how long the
    last one lived.
    """

    def one(number: int) -> tuple[int, float]:
        place, mark = PLACES[number % len(PLACES)], uuid.uuid4().hex
        environ = {
            **os.environ,
            "MUSTER_TEST": mark,
            "PYTHONPATH": os.pathsep.join(["src", *sys.path]),
        }
        with tempfile.TemporaryDirectory() as folder:
            program = subprocess.Popen(
                [sys.executable, "-m", "tests.fakes.fault_parents", place, folder],
                stdout=subprocess.PIPE,
                cwd=ROOT,
                env=environ,
                start_new_session=True,
            )
            assert program.stdout is not None
            assert program.stdout.readline() == b"ready\n"
            begun = time.monotonic()
            program.kill()
            program.wait()
            left = family(mark)
            gone = all_gone(left)
            seconds = time.monotonic() - begun
            program.stdout.close()
            return (0 if gone else len(left)), seconds

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        outcomes = list(pool.map(one, range(trials)))
    return {
        "trials": trials,
        "places": PLACES,
        "left_after_5_s": sum(left for left, _ in outcomes),
        "gone_after_ms": quantiles([seconds for _, seconds in outcomes]),
    }


def closing(cycles: int, hung: int) -> dict[str, Any]:
    """Opening and closing; closing while an environment hangs in its own close (deadline 5 s)."""
    times, before = [], None
    for cycle in range(cycles + 1):
        collector = MultiAsyncCollector([CountingEnv] * 2, None, frames_per_batch=20)
        collector.next()
        begun = time.monotonic()
        collector.shutdown()
        times.append(time.monotonic() - begun)
        del collector
        if not cycle:
            before = resources()
    after, slow = resources(), []
    for _ in range(hung):
        with tempfile.TemporaryDirectory() as folder:
            collector = MultiSyncCollector(
                partial(
                    OracleEnv,
                    Path(folder) / "counts",
                    fault=Fault(faults.holds_the_gil, "close"),
                ),
                None,
                frames_per_batch=20,
            )
            collector.next()
            begun = time.monotonic()
            collector.shutdown()
            slow.append(time.monotonic() - begun)
    return {
        "cycles": cycles,
        "growth": {
            key: None
            if before[key] == after[key]
            else [str(before[key]), str(after[key])]
            for key in after
        },
        "close_ms": quantiles(times),
        "close_of_a_hung_one_s": quantiles(slow, 1),
    }


def idling(seconds: float) -> dict[str, float]:
    """Share of one processor that workers and parent take while nobody asks for a batch."""
    found = {}
    for name, kind in KINDS.items():
        with kind([CountingEnv] * 2, None, frames_per_batch=2000) as collector:
            collector.next()
            select.select([], [], [], 1.0)
            pids = {*descendants(), os.getpid()}
            before = processor_time(pids)
            select.select([], [], [], seconds)
            found[name] = round((processor_time(pids) - before) / seconds, 4)
    return found


def memory(frames: int) -> dict[str, float]:
    """Largest growth of any process, in MiB, over so many frames, after a part of that in which
    allocators warm up.
    """
    found, warm = {}, frames * 2 // 5
    for name, kind in KINDS.items():
        make = partial(TorchCartPole, 256)
        with kind(make, None, num_workers=2, frames_per_batch=64 * 1024) as collector:
            done, before, pids = 0, dict[int, int](), {*descendants(), os.getpid()}
            for batch in collector:
                done += batch.numel()
                if done > warm and not before:
                    before = anonymous_bytes(pids)
                if done > warm + frames:
                    break
            after = anonymous_bytes(pids)
            found[name] = round(
                max(after[pid] - before[pid] for pid in after) / 2**20, 2
            )
    return found


def quantiles(seconds: list[float], per_s: int = 1000) -> dict[str, float]:
    ordered = sorted(seconds)
    at: Callable[[float], float] = lambda q: ordered[  # noqa: E731
        min(len(ordered) - 1, int(q * len(ordered)))
    ]
    digits = 1 if per_s == 1000 else 3
    picked = {"p50": statistics.median(ordered), "p99": at(0.99), "max": ordered[-1]}
    return {name: round(value * per_s, digits) for name, value in picked.items()}


def targets(result: dict[str, Any]) -> list[dict[str, Any]]:
    """What was promised, and whether it holds."""
    runs = list(result["kills"].values())
    kills_done = sum(run["kills"] for run in runs)
    rows = [
        (
            "steps that nobody accounts for, over all kills",
            0,
            sum(abs(run["unaccounted"]) for run in runs),
        ),
        (
            "steps made and not seen, per kill",
            1,
            max(run["in_the_middle_of_a_step"] / run["kills"] for run in runs),
        ),
        (
            "recovery from a kill, p50, ms",
            100,
            max(run["recovery_ms"]["p50"] for run in runs),
        ),
        (
            "recovery from a kill, p99, ms",
            500,
            max(run["recovery_ms"]["p99"] for run in runs),
        ),
        ("detection of a death, p50, ms", 100, result["detection"]["ms"]["p50"]),
        (
            "hang resolved after its deadline of 1 s, max, s",
            2,
            max(w["s"]["max"] for w in result["hangs"].values()),
        ),
        (
            "processes left 5 s after the parent's death",
            0,
            result["parents"]["left_after_5_s"],
        ),
        ("close, p99, ms", 300, result["closing"]["close_ms"]["p99"]),
        (
            "close of a hung environment, max, s",
            6,
            result["closing"]["close_of_a_hung_one_s"]["max"],
        ),
        (
            "resources that grow with open and close",
            0,
            sum(g is not None for g in result["closing"]["growth"].values()),
        ),
        ("processor share while nobody asks", 0.02, max(result["idling"].values())),
        (
            "memory growth, MiB",
            1.0 if result["memory_frames"] >= 10**7 else 4.0,
            max(result["memory"].values()),
        ),
    ]
    print(f"{kills_done} kills")
    return [
        {"what": what, "at_most": most, "measured": round(got, 4), "met": got <= most}
        for what, most, got in rows
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.faults", description=__doc__
    )
    parser.add_argument(
        "--quick", action="store_true", help="a look, in less than a minute"
    )
    parser.add_argument(
        "--output", type=Path, help="default: results/faults.json; nothing with --quick"
    )
    options = parser.parse_args()
    quick = options.quick
    result: dict[str, Any] = {"machine": machine(), "quick": quick}
    steps: list[tuple[str, Callable[[], Any]]] = [
        ("kills", lambda: {name: kills(name, 40 if quick else 500) for name in KINDS}),
        ("detection", lambda: detection(3 if quick else 50)),
        ("hangs", lambda: hangs(1 if quick else 10)),
        ("parents", lambda: parents(4 if quick else 100)),
        ("closing", lambda: closing(10 if quick else 100, 1 if quick else 3)),
        ("idling", lambda: idling(1.0 if quick else 10.0)),
        ("memory", lambda: memory(500_000 if quick else 10_000_000)),
    ]
    result["memory_frames"] = 500_000 if quick else 10_000_000
    for name, step in steps:
        result[name] = step()
        print(name, json.dumps(result[name]), flush=True)
    result["targets"] = targets(result)
    for row in result["targets"]:
        print(
            f"{'met   ' if row['met'] else 'MISSED'} {row['what']}: {row['measured']} (at most {row['at_most']})"
        )
    output = options.output or (None if quick else RESULTS / "faults.json")
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
