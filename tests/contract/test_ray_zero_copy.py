"""Batches that lie in Ray's object store (``RayCollector(zero_copy=True)``): users may rely on the
same as with other batches.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from muster import RayCollector, policies
from muster.errors import BadOption, SlotsExhausted
from muster.testing import ChainEnv, CountingEnv
from tests.fakes.ray_cluster import cluster, leave, needs_ray, ray_cluster  # noqa: F401
from tests.tools import assert_accounted, assert_chain, assert_same
from tests.waits import wait_until
from tests.warned import warnings_are_errors

pytestmark = [
    needs_ray,
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
]
on_a_cluster = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]
ROOM = {"num_cpus": 1, "memory": 2**28}
T = 1024
SIZED = {"num_envs": 4, "frames_per_batch": 4 * T, "seed": 0}  # about 400 kB


def collector(count: int = 1, env: Any = ChainEnv, policy: Any = None, **options: Any):
    given = {"zero_copy": True, "remote_configs": ROOM, **SIZED, **options}
    return RayCollector([env] * count, policy, **given)


def is_in_store(tensor: torch.Tensor) -> bool:
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if first <= address < last:
            return "plasma" in line
    raise AssertionError("no memory")


def all_in_store(batch: Any) -> bool:
    return all(is_in_store(batch.get(key)) for key in batch.keys(True, True))


class TestBatches:
    pytestmark = on_a_cluster

    def test_are_those_of_copies(self):
        nets = nn.Linear(4, 2), nn.Linear(4, 2)
        nets[1].load_state_dict(nets[0].state_dict())
        with contextlib.ExitStack() as made:
            ours, other = (
                made.enter_context(
                    collector(
                        1,
                        "CartPole-v1",
                        policies.categorical(net),
                        sync=True,
                        track_policy_version=True,
                        zero_copy=net is nets[0],
                    )
                )
                for net in nets
            )
            kept = []
            for number in range(5):
                for each, net in zip((ours, other), nets, strict=True):
                    net.bias.data += torch.tensor([0.1, 0.0])
                    each.update_policy_weights_()
                kept.append((ours.next(), other.next()))
                assert all_in_store(kept[-1][0])
                assert not is_in_store(kept[-1][1]["action"])
                versions = kept[-1][0]["collector", "policy_version"]
                assert set(versions.flatten().tolist()) == {number + 1}
            for one, another in kept:  # the first ones, too: nothing has changed them
                assert_same(one, another)
            assert_accounted(ours)

    def test_of_parts_of_a_rollout_are_those_of_copies(self):
        seen = {True: [], False: []}
        for zero_copy, batches in seen.items():
            with collector(
                sync=True, zero_copy=zero_copy, on_batch=batches.append
            ) as each:
                for steps in (4 * T - 400, 2000, 4 * T):
                    assert each.collect(n_step=steps).n_collected_steps == steps
        assert len(seen[True]) == len(seen[False])
        for one, another in zip(*seen.values(), strict=True):
            assert_same(one, another)
        assert any(all_in_store(batch) for batch in seen[True])

    def test_of_other_machines_are_in_the_store_of_this_one(self):
        with collector(2, sync=False) as ours:  # spread over both Ray nodes
            kept = {}
            while len(kept) < 2:
                batch = ours.next()
                assert all_in_store(batch)
                kept[int(batch["collector", "traj_ids"].min())] = batch
                assert_chain(batch)

    def test_of_several_workers_of_a_node(self):
        options = {"num_workers_per_collector": 2, "collector_class": "sync"}
        with collector(sync=True, **options) as ours:
            batch = ours.next()
            assert batch.shape[0] == 2
            assert all_in_store(batch)
            assert_chain(batch)

    def test_of_a_few_bytes_are_copied(self):
        with collector(frames_per_batch=4) as ours:
            batch = ours.next()
            assert not is_in_store(batch["observation"])
            assert_chain(batch)

    def test_can_be_written_and_are_independent(self):
        with collector(sync=False) as ours:
            first = ours.next()
            second = ours.next()
            before = second.clone()
            with warnings_are_errors():
                for key in list(first.keys(True, True)):
                    first.get(key).zero_()
                first["next", "reward"].add_(1.0).requires_grad_().sum().backward()
            assert_same(second, before)
            third = ours.next()
            assert_chain(third)
            assert (first["observation"] == 0).all()
            assert (first["next", "reward"] == 1).all()
            assert_same(second, before)

    def test_are_within_the_limit_of_slots_and_free_when_they_are_dropped(self):
        with collector(sync=True) as ours:
            nbytes = ours.next().bytes()
        with collector(sync=True, slot_memory_limit=int(3.9 * nbytes)) as ours:
            kept = [ours.next(), ours.next()]
            with pytest.raises(SlotsExhausted, match="still referenced"):
                for _ in range(3):
                    kept.append(ours.next())
            del kept[0]
            gc.collect()
            kept.append(ours.next())
            for _ in range(20):
                kept[-1] = None
                kept[-1] = ours.next()
                assert all_in_store(kept[-1])
            assert_accounted(ours)

    def test_leave_nothing_in_the_store(self, ray_cluster):  # noqa: F811
        from tests.contract.test_ray_links import _objects

        with collector(sync=True) as ours:
            for _ in range(30):
                batch = ours.next()
                part = batch["observation"][0, 0, :3]
            del batch
            wait_until(lambda: _objects(ray_cluster) <= 6, 60.0)
            assert is_in_store(part)

    def test_of_a_node_that_is_killed_stay_and_later_ones_are_right(self):
        with collector(2, sync=False, on_failure="restart") as ours:
            first = [ours.next() for _ in range(4)]
            before = [batch.clone() for batch in first]
            os.kill(ours.stats().workers[0].pid, signal.SIGKILL)
            actors = [ours._nodes.carrier._started.get(node) for node in range(2)]
            os.kill(int(actors[1].state.split()[-1]), signal.SIGKILL)
            for _ in range(12):
                batch = ours.next()
                assert_chain(batch)
                assert all_in_store(batch)
            assert ours.stats().restarts >= 2
            for one, other in zip(first, before, strict=True):
                assert_same(one, other)


class TestLife:
    pytestmark = on_a_cluster

    def test_is_longer_than_that_of_the_collector(self):
        import ray

        address = cluster().address
        leave()  # the collector joins by itself, and leaves
        config = {"address": address, "log_to_driver": False}
        with collector(ray_init_config=config) as ours:
            batch = ours.next()
            part = ours.next()["next", "observation"][:, 1:]
        before = batch.clone(), part.clone()
        assert ray.is_initialized()  # its memory would be used again
        filling = [ray.put(np.full(2**22, 7, np.uint8)) for _ in range(80)]
        assert_same(batch, before[0])
        assert torch.equal(part, before[1])
        assert is_in_store(part)
        del filling, batch
        with collector(ray_init_config=config, frames_per_batch=4) as ours:
            ours.next()
        assert ray.is_initialized()
        del part
        gc.collect()
        with collector(ray_init_config=config, frames_per_batch=4) as ours:
            ours.next()
        assert not ray.is_initialized()

    def test_ends_with_a_ray_of_the_collectors_own_but_batches_stay(self):
        import ray

        cluster()
        leave()
        config = {
            "address": "local",
            "num_cpus": 2,
            "object_store_memory": 100 * 2**20,
            "log_to_driver": False,
        }
        with collector(ray_init_config=config) as ours:
            batch = ours.next()
            before = batch.clone()
        assert not ray.is_initialized()
        assert_same(batch, before)


class TestMemory:
    def test_that_cannot_be_written_is_copied(self, tmp_path):
        from muster.cluster.ray_link import writable

        path = tmp_path / "block"
        path.write_bytes(bytes(range(200)) * 1000)
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        block = np.frombuffer(mapped, np.uint8)
        array = writable(block)
        assert array.flags.writeable
        assert not np.shares_memory(array, block)
        assert (array == block).all()
        array[:] = 0

    def test_that_can_be_written_is_used(self):
        from muster.cluster.ray_link import writable

        block = np.arange(100_000).astype(np.uint8)
        block.flags.writeable = False
        array = writable(block)
        assert np.shares_memory(array, block)
        array[5] = 200
        assert block[5] == 200
        assert block[0] == 0


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"transport": "direct"}, "zero_copy=True with transport='direct'"),
        ({"sync": True}, "rollouts of 2 actors"),
        (
            {"return_same_td": True, "sync": True},
            "zero_copy=True with return_same_td=True",
        ),
    ],
)
def test_refusals(options, match):
    with pytest.raises(BadOption, match=match):
        collector(2, CountingEnv, frames_per_batch=64, **{"num_envs": 4, **options})
