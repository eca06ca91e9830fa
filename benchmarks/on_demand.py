"""``python -m benchmarks.on_demand``: ``collect`` and the dialects, beside the collectors that they stand in for.

As in ``python -m benchmarks``, the systems of a case take turns of a fraction of a second, and every ratio is formed
within a round. A dialect and its peer share a process, and so do Muster's collector and the bare loops.
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

from benchmarks import on_demand_systems, on_demand_targets, report, runner, workers_targets
from benchmarks.on_demand_cases import CASES, Case
from benchmarks.systems import SYSTEMS

__all__ = ["on_demand_systems"]


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
                home = (SYSTEMS[name].home, python)
                if home not in homes:
                    homes[home] = runner.WorkerProcess(python, "on_demand_child")
                    stack.callback(homes[home].close)
                workers[name] = homes[home]
            results[case.name] = runner._measure_one(case.name, case.systems, workers, slices=rounds, seconds=seconds)
            for one in results[case.name].values():
                one.clock = clock
            print(f"\n{on_demand_targets.table(results, case)}\n({time.perf_counter() - since:.0f} s)", flush=True)
    return results


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.on_demand", description=__doc__)
    parser.add_argument("--case", action="append", choices=CASES, help="repeatable; default all")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.3, help="per slice (default 0.3)")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: for a machine in use by others")
    runner.add_python_option(parser)
    parser.add_argument("--output", type=Path, default=report.RESULTS / "on_demand.json")
    return parser.parse_args()


def main() -> None:
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that all processes are ended
    os.environ.update(runner.ONE_THREAD)
    begin = time.perf_counter()
    cases = [CASES[name] for name in options.case or CASES]
    rounds, seconds, clock = options.rounds, options.seconds, options.clock
    results = measure(cases, rounds=rounds, seconds=seconds, pythons=options.python, clock=clock)
    figures = [asked.figure(results) for asked in on_demand_targets.TARGETS if asked.workload in results]
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
