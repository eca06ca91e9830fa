"""``python -m benchmarks.ray_engines``: ``RayCollector`` over both of its engines, "ray" and "direct", side by side.

Measured: CPU of the main process and wall time of a batch. Both collectors of a case are made once and take turns.
The main process is on the head node of a Ray cluster of two nodes on this machine; actors are on the same node or on
the other.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import muster
from benchmarks import report, runner
from benchmarks.cluster_peers import CARTPOLE, MEMORY, SLOW_FRAMES, WEIGHTS, Heavy, ray_cluster
from benchmarks.nets import PlainPolicy
from benchmarks.workloads import Workload

ENGINES = ("direct", "ray")
PLACES = ("one node", "two nodes")
Spent = tuple[float, float]  # seconds of CPU and wall of a batch


def places() -> dict[str, str]:
    """Ids of the Ray nodes of the actors: that of this process, and another one."""
    here = ray.get_runtime_context().get_node_id()
    nodes = [one["NodeID"] for one in ray.nodes() if one["Alive"]]  # type: ignore[no-untyped-call]
    there = next(node for node in nodes if node != here)
    return dict(zip(PLACES, (here, there), strict=True))


def collector(workload: Workload, engine: str, at: str, nodes: int, policy: Any) -> Any:
    """Actors at one place, with the environments of the workload divided among them."""
    share = max(1, workload.B // nodes)
    strategy = NodeAffinitySchedulingStrategy(at, soft=False)  # type: ignore[no-untyped-call]
    return muster.RayCollector(
        [workload.make] * nodes,
        policy,
        transport=engine,
        num_envs=share,
        frames_per_batch=share * workload.T,
        sync=True,
        seed=0,
        remote_configs={"num_cpus": 0.01, "num_gpus": 0, "memory": MEMORY // 8, "scheduling_strategy": strategy},
    )


@contextmanager
def collectors(workload: Workload, at: str, nodes: int, make: Callable[[], Any]) -> Iterator[dict[str, Any]]:
    """By engine."""
    with ExitStack() as made:
        yield {engine: made.enter_context(collector(workload, engine, at, nodes, make())) for engine in ENGINES}


def measure(each: Mapping[str, Any], rounds: int, turn: int, *, publish: bool) -> dict[str, list[Spent]]:
    """CPU and wall of a batch in each round of ``turn`` batches of each engine. The first round is left out."""
    spent: dict[str, list[Spent]] = {engine: [] for engine in each}
    for number in range(rounds + 1):
        for engine, own in each.items():
            cpu, wall = time.process_time(), time.perf_counter()
            for _ in range(turn):
                if publish:
                    own.update_policy_weights_()
                own.next()
            if number:
                spent[engine].append(((time.process_time() - cpu) / turn, (time.perf_counter() - wall) / turn))
    return spent


@dataclass(frozen=True)
class Case:
    """Collectors, and what is measured with them.

    Attributes:
        names: of a figure, and whether new weights are published before each batch.
        turn: batches of a turn.
    """

    names: Mapping[str, bool]
    workload: Workload
    place: str
    nodes: int
    make: Callable[[], Any]
    turn: int


def cases(quick: bool) -> Iterator[Case]:
    def plain(workload: Workload) -> Callable[[], Any]:
        return lambda: PlainPolicy(workload.make()).eval()

    turn = 1 if quick else 3
    small = {"small": False, "small, new weights": True}
    yield Case(small, CARTPOLE, PLACES[0], 2, plain(CARTPOLE), 5 if quick else 50)
    for place in PLACES:
        yield Case({f"58 MB, {place}": False}, SLOW_FRAMES, place, 1, plain(SLOW_FRAMES), turn)
    for nodes in (1, 2) if quick else (1, 2, 4, 8):
        names = {f"one step of {nodes}": False, f"40 MB of weights to {nodes}": True}
        yield Case(names, WEIGHTS, PLACES[1], nodes, lambda: Heavy(WEIGHTS).eval(), turn)


def summary(spent: Mapping[str, list[Spent]]) -> dict[str, Any]:
    """Median and IQR in ms, and of ray over direct in each round."""
    found: dict[str, Any] = {}
    for index, what in enumerate(("cpu", "wall")):
        for engine, rounds in spent.items():
            found[f"{what}_ms_{engine}"] = _rounded([1e3 * one[index] for one in rounds])
        pairs = zip(spent["ray"], spent["direct"], strict=True)
        found[f"{what}_ray_over_direct"] = _rounded([a[index] / b[index] for a, b in pairs])
    return found


def _rounded(values: list[float]) -> list[float]:
    return [round(value, 3) for value in report.median_iqr(values)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ray_engines", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two rounds of few batches")
    parser.add_argument("--rounds", type=int, help="default 9; quick 2")
    parser.add_argument("--output", type=Path, default=report.RESULTS / "ray_engines.json")
    options = parser.parse_args()
    rounds = options.rounds or (2 if options.quick else 9)
    os.environ.update(runner.ONE_THREAD)
    os.environ.update(runner.environment())
    os.environ.update({"RAY_worker_niceness": "0", "RAY_raylet_start_wait_time_s": "120"})
    found: dict[str, Any] = {}
    with ray_cluster(1) as address:
        ray.init(address=address, log_to_driver=False)
        try:
            at = places()
            for case in cases(options.quick):
                with collectors(case.workload, at[case.place], case.nodes, case.make) as each:
                    for name, publish in case.names.items():
                        found[name] = summary(measure(each, rounds, case.turn, publish=publish))
                        print(name, found[name], flush=True)
        finally:
            ray.shutdown()
    how = {"rounds": rounds, "quick": options.quick}
    path = report.save({}, how, {"engines": found, "ray": ray.__version__}, options.output)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
