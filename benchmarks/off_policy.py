"""``python -m benchmarks.off_policy``: collect a step, sample 256 transitions, as DQN, SAC and TD3
do, without the learning.

As in ``python -m benchmarks.short_batches``, the systems of a case take turns of a fraction of a
second, and every ratio is formed within a round. Processor time, but for the workers: theirs is
wall time, with environments that wait, so that three processes have room on two cores. The tables of
docs/replay_memory.md are made from the results.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import report, runner
from benchmarks.case_runner import run_cases
from benchmarks.off_policy_systems import CASES, PIXELS
from benchmarks.systems import SYSTEMS
from benchmarks.workers_targets import Figure, Speed


def _over(case: str, over: str, under: str, at_least: float) -> Speed:
    return Speed(case, f"{over} / {under}", at_least, (over,), (under,))


TARGETS = (
    _over("off-cartpole", "off-memory", "off-hand", 0.7),
    _over("off-cartpole", "off-memory", "off-sb3", 2.0),
    _over("off-cartpole", "off-memory", "off-torchrl", 6.0),
    _over("off-four", "off-memory", "off-hand", 0.7),
    _over("off-four", "off-memory", "off-sb3", 2.0),
    _over("off-four", "off-memory", "off-torchrl", 6.0),
    _over("off-floats", "off-memory", "off-hand", 0.8),
    _over("off-floats", "off-memory", "off-sb3", 2.0),
    _over("off-floats", "off-memory", "off-torchrl", 6.0),
    _over("off-pixels", "off-memory", "off-hand", 1 / 1.1),
    _over("off-collect", "off-memory", "off-hand", 1 / 1.4),
    _over("off-collect", "off-memory", "off-sb3", 2.5),
    _over("off-workers", "off-workers-samples", "off-workers-waits", 0.95),
    _over("off-workers", "off-workers-samples", "off-workers-elsewhere", 0.95),
)
# what was asked of a plain module, for a head
HEAD_TARGETS = tuple(
    _over(target.workload, "off-memory-head", under, target.at_least)
    for target in TARGETS
    for under in target.under
    if target.over == ("off-memory",) and target.workload != PIXELS.name
)
MEMORY_SHARE = 0.55  # of the peers' bytes per transition
RESULTS = report.RESULTS / "off_policy.json"
PAGE = runner.ROOT / "docs" / "replay_memory.md"
COLUMNS = {
    "off-collect": "one CartPole: collect 1",
    "off-cartpole": "collect 1, sample 256",
    "off-four": "collect 4, sample 256",
    "off-floats": "8 environments of 17 floats: collect 8, sample 256",
    "off-pixels": "84x84x4 pixels: sample 256",
}
ROWS = {
    "loop written by hand, NumPy ring": ("off-hand",),
    "Muster, `ReplayMemory`": ("off-memory",),
    "Muster, `ReplayMemory`, head": ("off-memory-head",),
    "Muster, TorchRL's buffer": ("off-muster-torchrl",),
    "TorchRL": ("off-torchrl",),
    "Stable-Baselines3": ("off-sb3", "off-sb3-buffer"),
    "Tianshou's buffer": ("off-tianshou-buffer",),
}


def sizes(
    homes: runner.Homes, measured: Sequence[str]
) -> tuple[list[Figure], Mapping[str, Any]]:
    """Measure the bytes per transition of full memories of pixels."""
    if PIXELS.name not in measured:
        return [], {}
    found: dict[str, float] = {}
    for name, process in homes.of(PIXELS.systems).items():
        process.ask(do="build", system=name, workload=PIXELS.name)
        found[name] = process.ask(do="size", system=name)["bytes"]
        process.ask(do="drop", system=name)
    rows = [["memory of 84x84x4 pixels", "bytes per transition", "of one observation"]]
    for name, size in found.items():
        rows.append(
            [SYSTEMS[name].label, f"{size:,.0f}", f"{size / (84 * 84 * 4):.2f}"]
        )
    print("\n" + report.aligned(rows), flush=True)
    figures = [
        Figure(
            f"bytes per transition: off-memory / {peer}",
            MEMORY_SHARE,
            found["off-memory"] / found[peer] if peer in found else None,
            at_least=False,
            note="" if peer in found else "not installed",
        )
        for peer in ("off-sb3-buffer", "off-muster-torchrl", "off-tianshou-buffer")
    ]
    return figures, {"bytes_per_transition": found}


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Return the tables of the page by name: CPU time of an iteration, and bytes per transition."""
    times = [
        "| CPU us | " + " | ".join(COLUMNS.values()) + " |",
        "|---" * (len(COLUMNS) + 1) + "|",
    ]
    sizes = ["| | bytes per transition |", "|---|---|"]
    for label, systems in ROWS.items():
        cells = [_microseconds(results, case, systems) for case in COLUMNS]
        times.append(f"| {label} | " + " | ".join(cells) + " |")
        for name in systems:
            if name in results["bytes_per_transition"]:
                sizes.append(
                    f"| {label} | {results['bytes_per_transition'][name]:,.0f} |"
                )
    return {"times": "\n".join(times), "sizes": "\n".join(sizes)}


def _microseconds(results: Mapping[str, Any], case: str, systems: Sequence[str]) -> str:
    """Return the time of an iteration with the first of the systems that was measured."""
    for name in systems:
        found = results["workloads"][case].get(name, {})
        if "fps" in found:
            return f"{1e6 * CASES[case].counted / found['fps']:,.0f}"
    return ""


def with_tables(page: str, results: Mapping[str, Any]) -> str:
    """Return the page with its tables replaced."""
    for name, table in tables(results).items():
        begin = f"<!-- off_policy {name}: begin -->\n"
        end = f"\n<!-- off_policy {name}: end -->"
        before, rest = page.split(begin)
        page = f"{before}{begin}\n{table}\n{end}{rest.split(end)[1]}"
    return page


def main() -> None:
    """Measure, and write the tables if all cases were measured."""
    run_cases(
        "off_policy",
        __doc__,
        CASES,
        TARGETS + HEAD_TARGETS,
        lambda case: [
            name for name in ("off-hand", "off-workers-waits") if name in case.systems
        ],
        seconds=0.2,
        clock="cpu",
        more=sizes,
    )
    results = json.loads(RESULTS.read_text("utf-8"))
    if set(results["workloads"]) == set(CASES):
        PAGE.write_text(with_tables(PAGE.read_text("utf-8"), results), "utf-8")


if __name__ == "__main__":
    main()
