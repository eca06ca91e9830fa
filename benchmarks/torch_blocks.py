"""``python -m benchmarks.torch_blocks``: what a block costs through a process group, and over
"direct".

A request and one block from a node, by size; and weights for several nodes over bare process
groups, broadcast and one after the other. Measured: CPU of this process and wall time, in turns.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.engines import Figures, in_turns, parser, run
from muster.cluster.direct import DirectCarrier
from muster.cluster.distributed import TorchCarrier
from muster.cluster.launchers import MpLauncher
from muster.cluster.link import Block, Link
from muster.cluster.rendezvous import Rendezvous

ENGINES = ("direct", "torch_distributed")
SIZES = tuple(1 << n for n in range(14, 27, 2))
WEIGHT_BYTES = 40 << 20
WITHIN_S = 120.0


# --- blocks ---------------------------------------------------------------------------------------


def sends(link: Link, node: int) -> bool:
    """A node: sends blocks of the size that is asked for."""
    memory = {size: np.ones(size, np.uint8) for size in SIZES}
    for tag in range(1, 1 << 30):
        size = int(link.receive().message)
        if not size:
            return True
        link.send(b"", Block(memory[size]), tag)
    return False


def blocks(rounds: int) -> Iterator[tuple[str, Figures]]:
    """A request and a block of so many bytes, in memory that is expected."""
    with ExitStack() as made:
        links = {}
        for engine in ENGINES:
            launcher, rendezvous = (
                MpLauncher("benchmarks.torch_blocks:sends"),
                Rendezvous(1),
            )
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
            yield (
                f"block of {size >> 10} KiB",
                in_turns(calls, rounds, 20 if size < 1 << 22 else 4),
            )
        for link in links.values():
            link.send(b"0")


# --- weights over bare groups ---------------------------------------------------------------------


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


def weights(quick: bool, rounds: int) -> Iterator[tuple[str, Figures]]:
    """A group of all processes: a broadcast, and sends to each node, all begun at once."""
    for nodes in (1, 2) if quick else (1, 2, 4, 8):
        given = (nodes + 1, _free_port(), rounds + 1)
        others = [
            mp.get_context("spawn").Process(target=_receives, args=(n + 1, *given))
            for n in range(nodes)
        ]
        for other in others:
            other.start()
        group = _all(0, *given[:2])
        tensor = torch.ones(WEIGHT_BYTES, dtype=torch.uint8)

        def one_by_one() -> None:
            for work in [group.send([tensor], rank + 1, 1) for rank in range(nodes)]:  # noqa: B023
                work.wait()

        calls = {
            "broadcast": lambda: group.broadcast(tensor, 0).wait(),  # noqa: B023
            "sends": one_by_one,
        }
        yield f"40 MB over bare groups to {nodes}", in_turns(calls, rounds, 1)
        for other in others:
            other.join(WITHIN_S)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def parts(quick: bool, rounds: int) -> Iterator[tuple[str, Figures]]:
    yield from blocks(rounds)
    yield from weights(quick, rounds)


def main() -> None:
    arguments = parser("torch_blocks", __doc__).parse_args()
    run("torch_blocks", parts, arguments)


if __name__ == "__main__":
    main()
