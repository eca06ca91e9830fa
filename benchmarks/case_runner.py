"""Benchmarks that consist of cases: the systems of a case take turns, and ratios are formed within
a round.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from benchmarks import report, runner, workers_targets
from benchmarks.systems import SYSTEMS
from benchmarks.workers_targets import Figure, Speed
from benchmarks.workloads import Workload

Case = TypeVar(
    "Case", bound=Workload
)  # with ``systems``, the names of those that are measured
More = Callable[[runner.Homes, Sequence[str]], tuple[list[Figure], Mapping[str, Any]]]


def run_cases(
    name: str,
    description: str | None,
    cases: Mapping[str, Case],
    targets: Sequence[Speed],
    bases: Callable[[Case], Sequence[str]],
    *,
    seconds: float,
    clock: runner.Clock,
    more: More | None = None,
) -> None:
    """``python -m benchmarks.NAME``: measure, print a table for each case and the targets, write
    the results.

    Args:
        name: ``benchmarks.NAME_child`` is what runs the systems, each home in a process of its own.
        description: for ``--help``.
        cases: by name.
        targets: those of cases that are not measured are left out.
        bases: systems of a case to which all others are compared in its table.
        seconds: default length of a slice.
        clock: default; a case with a ``clock`` of its own keeps to it.
        more: called last, with the processes of systems; returns further figures and results.
    """
    options = _parse(name, description, cases, seconds, clock)
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit("terminated")
    )  # so that all processes are ended
    os.environ.update(runner.ONE_THREAD)
    begin = time.perf_counter()
    chosen = [cases[case] for case in options.case or cases]
    interpreters = runner.find_pythons(
        {system for case in chosen for system in _systems(case)}, options.python
    )
    results: report.Results = {}
    with runner.Homes(
        interpreters, partial(runner.WorkerProcess, module=f"{name}_child")
    ) as homes:
        for case in chosen:
            since, systems = time.perf_counter(), _systems(case)
            measured = runner.measure_one(
                case.name,
                systems,
                homes.of(systems),
                slices=options.rounds,
                seconds=options.seconds,
            )
            for one in measured.values():
                one.clock = getattr(case, "clock", options.clock)
            results[case.name] = measured
            print(
                f"\n{_table(measured, case, bases(case))}\n({time.perf_counter() - since:.0f} s)",
                flush=True,
            )
        figures = [
            target.figure(results) for target in targets if target.workload in results
        ]
        found: Mapping[str, Any] = {}
        if more is not None:
            further, found = more(homes, [*results])
            figures += further
    if figures:
        print("\n" + workers_targets.table(figures))
    extra = {
        "targets": [figure.summary() for figure in figures],
        "versions_by_interpreter": runner.peer_versions({*interpreters.values()}),
        **found,
    }
    how = {key: getattr(options, key) for key in ("rounds", "seconds", "clock")} | {
        "cases": [*results]
    }
    path = report.save(results, how, extra, options.output)
    print(f"\n{time.perf_counter() - begin:.0f} s; written to {path}")


def _parse(
    name: str,
    description: str | None,
    cases: Mapping[str, Any],
    seconds: float,
    clock: runner.Clock,
) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}", description=description
    )
    parser.add_argument(
        "--case", action="append", choices=cases, help="repeatable; default all"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--seconds", type=float, default=seconds, help=f"per slice (default {seconds})"
    )
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default=clock,
        help="cpu: for a machine in use by others",
    )
    runner.add_python_option(parser)
    parser.add_argument("--output", type=Path, default=report.RESULTS / f"{name}.json")
    return parser.parse_args()


def _systems(case: Any) -> Sequence[str]:
    systems: Sequence[str] = case.systems
    return systems


def _table(
    series: Mapping[str, runner.Series], case: Workload, bases: Sequence[str]
) -> str:
    """All systems of a case; ``us/step`` is of a time step of all environments."""
    rows = [
        [f"{case.name}: {case.describe}"],
        ["system", "frames/s", "IQR", "us/step", *(f"of {base}" for base in bases)],
    ]
    for name, own in series.items():
        label = SYSTEMS[name].label
        if not own.slices:
            rows.append([label, own.note.partition("\n")[0][:120] or "no slices"])
            continue
        fps, spread = report.median_iqr(own.fps)
        cells = [f"{fps:,.0f}", f"{spread / fps:.0%}", f"{1e6 * case.B / fps:.1f}"]
        for base in bases:
            got = report.ratio(own, series[base])
            cells.append(f"{got[0]:.3g}" if got else "")
        rows.append([label, *cells])
    return report.aligned(rows)
