"""``python -m benchmarks.rpc_engine``: ``RPCCollector`` over both of its engines, "rpc" and "direct", side by side.

Measured: CPU of the main process and wall time of a batch. Both collectors of a case are made once and take turns.
Nodes are processes of this machine.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import muster
from benchmarks import report, runner
from benchmarks.cluster_peers import CARTPOLE, SLOW_FRAMES, WEIGHTS, Heavy
from benchmarks.nets import PlainPolicy
from benchmarks.ray_engines import Spent, measure
from benchmarks.workloads import Workload

ENGINES = ("direct", "rpc")


def collector(workload: Workload, engine: str, nodes: int, policy: Any) -> Any:
    """Nodes with the environments of the workload divided among them."""
    share = max(1, workload.B // nodes)
    return muster.RPCCollector(
        [workload.make] * nodes,
        policy,
        transport=engine,
        launcher="mp",
        num_envs=share,
        frames_per_batch=share * workload.T,
        sync=True,
        seed=0,
    )


@contextmanager
def collectors(workload: Workload, nodes: int, make: Callable[[], Any]) -> Iterator[dict[str, Any]]:
    """By engine."""
    with ExitStack() as made:
        yield {engine: made.enter_context(collector(workload, engine, nodes, make())) for engine in ENGINES}


@dataclass(frozen=True)
class Case:
    """Collectors, and what is measured with them.

    Attributes:
        names: of a figure, and whether new weights are published before each batch.
        turn: batches of a turn.
    """

    names: Mapping[str, bool]
    workload: Workload
    nodes: int
    make: Callable[[], Any]
    turn: int


def cases(quick: bool) -> Iterator[Case]:
    def plain(workload: Workload) -> Callable[[], Any]:
        return lambda: PlainPolicy(workload.make()).eval()

    turn = 1 if quick else 3
    small = {"small": False, "small, new weights": True}
    yield Case(small, CARTPOLE, 2, plain(CARTPOLE), 5 if quick else 50)
    yield Case({"58 MB": False}, SLOW_FRAMES, 1, plain(SLOW_FRAMES), turn)
    for nodes in (1, 2) if quick else (1, 2, 4):
        names = {f"one step of {nodes}": False, f"40 MB of weights to {nodes}": True}
        yield Case(names, WEIGHTS, nodes, lambda: Heavy(WEIGHTS).eval(), turn)


def summary(spent: Mapping[str, list[Spent]]) -> dict[str, Any]:
    """Median and IQR in ms, and of rpc over direct in each round."""
    found: dict[str, Any] = {}
    for index, what in enumerate(("cpu", "wall")):
        for engine, rounds in spent.items():
            found[f"{what}_ms_{engine}"] = _rounded([1e3 * one[index] for one in rounds])
        pairs = zip(spent["rpc"], spent["direct"], strict=True)
        found[f"{what}_rpc_over_direct"] = _rounded([a[index] / b[index] for a, b in pairs])
    return found


def _rounded(values: list[float]) -> list[float]:
    return [round(value, 3) for value in report.median_iqr(values)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rpc_engine", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two rounds of few batches")
    parser.add_argument("--rounds", type=int, help="default 9; quick 2")
    parser.add_argument("--output", type=Path, default=report.RESULTS / "rpc_engine.json")
    options = parser.parse_args()
    rounds = options.rounds or (2 if options.quick else 9)
    os.environ.update(runner.ONE_THREAD)
    os.environ.update(runner.environment())
    found: dict[str, Any] = {}
    for case in cases(options.quick):
        with collectors(case.workload, case.nodes, case.make) as each:
            for name, publish in case.names.items():
                found[name] = summary(measure(each, rounds, case.turn, publish=publish))
                print(name, found[name], flush=True)
    how = {"rounds": rounds, "quick": options.quick}
    path = report.save({}, how, {"engines": found, "torch": torch.__version__}, options.output)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
