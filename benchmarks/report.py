"""From slices to tables and to a JSON file."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.runner import Clock, Series
from benchmarks.systems import SYSTEMS
from benchmarks.targets import TARGETS
from benchmarks.workloads import WORKLOADS

RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = ("torch", "tensordict", "numpy", "gymnasium")
Results = dict[str, dict[str, Series]]


def median_iqr(values: Sequence[float]) -> tuple[float, float]:
    """Median and interquartile range."""
    if len(values) < 2:
        return (values[0] if values else float("nan")), 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return statistics.median(values), high - low


def ratio(
    faster: Series, slower: Series, clock: Clock | None = None
) -> tuple[float, float] | None:
    """Median and IQR of the ratios within each round; None if either has no slices.

    Both slices of a round ran within seconds of each other, so what slows the machine down cancels.
    """
    clock = clock or faster.clock
    pairs = list(zip(faster.rates(clock), slower.rates(clock), strict=False))
    return median_iqr([a / b for a, b in pairs]) if pairs else None


def table(results: Results, workload: str) -> str:
    """All systems of one workload."""
    series = results[workload]
    spec = WORKLOADS[workload]
    header = f"{workload}: {spec.describe}, T={spec.T}"
    columns = ["system", "frames/s", "IQR", "of bare", "of limit", "x plain", "x heads"]
    rows = [[header], columns]
    for name, own in series.items():
        label = SYSTEMS[name].label
        if not own.slices:
            rows.append([label, own.note or "no slices"])
            continue
        fps, spread = median_iqr(own.fps)
        limit = (
            "limit-heads" if name in ("muster-heads", "limit-heads") else "limit-plain"
        )
        cells = [
            _cell(series, name, "bare"),
            _cell(series, name, limit)
            if name not in ("bare", "muster-random", "muster-compact")
            else "",
            _cell(series, "muster-plain", name),
            _cell(series, "muster-heads", name),
        ]
        rows.append([label, f"{fps:,.0f}", f"{spread / fps:.0%}", *cells])
    return aligned(rows)


def target_table(results: Results) -> str:
    """Every target for which both systems were measured, and whether it is met by the run's clock."""
    rows = [["target", "at least", "measured", "IQR", "by CPU time", ""]]
    for target in TARGETS:
        series = results.get(target.workload, {})
        if target.faster not in series or target.slower not in series:
            continue
        name = f"{target.workload}: {target.faster} / {target.slower}"
        got = ratio(series[target.faster], series[target.slower])
        if got is None:
            why = (
                series[target.slower].note
                or series[target.faster].note
                or "not measured"
            )
            rows.append([name, f"{target.at_least:.2f}", why[:60]])
        else:
            met = "met" if got[0] >= target.at_least else "MISSED"
            cpu = ratio(series[target.faster], series[target.slower], "cpu") or got
            rows.append(
                [
                    name,
                    f"{target.at_least:.2f}",
                    f"{got[0]:.2f}",
                    f"{got[1]:.2f}",
                    f"{cpu[0]:.2f}",
                    met,
                ]
            )
    return aligned(rows) if len(rows) > 1 else ""


def save(
    results: Results,
    options: dict[str, Any],
    extra: dict[str, Any],
    path: Path | None = None,
) -> Path:
    """Write everything that was measured, with what is needed to judge it."""
    now = datetime.datetime.now(datetime.timezone.utc)
    path = path or RESULTS / f"{now:%Y-%m-%d-%H%M%S}.json"
    content = {
        "date": now.isoformat(timespec="seconds"),
        "machine": machine(),
        "options": options,
        "workloads": {
            w: {s: _summary(series, one) for s, one in series.items()}
            for w, series in results.items()
        },
        "targets": [
            _target_summary(results, target)
            for target in TARGETS
            if target.workload in results
        ],
        **extra,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def machine() -> dict[str, Any]:
    """CPU, cores, load and versions."""
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(
            (
                line.partition(":")[2].strip()
                for line in lines
                if line.startswith("model name")
            ),
            cpu,
        )
    except OSError:
        pass
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "load": [round(x, 2) for x in os.getloadavg()],
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": versions,
    }


def _summary(series: dict[str, Series], own: Series) -> dict[str, Any]:
    if not own.slices:
        return {"note": own.note}
    fps, spread = median_iqr(own.fps)
    result: dict[str, Any] = {"fps": round(fps, 1), "iqr": round(spread, 1)}
    result["cpu_share"] = round(
        sum(s.cpu for s in own.slices) / sum(s.wall for s in own.slices), 3
    )
    for base in ("bare", "limit-plain", "limit-heads"):
        if base in series and (got := ratio(own, series[base])):
            result[f"of_{base}"] = [round(x, 4) for x in got]
    result["slices"] = [
        [s.frames, round(s.wall, 4), round(s.cpu, 4)] for s in own.slices
    ]
    if own.note:
        result["note"] = own.note
    return result


def _target_summary(results: Results, target: Any) -> dict[str, Any]:
    series = results[target.workload]
    got = None
    if target.faster in series and target.slower in series:
        got = ratio(series[target.faster], series[target.slower])
    measured = None
    if got is not None:
        cpu = ratio(series[target.faster], series[target.slower], "cpu") or got
        measured = {
            "median": round(got[0], 3),
            "iqr": round(got[1], 3),
            "by_cpu_time": round(cpu[0], 3),
        }
    return {
        **vars(target),
        "measured": measured,
        "met": None if got is None else got[0] >= target.at_least,
    }


def _cell(series: dict[str, Series], faster: str, slower: str) -> str:
    if faster not in series or slower not in series:
        return ""
    got = ratio(series[faster], series[slower])
    return "" if got is None else f"{got[0]:.3g}"


def aligned(rows: list[list[str]]) -> str:
    """Columns padded to their widest cell; rows of one or two cells are notes and pad nothing."""
    full = [row for row in rows if len(row) > 2]
    widths = [
        max(len(row[i]) for row in full if i < len(row))
        for i in range(max(map(len, full)))
    ]
    widths[0] = max(widths[0], *(len(row[0]) for row in rows if len(row) == 2), 0)
    lines = []
    for row in rows:
        cells = [
            row[0].ljust(widths[0]),
            *(cell.rjust(widths[i]) for i, cell in enumerate(row) if i),
        ]
        lines.append("  ".join(cells).rstrip() if len(row) > 1 else row[0])
    return "\n".join(lines)
