"""``python -m benchmarks.clusters``: nodes on this machine, beside TorchRL's, workers without
nodes, and a broadcast.

As in ``python -m benchmarks.workers``, every system is built once per case and the systems take
turns. Where the user may, everything runs in a network of its own, so that the bytes on its
loopback device are those of the benchmark.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import os
import signal
import socket
import struct
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import muster
from benchmarks import report, runner, workers_targets
from benchmarks.cluster_peers import (
    CARTPOLE,
    FRAMES,
    OF_SHORT,
    OF_WEIGHTS,
    PLAIN,
    RAY_ADDRESS,
    SHORT,
    SLOW_FRAMES,
    SPEED,
    WEIGHTS,
    ray_cluster,
)
from benchmarks.nets import PlainPolicy
from benchmarks.systems import SYSTEMS
from benchmarks.workers import PoolProcess
from benchmarks.workers_family import settle
from benchmarks.workers_targets import Figure
from benchmarks.workloads import WORKLOADS, Workload

CLONE_NEWNET = 0x40000000
SIOCSIFFLAGS, IFF_UP = 0x8914, 0x1

# --- what is compared with what -------------------------------------------------------------------


_PAYLOAD = ("muster-sync-plain", "dist-sync-plain", "ray-sync-plain", "ray-one-store")
CASES = {
    CARTPOLE.name: tuple(SPEED),
    FRAMES.name: _PAYLOAD,
    SLOW_FRAMES.name: _PAYLOAD,
    WEIGHTS.name: (*PLAIN, *OF_WEIGHTS),
}


@dataclass(frozen=True)
class Bound(workers_targets.Speed):
    """At most: the wall time of ``under`` against that of ``over``, within each round."""

    def figure(self, results: report.Results) -> Figure:
        return replace(super().figure(results), at_least=False)


SPEEDS = (
    *(
        workers_targets.Speed(
            CARTPOLE.name,
            f"{ours} / torchrl",
            5.0,
            (ours,),
            (f"torchrl-{short}-{how}",),
        )
        for short in SHORT.values()
        for how in ("sync", "async")
        for ours in (f"{short}-{how}-plain", f"{short}-{how}-heads")
    ),
    *(
        Bound(
            w.name,
            f"wall of {name} over MultiSync",
            most,
            ("muster-sync-plain",),
            (name,),
        )
        for w in (SLOW_FRAMES, FRAMES)
        for name, most in (
            ("dist-sync-plain", 1.2),
            ("ray-sync-plain", 1.3),
            ("ray-one-store", 1.3),
        )
    ),
)


# --- measuring ------------------------------------------------------------------------------------


class NodesProcess(PoolProcess):
    """A ``PoolProcess`` that also counts bytes on the loopback device, and waits until Ray is
    still.

    Attributes:
        wire: of every turn, by system: bytes.
    """

    def __init__(self, python: str) -> None:
        super().__init__(python, "cluster_peers")
        self.wire: defaultdict[str, list[int]] = defaultdict(list)

    def ask(self, **command: Any) -> dict[str, Any]:
        before = loopback_bytes()
        answer = super().ask(**command)
        settle(os.getpid(), at_most_s=1.0)
        if command["do"] == "run":
            self.wire[command["system"]].append(loopback_bytes() - before)
        return answer


def measure(
    cases: Mapping[str, Sequence[str]],
    *,
    rounds: int,
    seconds: float,
    pythons: Sequence[str] = (),
) -> tuple[report.Results, dict[str, Any]]:
    """Slices of all systems of each case, in turns; and bytes on the wire per frame, by case and
    system.
    """
    results: report.Results = {}
    wire: dict[str, Any] = {}
    interpreters = runner.find_pythons(
        {name for names in cases.values() for name in names}, pythons
    )
    for case, systems in cases.items():
        begin = time.perf_counter()
        with runner.Homes(interpreters, NodesProcess) as homes:
            workers = homes.of(systems)
            results[case] = runner.measure_one(
                case, systems, workers, slices=rounds, seconds=seconds
            )
            wire[case] = {
                name: per_frame(
                    cast(NodesProcess, workers[name]).wire[name][-rounds:], series
                )
                for name, series in results[case].items()
                if series.slices
            }
        print(
            f"\n{table(results, wire, case)}\n({time.perf_counter() - begin:.0f} s)",
            flush=True,
        )
    return results, wire


def per_frame(wire: Iterable[int], series: runner.Series) -> list[float]:
    """Median and IQR, over the rounds."""
    return _rounded(
        [n / turn.frames for n, turn in zip(wire, series.slices, strict=False)], 1
    )


def table(results: report.Results, wire: Mapping[str, Any], case: str) -> str:
    """All systems of a case."""
    rows = [
        [f"{case}: {WORKLOADS[case].describe}"],
        ["system", "per second", "IQR", "ms each", "bytes on the wire each"],
    ]
    for name, own in results[case].items():
        label = SYSTEMS[name].label
        if not own.slices:
            rows.append([label, own.note.partition("\n")[0][:120] or "no slices"])
            continue
        rate, spread = report.median_iqr(own.fps)
        cells = [
            f"{rate:,.4g}",
            f"{spread / rate:.0%}",
            f"{1e3 / rate:.3g}",
            f"{wire[case][name][0]:,.0f}",
        ]
        rows.append([label, *cells])
    return report.aligned(rows)


def figures_of(results: report.Results, wire: Mapping[str, Any]) -> list[Figure]:
    """What was asked for, and what came out."""
    found = [
        speed.figure(results)
        for speed in SPEEDS
        if speed.workload in results
        and {*speed.over, *speed.under} <= results[speed.workload].keys()
    ]
    for case in (FRAMES.name, SLOW_FRAMES.name):
        payload = payload_per_frame(WORKLOADS[case]) if case in results else 0.0
        for name in ("dist-sync-plain", "ray-sync-plain"):
            if case in results and name in wire[case]:
                over = wire[case][name][0] / payload
                found.append(
                    Figure(
                        f"{case}: {name}, bytes on the wire / payload",
                        1.02,
                        over,
                        at_least=False,
                    )
                )
    if WEIGHTS.name in results:
        found += [publish_figure(results, short) for short in OF_SHORT]
    return found


def publish_figure(results: report.Results, short: str) -> Figure:
    """What new weights add to a step on all nodes, against a plain broadcast, within each round."""
    name = f"40 MB to 4 nodes, {short}, over a plain broadcast"
    series = results[WEIGHTS.name]
    three = [
        series.get(one) for one in (f"{short}-publish", f"{short}-step", "broadcast")
    ]
    if not all(one is not None and one.slices for one in three):
        return Figure(name, 1.5, None, at_least=False, note="not measured")
    publish, step, plain = (one.fps for one in three if one is not None)
    ratios = [
        (1 / p - 1 / s) * b for p, s, b in zip(publish, step, plain, strict=False)
    ]
    median, spread = report.median_iqr(ratios)
    return Figure(name, 1.5, median, at_least=False, spread=spread)


def object_store(address: str, rounds: int) -> dict[str, Any]:
    """Ray's object store by itself: median and IQR of each piece in ms, and of two nodes over one
    in each round.
    """
    import ray

    from benchmarks.ray_store import PLACES, measure

    ray.init(address=address, log_to_driver=False)
    try:
        times = measure(rounds)
    finally:
        ray.shutdown()
    milliseconds = {
        place: {
            piece: _rounded([1e3 * x for x in each], 2)
            for piece, each in pieces.items()
        }
        for place, pieces in times.items()
    }
    one, two = (times[place]["store"] for place in PLACES)
    ratios = _rounded([b / a for a, b in zip(one, two, strict=True)], 2)
    pieces = list(milliseconds[PLACES[0]])
    rows = [["Ray's object store, 58 MB, ms", *pieces]]
    rows += [
        [place, *(f"{milliseconds[place][piece][0]:g}" for piece in pieces)]
        for place in PLACES
    ]
    print(f"\n{report.aligned(rows)}\ntwo nodes over one: {ratios[0]:g}")
    return {"ms": milliseconds, "two_nodes_over_one": ratios}


def _rounded(values: Sequence[float], digits: int) -> list[float]:
    """Median and IQR."""
    return [round(x, digits) for x in report.median_iqr(values)]


def payload_per_frame(workload: Workload) -> float:
    """Bytes of memory under the tensors of a batch of one machine's collector, which are what has
    to travel.
    """
    policy = PlainPolicy(workload.make()).eval()
    with muster.Collector(
        workload.make, policy, num_envs=4, frames_per_batch=4 * workload.T, seed=0
    ) as collector:
        batch = collector.next()
        return covered(batch) / batch.numel()


def covered(batch: Any) -> int:
    """Bytes under a batch's tensors; what is under several of them counts once."""
    spans = []
    for tensor in batch.values(True, True):
        extent = 1 + sum(
            (n - 1) * stride
            for n, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        spans.append(
            (tensor.data_ptr(), tensor.data_ptr() + extent * tensor.element_size())
        )
    total, reached = 0, 0
    for begin, end in sorted(spans):
        total += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return total


# --- a network of one's own -----------------------------------------------------------------------


def own_network() -> bool:
    """Put this process, and all that it starts, into a network with nothing but a loopback device,
    if it may.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not sys.platform.startswith("linux") or libc.unshare(CLONE_NEWNET) != 0:
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))
    return True


def loopback_bytes() -> int:
    """Received on the loopback device so far, headers included."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(
        (
            int(line.split(":")[1].split()[0])
            for line in lines
            if line.strip().startswith("lo:")
        ),
        0,
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.clusters", description=__doc__
    )
    parser.add_argument(
        "--quick", action="store_true", help="two rounds, no peers and no Ray"
    )
    parser.add_argument("--rounds", type=int, help="default 7; quick 2")
    parser.add_argument(
        "--seconds", type=float, help="per slice (default 0.5; quick 0.2)"
    )
    parser.add_argument(
        "--case", action="append", choices=CASES, help="repeatable; default all"
    )
    parser.add_argument(
        "--system", action="append", choices=SYSTEMS, help="repeatable; default all"
    )
    runner.add_python_option(parser)
    parser.add_argument("--output", type=Path, default=report.RESULTS / "clusters.json")
    return parser.parse_args()


def main() -> None:
    options = parse()
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit("terminated")
    )  # so that all processes are ended
    os.environ.update(runner.ONE_THREAD)
    alone, begin = own_network(), time.perf_counter()
    quick = options.quick
    rounds, seconds = (
        options.rounds or (2 if quick else 7),
        options.seconds or (0.2 if quick else 0.5),
    )
    wanted = options.system or [
        name
        for name in SYSTEMS
        if not quick or ("ray" not in name and "torchrl" not in name)
    ]
    cases = {
        case: [name for name in CASES[case] if name in wanted]
        for case in options.case or CASES
    }
    store: dict[str, Any] = {}
    with ExitStack() as stack:
        if any("ray" in name for names in cases.values() for name in names):
            os.environ.update(runner.environment())
            os.environ.update(
                {"RAY_worker_niceness": "0"}
            )  # not 15, with which actors would come after all others
            os.environ.update(
                {"RAY_raylet_start_wait_time_s": "120"}
            )  # not 30: a busy machine may need more
            os.environ[RAY_ADDRESS] = stack.enter_context(
                ray_cluster(4 if WEIGHTS.name in cases else 2)
            )
            store = object_store(os.environ[RAY_ADDRESS], 3 * rounds)
        results, wire = measure(
            cases, rounds=rounds, seconds=seconds, pythons=options.python
        )
    figures = figures_of(results, wire)
    print("\n" + workers_targets.table(figures))
    how = {
        "rounds": rounds,
        "seconds": seconds,
        "cases": cases,
        "own_network": alone,
        "quick": quick,
    }
    names = {name for systems in cases.values() for name in systems}
    extra = {
        "targets": [figure.summary() for figure in figures],
        "wire_bytes_each": wire,
        "object_store": store,
        "versions_by_interpreter": runner.peer_versions(
            {*runner.find_pythons(names, options.python).values()}
        ),
    }
    path = report.save(results, how, extra, options.output)
    print(f"\n{time.perf_counter() - begin:.0f} s; written to {path}")


if __name__ == "__main__":
    main()
