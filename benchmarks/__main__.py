"""``python -m benchmarks``: Muster, the limit and the peers, side by side in one run."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import report, runner
from benchmarks.systems import SYSTEMS
from benchmarks.workloads import WORKLOADS

QUICK_WORKLOADS = ("cartpole-1", "cartpole-8", "busy-8")
PARTS = ("speed", "import", "soak")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a minute: few workloads, no peers but SyncVectorEnv",
    )
    parser.add_argument(
        "--workload", action="append", choices=WORKLOADS, help="repeatable; default all"
    )
    parser.add_argument(
        "--system", action="append", choices=SYSTEMS, help="repeatable; default all"
    )
    parser.add_argument("--slices", type=int, help="rounds (default 9; quick 4)")
    parser.add_argument(
        "--seconds", type=float, help="per slice (default 0.4; quick 0.25)"
    )
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: for a machine in use by others",
    )
    parser.add_argument(
        "--soak",
        type=int,
        metavar="FRAMES",
        help="also watch memory over so many frames",
    )
    parser.add_argument(
        "--only",
        choices=PARTS,
        action="append",
        help="repeatable; default speed, import",
    )
    runner.add_python_option(parser)
    parser.add_argument(
        "--output", type=Path, help="JSON file (default benchmarks/results/<date>.json)"
    )
    return parser.parse_args()


def main() -> None:
    options = parse()
    os.environ.update(runner.ONE_THREAD)
    start = time.perf_counter()
    workloads = options.workload or (
        QUICK_WORKLOADS if options.quick else tuple(WORKLOADS)
    )
    systems = options.system or [
        name for name, entry in SYSTEMS.items() if entry.quick or not options.quick
    ]
    default_parts = (
        ("speed",) if options.quick or options.system or options.workload else PARTS[:3]
    )
    parts = set(options.only or default_parts) | ({"soak"} if options.soak else set())
    slices = options.slices or (4 if options.quick else 9)
    seconds = options.seconds or (0.25 if options.quick else 0.4)

    results: report.Results = {}
    extra: dict[str, Any] = {}
    if "speed" in parts:
        results = runner.measure(
            systems,
            workloads,
            slices=slices,
            seconds=seconds,
            pythons=options.python,
            clock=options.clock,
        )
        extra["versions_by_interpreter"] = runner.peer_versions(
            {*runner.find_pythons(systems, options.python).values()}
        )
        for workload in workloads:
            print("\n" + report.table(results, workload))
        print("\n" + report.target_table(results))
    if "import" in parts:
        extra["import_cpu_s"] = import_cost()
    if "soak" in parts:
        import torch

        from benchmarks.soak import memory_slope

        torch.set_num_threads(1)
        extra["soak"] = memory_slope(options.soak or 10_000_000)
    how = {
        "slices": slices,
        "seconds": seconds,
        "clock": options.clock,
        "systems": list(systems),
        "parts": sorted(parts),
    }
    path = report.save(results, how, extra, options.output)
    print(f"\n{time.perf_counter() - start:.0f} s; written to {path}")


def import_cost(repeats: int = 5) -> dict[str, float]:
    """CPU seconds of ``import muster``, and of ``from muster import Collector`` beyond torch;
    target < 0.3 s.
    """
    scripts = {
        "torch": "import torch",
        "muster": "import muster",
        "collector_beyond_torch": "import torch; s = t(); from muster import Collector",
        "muster_beyond_torch": "import torch; s = t(); import muster",
    }
    found: dict[str, list[float]] = {name: [] for name in scripts}
    for _ in range(repeats):
        for name, script in scripts.items():
            code = f"import time, json; t = time.process_time; s = t(); {script}; print(json.dumps(t() - s))"
            command = [sys.executable, "-c", code]
            run = subprocess.run(
                command,
                capture_output=True,
                text=True,
                check=True,
                cwd=runner.ROOT,
                env=runner.environment(),
            )
            found[name].append(json.loads(run.stdout))
    result = {
        name: round(statistics.median(values), 3) for name, values in found.items()
    }
    print(
        "\nCPU seconds to import: "
        + ", ".join(f"{name} {value:.3f}" for name, value in result.items())
    )
    return result


if __name__ == "__main__":
    main()
