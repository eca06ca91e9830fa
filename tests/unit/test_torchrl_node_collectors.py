"""What TorchRL's programs call on collectors with nodes, and on the collectors of the nodes: names,
paths, hooks, weight updaters and numbers.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("torchrl")
pytest.importorskip("gymnasium.envs.classic_control")

import torchrl.collectors.distributed as theirs
from tensordict import TensorDict
from torch.distributed import rpc
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import SerialEnv
from torchrl.testing.mocking_classes import CountingEnv

import muster.compat.torchrl.collectors.distributed as ours
from muster.compat.torchrl import Collector
from muster.compat.torchrl.node_collectors import (
    NodeCollector,
    calls_of,
    stats_of_nodes,
)
from muster.errors import BadOption, BadWeights, CollectorClosed, WorkerDied
from tests.fakes.pendulum import env_maker, linear
from tests.fakes.ray_cluster import needs_ray, ray_cluster
from tests.fakes.stats import stats, worker
from tests.fakes.torchrl_policies import Constant

__all__ = ["ray_cluster"]  # a fixture
PUBLIC = (
    *(
        "collectors",
        "collectors.collectors",
        "collectors.utils",
        "collectors.weight_update",
    ),
    *("collectors.distributed", "collectors.distributed.default_configs"),
    *(
        "collectors.distributed.generic",
        "collectors.distributed.ray",
        "collectors.distributed.rpc",
    ),
    *("collectors.distributed.ray_eval_worker", "collectors.distributed.sync"),
    *(
        "collectors.distributed.utils",
        "weight_update",
        "weight_update.weight_sync_schemes",
    ),
)
ACTOR = {"num_cpus": 1, "memory": 2**28}


@pytest.fixture
def opened() -> Iterator[Any]:
    """A collector with two nodes in processes of this machine."""
    with ours.DistributedCollector(
        [env_maker] * 2,
        linear(),
        frames_per_batch=20,
        total_frames=60,
        sync=True,
        launcher="mp",
    ) as collector:
        yield collector


@pytest.mark.parametrize("path", PUBLIC)
def test_names_are_at_the_path_of_torchrl(path: str) -> None:
    there = importlib.import_module(f"torchrl.{path}")
    here = importlib.import_module(f"muster.compat.torchrl.{path}")
    public = [
        name for name in getattr(there, "__all__", ()) if not name.startswith("_")
    ]
    missing = [name for name in public if getattr(here, name, None) is None]
    assert missing == []
    assert set(getattr(here, "__all__", ())) <= set(dir(there)), "and no names besides"


@pytest.mark.parametrize(
    "name", ["DistributedCollector", "RPCCollector", "RayCollector"]
)
def test_methods_of_torchrl_are_there(name: str) -> None:
    there, here = getattr(theirs, name), getattr(ours, name)
    methods = [
        m for m in dir(there) if not m.startswith("_") and callable(getattr(there, m))
    ]
    assert [
        method for method in methods if not callable(getattr(here, method, None))
    ] == []


@pytest.mark.parametrize(
    "name", ["DistributedCollector", "RPCCollector", "RayCollector"]
)
def test_defaults_are_those_of_torchrl(name: str) -> None:
    there, here = (
        inspect.signature(getattr(module, name).__init__).parameters
        for module in (theirs, ours)
    )
    named = {
        "collector_class",
        "exploration_type",
    }  # classes and enums there, their names here
    differ = {
        parameter: (there[parameter].default, here[parameter].default)
        for parameter in there.keys() & here.keys() - named
        if there[parameter].default != here[parameter].default
    }
    assert differ == {}


def test_attributes_of_torchrl_are_there(opened: Any) -> None:
    public = [
        name for name in dir(theirs.DistributedCollector) if not name.startswith("_")
    ]
    # unlike these, TorchRL's are only defined where another collector has set them
    unset = {"worker_idx"}
    assert [
        name for name in public if name not in unset and not hasattr(opened, name)
    ] == []
    assert (
        opened.trajs_per_batch
        is opened.trajs_per_write
        is opened.profile_config
        is None
    )
    assert (opened.traj_format, opened.verbose) == ("padded", False)


def set_by(cls: type) -> set[str]:
    """Public attributes that the constructor of a class sets."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls.__init__)))  # type: ignore[misc]
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
        and not node.attr.startswith("_")
    }


def test_arguments_are_attributes_as_in_torchrl(opened: Any) -> None:
    # what its own steps need, and arguments that are others here
    internal = {
        "collector_class",
        "env_constructors",
        "max_weight_update_interval",
        "policy_weights",
    }
    for cls in (theirs.DistributedCollector, theirs.RayCollector):
        known = set_by(cls)
        assert "frames_per_batch" in known
        internal |= set() if cls is theirs.DistributedCollector else {"no_cuda_sync"}
        given = known - internal
        assert sorted(name for name in given if not hasattr(opened, name)) == []
    assert (opened.launcher, opened.backend, opened.init_random_frames) == (
        "mp",
        "gloo",
        0,
    )
    assert opened.policy_factory == [None, None]
    assert opened.collected_frames == 0
    next(iter(opened))
    assert opened.collected_frames == 20


# --- calls on this collector ----------------------------------------------------------------------


def test_paths_and_repeated_calls_of_this_collector(opened: Any) -> None:
    weight = opened.get_distant_attr("policy.module.weight")
    assert weight is opened.policy.module.weight
    assert opened.map_fn(
        "get_distant_attr", [("frames_per_batch",), ("total_frames",)]
    ) == [20, 60]
    assert opened.map_fn("next")[0].shape == (2, 10), "one call without lists"
    seeds = opened.map_fn("set_seed", list_of_kwargs=[{"seed": 4}, {"seed": 8}])
    assert seeds == [5, 9], "two environments"
    with pytest.raises(ValueError, match="must have the same length"):
        opened.map_fn("next", [(), ()], [{}])
    with pytest.raises(
        BadOption, match="'total_frames' is int, which cannot be called"
    ):
        opened.map_fn("total_frames")
    with pytest.raises(BadOption, match="the path 'policy.nothing' leads nowhere"):
        opened.get_distant_attr("policy.nothing")


def test_hooks_can_be_set_after_the_collector_was_made(opened: Any) -> None:
    seen: list[Any] = []
    assert opened.pre_collect_hook is opened.post_collect_hook is None
    opened.pre_collect_hook = lambda: seen.append("before")
    opened.set_post_collect_hook(lambda batch: seen.append(batch.numel()))
    opened.next()
    assert seen == ["before", 20]
    opened.post_collect_hook = None
    opened.next()
    assert seen == ["before", 20, "before"]


def test_a_given_hook_is_shown_and_can_be_replaced() -> None:
    first: list[int] = []
    second: list[int] = []

    def given(batch: Any) -> None:
        first.append(batch.numel())

    with ours.DistributedCollector(
        [env_maker],
        linear(),
        frames_per_batch=10,
        launcher="mp",
        post_collect_hook=given,
    ) as collector:
        assert collector.post_collect_hook is given
        collector.next()
        collector.post_collect_hook = lambda batch: second.append(batch.numel())
        collector.next()
    assert (first, second) == ([10], [10])


@needs_ray
@pytest.mark.slow
def test_a_hook_that_would_not_be_called_is_refused(ray_cluster: Any) -> None:
    from muster import RayBuffer

    buffer = RayBuffer(partial(ReplayBuffer, storage=partial(LazyTensorStorage, 100)))
    told: dict[str, Any] = {"frames_per_batch": 10, "remote_configs": ACTOR}
    with ours.RayCollector(
        [env_maker], linear(), replay_buffer=buffer, **told
    ) as collector:
        with pytest.raises(BadOption, match="Pass the hook to the constructor"):
            collector.set_post_collect_hook(print)
        collector.set_post_collect_hook(None)
        assert collector.next() is None
        assert len(buffer) in (10, 20), (
            "the actor goes on while the batch is on its way"
        )
    buffer.close()


def test_numbers_have_the_names_of_torchrl(opened: Any) -> None:
    opened.next()
    opened.update_policy_weights_()
    assert opened.stats() == {
        "frames": 20,
        "batches": 1,
        "requested_frames_per_batch": 20,
        "stepped_frames": 20,
        "completed_frames": 0,
        "completed_trajectories": 0,
        "pending_frames": 0,
        "written_frames": 0,
        "total_frames": 60,
        "completed": False,
        "policy_version": 1,
        "worker_frames": 20,
        "workers": 2,
        "workers_alive": 2,
    }
    by_node = opened.stats("per_worker")
    assert (by_node["worker_0/frames"], by_node["worker_1/frames"]) == (10, 10)
    assert "frames" not in by_node
    assert (
        opened.stats("both", timeout=1.0).keys()
        == opened.stats().keys() | by_node.keys()
    )
    with pytest.raises(
        ValueError, match="workers must be one of 'aggregate', 'per_worker'"
    ):
        opened.stats("all")
    assert opened.muster_stats().executed == 20
    assert [batch.numel() for batch in opened] == [20, 20]
    assert opened.stats()["completed"]
    opened.shutdown()
    assert opened.stats()["frames"] == 60


def test_the_numbers_of_a_node_are_those_of_its_workers() -> None:
    workers = (
        worker(0, frames=100),
        worker(1, frames=20, restarts=1),
        worker(2, frames=3, state="dead"),
    )
    found = stats_of_nodes(stats(workers=workers), {0: [0, 1], 1: [2]}, "both", {})
    assert (found["worker_frames"], found["workers"], found["workers_alive"]) == (
        123,
        2,
        1,
    )
    assert (found["worker_0/frames"], found["worker_1/frames"]) == (120, 3)
    assert (found["worker_0/restarts"], found["worker_1/restarts"]) == (1, 0)


# --- weight updaters ------------------------------------------------------------------------------


def test_a_weight_updater_of_torchrls_distributed_collector(opened: Any) -> None:
    other = linear()
    with torch.no_grad():
        other.module.weight.fill_(3.0)
    assert opened.weight_updater is None
    with pytest.warns(DeprecationWarning, match="DistributedWeightUpdater"):
        updater = ours.DistributedWeightUpdater(None, other, 2, sync=True)
    opened.weight_updater = updater
    assert opened.weight_updater is updater
    assert updater.collector is opened
    opened.update_policy_weights_()
    opened.next()
    sums = [
        weight.item() for weight in opened.cascade_execute("policy.module.weight.sum")
    ]
    assert sums == [9.0, 9.0], "in the nodes"
    with pytest.raises(BadWeights):
        opened.update_policy_weights_({"strange": torch.zeros(1)})
    opened.weight_updater = None
    assert opened.weight_updater is None


def test_a_class_of_updaters_is_called(opened: Any) -> None:
    class Remembers:
        def __init__(self) -> None:
            self.pushed: list[Any] = []

        def push_weights(self, policy_or_weights: Any, worker_ids: Any) -> None:
            self.pushed.append(worker_ids)

    opened.weight_updater = Remembers
    opened.update_policy_weights_(worker_ids=[1])
    assert opened.weight_updater.pushed == [[1]]


# In a process of its own: references of torch RPC name the first agent that a process has had.
REFERENCES = """
import sys
import warnings

import torch
from torch.distributed import rpc

import muster.compat.torchrl.collectors.distributed as ours


class Receiver:
    def __init__(self):
        self.got = []

    def update_policy_weights_(self, weights):
        assert weights is not None
        self.got.append(weights)


options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{sys.argv[1]}")
rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
receivers = [Receiver(), Receiver()]
references = [rpc.RRef(receiver) for receiver in receivers]
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    updater = ours.RPCWeightUpdater([], Receiver, references, {"a": torch.ones(1)}, 2)
assert any("RPCWeightUpdater" in str(warning.message) for warning in caught)
updater.push_weights()
updater.push_weights({"a": torch.zeros(1)}, worker_ids=1)
got = [[float(weights["a"]) for weights in receiver.got] for receiver in receivers]
assert got == [[1.0], [1.0, 0.0]], got
updater.policy_weights = torch.nn.Linear(1, 1)
updater.push_weights(worker_ids=[0])
assert sorted(receivers[0].got[-1].keys()) == ["bias", "weight"]
del references, updater
rpc.shutdown(graceful=False)
"""


@pytest.mark.skipif(not rpc.is_available(), reason="this PyTorch has no RPC")
@pytest.mark.slow
def test_a_weight_updater_for_references(tmp_path: Any) -> None:
    command = [sys.executable, "-c", REFERENCES, str(tmp_path / "store")]
    done = subprocess.run(command, timeout=100, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# --- the collectors of nodes ----------------------------------------------------------------------


def test_one_entry_for_each_node() -> None:
    assert calls_of(None, None, 2) == [((), {}), ((), {})]
    assert calls_of([(1,), (2,)], None, 2) == [((1,), {}), ((2,), {})]
    assert calls_of(None, [{"a": 1}]) == [((), {"a": 1})]
    with pytest.raises(ValueError, match="Expected 2 argument entries, .* got 1"):
        calls_of([(1,)], None, 2)
    with pytest.raises(
        ValueError, match="Expected 2 keyword-argument entries, .* got 3"
    ):
        calls_of([(1,), (2,)], [{}] * 3, 2)


def two_envs() -> SerialEnv:
    return SerialEnv(2, env_maker)


@needs_ray
@pytest.mark.slow
def test_the_collectors_of_ray_actors(ray_cluster: Any) -> None:
    import ray

    factories = [env_maker, two_envs]
    with ours.RayCollector(
        factories,
        linear(),
        frames_per_batch=20,
        sync=False,
        remote_configs=ACTOR,
    ) as collector:
        assert collector.get_distant_attr("worker_idx") == [0, 1]
        names = [("worker_idx",), ("frames_per_batch",)]
        assert collector.map_fn("get_distant_attr", list_of_args=names) == [0, 20]
        assert collector.get_distant_attr("env.batch_size") == [
            torch.Size([]),
            torch.Size([2]),
        ]
        layers = "policy.module"
        scales = [
            ({"weight": torch.full((1, 3), float(i)), "bias": torch.zeros(1)},)
            for i in (1, 2)
        ]
        collector.map_fn(f"{layers}.load_state_dict", list_of_args=scales)
        sums = [
            weight.sum().item()
            for weight in collector.get_distant_attr(f"{layers}.weight")
        ]
        assert sums == [3.0, 6.0], "each actor has its own"
        with pytest.raises(ValueError, match="Expected 2 argument entries"):
            collector.map_fn("get_distant_attr", list_of_args=[("worker_idx",)])
        with pytest.raises(BadOption, match="leads nowhere"):
            collector.map_fn("env.nothing")
        with pytest.raises(BadOption, match="from NodeCollector"):
            collector.map_fn("nothing")

        actors = collector.remote_collectors
        assert len(actors) == 2
        assert ray.get(
            [actor.get_distant_attr.remote("worker_idx") for actor in actors]
        ) == [0, 1]
        assert ray.get(actors[1].getattr_env.remote("batch_size")) == torch.Size([2])
        weight = ray.get(actors[0].getattr_policy.remote("module.weight"))
        assert weight.sum().item() == 3.0
        with pytest.raises(AttributeError, match=r"no method 'fly'.*cascade_execute"):
            actors[0].fly.remote()

        collector.next()
        collector.map_fn("reset")
        first = collector.next()
        assert (
            first["collector", "traj_ids"].unique().numel()
            == first.shape.numel() // first.shape[-1]
        )
        given = {"weight": torch.full((1, 3), 5.0), "bias": torch.zeros(1)}
        actors[1].update_policy_weights_.remote(
            {f"module.{k}": v for k, v in given.items()}
        )
        collector.next()  # a node takes weights before a rollout
        collector.next()
        sums = [
            weight.sum().item()
            for weight in collector.get_distant_attr(f"{layers}.weight")
        ]
        assert (sums[0] == 15.0, sums[1]) == (False, 15.0)
        assert ray.get(actors[0].stats.remote())["restarts"] == 0
        assert isinstance(collector.local_policy(), type(linear()))
        with pytest.raises(BadOption, match="Pass num_collectors= for more"):
            collector.add_collectors([env_maker], 1, None, [{}], [{}])
        collector.stop_remote_collectors()
        assert collector.remote_collectors == []
        with pytest.raises(CollectorClosed):
            collector.get_distant_attr("worker_idx")


@needs_ray
@pytest.mark.slow
def test_a_node_with_workers_answers_with_a_list(ray_cluster: Any) -> None:
    with ours.RayCollector(
        [env_maker],
        linear(),
        frames_per_batch=20,
        num_workers_per_collector=2,
        collector_class="sync",
        remote_configs={"num_cpus": 2, "memory": 2**28},
    ) as collector:
        node = NodeCollector(collector, 0)
        assert node.getattr_env("batch_size") == [torch.Size([])] * 2
        assert (
            node.map_fn("policy.module.weight.sum", [(), ()])
            == [[linear().module.weight.sum()] * 2] * 2
        )
        with pytest.raises(BadOption, match="leave the arguments out"):
            node.cascade_execute("env.batch_size", 1)
        assert node.frames_per_batch == 20
        assert node.replay_buffer is None


# --- a policy that an InferenceServer on Ray serves -----------------------------------------------


@needs_ray
@pytest.mark.slow
def test_a_policy_that_an_inference_server_serves(ray_cluster: Any) -> None:
    from torchrl.modules.inference_server import InferenceServer

    told: dict[str, Any] = {
        "frames_per_batch": 20,
        "sync": True,
        "remote_configs": ACTOR,
    }
    owner = {"remote_config": {"num_cpus": 0.5}}
    with InferenceServer(
        policy_factory=linear, service_backend="ray", service_backend_options=owner
    ) as server:
        with pytest.raises(BadOption, match="policy_factory cannot be combined"):
            ours.RayCollector([env_maker], server, policy_factory=linear, **told)
        with pytest.raises(BadOption, match="workers are not connected to Ray"):
            ours.RayCollector([env_maker], server, inference="worker", **told)
        with ours.RayCollector([env_maker] * 2, server, **told) as collector:
            assert collector.local_policy() is server
            batch = collector.next()
            assert batch.shape == (2, 10)
            expected = linear().module(batch["observation"])
            torch.testing.assert_close(batch["action"], expected)
            with pytest.raises(BadOption, match="the policy is in the InferenceServer"):
                collector.update_policy_weights_()
            zeros = linear()
            torch.nn.init.zeros_(zeros.module.weight)
            torch.nn.init.constant_(zeros.module.bias, 0.5)
            collector.update_policy_weights_(zeros)
            collector.next()  # its first actions may be of before
            assert (collector.next()["action"] == 0.5).all()
            assert server.policy_version == 1

            scheme = collector._learner_weight_sync()
            assert scheme is collector._learner_weight_sync()
            weights = TensorDict.from_module(linear()).data
            scheme.connect(weights=weights)
            collector.next()
            batch = collector.next()
            torch.testing.assert_close(
                batch["action"], linear().module(batch["observation"])
            )
            with pytest.raises(
                BadOption, match="the learner of learner_backend='ray' publishes"
            ):
                collector.update_policy_weights_(zeros)


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_actions_of_a_service_are_stored_as_they_are(
    ray_cluster: Any, workers: int
) -> None:
    """Two workers' environments are acted for in one call."""
    from torchrl.modules.inference_server import InferenceServer

    with (
        InferenceServer(
            policy_factory=Constant,
            service_backend="ray",
            service_backend_options={"remote_config": {"num_cpus": 0.5}},
        ) as server,
        ours.RayCollector(
            [CountingEnv],
            server,
            frames_per_batch=40,
            init_random_frames=40,
            num_workers_per_collector=workers,
            collector_class="single" if workers == 1 else "sync",
            sync=True,
            remote_configs=ACTOR,
        ) as collector,
    ):
        action = collector.next()["action"]
        assert (action.shape, action.dtype) == ((1, 40), torch.float32)
        assert action.unique().tolist() == [0, 1]
        batch = collector.next()
        assert (batch["action"].shape, batch["action"].dtype) == (
            (1, 40),
            torch.float32,
        )
        counted = batch["next", "observation"] - batch["observation"]
        assert (counted == 1).all()
        assert (batch["action"] == 1).all()


@needs_ray
@pytest.mark.slow
def test_a_service_and_a_replay_buffer_on_ray(ray_cluster: Any) -> None:
    """As in TorchRL's tests: nothing of the loop is in this process."""
    from torchrl import service_backend
    from torchrl.data import TensorDictReplayBuffer
    from torchrl.modules.inference_server import InferenceServer

    owner = {"remote_config": {"num_cpus": 0}}
    with service_backend("ray"):
        buffer = TensorDictReplayBuffer(
            storage=partial(LazyTensorStorage, 100),
            batch_size=4,
            service_backend_options=owner,
            transport="auto",
        )
        server = InferenceServer(
            policy_factory=Constant, service_backend_options=owner, transport="auto"
        )
        collector = Collector(
            create_env_fn=CountingEnv,
            num_collectors=1,
            policy=server,
            replay_buffer=buffer,
            backend_options={"remote_configs": ACTOR},
            frames_per_batch=8,
            total_frames=16,
            sync=True,
        )
    with contextlib.ExitStack() as made:
        made.callback(buffer.shutdown)
        made.callback(server.shutdown)
        made.enter_context(collector)
        assert list(collector) == [None, None]
        assert len(buffer) == 16
        assert buffer.sample()["action"].shape == (4,)


# --- evaluation in an actor of Ray's ----------------------------------------------------------------


class Rewarding(CountingEnv):
    """The reward is the action."""

    def _step(self, tensordict: Any) -> Any:
        return super()._step(tensordict).set("reward", tensordict["action"].reshape(1))


def rewarding_env() -> Any:
    """Ends after five steps."""
    return Rewarding(max_steps=5)


def raising_env() -> Any:
    raise RuntimeError("no simulator here")


def made_for(env: Any) -> Constant:
    assert env.action_spec.shape == (1,)
    return Constant()


def weight(value: float) -> TensorDict:
    return TensorDict({"weight": torch.tensor(value)})


@needs_ray
@pytest.mark.slow
def test_evaluation_in_an_actor_while_a_collector_collects(ray_cluster: Any) -> None:
    """``RayEvalWorker``: weights are sent, and the result is asked for later, also from elsewhere."""
    told: dict[str, Any] = {"num_gpus": 0, "num_cpus": 0.5}
    evaluation = ours.RayEvalWorker(
        None, rewarding_env, made_for, name="muster-evaluation", **told
    )
    try:
        assert evaluation.poll() is None
        with ours.RayCollector(
            [rewarding_env], Constant(), frames_per_batch=12, remote_configs=ACTOR
        ) as collector:
            for _ in range(2):
                collector.next()
                policy = collector.local_policy()
                evaluation.submit(TensorDict.from_module(policy).data, max_steps=3)
            assert evaluation.poll(timeout=60.0) == {"reward": 1.0, "frames": None}
            assert evaluation.poll() is None, "a result is told once"
            assert collector.next()["action"].unique().tolist() == [1]

        elsewhere = ours.RayEvalWorker.from_name("muster-evaluation")
        elsewhere.submit(weight(2.0), max_steps=100)
        result = elsewhere.poll(timeout=60.0)
        assert result == {"reward": 2.0, "frames": None}, (
            "of the weights that were sent"
        )
    finally:
        evaluation.shutdown()
        evaluation.shutdown()
    with pytest.raises(ValueError, match="Failed to look up actor"):
        ours.RayEvalWorker.from_name("muster-evaluation")


@needs_ray
@pytest.mark.slow
def test_an_environment_that_cannot_be_made_for_evaluation(ray_cluster: Any) -> None:
    import ray

    evaluation = ours.RayEvalWorker(
        None, raising_env, made_for, num_gpus=0, num_cpus=0.5
    )
    evaluation.submit(weight(1.0), max_steps=3)
    with pytest.raises(ray.exceptions.RayActorError, match="no simulator here"):
        evaluation.poll(timeout=60.0)
    evaluation.shutdown()


# --- a learner on Ray, and the collector's own policy ---------------------------------------------


def constant(action: float) -> Any:
    """``linear()`` that always returns this action."""
    policy = linear()
    torch.nn.init.zeros_(policy.module.weight)
    torch.nn.init.constant_(policy.module.bias, action)
    return policy


def sent(policy: Any) -> TensorDict:
    """The weights of a policy, as a learner sends them."""
    return TensorDict.from_module(policy).data.clone()


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize("factory", [False, True])
def test_a_learner_sends_the_weights_of_the_policy(
    ray_cluster: Any, factory: bool
) -> None:
    """A learner of TorchRL's calls the same methods, of ``_remote_collectors`` and the scheme."""
    import ray

    options: dict[str, Any] = {
        "frames_per_batch": 20,
        "sync": True,
        "remote_configs": ACTOR,
        "collector_kwargs": {"track_policy_version": True},
    }
    if factory:
        options["policy_factory"] = linear
    with ours.RayCollector(
        [env_maker] * 2, None if factory else linear(), **options
    ) as collector:
        own = [tensor.clone() for tensor in collector.local_policy().parameters()]
        scheme = collector._learner_weight_sync()
        assert scheme is collector._learner_weight_sync()
        batch = collector.next()
        assert batch["policy_version"].unique().tolist() == [0]
        assert (collector.init_random_frames, collector.collected_frames) == (0, 20)
        (target,) = scheme._remote_collectors
        assert ray.get(target._weight_sync_signature.remote("policy")) == (
            (("module", "bias"), (1,), "torch.float32"),
            (("module", "weight"), (1, 3), "torch.float32"),
        )
        scheme._set_model_version(3)
        scheme.connect(weights=sent(constant(0.25)))
        for version, action in ((3, 0.25), (7, 0.5), (7, 0.75)):
            if action > 0.25:
                scheme._set_model_version(version)
                scheme.send(weights=sent(constant(action)))
            for _ in range(2):
                batch = collector.next()
                assert batch["action"].unique().tolist() == [action]
                for key in ("policy_version", ("next", "policy_version")):
                    assert batch[key].unique().tolist() == [version]
        assert collector.policy_version == 7
        with pytest.raises(BadOption, match="the learner of learner_backend='ray'"):
            collector.update_policy_weights_(constant(1.0))

        # the learners end, and others connect
        scheme.shutdown()
        again = collector._learner_weight_sync(new_generation=True)
        assert again is not scheme
        again._set_model_version(1)
        again.connect(weights=sent(constant(-0.5)))
        batch = collector.next()
        assert batch["action"].unique().tolist() == [-0.5]
        assert batch["policy_version"].unique().tolist() == [1]

        # weights that are not finite act nowhere
        again.send(weights=sent(constant(float("nan"))))
        with pytest.raises(BadWeights, match="not finite"):
            collector.next()
        assert collector.next()["action"].unique().tolist() == [-0.5]
        again.shutdown()
        for tensor, before in zip(
            collector.local_policy().parameters(), own, strict=True
        ):
            assert torch.equal(tensor, before)
    with pytest.raises(CollectorClosed):
        collector._learner_weight_sync()


@needs_ray
@pytest.mark.slow
def test_what_a_learner_needs(ray_cluster: Any) -> None:
    told: dict[str, Any] = {"frames_per_batch": 20, "remote_configs": ACTOR}
    publishing = ours.RayCollector(
        [env_maker], linear(), update_after_each_batch=True, **told
    )
    with publishing, pytest.raises(BadOption, match="Leave update_after_each_batch"):
        publishing._learner_weight_sync()
    random = ours.RayCollector([env_maker], None, **told)
    with random, pytest.raises(BadOption, match="which has no weights"):
        random._learner_weight_sync()


@needs_ray
@pytest.mark.slow
def test_the_receiver_of_a_learner_is_lost(ray_cluster: Any) -> None:
    import ray

    with ours.RayCollector(
        [env_maker], linear(), frames_per_batch=20, sync=True, remote_configs=ACTOR
    ) as collector:
        (target,) = collector._learner_weight_sync()._remote_collectors
        collector.next()
        ray.kill(target, no_restart=True)
        with pytest.raises(WorkerDied, match="receives the learner's weights"):
            collector.next()
        with pytest.raises(WorkerDied, match="that a learner sends weights to"):
            collector._learner_weight_sync(new_generation=True)


def test_what_a_learner_compares_is_as_in_torchrl() -> None:
    from torchrl.collectors import Collector

    from muster.compat.torchrl.learner_weights import WeightsReceiver
    from muster.weights.names import plain_modules

    policy = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)
    )
    policy.register_buffer("scale", torch.ones(2, dtype=torch.float64), False)
    asked = type("Asked", (), {"get_model": lambda self, model_id: policy})()
    expected = Collector._weight_sync_signature(asked, "policy")
    assert len(expected) == 10
    receiver = WeightsReceiver(plain_modules(policy))
    assert receiver._weight_sync_signature("policy") == expected
    assert receiver.newest(0) is None
    with pytest.raises(BadOption, match="the weights of the policy only"):
        receiver._weight_sync_signature("env.critic")
    with pytest.raises(BadOption, match="there is no scheme"):
        receiver._receive_weights_scheme()
