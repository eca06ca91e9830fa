"""Any callable on the observation: what it gets, what it may return, and its recurrent state."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from muster import Collector, Execution, policies
from muster.errors import BadOption, BadPolicyOutput, PolicyError
from muster.testing import CountingEnv, SpaceEnv
from tests.tools import collect, column, counting, joined, recorded

NESTED = spaces.Dict(
    {
        "a": spaces.Box(-1, 1, (2,)),
        "b": spaces.Tuple((spaces.Discrete(3), spaces.Text(3))),
    }
)


def zeros(obs: Any) -> torch.Tensor:
    return torch.zeros(obs.shape[:-1], dtype=torch.int64)


# --- what it gets ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_envs", "shape"), [(None, (2,)), (1, (1, 2)), (3, (3, 2))]
)
def test_the_observation_is_a_tensor_with_or_without_a_batch_dimension(num_envs, shape):
    seen = []

    def policy(obs: torch.Tensor) -> torch.Tensor:
        seen.append((type(obs), obs.dtype, tuple(obs.shape)))
        return zeros(obs)

    collect(counting(), policy, num_envs=num_envs, frames_per_batch=6)
    assert set(seen) == {(torch.Tensor, torch.float32, shape)}


@pytest.mark.parametrize("num_envs", [None, 2])
def test_dict_observations_are_dicts(num_envs):
    factory, made = recorded(lambda: SpaceEnv(NESTED, spaces.Discrete(2), length=100))
    seen = []

    def policy(obs: dict[str, Any]) -> torch.Tensor:
        assert list(obs) == ["a", "b"]
        assert list(obs["b"]) == ["0", "1"]
        seen.append((obs["a"].clone(), obs["b"]["0"].clone(), list(obs["b"]["1"])))
        return torch.zeros(obs["a"].shape[:-1], dtype=torch.int64)

    collect(
        factory,
        policy,
        num_envs=num_envs,
        frames_per_batch=4 * (num_envs or 1),
        batches=2,
    )
    assert len(seen) == 8
    for t, (a, b0, b1) in enumerate(seen):
        for i, env in enumerate(made):
            obs = env.observations[t]
            assert torch.equal(
                a if num_envs is None else a[i], torch.from_numpy(obs["a"])
            )
            assert (b0 if num_envs is None else b0[i]) == obs["b"][0]
            assert b1[i] == obs["b"][1]


def test_modules_and_methods_and_objects_are_functions():
    class Net(nn.Module):
        def forward(self, obs: torch.Tensor) -> torch.Tensor:
            return (obs[..., 1] % 2).long()

    class Agent:
        def act(self, obs: torch.Tensor) -> torch.Tensor:
            return Net()(obs)

        __call__ = act

    for policy in (Net(), Agent().act, Agent(), lambda obs, scale=1: Net()(obs)):
        assert column(collect(counting(4), policy, frames_per_batch=4), "action") == [
            0,
            1,
            0,
            1,
        ]


# --- what it may return ---------------------------------------------------------------------------


ONE = {
    "int": 1,
    "numpy_int": np.int64(1),
    "numpy_array": np.array(1),
    "int32": torch.tensor(1, dtype=torch.int32),
    "uint8": np.uint8(1),
    "bool": torch.tensor(True),
    "requires_grad": torch.tensor(1),
}


MANY = {
    "list": [1, 0, 1],
    "tuple_in_a_tuple": ((1, 0, 1), {}),
    "numpy": np.array([1, 0, 1]),
    "int32": np.array([1, 0, 1], np.int32),
    "reversed": np.array([1, 0, 1])[::-1],
    "strided": torch.tensor([1, 9, 0, 9, 1, 9])[::2],
    "alone_in_a_tuple": (torch.tensor([1, 0, 1]),),
    "no_extras": (torch.tensor([1, 0, 1]), {}),
}


@pytest.mark.parametrize("name", ONE)
def test_actions_of_one_environment(name):
    assert column(
        collect(counting(), lambda obs: ONE[name], frames_per_batch=3), "action"
    ) == [
        1,
        1,
        1,
    ]


@pytest.mark.parametrize("name", MANY)
def test_actions_of_several_environments(name):
    batch = collect(counting(), lambda obs: MANY[name], num_envs=3, frames_per_batch=9)
    assert column(batch, "action") == [[1, 1, 1], [0, 0, 0], [1, 1, 1]]
    assert batch["action"].dtype == torch.int64


def test_float64_actions_are_stored_as_the_space_says():
    env = lambda: SpaceEnv(spaces.Discrete(2), spaces.Box(-1, 1, (2,)))  # noqa: E731
    batch = collect(env, lambda obs: np.array([0.1, -0.1]), frames_per_batch=3)
    assert batch["action"].dtype == torch.float32
    assert batch["action"][2].tolist() == pytest.approx([0.1, -0.1])


def test_extras_become_columns_of_any_shape_and_dtype():
    def policy(obs: torch.Tensor) -> Any:
        t = obs[:, 1]
        return zeros(obs), {
            "value": t,
            "logits": torch.stack([t, -t], -1).double(),
            "flag": t > 1,
            "n": t.numpy().astype(int),
        }

    batch = collect(counting(), policy, num_envs=2, frames_per_batch=8, batches=2)
    t = batch["observation"][..., 1]
    assert torch.equal(batch["value"], t)
    assert torch.equal(batch["logits"], torch.stack([t, -t], -1).double())
    assert torch.equal(batch["flag"], t > 1)
    assert torch.equal(batch["n"], t.long())


def test_extras_are_those_of_the_step_and_not_a_shared_tensor():
    buffer = torch.zeros(())

    def policy(obs: torch.Tensor) -> Any:
        return torch.tensor(0), {"value": buffer.add_(1)}

    assert column(collect(counting(), policy, frames_per_batch=5), "value") == [
        1,
        2,
        3,
        4,
        5,
    ]


@pytest.mark.parametrize(
    "name", ["action", "next", "done", "collector", "observation", 3]
)
def test_extras_cannot_take_the_names_of_the_batch(name):
    with pytest.raises(BadPolicyOutput, match="which the batch uses"):
        collect(
            counting(), lambda obs: (0, {name: torch.tensor(1.0)}), frames_per_batch=3
        )


# --- no batch dimension ---------------------------------------------------------------------------


class SecondOfBatch(nn.Module):
    """Expects ``[B, 2]``."""

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return (obs[:, 1] > 0).long()


def fails_without_a_batch(kind: str) -> Any:
    if kind == "function":
        return lambda obs: (obs[:, 1] > 0).long()
    if kind == "state":
        return lambda obs, state: ((obs[:, 1] > 0).long(), torch.zeros(len(obs)))
    if kind == "module":
        return SecondOfBatch()
    if kind == "head":
        batched = nn.Sequential(nn.Flatten(1), nn.BatchNorm1d(2), nn.Linear(2, 2))
        return policies.categorical(batched)
    if kind == "td function":
        return lambda td: td.set("action", (td["observation"][:, 1] > 0).long())
    from tensordict.nn import TensorDictModule

    return TensorDictModule(SecondOfBatch(), ["observation"], ["action"])


@pytest.mark.parametrize("kind", ["function", "state", "module", "head", "td module"])
def test_a_network_of_another_size_is_told_the_shape_of_the_observation(kind):
    """CountingEnv's observation is ``[2]``."""
    layer = nn.Linear(5, 2)
    wrong: dict[str, Any] = {
        "function": lambda obs: layer(obs).argmax(-1),
        "state": lambda obs, state: (layer(obs).argmax(-1), torch.zeros(len(obs))),
        "module": nn.Sequential(layer, nn.Softmax(-1)),
        "head": policies.categorical(layer),
    }
    if kind == "td module":
        from tensordict.nn import TensorDictModule

        wrong[kind] = TensorDictModule(layer, ["observation"], ["action"])
    with pytest.raises(PolicyError, match="shapes cannot be multiplied") as info:
        collect(
            counting(),
            wrong[kind],
            num_envs=3,
            frames_per_batch=6,
            obs_dtype=torch.float32,
        )
    assert "observation: (3, 2). The first dimension (3) counts environments." in str(
        info.value
    )
    assert "num_envs=1" not in str(info.value)


@pytest.mark.parametrize(
    "kind", ["function", "state", "module", "head", "td function", "td module"]
)
def test_a_policy_that_misses_the_batch_dimension_is_told_of_num_envs(kind):
    options = {"frames_per_batch": 4, "obs_dtype": torch.float32}
    with pytest.raises(
        PolicyError,
        match=r"observation: \(2,\)\. Without num_envs=.*num_envs=1\. No environment",
    ) as info:
        collect(counting(), fails_without_a_batch(kind), **options)
    assert isinstance(info.value.__cause__, (IndexError, RuntimeError, ValueError))
    policy = fails_without_a_batch(kind)
    policy = policy.eval() if isinstance(policy, nn.Module) else policy
    assert collect(counting(), policy, num_envs=1, **options)["action"].shape == (1, 4)


def test_with_a_batch_dimension_or_another_cause_nothing_is_said_of_num_envs():
    for policy, options in (
        (lambda obs: obs[:, 7], {"num_envs": 2}),
        (nn.Linear(2, 2).double(), {"obs_dtype": "env"}),
    ):
        with pytest.raises(PolicyError) as info:
            collect(counting(), policy, frames_per_batch=4, **options)
        assert "num_envs" not in str(info.value)


def test_an_action_with_a_batch_dimension_too_many_names_num_envs():
    with pytest.raises(
        BadPolicyOutput, match=r"with shape \(1,\), expected \(\)\. Without num_envs="
    ):
        collect(
            counting(), lambda obs: torch.zeros(1, dtype=torch.long), frames_per_batch=4
        )


# --- recurrent state ------------------------------------------------------------------------------

STATES = {
    "tensor": (lambda s: s, lambda s: s),
    "tuple": (lambda s: (s, -s), lambda state: state[0]),
    "list": (lambda s: [s, -s], lambda state: state[0]),
    "dict": (lambda s: {"h": s, "deep": (s * 2,)}, lambda state: state["h"]),
}


def counting_state(form: str) -> Any:
    """A policy whose state counts the steps of the episode from 1, and which shows what it was
    given.
    """
    wrap, unwrap = STATES[form]

    def policy(obs: torch.Tensor, state: Any) -> Any:
        given = torch.zeros_like(obs[..., :1]) if state is None else unwrap(state)
        return zeros(obs), {"given": given[..., 0].clone()}, wrap(given + 1)

    return policy


@pytest.mark.parametrize("form", STATES)
@pytest.mark.parametrize("T", [2, 5, 10])
def test_state_is_carried_and_zeroed_where_an_episode_ended(form, T):
    lengths = iter([2, 3, 100])
    with Collector(
        lambda: CountingEnv(next(lengths)),
        counting_state(form),
        num_envs=3,
        frames_per_batch=3 * T,
    ) as c:
        batch = joined(c, 10 // T)
    expected = [[t % 2 for t in range(10)], [t % 3 for t in range(10)], list(range(10))]
    assert column(batch, "given") == expected
    part = {"tensor": (), "tuple": ("0",), "list": ("0",), "dict": ("h",)}[form]
    assert batch[("recurrent_state", *part)][..., 0].tolist() == expected


@pytest.mark.parametrize("name", ["state", "hidden", "carry"])
def test_the_second_parameter_makes_a_policy_recurrent_by_its_name(name):
    space: dict[str, Any] = {"torch": torch}
    exec(
        f"def policy(obs, {name}): return 0, torch.ones(1) + (0 if {name} is None else {name})",
        space,
    )
    batch = collect(counting(3), space["policy"], frames_per_batch=5)
    assert batch["recurrent_state"].flatten().tolist() == [0, 1, 2, 0, 1]


def test_a_state_changed_in_place_is_still_stored_as_each_step_began():
    def policy(obs: torch.Tensor, state: torch.Tensor | None) -> Any:
        state = torch.zeros(1) if state is None else state
        state += 1
        return 0, state

    batch = collect(counting(3), policy, frames_per_batch=5)
    assert batch["recurrent_state"].flatten().tolist() == [0, 1, 2, 0, 1]


def test_an_observation_that_has_the_states_name_is_refused():
    space = spaces.Dict({"recurrent_state": spaces.Box(0, 1, (1,))})
    with pytest.raises(BadOption, match="'recurrent_state'"):
        collect(
            lambda: SpaceEnv(space, spaces.Discrete(2)),
            counting_state("tensor"),
            frames_per_batch=3,
        )


def test_a_recurrent_policy_must_return_its_state():
    def policy(obs: Any, state: Any) -> Any:
        return torch.tensor(0)

    with pytest.raises(
        BadPolicyOutput, match=r"takes a state, so it must return \(action, state\)"
    ):
        collect(counting(), policy, frames_per_batch=3)


@pytest.mark.parametrize(
    "later", [torch.zeros(3), (torch.zeros(1), torch.zeros(1)), None], ids=str
)
def test_a_state_keeps_its_shape(later):
    def policy(obs: Any, state: Any) -> Any:
        return 0, torch.zeros(1) if state is None else later

    with (
        Collector(CountingEnv, policy, frames_per_batch=3) as collector,
        pytest.raises(BadPolicyOutput),
    ):
        collector.rollout()


# --- in-place changes -----------------------------------------------------------------------------


def test_changing_the_observation_in_place_is_refused():
    def policy(obs: torch.Tensor) -> torch.Tensor:
        obs -= 1
        return torch.tensor(0)

    with pytest.raises(BadPolicyOutput, match="changed its input observation in place"):
        collect(counting(), policy, frames_per_batch=3)


def test_in_place_layers_are_refused_and_harmless_ones_are_not():
    inplace = nn.Sequential(nn.Threshold(0.5, -1.0, inplace=True), nn.Linear(2, 1))
    with pytest.raises(BadPolicyOutput, match="in place"):
        collect(counting(), lambda obs: inplace(obs)[0].long() * 0, frames_per_batch=3)
    later = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True))
    assert (
        len(
            collect(
                counting(), lambda obs: later(obs)[0].long() * 0, frames_per_batch=3
            )
        )
        == 3
    )


# --- networks whose output is the action ----------------------------------------------------------


@pytest.mark.parametrize("width", [8, 600], ids=["numpy executor", "torch executor"])
@pytest.mark.parametrize("num_envs", [None, 2])
def test_a_network_of_known_layers_runs_in_the_executor_with_equal_actions(
    width, num_envs, request
):
    net = nn.Sequential(
        nn.Linear(3, width),
        nn.Tanh(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 1),
    )
    options = {"num_envs": num_envs, "frames_per_batch": 8, "seed": 0}
    with (
        Collector("Pendulum-v1", net, **options) as fast,
        Collector(
            "Pendulum-v1", net, execution=Execution(executor=False), **options
        ) as slow,
    ):
        for _ in range(3):
            a, b = fast.rollout(), slow.rollout()
            torch.testing.assert_close(a["action"], b["action"], rtol=1e-4, atol=1e-5)
            with torch.no_grad():
                net[0].weight.mul_(1.1)  # in place, as an optimizer does
        assert fast.stats().policy_path in request.node.name
        assert slow.stats().policy_path == "module"
        net[0] = nn.Linear(3, width)  # another layer: planned again
        torch.testing.assert_close(
            fast.rollout()["action"], slow.rollout()["action"], rtol=1e-4, atol=1e-5
        )


def test_inference_mode_can_be_switched_off_and_lazy_parameters_stay_trainable():
    lazy = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.Linear(4, 1))
    with Collector("Pendulum-v1", lazy, frames_per_batch=4) as collector:
        collector.rollout()
    lazy(torch.zeros(1, 3)).sum().backward()
    assert lazy[0].weight.grad is not None

    seen = []

    def policy(obs):
        seen.append(torch.is_inference_mode_enabled())
        return torch.zeros(1)

    for mode in (True, False):
        with Collector(
            "Pendulum-v1",
            policy,
            frames_per_batch=3,
            execution=Execution(inference_mode=mode),
        ) as collector:
            collector.rollout()
    assert seen == [False, True, True, False, False, False]
