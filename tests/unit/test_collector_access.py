"""Reaching into a collector, making its parts, and looking at what it does."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

import muster
from muster import Collector
from muster.errors import BadOption, EnvError, UnknownOption
from muster.testing import CountingEnv, SpaceEnv
from tests.tools import assert_same, column, counting, recorded


class Net(nn.Module):
    """Argmax of a linear layer; counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))
        self.calls = 0

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layers(obs).argmax(-1)


def collector(policy: Any = None, env: Any = None, **options: Any) -> Collector:
    return Collector(env or counting(3), policy, **{"frames_per_batch": 4, **options})


# --- attributes -----------------------------------------------------------------------------------


def test_models_are_found_by_path():
    policy = Net()
    with collector(policy) as c:
        assert c.get_model("policy") is policy
        assert c.get_model("layers") is c.get_model("policy.layers") is policy.layers
        assert (
            c.get_model("layers[0]")
            is c.get_model("policy.layers[0]")
            is policy.layers[0]
        )
        assert c.get_model("env") is c.env
        assert c.get_model("env.unwrapped") is c.env
        assert isinstance(c.get_model("policy"), nn.Module)


@pytest.mark.parametrize(
    "path",
    [
        "value_net",
        "",
        "policy.",
        "layers[9]",
        "layers[i]",
        "policy.layers()",
        "1 + 1",
        "a b",
    ],
)
def test_unknown_models_are_said_to_be_so(path):
    with (
        collector(Net()) as c,
        pytest.raises(BadOption, match="is not known here") as caught,
    ):
        c.get_model(path)
    assert isinstance(caught.value, ValueError)


def test_attributes_of_env_policy_and_buffer():
    env, policy = CountingEnv(3), Net()
    buffer = type("Rows", (list,), {"add": list.append, "capacity": 7})()
    with collector(policy, env, replay_buffer=buffer) as c:
        assert c.env is env
        assert c.getattr_env("length") == 3
        assert c.getattr_policy("layers") is policy.layers
        assert c.getattr_rb("capacity") == 7
        for get in (c.getattr_env, c.getattr_policy, c.getattr_rb):
            with pytest.raises(AttributeError, match="nothing"):
                get("nothing")
    with collector() as c, pytest.raises(BadOption, match="no replay buffer"):
        c.getattr_rb("capacity")


def test_several_environments_are_a_list_in_their_order():
    factory, made = recorded(lambda i: CountingEnv(i + 1))
    with Collector([factory, factory], None, num_envs=2, frames_per_batch=4) as c:
        assert c.env == made
        assert c.getattr_env("length") == [1, 2, 3, 4]


# --- cascade_execute ------------------------------------------------------------------------------


def test_cascade_execute_calls_what_a_path_names():
    policy = Net()
    before = policy.layers[0].weight.clone()
    with collector(policy) as c:
        c.cascade_execute("policy.layers[0].reset_parameters")
        assert not torch.equal(before, policy.layers[0].weight)
        assert c.cascade_execute("env.reset", seed=3)[1] == {}
        assert c.cascade_execute("set_seed", 5) == 5
        assert (
            c.cascade_execute("policy.layers[-1].extra_repr")
            == "in_features=4, out_features=2, bias=True"
        )


class Armed:
    """Notes every call of it."""

    def __init__(self) -> None:
        self.fired: list[Any] = []

    def __call__(self, *args: Any) -> Armed:
        self.fired.append(args)
        return self

    def __getitem__(self, key: Any) -> Any:
        return self


@pytest.mark.parametrize(
    "path",
    [
        "policy.armed().real",
        "policy.armed()",
        "policy.armed[policy.armed()]",
        "policy.armed[[x for x in range(9)]]",
        "policy.armed if policy.armed() else policy",
        "(lambda: policy.armed())",
        "policy.armed; policy.armed()",
        "policy.armed\npolicy.armed()",
        "policy.__class__.__init__.__globals__['nn']",
        "__class__.__init__.__globals__['copy'].deepcopy",
        "policy.armed.__call__",
        "__import__('os').getcwd",
        "[1]",
        "policy.armed + policy.armed",
        "policy.nothing",
        "",
        "policy.",
        "policy.armed[1:2](3)",
        "f'{policy.armed()}'",
        "policy.armed[f'{policy.armed()}']",
        "env.reset()[0].sum",
    ],
)
def test_cascade_execute_evaluates_nothing(path):
    policy = Net()
    policy.armed = Armed()
    with collector(policy) as c:
        with pytest.raises(BadOption, match="leads nowhere"):
            c.cascade_execute(path)
        assert policy.armed.fired == []


def test_cascade_execute_of_what_cannot_be_called():
    with (
        collector(Net()) as c,
        pytest.raises(BadOption, match="Linear|bool|cannot be called"),
    ):
        c.cascade_execute("policy.training")


# --- fake_tensordict and next ---------------------------------------------------------------------

BATCHES: dict[str, Any] = {
    "plain": {},
    "one": {"num_envs": None},
    "groups": {"groups": 2},
    "time_major": {"layout": "time_major"},
    "limit": {"max_frames_per_traj": 2},
    "masked": {"reset_when_done": False},
    "surplus": {"frames_per_batch": 7},
    "version": {"track_policy_version": True},
    "compact": {"compact_obs": True},
    "cpu": {"device": "cpu"},
    "meta": {"storing_device": "meta"},
    "random": {"init_random_frames": 100},
}


@pytest.mark.filterwarnings("ignore:frames_per_batch")
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("kind", ["function", "head"])
def test_a_fake_batch_is_like_a_real_one(name, kind):
    options = {"num_envs": 2, "frames_per_batch": 8, **BATCHES[name]}
    groups = options.pop("groups", None)
    space = spaces.Dict({"a": spaces.Box(-1, 1, (2, 3)), "b": spaces.Discrete(4)})
    env = (
        (lambda: SpaceEnv(space, spaces.Discrete(2)))
        if kind == "function"
        else counting(3)
    )
    policy: Any = muster.policies.categorical(nn.Linear(2, 2))
    if kind == "function":
        policy = lambda obs: (  # noqa: E731
            torch.zeros(obs["b"].shape, dtype=torch.int64),
            {"x": obs["a"] * 2},
        )
    with Collector([env] * groups if groups else env, policy, **options) as c:
        fake = c.fake_tensordict()
        executed = c.stats().executed
        c.rollout()
        random = name == "random"
        while random and c.stats().frames < 100:
            c.rollout()
        real = c.rollout()
    assert executed == 0
    assert fake.shape == real.shape
    assert fake.names == real.names
    assert fake.device == real.device
    assert set(fake.keys(True, True)) == set(real.keys(True, True))
    for key in real.keys(True, True):
        assert fake[key].shape == real[key].shape, key
        assert fake[key].dtype == real[key].dtype, key
        assert fake[key].device == real[key].device, key
        if fake[key].device.type != "meta":
            assert not fake[key].any(), key


def test_a_fake_batch_is_not_counted_and_changes_no_data():
    options: dict[str, Any] = {"num_envs": 2, "frames_per_batch": 8, "seed": 1}
    with (
        Collector(
            counting(3, noise=True),
            muster.policies.categorical(nn.Linear(3, 2)),
            **options,
        ) as c,
        Collector(counting(3, noise=True), c.policy, **options) as usual,
    ):
        c.fake_tensordict()
        c.fake_tensordict()
        for _ in range(2):
            assert_same(c.rollout(), usual.rollout())
        assert c.stats().frames == 16


# --- making the parts -----------------------------------------------------------------------------


def test_keywords_for_the_function_that_makes_environments():
    with Collector(
        CountingEnv,
        None,
        frames_per_batch=4,
        create_env_kwargs={"length": 2, "truncate": True},
    ) as c:
        assert column(c.rollout(), "next", "truncated") == [False, True, False, True]


def test_keywords_for_each_entry():
    kwargs = [{"length": 2}, {"length": 5}]
    with Collector(
        [CountingEnv] * 2, None, frames_per_batch=4, create_env_kwargs=kwargs
    ) as c:
        assert c.getattr_env("length") == [2, 5]
    with Collector(
        [CountingEnv] * 2, None, frames_per_batch=4, create_env_kwargs={"length": 4}
    ) as c:
        assert c.getattr_env("length") == [4, 4]


@pytest.mark.parametrize("kwargs", [[{}], [{}, {}, {}], 3, "length"], ids=str)
def test_keywords_that_are_not_one_for_each(kwargs):
    with pytest.raises(BadOption, match="create_env_kwargs.*2 dicts"):
        Collector([CountingEnv] * 2, None, frames_per_batch=4, create_env_kwargs=kwargs)


def test_keywords_that_the_function_does_not_know():
    with pytest.raises(EnvError, match="nothing"):
        Collector(
            CountingEnv, None, frames_per_batch=4, create_env_kwargs={"nothing": 1}
        )


def test_keywords_for_an_environment_that_is_made_already():
    with pytest.raises((BadOption, TypeError), match="create_env_kwargs|keyword"):
        Collector(
            CountingEnv(), None, frames_per_batch=4, create_env_kwargs={"length": 2}
        )


def test_a_policy_factory_makes_the_policy():
    made: list[Net] = []

    def factory() -> Net:
        made.append(Net())
        return made[-1]

    with collector(policy_factory=factory) as c:
        c.rollout()
        assert len(made) == 1
        assert c.policy is made[0]
        assert made[0].calls == 4
        assert c.getattr_policy("calls") == 4


def test_a_policy_factory_and_a_policy_exclude_each_other():
    with pytest.raises(BadOption, match="policy_factory cannot be used with policy"):
        collector(Net(), policy_factory=Net)
    with pytest.raises(BadOption, match="policy_factory"):
        collector(policy_factory=3)


# --- trust_policy ---------------------------------------------------------------------------------


def fill(data: Any) -> Any:
    """Takes a TensorDict under a name that does not say so."""
    data["action"] = torch.ones(data.shape, dtype=torch.int64)
    return data


def test_a_trusted_policy_takes_a_tensordict():
    with collector(fill, num_envs=2, trust_policy=True) as c:
        assert column(c.rollout(), "action") == [[1, 1]] * 2


def test_a_policy_is_known_by_its_signature():
    def by_name(td: Any) -> Any:
        return fill(td)

    def by_type(data: TensorDict) -> TensorDict:
        return fill(data)

    for policy in (
        by_name,
        by_type,
        TensorDictModule(lambda o: o[..., 0].long() // 3, ["observation"], ["action"]),
    ):
        with collector(policy) as c:
            assert column(c.rollout(), "action") == [1] * 4


# --- compiling ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["module", "tensordict"])
def test_a_compiled_policy_acts_as_it_is(kind):
    torch.manual_seed(0)
    policy: Any = Net()
    if kind == "tensordict":
        score = TensorDictModule(policy.layers, ["observation"], ["score"])
        policy = TensorDictSequential(
            score, TensorDictModule(lambda s: s.argmax(-1), ["score"], ["action"])
        )
    options: dict[str, Any] = {"num_envs": 2, "frames_per_batch": 8}
    with (
        collector(policy, compile_policy={"backend": "eager"}, **options) as compiled,
        collector(policy, **options) as usual,
    ):
        for _ in range(2):
            assert_same(compiled.rollout(), usual.rollout())
        assert compiled.policy is policy
        compiled.update_policy_weights_(policy)
        assert compiled.policy_version == 1


def test_weights_reach_a_compiled_policy():
    policy = Net()
    with collector(policy, compile_policy={"backend": "eager"}) as c:
        weights = {
            name: torch.zeros_like(tensor)
            for name, tensor in policy.state_dict().items()
        }
        for index in (0, 1):
            weights["layers.2.bias"] = torch.eye(2)[index]
            c.update_policy_weights_(weights)
            assert column(c.rollout(), "action") == [index] * 4


@pytest.mark.parametrize("option", ["compile_policy", "cudagraph_policy"])
def test_heads_are_not_compiled_as_a_whole(option):
    head = muster.policies.categorical(nn.Linear(2, 2))
    match = (
        "compile its network"
        if option == "compile_policy" or torch.cuda.is_available()
        else "CUDA"
    )
    with pytest.raises(BadOption, match=match):
        collector(head, **{option: True})


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without CUDA")
@pytest.mark.parametrize("value", [True, {}, {"warmup": 2}])
def test_cuda_graphs_need_cuda(value):
    with pytest.raises(BadOption, match="cudagraph_policy needs a CUDA device"):
        collector(Net(), cudagraph_policy=value)


@pytest.mark.parametrize("option", ["no_cuda_sync", "local_init_rb", "use_buffers"])
@pytest.mark.parametrize(
    "make",
    [
        Collector,
        muster.MultiSyncCollector,
        muster.DistributedCollector,
        muster.Evaluator,
    ],
)
def test_arguments_of_torchrl_that_would_have_no_effect_are_refused(make, option):
    with pytest.raises(
        UnknownOption,
        match=f"'{option}': it has no effect in Muster.*muster.compat.torchrl",
    ):
        make(counting(3), **{option: True})


# --- profiling and the timeline -------------------------------------------------------------------


def names_in(path: Any) -> list[str]:
    events = json.loads(path.read_text())["traceEvents"]
    return [event.get("name", "") for event in events if event["ph"] == "X"]


def test_a_profile_is_written_after_so_many_rollouts(tmp_path):
    with collector(Net(), worker_idx=0) as c:
        c.enable_profile(
            num_rollouts=2,
            warmup_rollouts=1,
            save_path=tmp_path / "trace_{worker_idx}.json",
        )
        assert c.profile_config is not None
        assert c.profile_config.num_rollouts == 2
        c.rollout()
        assert list(tmp_path.iterdir()) == []
        c.rollout()
        assert [path.name for path in tmp_path.iterdir()] == ["trace_0.json"]
        assert any(
            "addmm" in name or "linear" in name
            for name in names_in(tmp_path / "trace_0.json")
        )
        c.rollout()
        c.disable_profile()
        assert c.profile_config is None


def test_a_profile_is_ended_by_hand_by_another_one_and_by_shutdown(tmp_path):
    options = {"num_rollouts": 50, "warmup_rollouts": 0}
    c = collector(Net())
    c.enable_profile(save_path=tmp_path / "1.json", **options)
    c.rollout()
    c.enable_profile(save_path=tmp_path / "2.json", **options)
    c.rollout()
    c.shutdown()
    c.disable_profile()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.json", "2.json"]


# --- arguments of resets --------------------------------------------------------------------------


class Listening(CountingEnv):
    """Remembers what its resets were given."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> Any:
        self.heard = [*getattr(self, "heard", []), options]
        return super().reset(seed=seed, options=options)


@pytest.mark.parametrize("vector", [False, True], ids=["stacked", "vector"])
def test_options_of_a_reset_reach_the_environments_once(vector):
    factory, made = recorded(lambda: Listening(3))
    envs = (
        SyncVectorEnv([factory, factory], autoreset_mode=AutoresetMode.DISABLED)
        if vector
        else factory
    )
    with Collector(
        envs, None, num_envs=None if vector else 2, frames_per_batch=4
    ) as collector:
        collector.rollout()
        collector.reset([1], options={"level": 7})
        for _ in range(3):
            collector.rollout()
    quiet, told = made[0].heard, made[1].heard
    assert [heard for heard in quiet if heard] == []
    assert [heard["level"] for heard in told if heard and "level" in heard] == [7]
    assert len(told) > 2, "it was reset again"


def test_what_a_vector_environments_reset_does_not_take_is_refused():
    envs = SyncVectorEnv([CountingEnv] * 2, autoreset_mode=AutoresetMode.DISABLED)
    with Collector(envs, None, frames_per_batch=4) as collector:
        collector.reset(level=7)
        with pytest.raises(BadOption, match="options="):
            collector.rollout()
