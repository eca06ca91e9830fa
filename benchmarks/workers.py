"""``python -m benchmarks.workers``: two worker processes, sleeping environments, and what single
operations cost.

As in ``python -m benchmarks``, every system is built once per workload and the systems take turns
of a fraction of a second. What works ahead of its consumer (free-running workers, the two bare
loops) begins a turn in the middle of its work, and nobody's turn begins before all processes are
still.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report, runner, workers_targets
from benchmarks.systems import SYSTEMS
from benchmarks.workers_family import settle
from benchmarks.workers_systems import PAIRS, SLEEP_WORKLOAD, SLEEPERS
from benchmarks.workers_targets import Figure, combined
from benchmarks.workloads import WORKLOADS

ONE_PROCESS = ("bare", "muster-plain", "muster-heads")
SYSTEMS_OF = {
    **dict.fromkeys(
        ("cartpole-8", "cartpole-64", "busy-8", "frames-8", "pendulum-8"),
        (*ONE_PROCESS, *PAIRS, "async-vector"),
    ),
    SLEEP_WORKLOAD.name: (*SLEEPERS, "async-vector"),
}
QUICK_WORKLOADS = ("cartpole-8", "busy-8", SLEEP_WORKLOAD.name)
WARM_S = 0.1
MICRO_WITHIN_S = 300.0
SLEEPING = 3.0  # times longer slices where steps wait: few of them fit into one


class PoolProcess(runner.WorkerProcess):
    """Handle of one ``benchmarks.workers_child``, in a session of its own so that nothing of it
    stays behind.
    """

    def __init__(
        self, python: str, module: str = "workers_child", **environ: str
    ) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the worker)
        self._process = subprocess.Popen(
            [python, "-m", f"benchmarks.{module}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=runner.ROOT,
            env={**runner.environment(), **environ},
            start_new_session=True,
        )

    def ask(self, **command: Any) -> dict[str, Any]:
        """As its base, but a run begins in the middle of the work and ends when all is still."""
        try:
            if command["do"] == "run" and getattr(
                SYSTEMS[command["system"]], "ahead", False
            ):
                super().ask(**{**command, "seconds": WARM_S})
            answer = super().ask(**command)
        except runner.WorkerFailed:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1)
                # what it has started may spin and take the cores from everybody else
                self._end_session()
            raise
        settle(self._process.pid)
        return answer

    def close(self) -> None:
        super().close()
        self._end_session()

    def _end_session(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def measure(
    systems_of: Mapping[str, Sequence[str]],
    *,
    rounds: int,
    seconds: float,
    pythons: Sequence[str],
) -> report.Results:
    """``runner.measure`` with each workload's own systems, in ``PoolProcess``."""
    interpreters = runner.find_pythons(
        {name for names in systems_of.values() for name in names}, pythons
    )
    results: report.Results = {}
    with runner.Homes(interpreters, PoolProcess) as homes:
        for workload, systems in systems_of.items():
            workers = homes.of(systems)
            longer = SLEEPING if workload == SLEEP_WORKLOAD.name else 1.0
            begin = time.perf_counter()
            results[workload] = runner.measure_one(
                workload, systems, workers, slices=rounds, seconds=longer * seconds
            )
            print(
                f"\n{table(results, workload)}\n({time.perf_counter() - begin:.0f} s)",
                flush=True,
            )
    return results


def table(results: report.Results, workload: str) -> str:
    """All systems of one workload, fastest last."""
    spec, sleeping = WORKLOADS[workload], workload == SLEEP_WORKLOAD.name
    columns: dict[str, Any] = (
        {"of the limit": lambda name: ((name,), ("bare-one",), 1 / spec.B)}
        if sleeping
        else {
            "of 2 x bare": lambda name: ((name,), ("bare",), 0.5),
            "of bare in 2": lambda name: ((name,), ("bare-2",), 1.0),
            "x plain": lambda name: (("muster-sync-plain",), (name,), 1.0),
            "x heads": lambda name: (("muster-sync-heads",), (name,), 1.0),
        }
    )
    rows = [
        [f"{workload}: {spec.describe}, T={spec.T}"],
        ["system", "frames/s", "IQR", *columns],
    ]
    for name, own in results[workload].items():
        label = SYSTEMS[name].label
        if not own.slices:
            rows.append([label, own.note or "no slices"])
            continue
        fps, spread = report.median_iqr(own.fps)
        found = [
            combined(results, workload, *column(name)) for column in columns.values()
        ]
        rows.append(
            [
                label,
                f"{fps:,.0f}",
                f"{spread / fps:.0%}",
                *(f"{got[0]:.3g}" if got else "" for got in found),
            ]
        )
    return report.aligned(rows)


def micro(quick: bool) -> tuple[list[Figure], dict[str, Any]]:
    """``benchmarks.workers_micro`` in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.workers_micro",
        *(["--quick"] if quick else []),
    ]
    try:
        run = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=MICRO_WITHIN_S,
            cwd=runner.ROOT,
            env=runner.environment(),
        )
        found = json.loads(run.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, IndexError, ValueError) as error:
        return [
            Figure(
                "single operations",
                0.0,
                None,
                note=f"{type(error).__name__}: {error}"[:200],
            )
        ], {}
    figures = [
        Figure(**{k: v for k, v in one.items() if k != "met"})
        for one in found["figures"]
    ]
    return figures, found["details"]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.workers", description=__doc__
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="about a minute: no peers but AsyncVectorEnv",
    )
    parser.add_argument("--rounds", type=int, help="default 5; quick 3")
    parser.add_argument(
        "--seconds", type=float, help="per slice (default 0.4; quick 0.25)"
    )
    parser.add_argument(
        "--workload",
        action="append",
        choices=SYSTEMS_OF,
        help="repeatable; default all",
    )
    parser.add_argument(
        "--system", action="append", choices=SYSTEMS, help="repeatable; default all"
    )
    parser.add_argument("--only", choices=("speed", "micro"), help="default both")
    runner.add_python_option(parser)
    parser.add_argument("--output", type=Path, default=report.RESULTS / "workers.json")
    return parser.parse_args()


def main() -> None:
    options = parse()
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit("terminated")
    )  # so that all processes are ended
    os.environ.update(runner.ONE_THREAD)
    begin = time.perf_counter()
    quick = options.quick
    rounds, seconds = (
        options.rounds or (3 if quick else 5),
        options.seconds or (0.25 if quick else 0.4),
    )
    wanted = options.system or [
        name
        for name, entry in SYSTEMS.items()
        if entry.quick or not quick or name in (*ONE_PROCESS, "async-vector")
    ]
    workloads = options.workload or (QUICK_WORKLOADS if quick else tuple(SYSTEMS_OF))
    systems_of = {
        w: [name for name in SYSTEMS_OF[w] if name in wanted] for w in workloads
    }
    results: report.Results = {}
    figures: list[Figure] = []
    extra: dict[str, Any] = {}
    if options.only != "micro":
        results = measure(
            systems_of, rounds=rounds, seconds=seconds, pythons=options.python
        )
        figures += [
            speed.figure(results)
            for speed in workers_targets.SPEEDS
            if speed.workload in results
            and {*speed.over, *speed.under} <= {*systems_of[speed.workload]}
        ]
        names = {name for systems in systems_of.values() for name in systems}
        extra["versions_by_interpreter"] = runner.peer_versions(
            {*runner.find_pythons(names, options.python).values()}
        )
    if options.only != "speed":
        found, extra["micro"] = micro(quick)
        figures += found
    print("\n" + workers_targets.table(figures))
    extra["targets"] = [figure.summary() for figure in figures]
    how = {
        "rounds": rounds,
        "seconds": seconds,
        "systems": systems_of,
        "only": options.only,
        "quick": quick,
    }
    path = report.save(results, how, extra, options.output)
    print(f"\n{time.perf_counter() - begin:.0f} s; written to {path}")


if __name__ == "__main__":
    main()
