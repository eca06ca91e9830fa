"""``python -m benchmarks.scale``: what a frame costs as a collector grows, in CPU time and memory.

Each curve doubles one size, and runs in a process of its own. What is judged is the CPU time (of
the process and its workers) of the same piece of work of the whole collector: if the size doubles,
it may grow 2.2 times at most, so that a frame costs at most a tenth more; where a bare loop over
the same environments more than doubles, as much more. The same 2.2 holds for the memory of a slot.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import report, runner
from benchmarks.scale_curves import CURVES, Curve
from benchmarks.scale_measure import LIMIT, Point, growth, least

CURVE_WITHIN_S = 600.0
START_CPU_S, WITH_TORCH_MIB, WITHOUT_TORCH_MIB = 0.15, 120.0, 60.0  # per worker


def measured(name: str, *, quick: bool) -> list[Point]:
    """The points of a curve, measured in this process."""
    import torch

    torch.set_num_threads(1)
    curve = CURVES[name]
    sizes = curve.sizes[:6] if quick and curve.judged else curve.sizes
    return curve.points(
        sizes, rounds=3 if quick else 5, seconds=0.01 if quick else 0.03
    )


def in_a_process(name: str, *, quick: bool) -> dict[str, Any]:
    """The points of a curve, or the reason why there are none."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.scale",
        "--measure",
        name,
        *["--quick"] * quick,
    ]
    try:
        ran = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=CURVE_WITHIN_S,
            cwd=runner.ROOT,
            env=runner.environment(),
        )
        return {"points": json.loads(ran.stdout.splitlines()[-1])}
    except subprocess.TimeoutExpired:
        return {"error": f"not over after {CURVE_WITHIN_S:g} s"}
    except (IndexError, ValueError):
        return {"error": (ran.stderr.strip().splitlines() or ["no output"])[-1][:300]}


def curve(name: str, *, quick: bool) -> dict[str, Any]:
    """A curve, judged.

    One beyond the limit is measured once more: a cliff stands in both measurements.
    """
    result = judged(CURVES[name], in_a_process(name, quick=quick))
    if result.get("within") is False and "points" in (
        again := in_a_process(name, quick=quick)
    ):
        result = judged(
            CURVES[name],
            {"points": least(result["points"], again["points"]), "measured": 2},
        )
    return result


def judged(curve: Curve, found: dict[str, Any]) -> dict[str, Any]:
    """With the steepest doublings of CPU time and memory, relative to what is allowed."""
    result = {"grows": curve.grows, "cost": curve.cost, **found}
    if not curve.judged or not found.get("points"):
        return result
    result["within"] = True
    for name in ("cost_us", "slot_kib"):
        steps = growth(found["points"], name)
        times, allowed, at = max(
            steps, key=lambda step: step[0] / step[1], default=(0.0, LIMIT, 0)
        )
        result[name] = (
            {"times": round(times, 3), "allowed": round(allowed, 3), "at": at}
            if steps
            else None
        )
        result["within"] = result["within"] and times <= allowed
    return result


def table(name: str, result: dict[str, Any]) -> str:
    """All points of a curve."""
    lines = [[f"{name}: {result['grows']}; CPU time of {result['cost']}"]]
    if "error" in result:
        return f"{lines[0][0]}\n{result['error']}"
    names = list(result["points"][0])
    lines.append(names)
    lines += [
        [_shown(point.get(column, "")) for column in names]
        for point in result["points"]
    ]
    text = report.aligned(lines)
    if "within" in result:
        parts = [
            f"{key} {step['times']} times at {step['at']:g} (at most {step['allowed']})"
            for key in ("cost_us", "slot_kib")
            if (step := result[key])
        ]
        text += f"\nsteepest doubling: {', '.join(parts)}{'' if result['within'] else ': A CLIFF'}"
    return text


def _shown(value: Any) -> str:
    return (
        value
        if isinstance(value, str)
        else f"{value:,}"
        if isinstance(value, int)
        else f"{value:,.4g}"
    )


def per_worker(curves: dict[str, Any]) -> list[dict[str, Any]]:
    """What a worker costs, with the largest number of them, so that what they share counts once."""
    figures = []
    for name, mib in (
        ("workers", WITH_TORCH_MIB),
        ("workers-server", WITHOUT_TORCH_MIB),
    ):
        if points := curves.get(name, {}).get("points"):
            for column, limit in (("start_cpu_s", START_CPU_S), ("worker_mib", mib)):
                value = points[-1][column]
                figures.append(
                    {
                        "figure": f"{name}, {points[-1]['x']} of them: {column}",
                        "limit": limit,
                        "measured": round(value, 3),
                        "met": value <= limit,
                    }
                )
    return figures


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale", description=__doc__
    )
    parser.add_argument(
        "--quick", action="store_true", help="the first points of each curve"
    )
    parser.add_argument(
        "--curve", action="append", choices=CURVES, help="repeatable; default all"
    )
    parser.add_argument("--measure", choices=CURVES, help=argparse.SUPPRESS)
    parser.add_argument(
        "--output",
        type=Path,
        help="JSON file; curves that are not measured keep their values in it",
    )
    return parser.parse_args(argv)


def main() -> int:
    options = parse()
    if options.measure:
        print(json.dumps(measured(options.measure, quick=options.quick)))
        return 0
    os.environ.update(runner.ONE_THREAD)
    begin = time.perf_counter()
    curves: dict[str, Any] = {}
    for name in options.curve or CURVES:
        since = time.perf_counter()
        curves[name] = curve(name, quick=options.quick)
        print(
            f"\n{table(name, curves[name])}\n({time.perf_counter() - since:.0f} s)",
            flush=True,
        )
    path = options.output or report.RESULTS / (
        "scale-quick.json" if options.quick else "scale.json"
    )
    if path.exists():
        kept = json.loads(path.read_text())["curves"]
        curves = {
            name: curves.get(name) or kept[name]
            for name in CURVES
            if name in curves or name in kept
        }
    workers = per_worker(curves)
    print()
    for figure in workers:
        print(f"{figure['figure']}: {figure['measured']} (at most {figure['limit']})")
    result = {
        "machine": report.machine(),
        "quick": options.quick,
        "limit": LIMIT,
        "workers": workers,
        "curves": curves,
    }
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\n{time.perf_counter() - begin:.0f} s; written to {path}")
    return (
        0
        if all(one.get("within", "error" not in one) for one in curves.values())
        else 1
    )


if __name__ == "__main__":
    raise SystemExit(main())
