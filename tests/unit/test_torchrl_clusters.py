"""TorchRL's collectors for many machines in Muster's compat layer: arguments, batches, what is
refused.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torchrl")
pytest.importorskip("gymnasium.envs.classic_control")

import torchrl.collectors.distributed as theirs
from tensordict import TensorDict
from tensordict.nn import (
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from torch import nn
from torchrl.data import LazyTensorStorage, ReplayBuffer, Unbounded
from torchrl.envs import SerialEnv, TensorDictPrimer
from torchrl.modules import LSTMModule
from torchrl.testing.mocking_classes import CountingEnv

import muster
import muster.compat.torchrl.collectors.distributed as ours
from muster.compat.torchrl import Collector
from muster.errors import BadOption, BadWeights, CollectorClosed
from tests.fakes.pendulum import env_maker, linear
from tests.fakes.ray_cluster import needs_ray, ray_cluster
from tests.fakes.telling import made_with, telling
from tests.fakes.torchrl_policies import Constant

__all__ = ["ray_cluster"]  # a fixture
needs_rpc = pytest.mark.skipif(
    not torch.distributed.rpc.is_available(), reason="this PyTorch has no RPC"
)
VERSION = ("collector", "policy_version")
LAUNCHED = [
    "DistributedCollector",
    "DistributedSyncCollector",
    pytest.param("RPCCollector", marks=needs_rpc),
]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def printed(name: str) -> dict[str, Any]:
    """TorchRL's keywords with its defaults."""
    parameters = inspect.signature(getattr(theirs, name)).parameters.values()
    return {
        p.name: p.default
        for p in parameters
        if p.default is not p.empty and p.name != "policy"
    }


@pytest.mark.parametrize("name", LAUNCHED)
def test_every_argument_of_torchrl_with_its_default(name: str) -> None:
    options = printed(name) | {"launcher": "mp", "total_frames": 50}
    with getattr(ours, name)(
        [env_maker] * 2, linear(), frames_per_batch=20, **options
    ) as collector:
        assert (
            collector.total_frames,
            collector.frames_per_batch,
            collector.num_workers,
        ) == (
            50,
            20,
            2,
        )
        assert collector.requested_frames_per_batch == 20
        assert collector.device == collector.storing_device == [None, None]
        assert collector.post_collect_hook is collector.postproc is None
        assert [batch.numel() for batch in collector] == [20, 20, 20], (
            "the last batch is whole"
        )


@needs_ray
@pytest.mark.slow
def test_every_argument_of_torchrl_with_its_default_on_ray(ray_cluster: Any) -> None:
    told = printed("RayCollector") | {"total_frames": 50, "sync": True}
    told["remote_configs"] = [{"num_cpus": 1, "memory": 2**28}] * 2  # as many actors
    collector = ours.RayCollector(env_maker, linear(), frames_per_batch=20, **told)
    try:
        assert [batch.shape for batch in collector] == [(2, 10)] * 3
        asyncio.run(collector.async_shutdown())
        with pytest.raises(CollectorClosed):
            collector.next()
    finally:
        collector.shutdown(5.0, shutdown_ray=False)


@pytest.mark.parametrize(
    "name", ["DistributedCollector", "RPCCollector", "RayCollector"]
)
def test_help_shows_the_meaning_of_every_argument(name: str) -> None:
    cls = getattr(ours, name)
    text = f"{inspect.getdoc(cls)}\n{inspect.getdoc(cls.__init__)}"
    meanings = {
        name
        for line in re.findall(r"^    (\w[\w, ]*):", text, re.M)
        for name in line.split(", ")
    }
    assert (
        set(inspect.signature(cls).parameters)
        - {"create_env_fn", "policy", "frames_per_batch"}
        <= meanings
    )


def test_names_are_those_of_torchrl() -> None:
    assert set(ours.__all__) == set(theirs.__all__)
    for name in ("DistributedCollector", "RPCCollector", "RayCollector"):
        assert issubclass(getattr(ours, name), getattr(muster, name))


# --- batches --------------------------------------------------------------------------------------


def test_a_batch_has_a_row_per_node_with_one_worker_after_another() -> None:
    """As TorchRL 0.14's, whose nodes cannot be shut down here.

    Environments are copied to the nodes.
    """
    options: dict[str, Any] = {
        "num_workers_per_collector": 2,
        "collector_class": "sync",
        "sync": True,
    }
    options |= {
        "launcher": "mp",
        "frames_per_batch": 20,
        "total_frames": 40,
        "postproc": lambda batch: seen.append(batch),
    }
    seen: list[TensorDict] = []
    with ours.DistributedCollector([env_maker()] * 2, linear(), **options) as collector:
        batches = list(collector)
        assert collector.muster_stats().engine == "torch_distributed"
    for batch, shown in zip(batches, seen, strict=True):
        assert batch.shape == (2, 10)
        assert batch.names == [None, "time"]
        assert batch is shown
    ids = batches[1]["collector", "traj_ids"]
    assert ids.tolist() == [[n] * 5 + [n + 1] * 5 for n in (ids[0, 0], ids[1, 0])]
    assert len(ids.unique()) == 4


def test_a_node_is_one_rollout_ahead_as_in_torchrl() -> None:
    """Its next rollout has all weights that were published before the delivery of its last one."""
    options: dict[str, Any] = {
        "launcher": "mp",
        "sync": False,
        "track_policy_version": True,
    }
    with ours.DistributedCollector(
        [env_maker] * 2, linear(), frames_per_batch=20, **options
    ) as collector:
        batches, known, delivered = iter(collector), [0, 0], [0, 0]
        for published in range(30):
            batch, before = next(batches), delivered
            delivered = [worker.frames for worker in collector.muster_stats().workers]
            (node,) = (n for n in range(2) if delivered[n] > before[n])
            assert int(batch[VERSION].min()) >= known[node]
            known[node] = published
            collector.update_policy_weights_()


SHAPES = """
    import importlib, json, sys

    from tensordict.nn import TensorDictModule
    from torch import nn
    from torchrl.envs.libs.gym import GymEnv

    def env_maker():
        return GymEnv("Pendulum-v1", device="cpu")

    if __name__ == "__main__":
        module, name = sys.argv[1:3]
        more = json.loads(sys.argv[3])
        policy = TensorDictModule(nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])
        collector = getattr(importlib.import_module(module), name)(
            [env_maker] * 2, policy, frames_per_batch=20, total_frames=40, sync=True,
            launcher="mp", max_frames_per_traj=5, **more,
        )
        found = []
        for batch in collector:
            leaves = {str(k): [list(v.shape), str(v.dtype)] for k, v in batch.items(True, True)}
            steps = batch["next", "step_count"].flatten().tolist()
            found.append([list(batch.shape), batch.names, str(batch.device), sorted(leaves.items()), steps])
        collector.shutdown()
        print("found", json.dumps(found), flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("DistributedCollector", {}),
        pytest.param("RPCCollector", {}, marks=needs_rpc),
        pytest.param("RPCCollector", {"trajs_per_batch": 2}, marks=needs_rpc),
        pytest.param(
            "RPCCollector",
            {"collector_kwargs": {"trajs_per_batch": 2, "traj_format": "cat"}},
            marks=needs_rpc,
        ),
    ],
    ids=str,
)
def test_batches_look_like_those_of_torchrl(
    name: str, more: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "shapes.py").write_text(textwrap.dedent(SHAPES))
    command = [sys.executable, "-W", "ignore", str(tmp_path / "shapes.py")]
    runs = [
        subprocess.Popen(
            [
                *command,
                module,
                name,
                json.dumps({**more, "tcp_port": str(free_port())}),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for module in (
            "muster.compat.torchrl.collectors.distributed",
            "torchrl.collectors.distributed",
        )
    ]
    try:
        said = [run.communicate(timeout=280)[0] for run in runs]
    finally:
        for run in runs:
            run.kill()
            run.wait()
    found = [
        [line for line in text.splitlines() if line.startswith("found ")]
        for text in said
    ]
    assert all(len(lines) == 1 for lines in found), said
    mine, its = (json.loads(lines[0].removeprefix("found ")) for lines in found)
    assert len(its) == 2
    assert mine == its


def test_trajectories_of_different_nodes_have_different_ids() -> None:
    options: dict[str, Any] = {"max_frames_per_traj": 5, "launcher": "mp", "sync": True}
    with ours.DistributedCollector(
        [env_maker] * 2, linear(), frames_per_batch=20, **options
    ) as collector:
        ids = torch.cat(
            [collector.next()["collector", "traj_ids"] for _ in range(3)], 1
        )
    assert ids.unique().numel() == 12
    assert not set(ids[0].tolist()) & set(ids[1].tolist())


@pytest.mark.parametrize(
    ("interval", "versions"),
    [({}, [0, 1, 2, 3]), ({"update_interval": 2}, [0, 0, 1, 1, 2])],
)
def test_weights_are_published_every_so_many_batches(
    interval: dict[str, int], versions: list[int]
) -> None:
    options: dict[str, Any] = {
        **interval,
        "track_policy_version": True,
        "launcher": "mp",
    }
    with ours.DistributedSyncCollector(
        [env_maker] * 2, linear(), frames_per_batch=4, **options
    ) as collector:
        found = [collector.next()[VERSION].unique().tolist() for _ in versions]
    assert found == [[version] for version in versions]


def test_arguments_without_effect_are_accepted() -> None:
    nothing = {"no_cuda_sync": True, "use_buffers": False, "local_init_rb": True}
    options: dict[str, Any] = {**nothing, "collector_kwargs": nothing, "launcher": "mp"}
    with ours.DistributedSyncCollector(
        [env_maker] * 2, linear(), frames_per_batch=4, **options
    ) as collector:
        assert collector.next().shape == (2, 2)


class CountingPolicy(TensorDictModuleBase):
    """Counts on in every ``CountingEnv``."""

    in_keys = ["observation"]  # noqa: RUF012
    out_keys = ["action"]  # noqa: RUF012

    def forward(self, td: Any) -> Any:
        return td.set("action", torch.ones_like(td["observation"], dtype=torch.int8))


@pytest.mark.parametrize("made_by", ["policy", "factory", "factory beside the policy"])
def test_actions_have_the_shape_and_dtype_of_the_policy(made_by: str) -> None:
    """As ``torchrl.testing``'s policies for a ``CountingEnv``, whose actions are ``[1]`` and int8."""
    policy = None if made_by == "factory" else Constant()
    options: dict[str, Any] = {
        "launcher": "mp",
        "sync": True,
        "tcp_port": str(free_port()),
    }
    if made_by != "policy":
        options["policy_factory"] = Constant
    if policy is not None:
        options["update_interval"] = 1
    with ours.DistributedCollector(
        [CountingEnv] * 2, policy, frames_per_batch=8, **options
    ) as collector:
        first = collector.next()
        assert (first["action"].shape, first["action"].dtype) == ((2, 4), torch.float32)
        if policy is None:
            collector.update_policy_weights_(TensorDict({"weight": torch.tensor(2.0)}))
        else:
            policy.weight.data.add_(1)
        assert (first["action"] == 1).all()
        collector.next()
        assert (collector.next()["action"] == 2).all()


class FloatActions(Constant):
    """Its actions are of the environment's shape, and floats."""

    def forward(self, td: Any) -> Any:
        return td.set("action", self.weight.expand(*td.shape, 1).clone())


@pytest.mark.parametrize("policy", [Constant, FloatActions])
def test_random_actions_are_the_environments_in_the_form_of_the_policys(
    policy: type[Constant],
) -> None:
    """``CountingEnv`` has the actions 0 and 1."""
    expected = (40,) if policy is Constant else (40, 1)
    with ours.DistributedCollector(
        [CountingEnv],
        policy(),
        frames_per_batch=40,
        init_random_frames=40,
        launcher="mp",
        tcp_port=str(free_port()),
    ) as collector:
        batch = collector.next()
        action = batch["action"]
        assert (action.shape, action.dtype) == (expected, torch.float32)
        assert action.unique().tolist() == [0, 1]
        counted = batch["next", "observation"] - batch["observation"]
        assert torch.equal(counted.reshape(-1), action.reshape(-1).int())
        assert (collector.next()["action"] == 1).all()


def test_random_actions_in_this_process_are_in_the_form_of_the_policys() -> None:
    collector = Collector(
        CountingEnv(), Constant(), frames_per_batch=40, init_random_frames=40
    )
    action = collector.next()["action"]
    assert (action.shape, action.dtype) == ((40,), torch.float32)
    assert action.unique().tolist() == [0, 1]
    assert (collector.next()["action"] == 1).all()
    collector.shutdown()


class AnyForm(Constant):
    returns_any_actions = True


def test_a_server_stores_actions_as_they_are_also_of_a_worker_that_was_restarted() -> (
    None
):
    """What the collectors over nodes do with an ``InferenceServer`` of TorchRL's."""
    with muster.MultiSyncCollector(
        [CountingEnv] * 2,
        AnyForm(),
        frames_per_batch=16,
        init_random_frames=16,
        inference="server",
        trust_policy=True,
        on_failure="restart",
    ) as collector:
        random = collector.next()["action"]
        assert (random.shape, random.dtype) == ((2, 8), torch.float32)
        assert set(random.unique().tolist()) <= {0.0, 1.0}
        assert (collector.next()["action"] == 1).all()
        os.kill(collector.stats().workers[1].pid, signal.SIGKILL)
        while not collector.stats().restarts:
            action = collector.next()["action"]
            assert (action.shape, action.dtype) == ((2, 8), torch.float32)
        assert (collector.next()["action"] == 1).all()


class Moded(Constant):
    """Acts 1 in training mode, and 0 in evaluation mode."""

    def forward(self, td: Any) -> Any:
        return td.set(
            "action", torch.full((*td.shape, 1), int(self.training), dtype=torch.int8)
        )


@pytest.mark.parametrize("training", [True, False])
def test_a_policy_acts_in_the_mode_that_it_has_as_in_torchrl(training: bool) -> None:
    options: dict[str, Any] = {"launcher": "mp", "tcp_port": str(free_port())}
    with ours.DistributedCollector(
        [CountingEnv], Moded().train(training), frames_per_batch=8, **options
    ) as collector:
        assert (collector.next()["action"] == int(training)).all()


@pytest.mark.parametrize("name", LAUNCHED)
def test_weights_may_be_nested_dicts(name: str) -> None:
    def nested(value: float) -> dict[str, Any]:
        td: TensorDict = TensorDict.from_module(linear()).data * 0 + value
        return td.to_dict()

    options: dict[str, Any] = {"launcher": "mp"}
    options |= (
        {"update_interval": 100}
        if name == "DistributedSyncCollector"
        else {"sync": True}
    )
    with getattr(ours, name)(
        [env_maker] * 2, linear(), frames_per_batch=4, **options
    ) as collector:
        ways = (
            lambda: collector.update_policy_weights_(nested(0.0)),
            lambda: collector.update_policy_weights_(weights=nested(1.0)),
            lambda: collector.update_policy_weights_(
                weights_dict={"policy": nested(0.0)}
            ),
            lambda: collector.receive_weights(nested(1.0)),
            lambda: collector.receive_weights(weights=nested(0.0)),
        )
        for number, publish in enumerate(ways):
            publish()
            batch = collector.next()
            expected = (batch["observation"].sum(-1, keepdim=True) + 1) * (number % 2)
            torch.testing.assert_close(batch["action"], expected)
        with pytest.raises(BadWeights, match="named differently"):
            collector.update_policy_weights_({"module": {"weight": torch.zeros(1, 3)}})


# --- whole trajectories ---------------------------------------------------------------------------


def short_and_long() -> list[Any]:
    """Environments of two nodes, with episodes of three and of six steps."""
    return [partial(CountingEnv, max_steps=length) for length in (2, 5)]


@pytest.mark.parametrize("where", ["argument", "keyword of the nodes"])
@pytest.mark.parametrize("layout", [None, "padded", "pad", "cat"])
@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("name", LAUNCHED)
def test_whole_trajectories_are_padded_by_default(
    name: str, sync: bool, layout: str | None, where: str
) -> None:
    """As in TorchRL 0.14: so many of each node with ``sync``, and zeros behind them."""
    if name == "DistributedSyncCollector" and not sync:
        pytest.skip("it is always synchronous")
    options: dict[str, Any] = {"launcher": "mp", "frames_per_batch": 24}
    options |= {} if name == "DistributedSyncCollector" else {"sync": sync}
    told: dict[str, Any] = {"trajs_per_batch": 2} | (
        {} if layout is None else {"traj_format": layout}
    )
    options |= told if where == "argument" else {"collector_kwargs": told}
    with getattr(ours, name)(
        short_and_long(), policy=CountingPolicy(), **options
    ) as collector:
        batches = [collector.next() for _ in range(3)]
    count = 4 if sync else 2
    seen: list[int] = []
    for batch in batches:
        ids, done = batch["collector", "traj_ids"], batch["next", "done"][..., 0]
        assert int(done.sum()) == count
        if layout == "cat":
            assert (batch.names, int(done[-1])) == (["time"], 1)
            seen += ids[done].tolist()
            continue
        mask = batch["collector", "mask"]
        assert batch.names == [None, "time"]
        assert mask.shape == (count, int(mask.sum(1).max()))
        assert {int(length) for length in mask.sum(1)} <= {3, 6}
        for key in batch.keys(True, True):
            assert not batch[key][~mask].any(), key
        assert (ids == ids[:, :1]).logical_or(~mask).all()
        seen += ids[:, 0].tolist()
    assert len(set(seen)) == 3 * count


def test_trajectories_of_musters_own_are_so_many_in_all() -> None:
    wanted = muster.Trajectories(2, rule="per_env")
    options: dict[str, Any] = {
        "launcher": "mp",
        "frames_per_batch": 24,
        "sync": True,
        "trajs_per_batch": wanted,
    }
    with ours.RPCCollector(short_and_long(), CountingPolicy(), **options) as collector:
        assert sorted(collector.next()["collector", "mask"].sum(1).tolist()) == [3, 6]


def test_trajectories_in_a_replay_buffer_are_not_padded() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(200))
    options: dict[str, Any] = {
        "launcher": "mp",
        "frames_per_batch": 24,
        "sync": True,
        "trajs_per_batch": 1,
    }
    options |= {"replay_buffer": buffer, "traj_format": "padded"}
    with ours.DistributedCollector(
        short_and_long(), CountingPolicy(), **options
    ) as collector:
        assert collector.next() is None
    stored = buffer[:]
    assert ("collector", "mask") not in stored.keys(True)
    assert int(stored["next", "done"].sum()) == 2
    assert bool(stored["next", "done"][-1])


@needs_ray
@pytest.mark.parametrize("made", [ours.RayCollector, partial(Collector, backend="ray")])
def test_actors_cannot_write_into_a_buffer_of_this_process(made: Any) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(200))
    with pytest.raises(TypeError, match="service_backend='ray'.* or muster.RayBuffer"):
        made([env_maker], linear(), frames_per_batch=10, replay_buffer=buffer)


@pytest.mark.parametrize("adds", [True, [True]])
def test_nodes_add_the_transforms_of_a_recurrent_policy_on_request(adds: Any) -> None:
    name = "auto_register_policy_transforms"
    told = [{name: True}] if isinstance(adds, list) else {name: True}
    lstm = LSTMModule(3, 4, in_key="observation", out_key="features")
    head = TensorDictModule(nn.Linear(4, 1), ["features"], ["action"])
    with ours.DistributedCollector(
        [env_maker],
        TensorDictSequential(lstm, head),
        frames_per_batch=10,
        launcher="mp",
        collector_kwargs=told,
    ) as collector:
        batch = collector.next()
    assert batch["is_init"].squeeze(-1).tolist() == [True] + [False] * 9
    assert not batch["next", "is_init"].any(), "InitTracker's"
    state = batch["next", "recurrent_state_h"]
    assert torch.equal(state[:-1], batch["recurrent_state_h"][1:])


class BeginsAtFive(TensorDictModuleBase):
    in_keys = ["observation", "memory", "is_init"]  # noqa: RUF012
    out_keys = ["action", ("next", "memory")]  # noqa: RUF012

    def make_tensordict_primer(self) -> TensorDictPrimer:
        return TensorDictPrimer(memory=Unbounded((1,)), default_value=5.0)

    def forward(self, td: Any) -> Any:
        td.set("action", torch.zeros(*td.shape, 1))
        return td.set(("next", "memory"), td["memory"] + 1)


def test_nodes_begin_with_the_state_of_a_primer_that_was_added() -> None:
    with ours.DistributedCollector(
        [env_maker],
        BeginsAtFive(),
        frames_per_batch=3,
        launcher="mp",
        collector_kwargs={"auto_register_policy_transforms": True},
    ) as collector:
        assert collector.next()["memory"].squeeze(-1).tolist() == [5, 6, 7]


def test_transforms_of_nodes_that_differ_are_refused() -> None:
    name = "auto_register_policy_transforms"
    with pytest.raises(BadOption, match=f"{name}=.*all nodes share one"):
        ours.DistributedCollector(
            [env_maker] * 2,
            linear(),
            frames_per_batch=10,
            launcher="mp",
            collector_kwargs=[{name: True}, {}],
        )


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("hook", ["none", "postproc", "on_episode_done"])
def test_rpc_joins_the_batches_of_all_nodes(hook: str, batched: bool) -> None:
    seen: list[Any] = []
    options: dict[str, Any] = {"launcher": "mp", "frames_per_batch": 48, "sync": True}
    options |= (
        {} if hook == "none" else {hook: lambda batch: seen.append(batch.clone())}
    )
    envs = (
        [partial(SerialEnv, 2, make) for make in short_and_long()]
        if batched
        else short_and_long()
    )
    with ours.RPCCollector(envs, CountingPolicy(), **options) as collector:
        batch = collector.next()
    assert (batch.shape, batch.names) == (
        ((4, 12), [None, "time"]) if batched else ((48,), ["time"])
    )
    rows = batch["observation"].reshape(2, -1)
    assert (int(rows[0].max()), int(rows[1].max())) == (2, 5), (
        "those of one node after those of the other"
    )
    if hook == "postproc":
        assert (seen[0] == batch).all()
    elif hook == "on_episode_done":
        assert {episode.numel() for episode in seen} == {3, 6}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"split_trajs": True},
        {"preemptive_threshold": 0.5},
        {"extend_buffer": False},
        {"compact_obs": True},
    ],
    ids=str,
)
def test_no_option_excludes_the_join_that_was_not_asked_for(
    options: dict[str, Any],
) -> None:
    told = dict(options)
    if "extend_buffer" in told:
        told["replay_buffer"] = ReplayBuffer(storage=LazyTensorStorage(200))
    options = {"launcher": "mp", "frames_per_batch": 24, "sync": True}
    with ours.RPCCollector(
        short_and_long(), CountingPolicy(), **options, **told
    ) as collector:
        batch = collector.next()
    if "split_trajs" in told:
        assert batch["collector", "mask"].sum() == 24
    elif "extend_buffer" in told:
        assert told["replay_buffer"][:].shape == (12, 2), "time steps of both nodes"
    else:
        assert (batch.shape, batch.names) == ((24,), ["time"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
@pytest.mark.parametrize("where", ["argument", "keyword of the nodes"])
def test_options_for_a_faster_policy_on_nodes_without_cuda(where: str) -> None:
    told: dict[str, Any] = {
        "cudagraph_policy": {"warmup": 3},
        "compile_policy": {"backend": "eager", "warmup": 2},
    }
    options: dict[str, Any] = {"launcher": "mp", "frames_per_batch": 8, "sync": True}
    options |= told if where == "argument" else {"collector_kwargs": told}
    with ours.DistributedCollector(
        short_and_long(), CountingPolicy(), **options
    ) as collector:
        assert collector.next().shape == (2, 4)
    with pytest.raises(TypeError, match="nothing"):
        ours.DistributedCollector(
            short_and_long(),
            launcher="mp",
            frames_per_batch=8,
            collector_kwargs={"cudagraph_policy": {"nothing": 1}},
        )


# --- what is translated, and what is refused ------------------------------------------------------


def test_lists_with_equal_entries_are_one_for_all() -> None:
    options: dict[str, Any] = {
        "policy_factory": [linear, linear],
        "device": ["cpu", "cpu"],
        "launcher": "mp",
    }
    with ours.DistributedCollector(
        [env_maker] * 2, frames_per_batch=10, **options
    ) as collector:
        assert collector.next().device == torch.device("cpu")


@pytest.mark.parametrize("sync", [True, False])
def test_lists_have_an_entry_for_each_node(sync: bool) -> None:
    lengths = [{"create_env_kwargs": {"length": length}} for length in (2, 4)]
    with ours.DistributedCollector(
        [made_with] * 2,
        policy_factory=[telling(1), telling(2)],
        collector_kwargs=lengths,
        frames_per_batch=16 if sync else 8,
        launcher="mp",
        sync=sync,
    ) as collector:
        batch = collector.next()
        rows = batch if sync else [batch, collector.next()]
        found = {
            int(row["number"].unique()): int(row["next", "done"].sum()) for row in rows
        }
    assert found.items() <= {1: 4, 2: 2}.items()
    assert len(found) == 2 or not sync, "else the node that is first may be first again"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"sync": True, "frames_per_batch": 21},
            "21 cannot be shared equally by 2 nodes",
        ),
        ({"storing_device": ["cpu", "meta"]}, "storing_device=.*all nodes share one"),
        ({"policy_factory": [linear, env_maker, linear]}, "policy_factory"),
        ({"device": []}, "device is an empty list"),
        ({"update_interval": 0}, "update_interval=0"),
        (
            {"update_interval": 1, "update_after_each_batch": True},
            "update_interval, update_after_each_batch",
        ),
        (
            {"update_interval": 1, "max_weight_update_interval": 0},
            "all say when to publish",
        ),
        ({"frames_per_batch": 0}, "frames_per_batch=0"),
        ({"trajs_per_batch": 0}, "trajs_per_batch=0"),
        ({"trajs_per_batch": True}, "trajs_per_batch=True"),
        ({"trajs_per_batch": 2, "traj_format": "cut"}, "traj_format='cut'"),
    ],
)
def test_what_nodes_cannot_do_is_refused(options: dict[str, Any], said: str) -> None:
    told = {"frames_per_batch": 20, "launcher": "mp", **options}
    with pytest.raises(BadOption, match=said):
        ours.DistributedCollector([env_maker] * 2, **told)


def test_one_memory_and_joined_batches_exclude_each_other() -> None:
    told: dict[str, Any] = {
        "frames_per_batch": 20,
        "launcher": "mp",
        "sync": True,
        "return_same_td": True,
    }
    with pytest.raises(
        BadOption, match=r"return_same_td .*RPCCollector\(sync=True\) copies"
    ):
        ours.RPCCollector([env_maker] * 2, **told)
    with ours.RPCCollector([env_maker] * 2, cat_results="stack", **told) as collector:
        assert collector.next() is collector.next()
        assert collector.next().shape == (2, 10)


def test_arguments_of_torchrl_that_exclude_each_other() -> None:
    with pytest.raises(TypeError, match="no argument 'sync'"):
        ours.DistributedSyncCollector([env_maker], frames_per_batch=20, sync=False)
    with pytest.raises(BadOption, match="give update_interval instead"):
        ours.DistributedSyncCollector(
            [env_maker], frames_per_batch=20, max_weight_update_interval=3
        )
    with pytest.raises(TypeError, match="frames_per_batch"):
        ours.RPCCollector([env_maker])  # type: ignore[call-arg]
