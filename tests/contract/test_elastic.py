"""Nodes that come and go while a collector is at work: real ones, over torch.distributed and Ray."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from muster import DistributedCollector, RayCollector, RPCCollector
from tests.fakes.leisurely import LeisurelyEnv
from tests.fakes.ray_cluster import Remote, needs_ray, ray_cluster  # noqa: F401 (a fixture)
from tests.tools import assert_accounted, assert_balanced
from tests.waits import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

USUAL = {
    "num_envs": 2,
    "frames_per_batch": 100,
    "sync": False,
    "on_failure": "restart",
    "seed": 0,
    "min_nodes": 1,
}
TRIES = 100_000
KINDS: list[Any] = [DistributedCollector]
if torch.distributed.rpc.is_available():
    KINDS.append(RPCCollector)


def until(collector: Any, batches: Iterator[Any], *contributing: int) -> None:
    """Take batches until each of these workers has had a part in one more."""
    before = [worker.frames for worker in collector.stats().workers]
    for _ in range(TRIES):
        next(batches)
        workers = collector.stats().workers
        if all(workers[i].frames > before[i] for i in contributing):
            return
    raise AssertionError(
        f"{contributing} have not all contributed: {collector.stats().workers}"
    )


@contextlib.contextmanager
def node(where: str, token: str) -> Iterator[subprocess.Popen[bytes]]:
    """A node that somebody starts; it does not outlive the test."""
    argv = [sys.executable, "-m", "muster", "node", where]
    with subprocess.Popen(argv, env=os.environ | {"MUSTER_TOKEN": token}) as started:
        try:
            yield started
        finally:
            started.kill()


@pytest.mark.parametrize("kind", KINDS)
def test_nodes_that_people_start_when_they_like(kind: Any) -> None:
    port, token = free_port(), secrets.token_hex(32)
    where = f"127.0.0.1:{port}"
    options: dict[str, Any] = {
        "launcher": "manual",
        "tcp_port": port,
        "token": token.encode(),
        "total_frames": -1,
    }
    with (
        node(where, token) as first,
        kind([LeisurelyEnv] * 3, None, **USUAL | options) as collector,
        node(where, token),
    ):
        batches = iter(collector)
        (one,) = [
            worker.index
            for worker in collector.stats().workers
            if worker.state == "working"
        ]
        others = {0, 1, 2} - {one}
        for _ in range(TRIES):
            next(batches)
            if come := [
                worker.index
                for worker in collector.stats().workers
                if worker.frames and worker.index != one
            ]:
                break
        (other,) = come
        (missing,) = others - {other}
        assert collector.stats().workers[missing].state == "joining"
        first.send_signal(signal.SIGKILL)
        first.wait()
        for _ in range(TRIES):
            next(batches)
            if collector.stats().workers[one].state == "joining":
                break
        until(collector, batches, other)
        assert collector.stats().nodes == 1
        with node(where, token), node(where, token):
            until(collector, batches, one, other, missing)
            assert collector.stats().nodes == 3
            assert collector.stats().restarts == 1
            collector.shutdown()
    assert_accounted(collector)


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_does_not_wait_for_nodes(tmp_path: Path, kind: Any) -> None:
    port, token = free_port(), secrets.token_hex(32)
    options: dict[str, Any] = {
        "launcher": "manual",
        "tcp_port": port,
        "token": token.encode(),
        "total_frames": 2000,
    }
    with (
        node(f"127.0.0.1:{port}", token),
        kind([LeisurelyEnv] * 3, None, **USUAL | options) as collector,
    ):
        assert sum(batch.numel() for batch in collector) == 2000
        assert sum(worker.frames > 0 for worker in collector.stats().workers) == 1
    assert_accounted(collector)


@needs_ray
def test_machines_that_join_a_ray_cluster_and_leave_it(ray_cluster: Remote) -> None:  # noqa: F811
    room = {
        "num_cpus": 4,
        "node_ip_address": "127.0.0.1",
        "object_store_memory": 200 * 2**20,
    }
    machines = [ray_cluster.add_node(**room, resources={"elastic": 1})]
    need = {"num_cpus": 1, "resources": {"elastic": 1}}
    try:
        with RayCollector(
            [LeisurelyEnv],
            None,
            num_collectors=3,
            remote_configs=need,
            total_frames=-1,
            **USUAL,
        ) as collector:
            batches = iter(collector)
            (one,) = [
                worker.index
                for worker in collector.stats().workers
                if worker.state == "working"
            ]
            for _ in range(5):
                next(batches)
            assert collector.stats().nodes == 1
            machines.append(ray_cluster.add_node(**room, resources={"elastic": 2}))
            others = {0, 1, 2} - {one}
            until(collector, batches, *others)
            assert collector.stats().nodes == 3
            ray_cluster.remove_node(machines.pop(0), allow_graceful=False)
            for _ in range(TRIES):
                next(batches)
                if collector.stats().workers[one].state == "joining":
                    break
            until(collector, batches, *others)
            assert collector.stats().nodes == 2
            machines.append(ray_cluster.add_node(**room, resources={"elastic": 1}))
            until(collector, batches, one)
        stats = collector.stats()
        assert_balanced(stats)
        assert stats.restarts == 1
    finally:
        for machine in machines:
            ray_cluster.remove_node(machine)
