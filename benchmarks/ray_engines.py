"""``python -m benchmarks.ray_engines``: ``RayCollector`` over both of its engines, "ray" and "direct", side by side.

Measured: CPU of the main process and wall time of a batch. Both collectors of a case are made once and take turns. The
main process is on the head node of a Ray cluster of two nodes on this machine; actors are on the same node or the other.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
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
def batches(workload: Workload, at: str, nodes: int, make: Callable[[], Any], *, publish: bool) -> Iterator[Any]:
    """By engine, a function that collects a batch, after new weights if there are to be any."""
    with ExitStack() as made:
        found: dict[str, Callable[[], Any]] = {}
        for engine in ENGINES:
            own = made.enter_context(collector(workload, engine, at, nodes, make()))

            def batch(own: Any = own) -> None:
                if publish:
                    own.update_policy_weights_()
                own.next()

            found[engine] = batch
        yield found


def measure(each: Mapping[str, Callable[[], Any]], rounds: int, turn: int) -> dict[str, list[Spent]]:
    """CPU and wall of a batch in each round, of ``turn`` batches of each engine in turns. The first round is left out."""
    spent: dict[str, list[Spent]] = {engine: [] for engine in each}
    for number in range(rounds + 1):
        for engine, batch in each.items():
            cpu, wall = time.process_time(), time.perf_counter()
            for _ in range(turn):
                batch()
            if number:
                spent[engine].append(((time.process_time() - cpu) / turn, (time.perf_counter() - wall) / turn))
    return spent


def cases(quick: bool) -> Iterator[tuple[str, Workload, str, int, Callable[[], Any], bool, int]]:
    """Name, workload, place, nodes, policy, whether weights are published, and batches of a turn."""

    def plain(workload: Workload) -> Callable[[], Any]:
        return lambda: PlainPolicy(workload.make()).eval()

    turn = 5 if quick else 50
    yield "small", CARTPOLE, PLACES[0], 2, plain(CARTPOLE), False, turn
    yield "small, new weights", CARTPOLE, PLACES[0], 2, plain(CARTPOLE), True, turn
    for place in PLACES:
        yield f"58 MB, {place}", SLOW_FRAMES, place, 1, plain(SLOW_FRAMES), False, 1 if quick else 3
    for nodes in (1, 2) if quick else (1, 2, 4, 8):
        for publish in (False, True):
            name = f"40 MB of weights to {nodes}" if publish else f"one step of {nodes}"
            yield name, WEIGHTS, PLACES[1], nodes, lambda: Heavy(WEIGHTS).eval(), publish, 1 if quick else 3


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
            for name, workload, place, nodes, make, publish, turn in cases(options.quick):
                with batches(workload, at[place], nodes, make, publish=publish) as each:
                    found[name] = summary(measure(each, rounds, turn))
                print(name, found[name], flush=True)
        finally:
            ray.shutdown()
    how = {"rounds": rounds, "quick": options.quick}
    path = report.save({}, how, {"engines": found, "ray": ray.__version__}, options.output)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
