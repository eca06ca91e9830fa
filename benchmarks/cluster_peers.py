"""Collectors with nodes, Muster's and TorchRL's, and torch.distributed by itself; importing this
makes them known.

``python -m benchmarks.cluster_peers`` is the process of one system of ``benchmarks.clusters``; see
``worker``.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import torch
from torch import Tensor, nn

import muster
from benchmarks import envs, worker
from benchmarks.envs import FramesEnv
from benchmarks.nets import PlainPolicy
from benchmarks.systems import SYSTEMS
from benchmarks.systems.muster_ import head_for
from benchmarks.workers_systems import PAIRS, Crewed
from benchmarks.workloads import WORKLOADS, Workload

SLOW_ID = "MusterBench/SlowFrames-v0"
RAY_ADDRESS = "MUSTER_BENCH_RAY"  # environment variable; the cluster that all systems with Ray share
HEAVY = 10_000_000  # float32: 40 MB
MEMORY = 512 * 2**20  # of an actor, for Ray's scheduler
QUIET: dict[str, Any] = {"object_store_memory": 400 * 2**20, "include_dashboard": False}

gymnasium.register(
    SLOW_ID, entry_point=functools.partial(FramesEnv, 200e-6), max_episode_steps=500
)  # as ``FRAMES``, but a step costs what a small simulator's does


CARTPOLE = Workload(
    "nodes-cartpole", "CartPole-v1", 16, 128, "2 nodes, 8 CartPoles on each"
)
FRAMES = Workload(
    "nodes-frames",
    envs.FRAMES,
    8,
    128,
    "2 nodes, 4 envs on each, 84x84x4 uint8, 20 us step",
)
SLOW_FRAMES = Workload(
    "nodes-slow-frames",
    f"benchmarks.cluster_peers:{SLOW_ID}",
    8,
    128,
    "2 nodes, 4 envs on each, 84x84x4 uint8, 200 us step",
)
WEIGHTS = Workload(
    "nodes-weights",
    "CartPole-v1",
    4,
    1,
    "4 nodes, 1 CartPole on each, 40 MB of weights, one step",
)


# --- TorchRL --------------------------------------------------------------------------------------


def serial(workload: Workload) -> Any:
    """All environments of a node, in its process; as ``systems.torchrl_``."""
    from torchrl.envs import GymWrapper, SerialEnv

    torch.set_num_threads(1)
    one = functools.partial(_wrapped, workload)
    return (
        GymWrapper(workload.make()) if workload.B == 1 else SerialEnv(workload.B, one)
    )


def _wrapped(workload: Workload) -> Any:
    from torchrl.envs import GymWrapper

    return GymWrapper(
        workload.make(), categorical_action_encoding=True, from_pixels=False
    )


def actor(workload: Workload) -> Any:
    """``PlainPolicy`` as TorchRL has it."""
    from tensordict.nn import TensorDictModule
    from torch.distributions import Categorical
    from torchrl.modules import ProbabilisticActor

    net = PlainPolicy(workload.make()).net
    return ProbabilisticActor(
        TensorDictModule(net, ["observation"], ["logits"]),
        in_keys=["logits"],
        spec=serial(workload).action_spec,
        distribution_class=Categorical,
        return_log_prob=True,
    )


class TorchRL:
    """A collector of two nodes, each with half of the workload's environments.

    TorchRL divides ``frames_per_batch`` by the nodes if they are synchronous, and does not if they
    are not.

    Args:
        engine: "DistributedCollector" or "RayCollector".
        nodes: how many.
    """

    def __init__(
        self, workload: Workload, engine: str, *, sync: bool, nodes: int = 2
    ) -> None:
        from torchrl.collectors import distributed

        share = replace(workload, B=workload.B // nodes)
        factories = [functools.partial(serial, share)] * nodes
        own = (
            distributed_options()
            if engine == "DistributedCollector"
            else ray_options(nodes)
        )
        frames = workload.frames if sync else share.frames
        self.collector: Any = getattr(distributed, engine)(
            factories,
            actor(share),
            frames_per_batch=frames,
            total_frames=10**9,
            sync=sync,
            **own,
        )
        self.batches: Iterator[Any] = iter(self.collector)

    def rollout(self) -> int:
        return int(next(self.batches).numel())

    def close(self) -> None:
        """Nothing: all processes of the session are ended with this one."""


def distributed_options() -> dict[str, Any]:
    return {
        "launcher": "mp",
        "backend": "gloo",
        "tcp_port": 20_000 + os.getpid() % 20_000,
    }


def ray_options(nodes: int, *, one_store: bool = False) -> dict[str, Any]:
    """One actor on each of the cluster's nodes.

    For every whole CPU of a node Ray starts a process in advance.

    Args:
        one_store: instead, all of them on the only node of a Ray of their own, as ``ray.init()``
            starts it.
    """
    if one_store:
        store = {"address": "local", "num_cpus": 1, "log_to_driver": False, **QUIET}
        return {
            "ray_init_config": store,
            "remote_configs": {"num_cpus": 0.1, "num_gpus": 0, "memory": MEMORY},
        }
    each = [
        {
            "num_cpus": 0.1,
            "num_gpus": 0,
            "memory": MEMORY,
            "resources": {f"place-{i}": 1},
        }
        for i in range(nodes)
    ]
    address = os.environ[RAY_ADDRESS]
    quiet = {
        "log_to_driver": False,
        "runtime_env": {"env_vars": {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}},
    }
    return {"ray_init_config": {"address": address, **quiet}, "remote_configs": each}


@contextmanager
def ray_cluster(nodes: int) -> Iterator[str]:
    """A Ray head and so many nodes with processes and object stores of their own on this machine;
    its address.
    """
    folder = tempfile.mkdtemp(
        prefix="bench-ray-", dir="/tmp"
    )  # else other clusters' users would find this one
    os.environ["RAY_TMPDIR"] = folder
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **QUIET})
    try:
        for i in range(nodes):
            cluster.add_node(
                num_cpus=1, resources={f"place-{i}": 100}, memory=100 * MEMORY, **QUIET
            )
        yield cluster.address
    finally:
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


# --- torch.distributed by itself ------------------------------------------------------------------


class Broadcast:
    """40 MB from one process to four, and a word back from each. A "frame" is one time.

    Args:
        collective: ``broadcast``; else four ``isend`` out of the same buffer.
    """

    def __init__(
        self, workload: Workload, nodes: int = 4, *, collective: bool = True
    ) -> None:
        self._nodes, self._collective = nodes, collective
        path = Path(tempfile.mkdtemp(prefix="muster-bench-")) / "store"
        context = multiprocessing.get_context("fork")
        for rank in range(1, nodes + 1):
            context.Process(
                target=_get, args=(str(path), rank, nodes + 1, collective), daemon=True
            ).start()
        self._buffer = _join(str(path), 0, nodes + 1)

    def rollout(self) -> int:
        from torch import distributed

        if self._collective:
            distributed.broadcast(self._buffer, 0)
        else:
            for work in [
                distributed.isend(self._buffer, rank)
                for rank in range(1, self._nodes + 1)
            ]:
                assert work is not None
                work.wait()
        distributed.barrier()
        return 1

    def close(self) -> None:
        """Nothing: the others end with this process."""


def _join(path: str, rank: int, world: int) -> Tensor:
    from torch import distributed

    distributed.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=world
    )
    return torch.ones(HEAVY)


def _get(path: str, rank: int, world: int, collective: bool) -> None:
    from torch import distributed

    buffer = _join(path, rank, world)
    while True:
        if collective:
            distributed.broadcast(buffer, 0)
        else:
            distributed.recv(buffer, 0)
        distributed.barrier()


class Heavy(nn.Module):
    """The policy with 40 MB of weights more, which cost nothing but their transport."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.plain = PlainPolicy(workload.make())
        self.more = nn.Parameter(torch.zeros(HEAVY))

    def forward(self, obs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """See ``PlainPolicy``."""
        found: tuple[Tensor, dict[str, Tensor]] = self.plain(obs)
        return found


# --- Muster's -------------------------------------------------------------------------------------


class Nodes:
    """A collector with nodes; the workload's environments are divided among them.

    Args:
        engine: "DistributedCollector" or "RayCollector".
        policy: "plain", "heads" or "heavy".
        one_store: see ``ray_options``.
    """

    def __init__(
        self,
        workload: Workload,
        engine: str,
        policy: str = "plain",
        nodes: int = 2,
        *,
        one_store: bool = False,
        **options: Any,
    ) -> None:
        share = workload.B // nodes
        ray = engine == "RayCollector"
        own = ray_options(nodes, one_store=one_store) if ray else {"launcher": "mp"}
        makes = {
            "plain": lambda: PlainPolicy(workload.make()).eval(),
            "heavy": lambda: Heavy(workload).eval(),
        }
        makes["heads"] = lambda: head_for(workload.make())
        self.collector: Any = getattr(muster, engine)(
            [workload.make] * nodes,
            makes[policy](),
            num_envs=None if share == 1 else share,
            frames_per_batch=workload.frames // nodes,
            collector_class="single",
            seed=0,
            **own,
            **options,
        )
        self.batches: Any = iter(self.collector)

    def rollout(self) -> int:
        return int(next(self.batches).numel())

    def close(self) -> None:
        self.collector.shutdown()


class Publish:
    """One step on every node; before it, new weights of 40 MB for all nodes. A "frame" is one time.

    Args:
        publish: else it is the step alone.
        one_store: see ``ray_options``.
    """

    def __init__(
        self, workload: Workload, engine: str, *, publish: bool, one_store: bool = False
    ) -> None:
        self._nodes, self._publish = (
            _heavy(workload, engine, one_store=one_store),
            publish,
        )

    def rollout(self) -> int:
        if self._publish:
            self._nodes.collector.update_policy_weights_()
        self._nodes.rollout()
        return 1

    def close(self) -> None:
        """Nothing: the collector is also another system's, and ends with the process."""


@functools.cache
def _heavy(workload: Workload, engine: str, *, one_store: bool) -> Nodes:
    return Nodes(workload, engine, "heavy", nodes=4, sync=True, one_store=one_store)


# --- all systems, by name -------------------------------------------------------------------------


_NEEDS = {"DistributedCollector": ("torch", "gymnasium", "tensordict")}
_NEEDS["RayCollector"] = (*_NEEDS["DistributedCollector"], "ray")
SHORT = {"DistributedCollector": "dist", "RayCollector": "ray"}
OF_SHORT = {
    **{short: (engine, False) for engine, short in SHORT.items()},
    "ray-one-store": ("RayCollector", True),
}


def _ours(engine: str, policy: str, *, sync: bool) -> dict[str, Crewed]:
    how = "sync" if sync else "async"
    options = {"engine": engine, "policy": policy, "sync": sync}
    label = f"Muster {engine}, {how}, {policy}"
    return {
        f"{SHORT[engine]}-{how}-{policy}": Crewed(
            "cluster_peers:Nodes",
            label,
            _NEEDS[engine],
            options=options,
            ahead=not sync,
        )
    }


def _theirs(engine: str, *, sync: bool) -> dict[str, Crewed]:
    how = "sync" if sync else "async"
    needs = (*_NEEDS[engine], "torchrl", "pandas")
    label = f"TorchRL {engine}, {how}"
    options = {"engine": engine, "sync": sync}
    return {
        f"torchrl-{SHORT[engine]}-{how}": Crewed(
            "cluster_peers:TorchRL", label, needs, options=options, ahead=not sync
        )
    }


def _weights(short: str) -> dict[str, Crewed]:
    engine, one_store = OF_SHORT[short]
    where = ", one object store" if one_store else ""
    return {
        f"{short}-{name}": Crewed(
            "cluster_peers:Publish", f"Muster {engine}{where}, {label}", _NEEDS[engine], home=f"{short}-weights",
            options={"engine": engine, "publish": name == "publish", "one_store": one_store},
        )
        for name, label in (("publish", "publish and one step"), ("step", "one step"))
    }  # fmt: skip


_ENGINES = ("DistributedCollector", "RayCollector")
SPEED = {
    name: entry
    for engine in _ENGINES
    for sync in (True, False)
    for name, entry in {
        **_ours(engine, "plain", sync=sync),
        **_ours(engine, "heads", sync=sync),
        **_theirs(engine, sync=sync),
    }.items()
}
PLAIN = {
    "broadcast": Crewed(
        "cluster_peers:Broadcast",
        "torch.distributed.broadcast",
        options={"collective": True},
    ),
    "isends": Crewed(
        "cluster_peers:Broadcast",
        "4 x torch.distributed.isend",
        options={"collective": False},
    ),
}
ONE_STORE = {
    "ray-one-store": Crewed(
        "cluster_peers:Nodes", "Muster RayCollector, sync, plain, one object store", _NEEDS["RayCollector"],
        options={"engine": "RayCollector", "sync": True, "one_store": True},
    )
}  # fmt: skip
OF_WEIGHTS = {
    name: entry for short in OF_SHORT for name, entry in _weights(short).items()
}
SYSTEMS.update({**PAIRS, **SPEED, **PLAIN, **OF_WEIGHTS, **ONE_STORE})
WORKLOADS.update({w.name: w for w in (CARTPOLE, FRAMES, SLOW_FRAMES, WEIGHTS)})


if __name__ == "__main__":
    worker.main()
