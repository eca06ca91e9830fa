"""``python -m benchmarks.inference``: where the policy runs, who waits for whom, and when
environments are reset.

All systems of a case are built once and take turns of a fraction of a second; every ratio is formed
within a round. The parts of a limit (bare loops in as many processes, the policy alone) are systems
among the others.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from contextlib import closing
from pathlib import Path

from benchmarks import (
    inference_systems,
    inference_targets,
    report,
    runner,
    workers_targets,
)
from benchmarks.inference_cases import CASES, CUDA_CASE, Case
from benchmarks.runner import Series, Slice
from benchmarks.workers import PoolProcess

Told = dict[str, dict[str, float]]


class Bench:
    """Measures case after case in one process, or in a new one if something failed in it."""

    def __init__(self, turns: int, seconds: float, devices: str = "") -> None:
        self._turns, self._seconds, self._devices = turns, seconds, devices
        self._process: PoolProcess | None = None

    def measure(self, case: Case) -> tuple[dict[str, Series], Told]:
        """Slices of all systems of a case, in turns, and what they tell besides."""
        process = self._process = self._process or PoolProcess(
            sys.executable, "inference_child", CUDA_VISIBLE_DEVICES=self._devices
        )
        series, told = {name: Series() for name in case.systems}, Told()
        for name, one in series.items():
            runner._try(one, process, do="build", system=name, workload=case.name)
        for turn in range(self._turns):
            for name in runner._rotated(
                [name for name, one in series.items() if not one.note], turn
            ):
                answer = runner._try(
                    series[name],
                    process,
                    do="run",
                    system=name,
                    seconds=case.seconds * self._seconds,
                )
                if answer:
                    series[name].slices.append(Slice(**answer))
        for name, one in series.items():
            told[name] = (
                {} if one.note else runner._try(one, process, do="tell", system=name)
            )
        for name in series:
            runner._try(Series(), process, do="drop", system=name)
        if any(one.note for one in series.values()):
            self.close()
        return series, told

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.inference", description=__doc__
    )
    parser.add_argument(
        "--case",
        action="append",
        choices=[*CASES, CUDA_CASE.name],
        help="repeatable; default all",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, default=0.3, help="per slice (default 0.3)"
    )
    parser.add_argument(
        "--output", type=Path, default=report.RESULTS / "inference.json"
    )
    return parser.parse_args()


def shown(bench: Bench, case: Case) -> tuple[dict[str, Series], Told]:
    """Measure a case, and print its table."""
    since = time.perf_counter()
    series, told = bench.measure(case)
    print(f"\n{inference_targets.table({case.name: series}, case, told)}")
    print(f"({time.perf_counter() - since:.0f} s)", flush=True)
    return series, told


def main() -> None:
    options = parse()
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit("terminated")
    )  # so that all processes are ended
    begin = time.perf_counter()
    wanted = options.case or [*CASES, CUDA_CASE.name]
    results: report.Results = {}
    tellings: dict[str, Told] = {}
    with closing(Bench(options.rounds, options.seconds)) as bench:
        for name in wanted:
            if name != CUDA_CASE.name:
                results[name], tellings[name] = shown(bench, CASES[name])
    if CUDA_CASE.name in wanted and inference_systems.has_gpu():
        with closing(
            Bench(
                options.rounds,
                options.seconds,
                os.environ.get("CUDA_VISIBLE_DEVICES", "0"),
            )
        ) as bench:
            results[CUDA_CASE.name], tellings[CUDA_CASE.name] = shown(bench, CUDA_CASE)
    elif CUDA_CASE.name in wanted:
        results[CUDA_CASE.name] = {
            system: Series(note="no GPU here") for system in CUDA_CASE.systems
        }
        print(f"\n{CUDA_CASE.name}: no GPU here")
    figures = [
        asked.figure(results)
        for asked in inference_targets.TARGETS
        if asked.case in wanted
    ]
    if figures:
        print("\n" + workers_targets.table(figures))
    how = {"rounds": options.rounds, "seconds": options.seconds, "cases": wanted}
    extra = {"told": tellings, "targets": [figure.summary() for figure in figures]}
    path = report.save(results, how, extra, options.output)
    print(f"\n{time.perf_counter() - begin:.0f} s; written to {path}")


if __name__ == "__main__":
    main()
