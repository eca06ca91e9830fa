"""``python -m benchmarks.engines ENGINE``: a collector over its engine and over "direct", side by
side.

ENGINE is "ray", "torch_distributed" or "rpc". Measured: CPU of the main process and wall time of a
batch. Both collectors of a case are made once and take turns. Nodes are processes of this machine;
with Ray they are actors on the Ray node of the main process, or on another one.
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

import torch

import muster
from benchmarks import report, runner
from benchmarks.cluster_peers import (
    CARTPOLE,
    MEMORY,
    SLOW_FRAMES,
    WEIGHTS,
    Heavy,
    ray_cluster,
)
from benchmarks.nets import PlainPolicy
from benchmarks.workloads import Workload

COLLECTORS = {
    "ray": muster.RayCollector,
    "torch_distributed": muster.DistributedCollector,
    "rpc": muster.RPCCollector,
}
HERE, THERE = "one node", "two nodes"  # Ray nodes
Spent = tuple[float, float]  # seconds of CPU and wall
Figures = dict[str, Any]


def in_turns(
    calls: Mapping[str, Callable[[], Any]], rounds: int, times: int
) -> Figures:
    """Median and IQR of a call in ms, and of the second over the first in each round.

    The first round is left out.
    """
    found: dict[str, list[Spent]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            one = _spent(call, times)
            if number:
                found[name].append(one)
    result: Figures = {}
    first, second = calls
    for index, what in enumerate(("cpu", "wall")):
        for name, turns in found.items():
            result[f"{what}_ms_{name}"] = _rounded(
                [1e3 * turn[index] for turn in turns]
            )
        pairs = zip(found[second], found[first], strict=True)
        result[f"{what}_{second}_over_{first}"] = _rounded(
            [a[index] / b[index] for a, b in pairs]
        )
    return result


def _spent(call: Callable[[], Any], times: int) -> Spent:
    """CPU of this process and wall time of a call."""
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(times):
        call()
    return (time.process_time() - cpu) / times, (time.perf_counter() - wall) / times


def _rounded(values: list[float]) -> list[float]:
    return [round(value, 3) for value in report.median_iqr(values)]


def run(
    name: str,
    parts: Callable[[bool, int], Iterator[tuple[str, Figures]]],
    arguments: argparse.Namespace,
) -> None:
    """Print the figures as they come, with one thread, and write them to a file of this name."""
    os.environ.update(runner.ONE_THREAD)
    os.environ.update(runner.environment())
    torch.set_num_threads(1)
    rounds = arguments.rounds or (2 if arguments.quick else 9)
    found: Figures = {}
    for what, figures in parts(arguments.quick, rounds):
        found[what] = figures
        print(what, figures, flush=True)
    how = {"rounds": rounds, "quick": arguments.quick}
    path = report.save(
        {}, how, {"engines": found}, arguments.output or report.RESULTS / f"{name}.json"
    )
    print(f"written to {path}")


def parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """A parser of the arguments for ``run``."""
    made = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{module}", description=description
    )
    made.add_argument("--quick", action="store_true", help="two rounds of few batches")
    made.add_argument("--rounds", type=int, help="default 9; quick 2")
    made.add_argument("--output", type=Path)
    return made


@dataclass(frozen=True)
class Case:
    """Collectors, and what is measured with them.

    Attributes:
        names: of a figure, and whether new weights are published before each batch.
        place: of the nodes, with Ray.
        turn: batches of a turn.
    """

    names: Mapping[str, bool]
    workload: Workload
    nodes: int
    make: Callable[[], Any]
    turn: int
    place: str = HERE


def cases(engine: str, quick: bool) -> Iterator[Case]:
    def plain(workload: Workload) -> Callable[[], Any]:
        return lambda: PlainPolicy(workload.make()).eval()

    turn = 1 if quick else 3
    small = {"small": False, "small, new weights": True}
    yield Case(small, CARTPOLE, 2, plain(CARTPOLE), 5 if quick else 50)
    for place in (HERE, THERE) if engine == "ray" else (HERE,):
        yield Case(
            {f"58 MB, {place}": False}, SLOW_FRAMES, 1, plain(SLOW_FRAMES), turn, place
        )
    for nodes in (1, 2) if quick else (1, 2, 4, 8):
        names = {f"one step of {nodes}": False, f"40 MB of weights to {nodes}": True}
        yield Case(names, WEIGHTS, nodes, lambda: Heavy(WEIGHTS).eval(), turn, THERE)


def batches(engine: str) -> Callable[[bool, int], Iterator[tuple[str, Figures]]]:
    def measured(quick: bool, rounds: int) -> Iterator[tuple[str, Figures]]:
        with started(engine) as options:
            for case in cases(engine, quick):
                with ExitStack() as made:
                    each = {
                        transport: made.enter_context(
                            collector(engine, transport, case, options[case.place])
                        )
                        for transport in ("direct", engine)
                    }
                    for name, publishes in case.names.items():
                        calls = {
                            e: publishing(one) if publishes else one.next
                            for e, one in each.items()
                        }
                        yield name, in_turns(calls, rounds, case.turn)

    return measured


def collector(
    engine: str, transport: str, case: Case, options: Mapping[str, Any]
) -> Any:
    """Nodes with the environments of the workload divided among them."""
    workload = case.workload
    share = max(1, workload.B // case.nodes)
    return COLLECTORS[engine](
        [workload.make] * case.nodes,
        case.make(),
        transport=transport,
        num_envs=share,
        frames_per_batch=share * workload.T,
        sync=True,
        seed=0,
        **options,
    )


def publishing(collector: Any) -> Callable[[], Any]:
    return lambda: (collector.update_policy_weights_(), collector.next())


@contextmanager
def started(engine: str) -> Iterator[dict[str, dict[str, Any]]]:
    """What nodes need, and further options of the collector, by place."""
    if engine != "ray":
        options = {"launcher": "mp"}
        yield {HERE: options, THERE: options}
        return
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    os.environ.update(
        {"RAY_worker_niceness": "0", "RAY_raylet_start_wait_time_s": "120"}
    )
    with ray_cluster(1) as address:
        ray.init(address=address, log_to_driver=False)
        try:
            here = ray.get_runtime_context().get_node_id()
            nodes = [one["NodeID"] for one in ray.nodes() if one["Alive"]]  # type: ignore[no-untyped-call]
            places = {HERE: here, THERE: next(node for node in nodes if node != here)}
            room = {"num_cpus": 0.01, "num_gpus": 0, "memory": MEMORY // 8}
            yield {
                place: {
                    "remote_configs": {
                        **room,
                        "scheduling_strategy": NodeAffinitySchedulingStrategy(
                            node, soft=False
                        ),  # type: ignore[no-untyped-call]
                    }
                }
                for place, node in places.items()
            }
        finally:
            ray.shutdown()


def main() -> None:
    known = parser("engines", __doc__)
    known.add_argument("engine", choices=COLLECTORS)
    arguments = known.parse_args()
    run(f"engine_{arguments.engine}", batches(arguments.engine), arguments)


if __name__ == "__main__":
    main()
