"""Ray's object store without Muster: images from one process to another, on one node and between
two, in pieces.

An actor puts a batch into the store of its node. This process takes it out of the store of its own
node, into memory that exists, as a collector does with a rollout. Beside it, the same bytes over a
socket between the same processes.
"""

from __future__ import annotations

import pickle
import socket
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

FRAMES, SHAPE = 1024, (84, 84, 4)  # 58 MB
WAIT_S = 120.0
PLACES = "one node", "two nodes"
Times = dict[str, list[float]]  # seconds of each round, by piece


def images(frames: int) -> dict[str, NDArray[np.uint8]]:
    """Nearly all bytes of a batch."""
    rng = np.random.default_rng(0)
    return {
        key: rng.integers(0, 256, (frames, *SHAPE), np.uint8)
        for key in ("observation", "next observation")
    }


class Sender:
    """Has a batch; runs in an actor. Methods return their own seconds."""

    def __init__(self, address: tuple[str, int], frames: int) -> None:
        self._batch = images(frames)
        self._socket = socket.create_connection(address, WAIT_S)

    def serialise(self) -> float:
        buffers: list[pickle.PickleBuffer] = []
        return seconds(
            lambda: pickle.dumps(
                self._batch, protocol=5, buffer_callback=buffers.append
            )
        )[0]

    def put(self) -> tuple[float, list[Any]]:
        """And the reference, in a list: Ray resolves others."""
        spent, ref = seconds(lambda: ray.put(self._batch))
        return spent, [ref]

    def send(self) -> None:
        for array in self._batch.values():
            self._socket.sendall(array.data.cast("B"))


def seconds(do: Callable[[], Any]) -> tuple[float, Any]:
    """Of ``do``, and its result."""
    begin = time.perf_counter()
    result = do()
    return time.perf_counter() - begin, result


def measure(rounds: int, frames: int = FRAMES) -> dict[str, Times]:
    """All pieces, by place; the places take turns.

    This process is connected to a cluster of two nodes or more.
    """
    here = ray.get_runtime_context().get_node_id()
    nodes = [one["NodeID"] for one in ray.nodes() if one["Alive"]]  # type: ignore[no-untyped-call]
    there = next(node for node in nodes if node != here)
    receivers = {
        place: Receiver(node, frames)
        for place, node in zip(PLACES, (here, there), strict=True)
    }
    found: dict[str, Times] = {place: defaultdict(list) for place in PLACES}
    for _ in range(rounds):
        for place, receiver in receivers.items():
            for piece, spent in receiver.batch().items():
                found[place][piece].append(spent)
    return found


class Receiver:
    """This process, and the ``Sender`` that it gets batches from.

    Args:
        node: id of the Ray node of the sender.
    """

    def __init__(self, node: str, frames: int) -> None:
        self._expected = images(frames)
        self._memory = {
            key: np.zeros_like(array) for key, array in self._expected.items()
        }
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(WAIT_S)
            strategy = NodeAffinitySchedulingStrategy(node, soft=False)  # type: ignore[no-untyped-call]
            sender: Any = ray.remote(num_cpus=0, scheduling_strategy=strategy)(Sender)
            self._sender = sender.remote(server.getsockname(), frames)
            self._socket, _ = server.accept()
        self._socket.settimeout(WAIT_S)
        self.batch()  # allocates

    def batch(self) -> dict[str, float]:
        """Seconds of each piece."""
        serialise = ray.get(self._sender.serialise.remote(), timeout=WAIT_S)
        put, (ref,) = ray.get(self._sender.put.remote(), timeout=WAIT_S)
        transfer, (ready, _) = seconds(
            lambda: ray.wait([ref], timeout=WAIT_S, fetch_local=True)
        )
        assert ready, f"the object store did not deliver in {WAIT_S:g} s"
        get, stored = seconds(lambda: ray.get(ref, timeout=WAIT_S))
        copy, _ = seconds(lambda: self._copy(stored))
        self._check()
        sent = self._sender.send.remote()
        over_socket, _ = seconds(self._receive)
        ray.get(sent, timeout=WAIT_S)
        self._check()
        return {
            "serialise": serialise, "put": put, "transfer": transfer, "get": get, "copy": copy,
            "store": put + transfer + get + copy, "socket": over_socket,
        }  # fmt: skip

    def _copy(self, batch: dict[str, NDArray[np.uint8]]) -> None:
        for key, array in batch.items():
            self._memory[key][...] = array

    def _receive(self) -> None:
        for array in self._memory.values():
            left = array.data.cast("B")
            while left:
                left = left[self._socket.recv_into(left) :]

    def _check(self) -> None:
        """All has come; the memory is cleared for the next time."""
        for key, array in self._memory.items():
            assert np.array_equal(array, self._expected[key])
            array[...] = 0
