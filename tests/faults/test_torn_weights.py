"""Weights that are read while they are written: never a mixture, and always of the version that is
said.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from muster.memory.shared import Arena
from muster.weights import SharedMemory

PATIENCE_S = 60.0


def in_child(read: Callable[[], dict[str, int]]) -> tuple[int, int]:
    """Run ``read`` in a forked process; gives its pid, and where its result can be read."""
    result, there = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(int(2 * PATIENCE_S))
        code = 1
        try:
            os.write(there, json.dumps(read()).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(there)
    return pid, result


def while_reading(
    children: list[tuple[int, int]], write: Callable[[int], None]
) -> tuple[int, list[dict[str, int]]]:
    """Write versions 1, 2, ... until all children have ended; gives their number, and what the
    children say.
    """
    version, running, until = (
        0,
        [pid for pid, _ in children],
        time.monotonic() + PATIENCE_S,
    )
    while running:
        version += 1
        write(version)
        if version % 50 == 0 or time.monotonic() > until:
            running = [pid for pid in running if os.waitpid(pid, os.WNOHANG)[0] == 0]
            if time.monotonic() > until:
                for pid in running:
                    os.kill(pid, signal.SIGKILL)
    results = []
    for _, result in children:
        with os.fdopen(result) as file:
            results.append(json.loads(file.read() or "{}"))
    return version, results


def reader(
    ticket: Any, numel: int, reads: int, number: int = 0
) -> Callable[[], dict[str, int]]:
    """Reads; ``number`` is that of the worker, who gets every second version."""

    def read() -> dict[str, int]:
        subscriber = ticket.open(ticket.fds)
        into = {"a": torch.zeros(numel), "b": torch.zeros(numel)}
        torn = wrong = foreign = backwards = last = 0
        for _ in range(reads):
            subscriber._taken = 0  # read it again, also if it is no newer
            version = subscriber.take(into)
            values = {
                float(f(t)) for t in into.values() for f in (torch.min, torch.max)
            }
            torn += len(values) > 1
            wrong += values != {float(version)}
            foreign += version > 0 and version % 2 != number
            backwards += version < last
            last = version
        return {
            "torn": torn,
            "wrong": wrong,
            "foreign": foreign,
            "backwards": backwards,
        }

    return read


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "numel", "reads", "at_least"),  # reads of each of two readers, updates
    [
        (SharedMemory(), 2_000, 40_000, 10_000),
        (SharedMemory(), 1_000_000, 200, 100),
    ],
    ids=["small", "large"],
)
def test_no_read_is_torn_and_every_version_is_right(scheme, numel, reads, at_least):
    weights = {"a": torch.zeros(numel), "b": torch.zeros(numel)}
    publisher = scheme.publisher(weights, 2)
    tickets = [publisher.ticket(i) for i in range(2)]

    def write(version: int) -> None:
        for tensor in weights.values():
            tensor.fill_(version)
        publisher.publish(weights, version, workers=[version % 2])

    children = [
        in_child(reader(ticket, numel, reads, number))
        for number, ticket in enumerate(tickets)
    ]
    updates, results = while_reading(children, write)
    for thing in (*tickets, publisher):
        thing.close()
    assert results == [{"torn": 0, "wrong": 0, "foreign": 0, "backwards": 0}] * 2
    assert updates >= at_least


def test_the_same_readers_find_torn_weights_in_a_single_buffer():
    numel = 1_000_000
    arena = Arena.create("naive")
    offset = arena.allocate(8 * numel)
    shared = torch.from_numpy(arena.view(offset, 8 * numel).view(np.float32)).view(
        2, numel
    )

    class Naive:
        """Takes what is there."""

        fds: tuple[int, ...] = ()

        def open(self, fds: Any) -> Naive:
            return self

        def take(self, into: dict[str, torch.Tensor]) -> int:
            version = int(shared[0, 0])
            into["a"].copy_(shared[0])
            into["b"].copy_(shared[1])
            return version

    def write(version: int) -> None:
        shared.fill_(version)

    _, results = while_reading([in_child(reader(Naive(), numel, 300))], write)
    arena.close()
    assert results[0]["torn"] > 0
