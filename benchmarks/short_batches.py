"""``python -m benchmarks.short_batches``: batches of few steps, as DQN, SAC and TD3 collect them.

As in ``python -m benchmarks``, the systems of a case take turns of a fraction of a second, and every ratio is formed
within a round. Muster, the bare loops and the loop written by hand share a process.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks import report, runner, workers_targets
from benchmarks.short_batches_systems import CASES, ENVS, Case
from benchmarks.systems import SYSTEMS
from benchmarks.workers_targets import Speed


def _over(case: str, over: str, under: str, at_least: float) -> Speed:
    return Speed(case, f"{over} / {under}", at_least, (over,), (under,))


TARGETS = (
    *(_over(f"short-1-{B}", "short-plain", "loop-plain", 0.55) for B in ENVS),
    *(_over(f"short-1-{B}", "short-heads", "loop-plain", 0.55) for B in ENVS),
    *(_over(f"short-1-{B}", "short-plain-asked", "loop-plain", 0.55) for B in ENVS),
    *(_over(f"short-1-{B}", "short-plain-ring", "loop-plain", 0.55) for B in ENVS),
    *(_over(f"short-1-{B}", "short-plain", "short-sb3", 2.0) for B in ENVS),
    *(_over(f"short-1-{B}", "short-plain", "short-torchrl", 4.0) for B in ENVS),
    _over("short-32-64", "short-heads", "bare", 0.72),
    *(_over(f"short-32-{B}", "short-random", "bare", 0.90) for B in (8, 64)),
)


def measure(
    cases: Sequence[Case], *, rounds: int, seconds: float, pythons: Sequence[str], clock: runner.Clock
) -> report.Results:
    """Slices of all systems of each case, in turns."""
    interpreters = runner.find_pythons({name for case in cases for name in case.systems}, pythons)
    homes: dict[tuple[str, str], runner.WorkerProcess] = {}
    results: report.Results = {}
    with ExitStack() as stack:
        for case in cases:
            since = time.perf_counter()
            workers: dict[str, runner.WorkerProcess] = {}
            for name in case.systems:
                python = interpreters[name]
                if python is None:
                    continue
                home = (SYSTEMS[name].home or name, python)
                if home not in homes:
                    homes[home] = runner.WorkerProcess(python, "short_batches_child")
                    stack.callback(homes[home].close)
                workers[name] = homes[home]
            results[case.name] = runner._measure_one(case.name, case.systems, workers, slices=rounds, seconds=seconds)
            for one in results[case.name].values():
                one.clock = clock
            print(f"\n{table(results, case)}\n({time.perf_counter() - since:.0f} s)", flush=True)
    return results


def table(results: report.Results, case: Case) -> str:
    """All systems of a case; ``us/step`` is of a time step of all environments."""
    series = results[case.name]
    rows = [[f"{case.name}: {case.describe}"], ["system", "us/step", "IQR", "of bare", "of loop"]]
    for name, own in series.items():
        if not own.slices:
            rows.append([SYSTEMS[name].label, own.note.partition("\n")[0][:100] or "no slices"])
            continue
        fps, spread = report.median_iqr(own.fps)
        cells = [f"{1e6 * case.B / fps:.1f}", f"{spread / fps:.0%}"]
        for base in ("bare", "loop-plain"):
            got = report.ratio(own, series[base])
            cells.append(f"{got[0]:.3g}" if got else "")
        rows.append([SYSTEMS[name].label, *cells])
    return report._aligned(rows)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.short_batches", description=__doc__)
    parser.add_argument("--case", action="append", choices=CASES, help="repeatable; default all")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.2, help="per slice (default 0.2)")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="cpu", help="cpu: for a machine in use by others")
    runner.add_python_option(parser)
    parser.add_argument("--output", type=Path, default=report.RESULTS / "short_batches.json")
    return parser.parse_args()


def main() -> None:
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that all processes are ended
    os.environ.update(runner.ONE_THREAD)
    begin = time.perf_counter()
    cases = [CASES[name] for name in options.case or CASES]
    rounds, seconds, clock = options.rounds, options.seconds, options.clock
    results = measure(cases, rounds=rounds, seconds=seconds, pythons=options.python, clock=clock)
    figures = [target.figure(results) for target in TARGETS if target.workload in results]
    if figures:
        print("\n" + workers_targets.table(figures))
    pythons = {*runner.find_pythons({name for case in cases for name in case.systems}, options.python).values()}
    extra = {
        "targets": [figure.summary() for figure in figures],
        "versions_by_interpreter": runner.peer_versions(pythons),
    }
    how = {"rounds": rounds, "seconds": seconds, "clock": clock, "cases": [case.name for case in cases]}
    path = report.save(results, how, extra, options.output)
    print(f"\n{time.perf_counter() - begin:.0f} s; written to {path}")


if __name__ == "__main__":
    main()
