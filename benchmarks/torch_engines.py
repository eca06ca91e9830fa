"""``python -m benchmarks.torch_engines``: ``DistributedCollector`` over both of its engines, and blocks over links.

Nodes are processes of this machine. Measured: CPU of the main process and wall time of a batch; the same of one block
from a node, by size; and weights for several nodes over bare process groups, broadcast and one after the other. The
engines take turns.
"""

from __future__ import annotations

import argparse
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import muster
from benchmarks import report, runner
from benchmarks.cluster_peers import CARTPOLE, SLOW_FRAMES, WEIGHTS, Heavy
from benchmarks.nets import PlainPolicy
from benchmarks.workloads import Workload
from muster.cluster.direct import DirectCarrier
from muster.cluster.distributed import TorchCarrier
from muster.cluster.launchers import MpLauncher
from muster.cluster.link import Block, Link
from muster.cluster.rendezvous import Rendezvous

ENGINES = ("direct", "torch_distributed")
SIZES = tuple(1 << n for n in range(14, 27, 2))
WEIGHT_BYTES = 40 << 20
WITHIN_S = 120.0
Spent = tuple[float, float]  # seconds of CPU and wall


def spent(call: Callable[[], Any], times: int) -> Spent:
    """CPU of this process and wall time of a call."""
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(times):
        call()
    return (time.process_time() - cpu) / times, (time.perf_counter() - wall) / times


def in_turns(calls: Mapping[str, Callable[[], Any]], rounds: int, times: int) -> dict[str, Any]:
    """Median and IQR in ms of each, and of the engines' ratio in each round. The first round is left out."""
    found: dict[str, list[Spent]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            one = spent(call, times)
            if number:
                found[name].append(one)
    result: dict[str, Any] = {}
    first, second = calls
    for index, what in enumerate(("cpu", "wall")):
        for name, turns in found.items():
            result[f"{what}_ms_{name}"] = _rounded([1e3 * turn[index] for turn in turns])
        pairs = zip(found[second], found[first], strict=True)
        result[f"{what}_{second}_over_{first}"] = _rounded([a[index] / b[index] for a, b in pairs])
    return result


def _rounded(values: list[float]) -> list[float]:
    return [round(value, 3) for value in report.median_iqr(values)]


# --- batches ------------------------------------------------------------------------------------------


def collector(workload: Workload, engine: str, nodes: int, policy: Any) -> Any:
    share = max(1, workload.B // nodes)
    return muster.DistributedCollector(
        [workload.make] * nodes,
        policy,
        transport=engine,
        launcher="mp",
        num_envs=share,
        frames_per_batch=share * workload.T,
        sync=True,
        seed=0,
    )


def batches(quick: bool, rounds: int) -> Iterator[tuple[str, dict[str, Any]]]:
    def plain(workload: Workload) -> Any:
        return PlainPolicy(workload.make()).eval()

    def publishing(one: Any) -> Callable[[], Any]:
        return lambda: (one.update_policy_weights_(), one.next())

    turn = 1 if quick else 3
    cases: list[tuple[Mapping[str, bool], Workload, int, Callable[[Workload], Any], int]] = [
        ({"small": False, "small, new weights": True}, CARTPOLE, 2, plain, 5 if quick else 50),
        ({"58 MB": False}, SLOW_FRAMES, 1, plain, turn),
    ]
    for nodes in (1, 2) if quick else (1, 2, 4, 8):
        names = {f"one step of {nodes}": False, f"40 MB of weights to {nodes}": True}
        cases.append((names, WEIGHTS, nodes, lambda workload: Heavy(workload).eval(), turn))
    for names, workload, nodes, make, times in cases:
        with ExitStack() as made:
            each = {e: made.enter_context(collector(workload, e, nodes, make(workload))) for e in ENGINES}
            for name, publish in names.items():
                calls = {e: publishing(one) if publish else one.next for e, one in each.items()}
                yield name, in_turns(calls, rounds, times)


# --- blocks -------------------------------------------------------------------------------------------


def sends(link: Link, node: int) -> bool:
    """A node: sends blocks of the size that is asked for."""
    memory = {size: np.ones(size, np.uint8) for size in SIZES}
    for tag in range(1, 1 << 30):
        size = int(link.receive().message)
        if not size:
            return True
        link.send(b"", Block(memory[size]), tag)
    return False


def blocks(rounds: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """A request and a block of so many bytes, in memory that is expected."""
    with ExitStack() as made:
        links = {}
        for engine in ENGINES:
            launcher, rendezvous = MpLauncher("benchmarks.torch_engines:sends"), Rendezvous(1)
            carrier = DirectCarrier(launcher, rendezvous)
            if engine == "torch_distributed":
                carrier = TorchCarrier(launcher, rendezvous, large=1)
            made.enter_context(closing(carrier))
            links[engine] = carrier.connect(0, 0, WITHIN_S, threading.Event())
            made.callback(links[engine].close)
        tags = dict.fromkeys(ENGINES, 0)
        for size in SIZES:
            memory = np.zeros(size, np.uint8)

            def one(engine: str) -> None:
                tags[engine] += 1
                links[engine].expect(tags[engine], memory)  # noqa: B023
                links[engine].send(b"%d" % size)  # noqa: B023
                links[engine].receive()

            calls = {engine: (lambda engine=engine: one(engine)) for engine in ENGINES}
            yield f"block of {size >> 10} KiB", in_turns(calls, rounds, 20 if size < 1 << 22 else 4)
        for link in links.values():
            link.send(b"0")


# --- weights over bare groups -------------------------------------------------------------------------


def _receives(rank: int, size: int, port: int, count: int) -> None:
    torch.set_num_threads(1)
    group = _all(rank, size, port)
    weights = torch.zeros(WEIGHT_BYTES, dtype=torch.uint8)
    for _ in range(count):
        group.broadcast(weights, 0).wait()
        group.recv([weights], 0, 1).wait()


def _all(rank: int, size: int, port: int) -> Any:
    limit = timedelta(seconds=WITHIN_S)
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0, limit)
    return dist.ProcessGroupGloo(store, rank, size, limit)


def weights(quick: bool, rounds: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """A group of all processes: a broadcast, and sends to each node, all begun at once."""
    for nodes in (1, 2) if quick else (1, 2, 4, 8):
        given = (nodes + 1, _free_port(), rounds + 1)
        others = [mp.get_context("spawn").Process(target=_receives, args=(n + 1, *given)) for n in range(nodes)]
        for other in others:
            other.start()
        group = _all(0, *given[:2])
        tensor = torch.ones(WEIGHT_BYTES, dtype=torch.uint8)

        def one_by_one() -> None:
            for work in [group.send([tensor], rank + 1, 1) for rank in range(nodes)]:  # noqa: B023
                work.wait()

        calls = {"broadcast": lambda: group.broadcast(tensor, 0).wait(), "sends": one_by_one}  # noqa: B023
        yield f"40 MB over bare groups to {nodes}", in_turns(calls, rounds, 1)
        for other in others:
            other.join(WITHIN_S)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.torch_engines", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two rounds of few batches")
    parser.add_argument("--rounds", type=int, help="default 9; quick 2")
    parser.add_argument("--output", type=Path, default=report.RESULTS / "torch_engines.json")
    options = parser.parse_args()
    rounds = options.rounds or (2 if options.quick else 9)
    os.environ.update(runner.ONE_THREAD)
    os.environ.update(runner.environment())
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for part in (blocks(rounds), weights(options.quick, rounds), batches(options.quick, rounds)):
        for name, figures in part:
            found[name] = figures
            print(name, figures, flush=True)
    path = report.save({}, {"rounds": rounds, "quick": options.quick}, {"engines": found}, options.output)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
