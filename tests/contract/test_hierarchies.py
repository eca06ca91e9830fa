"""Weights on their way down: main process, nodes, workers, and collectors inside processes of the
user's.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from muster import (
    DistributedCollector,
    MultiAsyncCollector,
    MultiSyncCollector,
    RayCollector,
    RPCCollector,
)
from muster.errors import BadOption
from muster.testing import CountingEnv
from muster.weights import (
    DistributedWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    RayWeightSyncScheme,
    RPCWeightSyncScheme,
    SharedMemoryWeightSyncScheme,
)
from tests.fakes.node_runs import all_blocks_in_groups
from tests.fakes.ray_cluster import cluster, needs_ray
from tests.tools import assert_accounted, counting

PATIENCE = 60.0
VERSION = ("collector", "policy_version")
STEPS = 3  # of every environment in a batch
needs_rpc = pytest.mark.skipif(
    not torch.distributed.rpc.is_available(), reason="this PyTorch has no RPC"
)
TORCH_ENGINES = ("torch_distributed", "direct")  # of DistributedCollector
ENGINES = [
    *TORCH_ENGINES,
    pytest.param("rpc", marks=[needs_rpc, pytest.mark.slow]),
    pytest.param("ray", marks=[needs_ray, pytest.mark.slow]),
    pytest.param("ray, direct", marks=[needs_ray, pytest.mark.slow]),
]


class Actor(nn.Module):
    """Shows its weight in every row."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(value))

    def forward(self, obs: torch.Tensor) -> Any:
        weight = self.weight.expand(obs.shape[:-1])
        return (obs[..., 1] >= weight).long(), {"weight": weight}


class Two(nn.Module):
    """An actor and a critic, which shows its own."""

    def __init__(self, actor: float, critic: float) -> None:
        super().__init__()
        self.actor, self.critic = Actor(actor), Actor(critic)

    def forward(self, obs: torch.Tensor) -> Any:
        action, extras = self.actor(obs)
        return action, {**extras, "value": self.critic(obs)[1]["weight"]}


@contextlib.contextmanager
def nodes(
    policy: Any,
    *,
    workers: int = 2,
    frames: int = 0,
    engine: str = "torch_distributed",
    **options: Any,
) -> Iterator[DistributedCollector | RPCCollector | RayCollector]:
    """Two nodes on this machine, with two environments in each of their workers; single nodes'
    batches by default.
    """
    told: dict[str, Any] = {
        "collector_class": MultiSyncCollector,
        "num_workers_per_collector": workers,
        "num_envs": 2,
        "frames_per_batch": frames or 2 * workers * STEPS,
        "track_policy_version": True,
    }
    make: Any = RPCCollector if engine == "rpc" else DistributedCollector
    if engine in (*TORCH_ENGINES, "rpc"):
        told |= {"launcher": "mp", "transport": engine}
    else:
        cluster()
        make = RayCollector
        told |= {
            "transport": engine.rpartition(" ")[2],
            "remote_configs": {"num_cpus": 1, "memory": 2**28},
        }
    with (
        all_blocks_in_groups(),
        make([counting(5)] * 2, policy, **{**told, **options}) as collector,
    ):
        yield collector


def of(batch: Any) -> tuple[list[float], list[int]]:
    """The weights and the versions that a batch was collected with."""
    return batch["weight"].unique().tolist(), batch[VERSION].unique().tolist()


# --- main process, node, workers ------------------------------------------------------------------


@pytest.mark.parametrize("inference", ["worker", "server"])
@pytest.mark.parametrize("engine", ENGINES)
def test_weights_and_versions_reach_the_leaves(engine, inference):
    policy = Actor(0.0)
    with nodes(
        policy, engine=engine, sync=True, collector_kwargs={"inference": inference}
    ) as collector:
        assert collector.stats().engine == engine.rpartition(" ")[2]
        batch = collector.rollout()
        assert batch["weight"].numel() == 2 * 2 * 2 * STEPS, (
            "two nodes, two workers, two environments"
        )
        assert of(batch) == ([0.0], [0])
        for version in (1, 2):
            with torch.no_grad():
                policy.weight += 1  # what the optimizer does
            assert of(collector.rollout()) == ([float(version) - 1], [version - 1])
            collector.update_policy_weights_(policy)
            assert of(collector.rollout()) == ([float(version)], [version])
        collector.update_policy_weights_(Actor(7.0), worker_ids=[1])
        batch = collector.rollout()
        assert batch["weight"].flatten(1).unique(dim=1).flatten().tolist() == [
            2.0,
            2.0,
            7.0,
            7.0,
        ], "workers of node 1"
        assert torch.equal(batch[VERSION] == 3, batch["weight"] == 7.0)
        assert_accounted(collector)


@pytest.mark.parametrize("cls", [MultiSyncCollector, MultiAsyncCollector])
@pytest.mark.parametrize("engine", ENGINES)
def test_the_seeds_example(engine, cls):
    """Nodes that go on while the user trains: a rollout has the weights that were newest when it
    was begun. (A worker's very first action is asked for when it is started, to see what the policy
    returns.)
    """
    policy = Actor(0.0)
    frames = 2 * STEPS * (2 if cls is MultiSyncCollector else 1)
    schemes = {
        **dict.fromkeys(TORCH_ENGINES, DistributedWeightSyncScheme),
        "rpc": RPCWeightSyncScheme,
    }
    scheme = {"policy": schemes.get(engine, RayWeightSyncScheme)()}
    options = {
        "collector_class": cls,
        "weight_sync_schemes": scheme,
        "total_frames": -1,
    }
    with nodes(policy, engine=engine, frames=frames, **options) as collector:
        seen: list[int] = []
        for batch in collector:
            assert batch["weight"].numel() == frames
            version = batch[VERSION]
            assert torch.equal(batch["weight"], version.float()), (
                "each version has its weights"
            )
            assert (version[..., 1:] == version[..., 1:2]).all(), (
                "and each rollout one version"
            )
            seen.append(int(version.max()))
            if seen.count(seen[-1]) > 2 and seen[-1] >= 2:
                break
            nn.init.constant_(policy.weight, float(collector.policy_version) + 1)
            collector.update_policy_weights_(policy)
        assert seen[-1] >= 2
        assert_accounted(collector)


@pytest.mark.parametrize("scheme", [NoWeightSyncScheme(), "none"], ids=str)
def test_nodes_that_keep_their_weights(scheme):
    with nodes(
        Actor(1.0), workers=1, sync=True, weight_sync_schemes={"policy": scheme}
    ) as collector:
        collector.update_policy_weights_(Actor(2.0))
        assert of(collector.rollout()) == ([1.0], [0])


@pytest.mark.parametrize(
    "scheme",
    [RayWeightSyncScheme(), SharedMemoryWeightSyncScheme(), "shared", 3],
    ids=repr,
)
def test_what_does_not_fit_to_nodes_is_refused(scheme):
    message = "is not a way to send weights to nodes that torch.distributed connects.*DistributedWeightSyncScheme"
    with (
        pytest.raises(BadOption, match=message),
        nodes(Actor(1.0), weight_sync_schemes={"policy": scheme}),
    ):
        pass
    with pytest.raises(
        BadOption, match="DistributedWeightSyncScheme is for DistributedCollector"
    ):
        MultiSyncCollector(
            [counting()],
            Actor(0.0),
            frames_per_batch=4,
            weight_sync_schemes={"policy": DistributedWeightSyncScheme()},
        )


def test_several_models_as_one_version():
    policy = Two(1.0, 10.0)
    with nodes(policy, workers=1, sync=True) as collector:

        def shown() -> tuple[float, float, int]:
            batch = collector.rollout()
            (weight,), (value,), (version,) = (
                batch[key].unique().tolist() for key in ("weight", "value", VERSION)
            )
            return weight, value, version

        assert shown() == (1.0, 10.0, 0)
        collector.update_policy_weights_(Actor(20.0), model_id="critic")
        assert shown() == (1.0, 20.0, 1)
        collector.update_policy_weights_(
            weights_dict={"actor": Actor(3.0), "critic": Actor(30.0).state_dict()}
        )
        assert shown() == (3.0, 30.0, 2)
        with pytest.raises(BadOption, match="model_id='fax' is not known here"):
            collector.update_policy_weights_(
                weights_dict={"actor": Actor(4.0), "fax": Actor(40.0)}
            )
        assert shown() == (3.0, 30.0, 2)


# --- collectors inside the user's own processes ---------------------------------------------------


def collect(scheme: Any, worker: int, pipe: Any) -> None:
    """A process of the user's, with a collector that has workers of its own; answers with what its
    batches show.
    """
    torch.set_num_threads(1)
    factories = [partial(CountingEnv, 5)] * 2
    options: Any = {
        "num_envs": 2,
        "frames_per_batch": 4 * STEPS,
        "track_policy_version": True,
        "worker_idx": worker,
    }
    with MultiSyncCollector(
        factories, Actor(-1.0), weight_recv_schemes={"policy": scheme}, **options
    ) as collector:
        pipe.send(of(collector.rollout()))
        while pipe.poll(PATIENCE) and pipe.recv():
            batch = collector.rollout()
            pipe.send((batch["weight"].numel(), *of(batch)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "cls", [SharedMemoryWeightSyncScheme, MultiProcessWeightSyncScheme]
)
def test_a_collector_in_a_process_of_ones_own_hands_weights_on_to_its_workers(cls):
    scheme = cls(deadline_s=PATIENCE)
    scheme.init_on_sender(model=Actor(1.0), num_workers=2)
    scheme.connect()
    context = multiprocessing.get_context("spawn")
    pipe, there = context.Pipe()
    process = context.Process(target=collect, args=(scheme, 1, there))
    process.start()
    there.close()
    try:
        assert pipe.poll(PATIENCE)
        assert pipe.recv() == ([1.0], [1]), (
            "the parent's first weights, which are this collector's first update"
        )
        for number, value in enumerate((2.0, 3.0), 2):
            scheme.send(
                Actor(value)
            )  # waits for the collector; its workers begin the next rollout with it
            pipe.send(True)
            assert pipe.poll(PATIENCE)
            assert pipe.recv() == (4 * STEPS, [value], [number])
    finally:
        with contextlib.suppress(OSError):
            pipe.send(False)
        process.join(PATIENCE)
        scheme.shutdown()
    assert process.exitcode == 0
