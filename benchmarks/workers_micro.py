"""``python -m benchmarks.workers_micro``: single operations of collectors with worker processes, in
this process.

The last line of what it prints is JSON: the figures, and everything else that was measured.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import muster
from benchmarks import envs
from benchmarks.nets import PlainPolicy
from benchmarks.systems.muster_ import head_for
from benchmarks.workers_family import cpu_seconds, family, rss_mib, settle
from benchmarks.workers_targets import Figure
from benchmarks.workloads import WORKLOADS, Workload

Found = tuple[list[Figure], dict[str, Any]]
ONE = WORKLOADS["cartpole-1"]


def small(workers: int, *, kind: str = "MultiSyncCollector") -> Any:
    """One CartPole in each worker, 16 steps per batch."""
    frames = 16 * workers if "Sync" in kind else 16
    make: Any = getattr(muster, kind)
    return make(
        [ONE.make] * workers, head_for(ONE.make()), frames_per_batch=frames, seed=0
    )


def hand_over(quick: bool) -> Found:
    """Microseconds from the end of a batch's last rollout, when its slots are full, until the user
    has it.

    For comparison: a fourth of the batch, and the same batch in one process, where nothing is
    handed over.
    """
    sizes = {"1024 frames": 128, "256 frames": 32, "1024 frames, one process": 128}
    microseconds: dict[str, list[float]] = {name: [] for name in sizes}
    collectors: dict[str, Any] = {}
    for name, T in sizes.items():
        workload = Workload(name, envs.FRAMES, 8, T, "")
        policy = PlainPolicy(workload.make()).eval()
        if name.endswith("one process"):
            collectors[name] = muster.Collector(
                workload.make, policy, num_envs=8, frames_per_batch=8 * T, seed=0
            )
        else:
            factories = [workload.make] * 2
            collectors[name] = muster.MultiSyncCollector(
                factories, policy, num_envs=4, frames_per_batch=8 * T, seed=0
            )
    iterators = {name: iter(collector) for name, collector in collectors.items()}
    for _ in range(8 if quick else 40):
        for name, iterator in iterators.items():
            timeline = collectors[name].timeline
            timeline.clear()
            timeline.start()
            batch = next(iterator)
            has = time.perf_counter_ns()
            microseconds[name].append(has / 1e3 - rollouts_end(timeline))
            del batch
    for collector in collectors.values():
        collector.shutdown()
    medians = {
        name: statistics.median(series[2:]) for name, series in microseconds.items()
    }
    large, fourth, alone = medians.values()
    figures = [
        Figure(
            "hand-over of 84x84x4 x 1024 frames",
            200,
            large,
            False,
            "us",
            note=f"in one process {alone:.0f}",
        ),
        Figure("... of a fourth of that", 200, fourth, False, "us"),
        Figure("... the first over the second", 1.5, large / fourth, False),
    ]
    return figures, {"median_us": medians, "all_us": microseconds}


def rollouts_end(timeline: Any) -> float:
    """When the last of the timeline's rollouts ended, in microseconds of
    ``time.perf_counter_ns()``.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        timeline.save(path)
        events = json.loads(path.read_text())["traceEvents"]
    return max(
        float(event["ts"] + event["dur"])
        for event in events
        if event["name"] == "rollout"
    )


def open_and_close(quick: bool) -> Found:
    """Seconds to the first batch of 8 workers, and to close them; the fork server is warm from the
    second time on.
    """
    opened, first, closed = [], [], []
    for _ in range(3 if quick else 6):
        begin = time.perf_counter()
        collector = small(8)
        opened.append(time.perf_counter() - begin)
        next(iter(collector))
        first.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        collector.shutdown()
        closed.append(time.perf_counter() - begin)
    warm = first[1:]
    figures = [
        Figure(
            "8 workers, warm, to the first batch",
            2.0,
            statistics.median(warm),
            False,
            "s",
            note=_worst(warm),
        ),
        Figure(
            "close of 8 workers",
            0.3,
            statistics.median(closed),
            False,
            "s",
            note=_worst(closed),
        ),
    ]
    return figures, {"open_s": opened, "first_batch_s": first, "close_s": closed}


def _worst(seconds: list[float]) -> str:
    return f"worst {max(seconds):.3f}"


def left_behind() -> dict[str, float]:
    """What this process holds."""
    gc.collect()
    settle(os.getpid())
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "python threads": threading.active_count(),
        "/dev/shm": len(os.listdir("/dev/shm")),
        "children": len(family(os.getpid())) - 1,
        "memory maps": len(Path("/proc/self/maps").read_text().splitlines()),
        "RSS MiB": round(rss_mib(), 2),
    }


def cycles(quick: bool) -> Found:
    """Open, one batch, close, a hundred times: what is left that was not there after the first ten."""
    number = 20 if quick else 100

    def some(times: int) -> dict[str, float]:
        for _ in range(times):
            collector = small(2)
            next(iter(collector))
            collector.shutdown()
            del collector
        return left_behind()

    before, begin = some(10), time.perf_counter()
    after = some(number)
    seconds = time.perf_counter() - begin
    grown = {name: after[name] - before[name] for name in before}
    loose = {
        "RSS MiB": 4.0,
        "memory maps": 16.0,
    }  # allocators move; a leak of one page per cycle would not pass
    figures = [
        Figure(
            f"{name} left by {number} open/close cycles",
            loose.get(name, 0.0),
            value,
            False,
            "",
        )
        for name, value in grown.items()
    ]
    return figures, {
        "cycles": number,
        "seconds": seconds,
        "before": before,
        "after": after,
    }


def sleeping_consumer(quick: bool) -> Found:
    """CPU seconds of the workers while the user does nothing, after the second that they may take
    to work ahead.
    """
    seconds = 3.0 if quick else 10.0
    collector = small(2, kind="MultiAsyncCollector")
    batches = iter(collector)
    for batch in itertools.islice(batches, 20):
        del batch
    marks = []
    for pause in (0.0, 1.0, seconds - 1.0):
        time.sleep(pause)  # noqa: TID251 (the sleeping consumer)
        marks.append(cpu_seconds(os.getpid(), without_root=True))
    collector.shutdown()
    ahead, idle = marks[1] - marks[0], marks[2] - marks[1]
    figure = Figure(
        f"workers' CPU while the consumer sleeps {seconds:.0f} s",
        0.02,
        round(idle, 3),
        False,
        "s",
    )
    return [figure], {"cpu_s_first_second": ahead, "cpu_s_after": idle}


PARTS: tuple[Callable[[bool], Found], ...] = (
    hand_over,
    open_and_close,
    cycles,
    sleeping_consumer,
)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.workers_micro", description=__doc__
    )
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    figures: list[Figure] = []
    details: dict[str, Any] = {}
    for part in PARTS:
        try:
            found, details[part.__name__] = part(quick)
        except Exception as error:
            found = [
                Figure(
                    part.__name__.replace("_", " "),
                    0.0,
                    None,
                    note=f"{type(error).__name__}: {error}"[:200],
                )
            ]
        figures += found
    print(
        json.dumps({"figures": [one.summary() for one in figures], "details": details})
    )


if __name__ == "__main__":
    main()
