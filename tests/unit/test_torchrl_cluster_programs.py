"""The programs that the second seed document (TorchRL) prints for collectors on many machines, with the data
they must give.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule

from muster import (
    Collector,
    DistributedCollector,
    MultiAsyncCollector,
    MultiSyncCollector,
    RayCollector,
    RPCCollector,
)
from muster.errors import BadOption
from muster.weights import (
    DistributedWeightSyncScheme,
    RayWeightSyncScheme,
    RPCWeightSyncScheme,
)
from tests.fakes.netns import listening
from tests.fakes.ray_cluster import needs_ray, ray_cluster
from tests.faults.test_worker_resources import descendants
from tests.tools import assert_accounted
from tests.waits import free_port, wait_until

pytest.importorskip("torchrl")
pytest.importorskip("gymnasium.envs.classic_control")
from torchrl.data import LazyTensorStorage, RayReplayBuffer
from torchrl.envs.libs.gym import GymEnv

from tests.fakes.pendulum import env_maker, linear

__all__ = ["ray_cluster"]  # a fixture
needs_rpc = pytest.mark.skipif(
    not torch.distributed.rpc.is_available(), reason="this PyTorch has no RPC"
)
STEP_COUNT, TRAJ_IDS, VERSION = (
    "step_count",
    ("collector", "traj_ids"),
    ("collector", "policy_version"),
)


class Learner:
    """The ``train_step`` of the seed, which also looks whether the weights that acted are its own."""

    def __init__(self, policy: TensorDictModule) -> None:
        self.policy = policy
        self.optimizer = torch.optim.SGD(policy.parameters(), 0.1)

    def acted_in(self, batch: Any) -> bool:
        with torch.no_grad():
            return torch.allclose(
                self.policy.module(batch["observation"].clone()),
                batch["action"],
                atol=1e-6,
            )

    def train(self, batch: Any) -> None:
        self.optimizer.zero_grad()
        self.policy.module(batch["observation"].clone()).square().mean().backward()
        self.optimizer.step()


def zero(policy: TensorDictModule, bias: float) -> None:
    """The action is the bias from now on."""
    with torch.no_grad():
        policy.module.weight.zero_()
        policy.module.bias.fill_(bias)


# --- the constructors -----------------------------------------------------------------------------

COMMON = {
    "policy": None,
    "policy_factory": None,
    "total_frames": -1,
    "device": None,
    "collector_class": "single",  # Collector
    "collector_kwargs": None,
    "num_workers_per_collector": 1,
    "sync": False,
    "update_after_each_batch": False,
    "max_weight_update_interval": -1,
    "weight_sync_schemes": None,
    "weight_recv_schemes": None,
}
LAUNCHED = {"backend": "gloo", "launcher": "submitit", "tcp_port": None}
PRINTED = {
    DistributedCollector: COMMON
    | LAUNCHED
    | {
        "slurm_kwargs": None,
        "storing_device": None,
        "env_device": None,
        "policy_device": None,
    },
    RPCCollector: COMMON
    | LAUNCHED
    | {"visible_devices": None, "tensorpipe_options": None, "trajs_per_batch": None},
    RayCollector: COMMON
    | {"ray_init_config": None, "remote_configs": None, "num_collectors": None}
    | {"replay_buffer": None, "trajs_per_batch": None},
}


def defaults(cls: type) -> dict[str, Any]:
    """Of all its keywords."""
    return {name: p.default for name, p in inspect.signature(cls).parameters.items()}


@pytest.mark.parametrize("cls", PRINTED)
def test_constructors_have_what_is_printed_with_these_defaults(cls: type) -> None:
    found = defaults(cls)
    assert {name: found[name] for name in PRINTED[cls]} == PRINTED[cls]
    assert list(inspect.signature(cls).parameters)[:2] == ["create_env_fn", "policy"]
    assert {"frames_per_batch", "max_frames_per_traj"} <= found.keys()


def test_printed_defaults_can_be_given() -> None:
    told: dict[str, Any] = {
        name: default
        for name, default in PRINTED[DistributedCollector].items()
        if name != "policy"
    }
    told |= {"max_frames_per_traj": -1, "collector_class": Collector, "launcher": "mp"}
    with DistributedCollector(
        [env_maker], linear(), frames_per_batch=10, **told
    ) as collector:
        assert collector.next().shape == (10,)


@pytest.mark.parametrize(
    ("given", "workers"),
    [
        ("single", 1),
        ("sync", 2),
        ("async", 2),
        (Collector, 1),
        (MultiSyncCollector, 2),
        (MultiAsyncCollector, 2),
    ],
)
def test_every_collector_class(given: Any, workers: int) -> None:
    options: dict[str, Any] = {
        "collector_class": given,
        "num_workers_per_collector": workers,
        "launcher": "mp",
    }
    with DistributedCollector(
        [env_maker], linear(), frames_per_batch=20, seed=1, **options
    ) as collector:
        batch = collector.next()
        assert len(collector.stats().workers) == workers
    joint = given in ("sync", MultiSyncCollector)
    assert batch.shape == ((2, 10) if joint else (20,)), (
        "a synchronous node joins what its workers did"
    )


# --- DistributedCollector -------------------------------------------------------------------------


def test_distributed_collector() -> None:
    env_maker = lambda: GymEnv("Pendulum-v1", device="cpu")  # noqa: E731
    policy = linear()
    learner = Learner(policy)
    collector = DistributedCollector(
        create_env_fn=[env_maker, env_maker],
        policy=policy,
        frames_per_batch=200,
        total_frames=2_000,
        collector_class=Collector,
        backend="gloo",
        launcher="mp",
        sync=True,
    )
    for batch in collector:
        assert batch.shape == (2, 200), "frames_per_batch * num_nodes"
        assert batch.names == [None, "time"]
        assert len(batch["observation"][:, 0, 0].unique()) == 2, "two nodes, two seeds"
        assert learner.acted_in(batch)
        learner.train(batch)
        collector.update_policy_weights_(policy)
    assert (collector.stats().batches, collector.stats().frames) == (5, 2_000)
    assert_accounted(collector)
    collector.shutdown()


def test_weight_sync_schemes_of_torch_distributed() -> None:
    policy = linear()
    collector = DistributedCollector(
        create_env_fn=[env_maker, env_maker],
        policy=policy,
        frames_per_batch=200,
        weight_sync_schemes={"policy": DistributedWeightSyncScheme()},
        backend="gloo",
        launcher="mp",
        sync=True,
    )
    zero(policy, 0.25)
    collector.update_policy_weights_(policy)
    assert collector.next()["action"].unique().tolist() == [0.25]
    collector.shutdown()


@pytest.mark.parametrize("sync", [True, False])
def test_the_nodes_of_a_batch_get_weights_after_it(sync: bool) -> None:
    policy = linear()
    options: dict[str, Any] = {
        "update_after_each_batch": True,
        "track_policy_version": True,
        "launcher": "mp",
        "sync": sync,
    }
    with DistributedCollector(
        [env_maker] * 2, policy, frames_per_batch=20, **options
    ) as collector:
        first = collector.next()
        assert first[VERSION].unique().tolist() == [0]
        zero(policy, 0.5)
        versions = [0]
        for _ in range(
            500
        ):  # asynchronous nodes are some rollouts ahead, more of them on a busy machine
            batch = collector.next()
            versions = batch[VERSION].unique().tolist()
            assert (batch["action"].unique().tolist() == [0.5]) == (versions != [0])
            if versions != [0]:
                break
        assert versions != [0]


def test_multi_level_hierarchy() -> None:
    policy = linear()
    collector = DistributedCollector(
        create_env_fn=[env_maker, env_maker],
        policy=policy,
        frames_per_batch=200,
        collector_class=MultiSyncCollector,
        num_workers_per_collector=2,
        backend="gloo",
        launcher="mp",
        track_policy_version=True,
    )
    assert len(collector.stats().workers) == 4
    zero(policy, 0.75)
    collector.update_policy_weights_(policy)
    for _ in range(8):  # until what was begun before is through
        batch = collector.next()
        assert batch.shape == (2, 100), "of one node, of its two workers"
        if batch[VERSION].unique().tolist() == [1]:
            break
    assert batch[VERSION].unique().tolist() == [1]
    assert batch["action"].unique().tolist() == [0.75]
    collector.shutdown()


# --- RPCCollector ---------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", [True, False])
def test_rpc_collector(sync: bool) -> None:
    policy = linear()
    collector = RPCCollector(
        create_env_fn=[env_maker, env_maker],
        policy=policy,
        frames_per_batch=50,
        total_frames=400,
        collector_class=Collector,
        collector_kwargs={"storing_device": "cpu"},
        launcher="mp",
        sync=sync,
        visible_devices=["cpu", "cpu"],
        tensorpipe_options={"num_worker_threads": 4},
        max_weight_update_interval=2,
        weight_sync_schemes={"policy": RPCWeightSyncScheme()},
    )
    frames = 0
    for batch in collector:
        assert batch.shape == ((2, 50) if sync else (50,))
        frames += batch.numel()
    assert frames == 400
    assert collector.stats().batches == (4 if sync else 8)
    assert_accounted(collector)
    collector.shutdown()


def test_rpc_collector_of_whole_episodes() -> None:
    options: dict[str, Any] = {
        "max_frames_per_traj": 25,
        "trajs_per_batch": 3,
        "launcher": "mp",
    }
    with RPCCollector(
        [env_maker] * 2, linear(), frames_per_batch=50, **options
    ) as collector:
        batch = collector.next()
    assert batch.shape == (75,)
    assert batch["next", "done"][..., 0].nonzero()[:, 0].tolist() == [24, 49, 74]


def test_rpc_collector_listens_where_nodes_join_and_where_rpc_does() -> None:
    before = listening(os.getpid())
    with RPCCollector(
        [env_maker], linear(), frames_per_batch=10, launcher="mp"
    ) as collector:
        collector.next()
        here = listening(os.getpid()) - before
        nodes = {pid: found for pid in descendants() if (found := listening(pid))}
    assert len(here) == 2
    assert [len(found) for found in nodes.values()] == [1]
    assert {host for found in (here, *nodes.values()) for host, _ in found} == {
        "127.0.0.1"
    }
    assert listening(os.getpid()) == before


def test_rpc_collector_without_rpc_listens_where_nodes_join_and_nowhere_else() -> None:
    before = listening(os.getpid())
    with RPCCollector(
        [env_maker], linear(), frames_per_batch=10, launcher="mp", transport="direct"
    ) as collector:
        collector.next()
        assert len(listening(os.getpid()) - before) == 1
        started = descendants()
        assert started
        assert not any(listening(pid) for pid in started)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"visible_devices": ["cpu"]}, "1 devices for 2 nodes"),
        ({"visible_devices": ["cpu", "gpu"]}, "'gpu', which is not a device"),
        ({"visible_devices": ["cpu", "meta"]}, "'meta': expected 'cpu'"),
        ({"visible_devices": ["cpu", -3]}, "-3, which is not a device"),
        (
            {"tensorpipe_options": {"init_method": "env://"}},
            "'init_method'.*tcp_port and bind",
        ),
        ({"tensorpipe_options": {"device_maps": {}}}, "'device_maps'.*hosts' memory"),
        pytest.param(
            {"tensorpipe_options": {"threads": 3}},
            "threads: .*num_worker_threads",
            marks=needs_rpc,
        ),
        pytest.param(
            {"tensorpipe_options": {"num_worker_threads": 0}},
            "must be positive",
            marks=needs_rpc,
        ),
        pytest.param(
            {"tensorpipe_options": {"num_worker_threads": "many"}},
            "wrong type",
            marks=needs_rpc,
        ),
        pytest.param(
            {"tensorpipe_options": {"_transports": ["pigeon"]}},
            "Unknown transport: pigeon",
            marks=needs_rpc,
        ),
    ],
)
def test_rpc_options_that_cannot_be(options: dict[str, Any], said: str) -> None:
    with pytest.raises(BadOption, match=said):
        RPCCollector(
            [env_maker] * 2, linear(), frames_per_batch=10, launcher="mp", **options
        )


def test_devices_of_rpc_collector_that_this_process_does_not_have() -> None:
    options: dict[str, Any] = {
        "visible_devices": ["cuda:1"],
        "tensorpipe_options": {"rpc_timeout": 10_000},
    }
    with RPCCollector(
        [env_maker], linear(), frames_per_batch=10, launcher="mp", **options
    ) as collector:
        assert collector.next().numel() == 10


# --- what users may have set up before ------------------------------------------------------------

RANKS = """
    import os, sys
    import torch
    import torch.distributed as dist
    import torch.distributed.rpc as rpc

    rank, world_size, master_port, with_rpc = (int(a) for a in sys.argv[1:])

    # Must be called before RPCCollector
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = str(master_port)

    dist.init_process_group(backend="gloo", init_method="env://", rank=rank, world_size=world_size)
    if with_rpc:
        rpc.init_rpc(
            f"COLLECTOR_NODE_{rank}",
            rank=rank,
            world_size=world_size,
            backend=rpc.BackendType.TENSORPIPE,
        )
    if rank == 0:
        from muster import DistributedCollector, RPCCollector

        cls = RPCCollector if with_rpc else DistributedCollector
        made = cls(["CartPole-v1"] * 2, None, frames_per_batch=20, total_frames=80, sync=True, launcher="mp")
        assert [tuple(batch.shape) for batch in made] == [(2, 20)] * 2
        made.shutdown()
    total = torch.ones(())
    dist.all_reduce(total)  # what the user has set up still works
    assert total == world_size
    if with_rpc:
        assert rpc.rpc_sync(f"COLLECTOR_NODE_{(rank + 1) % world_size}", torch.add, (1, 2)) == 3
        rpc.shutdown()
    dist.destroy_process_group()
    print("rank", rank, "is through", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("with_rpc", [pytest.param(1, marks=needs_rpc), 0])
def test_process_groups_of_the_users_own(with_rpc: int, tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(textwrap.dedent(RANKS))
    port = free_port()
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                str(tmp_path / "ranks.py"),
                str(rank),
                "2",
                str(port),
                str(with_rpc),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for number, text in enumerate(said):
        assert f"rank {number} is through" in text, text


# --- RayCollector ---------------------------------------------------------------------------------


@needs_ray
@pytest.mark.slow
def test_ray_collector(ray_cluster: Any) -> None:
    env_maker = lambda: GymEnv("Pendulum-v1", device="cpu")  # noqa: E731
    policy = linear()
    collector = RayCollector(
        create_env_fn=[env_maker, env_maker, env_maker],
        policy=policy,
        collector_class=Collector,
        frames_per_batch=200,
        total_frames=2_000,
        max_frames_per_traj=50,
        collector_kwargs={"device": "cpu", "storing_device": "cpu"},
        num_collectors=3,
        sync=False,
        remote_configs={
            "num_cpus": 2,
            "num_gpus": 0,
            "memory": 1 * 1024**3,
        },
        max_weight_update_interval=2,
    )
    batches = 0
    for batch in collector:
        batches += 1
        assert batch.shape == (200,)
        assert batch.device == torch.device("cpu")
        assert batch["next", "truncated"][..., 0].nonzero()[:, 0].tolist() == [
            49,
            99,
            149,
            199,
        ]
        collector.update_policy_weights_(policy)
    assert (batches, collector.stats().frames) == (10, 2_000)
    assert_accounted(collector)
    collector.shutdown()


@needs_ray
@pytest.mark.slow
def test_ray_broadcasts_and_takes_lists(ray_cluster: Any) -> None:
    policy = linear()
    small = {"num_cpus": 1, "num_gpus": 0, "memory": 2**28}
    collector = RayCollector(
        env_maker,
        policy,
        frames_per_batch=50,
        num_collectors=2,
        sync=True,
        collector_kwargs=[{"storing_device": "cpu"}] * 2,
        remote_configs=[small, small | {"num_cpus": 2}],
        weight_sync_schemes={"policy": RayWeightSyncScheme()},
        update_after_each_batch=True,
    )
    zero(policy, 0.25)
    collector.update_policy_weights_(policy)
    batch = collector.next()
    assert batch.shape == (2, 50)
    assert batch["action"].unique().tolist() == [0.25]
    zero(policy, 0.5)
    assert collector.next()["action"].unique().tolist() == [0.5], "without a call"
    collector.shutdown()


@needs_ray
@pytest.mark.slow
def test_ray_actors_write_into_a_replay_buffer(ray_cluster: Any) -> None:
    small = {"num_cpus": 1, "num_gpus": 0, "memory": 2**28}
    replay_buffer = RayReplayBuffer(
        storage=partial(LazyTensorStorage, 1_000), remote_config=small
    )
    try:
        collector = RayCollector(
            env_maker,
            linear(),
            frames_per_batch=100,
            total_frames=400,
            num_collectors=2,
            remote_configs=small,
            replay_buffer=replay_buffer,
        )
        assert list(collector) == [None] * 4, "they do not come by here"
        assert_accounted(collector)
        collector.shutdown()
        assert len(replay_buffer) >= 400, "and what had been begun"
        assert replay_buffer.sample(32)["next", "observation"].shape == (32, 3)
    finally:
        replay_buffer.close()


@needs_ray
@pytest.mark.slow
def test_actors_write_nothing_while_the_collector_is_paused(ray_cluster: Any) -> None:
    small = {"num_cpus": 1, "num_gpus": 0, "memory": 2**28}
    replay_buffer = RayReplayBuffer(
        storage=partial(LazyTensorStorage, 1_000), remote_config=small
    )
    try:
        with RayCollector(
            env_maker,
            linear(),
            frames_per_batch=10,
            num_collectors=2,
            remote_configs=small,
            replay_buffer=replay_buffer,
        ) as collector:
            collector.start()
            wait_until(lambda: replay_buffer.write_count > 0)
            for _ in range(3):
                with collector.pause():
                    written = replay_buffer.write_count
                    assert written == collector.stats().executed, "nothing is begun"
                wait_until(lambda before=written: replay_buffer.write_count > before)
            collector.async_shutdown()
    finally:
        replay_buffer.close()


@needs_ray
@pytest.mark.slow
def test_lists_of_another_length_are_refused(ray_cluster: Any) -> None:
    with pytest.raises(
        BadOption, match=r"num_collectors=3, but create_env_fn has 2 entries"
    ):
        RayCollector([env_maker] * 2, linear(), frames_per_batch=50, num_collectors=3)
    with pytest.raises(BadOption, match=r"remote_configs.*2"):
        RayCollector(
            [env_maker] * 2,
            linear(),
            frames_per_batch=50,
            remote_configs=[{"num_cpus": 1}] * 3,
        )
    with pytest.raises(
        BadOption, match=r"transport='socket': expected 'ray' or 'direct'"
    ):
        RayCollector([env_maker] * 2, linear(), frames_per_batch=50, transport="socket")
