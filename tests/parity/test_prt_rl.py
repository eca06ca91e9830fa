"""What prt_rl's compat layer returns where prt_rl does not do what its document says, and all else
that it promises.
"""

from __future__ import annotations

import inspect
import random
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import muster.policies
from muster.compat import prt_rl
from muster.compat.prt_rl import Collector, MetricsTracker
from muster.errors import (
    BadEnvOutput,
    BadOption,
    BadPolicyOutput,
    EnvError,
    HookError,
    PolicyError,
    UnsupportedEnv,
)
from tests.fakes.prt_rl_parts import Counting, CountingGym, Policy, Sampling

GYM_STATES = [
    [[2, 0], [3, 0]],
    [[2, 1], [3, 1]],
    [[2, 0], [3, 2]],
    [[2, 1], [3, 0]],
    [[2, 0], [3, 1]],
]
GYM_NEXT = [
    [[2, 1], [3, 1]],
    [[2, 2], [3, 2]],
    [[2, 1], [3, 3]],
    [[2, 2], [3, 1]],
    [[2, 1], [3, 2]],
]


class Wrapped:
    """prt_rl's interface over a Gymnasium vector environment, as ``GymnasiumWrapper`` has it."""

    render_mode: Any = None
    device = torch.device("cpu")

    def __init__(self, lengths: list[int], **kwargs: Any) -> None:
        factories = [lambda n=n: CountingGym(n) for n in lengths]
        self.num_envs = len(lengths)
        self.env: Any = (
            SyncVectorEnv(factories, **kwargs) if self.num_envs > 1 else factories[0]()
        )
        self.steps = 0

    def get_num_envs(self) -> int:
        return self.num_envs

    def get_parameters(self) -> Any:
        return SimpleNamespace(action_continuous=False)

    def reset(self, seed: int | None = None) -> Any:
        return torch.tensor(self.env.reset(seed=seed)[0]).float(), {}

    def reset_index(self, index: int) -> Any:
        return torch.tensor(self.env.envs[index].reset()[0]).float(), {}

    def step(self, action: torch.Tensor) -> Any:
        self.steps += 1
        state, reward, terminated, truncated, info = self.env.step(
            action.numpy().squeeze(-1)
        )
        reward, done = (
            torch.tensor(reward).float(),
            torch.tensor(terminated | truncated),
        )
        return (
            torch.tensor(state).float(),
            reward.unsqueeze(-1),
            done.unsqueeze(-1),
            info,
        )


class GymnasiumWrapper(Wrapped):
    """One that is known by its name; its ``step`` is nobody's business."""


GymnasiumWrapper.__module__ = "prt_rl.env.wrappers.gymnasium_envs"


def lists(found: dict[str, torch.Tensor], *names: str) -> list[Any]:
    return [found[name].tolist() for name in names]


def signature(function: Any) -> list[tuple[str, Any]]:
    return [
        (p.name, p.default)
        for p in inspect.signature(function).parameters.values()
        if p.name != "self"
    ]


# --- the document ---------------------------------------------------------------------------------


def test_names_and_defaults_are_those_of_the_document() -> None:
    empty = inspect.Parameter.empty
    assert signature(Collector) == [("env", empty), ("logger", None), ("flatten", True)]
    assert signature(Collector.collect_experience) == [
        ("policy", empty),
        ("num_steps", 1),
        ("bootstrap", True),
    ]
    assert signature(Collector.collect_trajectory) == [
        ("policy", empty),
        ("num_trajectories", None),
        ("min_num_steps", None),
    ]
    assert signature(MetricsTracker) == [("num_envs", empty), ("logger", None)]
    assert isinstance(
        Collector(Counting([2])).get_metric_tracker(), prt_rl.MetricsTracker
    )


def test_keys_shapes_and_dtypes_with_and_without_a_time_dimension() -> None:
    rows = Collector(Counting([2, 3]), flatten=False).collect_experience(Policy(), 7)
    flat = Collector(Counting([2, 3])).collect_experience(Policy(), 7)
    assert list(rows) == [
        "state",
        "action",
        "next_state",
        "reward",
        "done",
        "value",
        "log_prob",
        "last_value_est",
    ]
    width = {"state": 3, "next_state": 3}
    for name in list(rows)[:-1]:
        assert rows[name].shape == (4, 2, width.get(name, 1))
        assert torch.equal(flat[name], rows[name].reshape(8, -1))
    assert rows["last_value_est"].shape == flat["last_value_est"].shape == (2, 1)
    assert [rows[k].dtype for k in ("action", "reward", "done")] == [
        torch.int64,
        torch.float32,
        torch.bool,
    ]


def test_the_last_value_is_zero_where_the_last_step_ended_an_episode() -> None:
    collector, policy = Collector(Counting([2, 4])), Policy()
    assert collector.collect_experience(policy, 4)["last_value_est"].tolist() == [
        [0.0],
        [142.0],
    ]
    assert collector.collect_experience(policy, 4)["last_value_est"].tolist() == [
        [0.0],
        [0.0],
    ]
    assert policy.calls == 4  # the fifth is forgotten,
    asked: list[Any] = []

    def act(obs: torch.Tensor, deterministic: bool | None = None) -> Any:
        asked.append(deterministic)
        return torch.zeros(len(obs), 1), {"value": obs[:, :1]}

    assert (
        Collector(Counting([1, 1]))
        .collect_experience(SimpleNamespace(act=act), 2)["last_value_est"]
        .sum()
        == 0
    )
    assert asked == [False]  # and of ends nobody asks


def test_there_is_no_last_value_unless_it_is_wanted_and_the_policy_has_one() -> None:
    assert "last_value_est" not in Collector(Counting([2])).collect_experience(
        Policy(), 3, bootstrap=False
    )
    assert "last_value_est" not in Collector(Counting([2])).collect_experience(
        Sampling(), 3
    )
    assert "last_value_est" not in Collector(Counting([2])).collect_trajectory(
        Policy(), 3
    )


class Remembering(nn.Module):
    """Changes all that a policy can remember, whenever it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.BatchNorm1d(3)
        self.hidden = torch.zeros(2)
        self.kept = torch.zeros(2)
        self.counts, self.pair, self.named = (
            [0],
            (torch.zeros(1), [0]),
            {"a": torch.zeros(1)},
        )
        self.array = np.zeros(2)
        self.generator, self.noise = (
            torch.Generator().manual_seed(3),
            np.random.default_rng(3),
        )
        self.number, self.made = 0, None

    def act(self, obs: torch.Tensor, deterministic: bool = False) -> Any:
        self.hidden = self.hidden + 1
        self.kept += 1
        self.counts.append(len(self.counts))
        self.pair[0].add_(1)
        self.pair[1][0] += 1
        self.named["a"] += 1
        self.named[str(len(self.named))] = torch.ones(1)
        self.array += 1
        self.number += 1
        draws = (
            torch.rand(1)
            + torch.rand(1, generator=self.generator)
            + np.random.rand()
            + self.noise.random()
            + random.random()
        )
        with torch.inference_mode():
            self.made = torch.zeros(1) if self.made is None else self.made.add_(1)
        return torch.zeros(len(obs), 1), {"value": self.layer(obs)[:, :1] * 0 + draws}

    def memory(self) -> Any:
        return [
            self.hidden.tolist(),
            self.kept.tolist(),
            list(self.counts),
            self.pair[0].tolist(),
            list(self.pair[1]),
            {name: value.tolist() for name, value in self.named.items()},
            self.array.tolist(),
            self.number,
            self.made.tolist(),
            self.layer.running_mean.tolist(),  # type: ignore[union-attr]
            self.generator.get_state().tolist(),
            self.noise.bit_generator.state,
        ]


def test_asking_for_the_last_value_changes_neither_generators_nor_what_a_policy_remembers() -> (
    None
):
    def collected(bootstrap: bool) -> Any:
        torch.manual_seed(5)
        np.random.seed(5)
        random.seed(5)
        policy, collector = Remembering(), Collector(Counting([3, 4]))
        found = [
            collector.collect_experience(policy, n, bootstrap=bootstrap)[
                "value"
            ].tolist()
            for n in (4, 6, 10)
        ]
        return (
            found,
            policy.memory(),
            torch.rand(1).item(),
            np.random.rand(),
            random.random(),
        )

    with torch.no_grad():
        assert collected(True) == collected(False)


def test_a_state_that_belongs_to_a_graph_is_not_written_to() -> None:
    policy = Remembering()
    policy.hidden = nn.Parameter(torch.zeros(2)) * 2
    found = Collector(Counting([3, 4])).collect_experience(policy, 4)
    (found["value"].sum() + (policy.hidden**2).sum()).backward()
    assert found["last_value_est"].shape == (2, 1)


# --- which trajectories ---------------------------------------------------------------------------


def chosen(
    lengths: list[int], trajectories: int | None, steps: int
) -> list[tuple[int, int]]:
    """(environment, which of its episodes) as the document has it: everything that ends, put in
    order, is looked at.
    """
    N = len(lengths)
    ends = sorted((lengths[i] * (k + 1), i, k) for i in range(N) for k in range(200))
    if trajectories is None:
        taken, total = [], 0
        for _, i, k in ends:
            if total < steps:
                taken.append((i, k))
                total += lengths[i]
        return taken
    share, rest = divmod(trajectories, N)
    if not share:
        taken = [(i, 0) for i in range(trajectories)]
    else:
        taken = [(i, k) for i in range(N) for k in range(share)] + [
            (i, k) for _, i, k in ends if k == share
        ][:rest]
    return sorted(
        taken,
        key=lambda pair: (
            lengths[pair[0]] * (pair[1] + 1),
            pair[1] >= share > 0,
            pair[0],
        ),
    )


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    trajectories=st.none() | st.integers(1, 14),
    steps=st.integers(1, 40),
    before=st.integers(0, 9),
)
def test_whole_trajectories_in_the_order_of_their_ends(
    lengths: list[int], trajectories: int | None, steps: int, before: int
) -> None:
    collector = Collector(Counting(lengths))
    if before:
        collector.collect_experience(Policy(), before)
    begun = (
        collector._side.env.env.state[:, 1].tolist() if before else [0] * len(lengths)
    )  # type: ignore[attr-defined]
    ended = collector._side.env.env.state[:, 2] >= collector._side.env.env.state[:, 0]  # type: ignore[attr-defined]
    assert before == 0 or ended.shape == (len(lengths),)
    wanted = (
        {"min_num_steps": steps}
        if trajectories is None
        else {"num_trajectories": trajectories}
    )
    found = collector.collect_trajectory(Policy(), **wanted)
    expected = [
        [lengths[i], begun[i] + k + 1, t]
        for i, k in chosen(lengths, trajectories, steps)
        for t in range(lengths[i])
    ]
    assert found["state"].tolist() == expected


# --- environments ---------------------------------------------------------------------------------


def test_no_step_is_lost_to_a_second_reset_by_the_vector_environment_inside() -> None:
    env = Wrapped([2, 3])
    found = Collector(env, flatten=False).collect_experience(Policy(), 10)
    assert lists(found, "state", "next_state") == [GYM_STATES, GYM_NEXT]
    assert found["reward"][:, :, 0].tolist() == [[1, 1], [2, 2], [1, 3], [2, 1], [1, 2]]
    assert [inner.resets for inner in env.env.envs] == [1 + 1 + 1, 1 + 1]
    assert env.steps == 5


def test_prt_rls_own_wrapper_is_looked_through() -> None:
    env = GymnasiumWrapper([2, 3])
    found = Collector(env, flatten=False).collect_experience(Policy(), 10)
    assert lists(found, "state", "next_state") == [GYM_STATES, GYM_NEXT]
    assert env.steps == 0
    one = Collector(GymnasiumWrapper([3])).collect_experience(Policy(), 4)
    assert one["state"].tolist() == [[3, 0], [3, 1], [3, 2], [3, 0]]


@pytest.mark.parametrize("what", ["derived", "patched", "rendered"])
def test_a_wrapper_that_does_something_of_its_own_is_asked(what: str) -> None:
    env = (
        type("Derived", (GymnasiumWrapper,), {})([2, 3])
        if what == "derived"
        else GymnasiumWrapper([2, 3])
    )
    if what == "patched":
        env.step = env.step  # type: ignore[method-assign]
    if what == "rendered":
        env.render_mode = "rgb_array"
    found = Collector(env, flatten=False).collect_experience(Policy(), 10)
    assert lists(found, "state", "next_state") == [GYM_STATES, GYM_NEXT]
    assert env.steps == 5


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_vector_environments_of_all_kinds_give_the_same(mode: AutoresetMode) -> None:
    env = SyncVectorEnv(
        [lambda: CountingGym(2), lambda: CountingGym(3)], autoreset_mode=mode
    )
    found = Collector(env, flatten=False).collect_experience(Policy(), 10)
    assert lists(found, "state", "next_state") == [GYM_STATES, GYM_NEXT]
    assert (found["state"].dtype, found["action"].dtype, found["action"].shape) == (
        torch.float32,
        torch.int64,
        (5, 2, 1),
    )


def test_one_gymnasium_environment_is_one_of_one() -> None:
    collector = Collector(CountingGym(3), flatten=False)
    found = collector.collect_experience(Policy(), 4)
    assert lists(found, "state", "action", "last_value_est") == [
        [[[3, 0]], [[3, 1]], [[3, 2]], [[3, 0]]],
        [[[3]], [[5]], [[7]], [[3]]],
        [[131.0]],
    ]
    assert (
        collector.collect_trajectory(Policy(), 2)["reward"].tolist()
        == [[1], [2], [3]] * 2
    )


def test_a_number_for_each_environment_is_an_action_too() -> None:
    policy = SimpleNamespace(act=lambda obs, deterministic: (torch.arange(2), {}))
    found = Collector(SyncVectorEnv([lambda: CountingGym(2)] * 2)).collect_experience(
        policy, 4
    )
    assert found["action"].tolist() == [0, 1, 0, 1]


def test_discrete_states_have_a_dimension() -> None:
    env = gymnasium.make_vec("FrozenLake-v1", num_envs=2, is_slippery=False)
    seen: list[Any] = []

    def act(obs: torch.Tensor, deterministic: bool = False) -> Any:
        seen.append((tuple(obs.shape), obs.dtype))
        return torch.full((2, 1), 2), {}

    found = Collector(env, flatten=False).collect_experience(
        SimpleNamespace(act=act), 4
    )
    assert found["state"].tolist() == [[[0], [0]], [[1], [1]]]
    assert seen == [((2, 1), torch.int64)] * 2


def test_continuous_actions_keep_the_policys_dtype() -> None:
    policy = SimpleNamespace(
        act=lambda obs, deterministic: (
            torch.full((1, 1), 0.5, dtype=torch.float64),
            {},
        )
    )
    found = Collector(gymnasium.make("Pendulum-v1")).collect_experience(policy, 3)
    assert found["action"].tolist() == [[0.5]] * 3
    assert found["action"].dtype == torch.float64


def test_rewards_of_several_agents_stay_and_their_sum_is_tracked() -> None:
    collector = Collector(Counting([2, 4], agents=3), flatten=False)
    found = collector.collect_experience(Policy(), 4)
    assert found["reward"].shape == (2, 2, 3, 1)
    assert found["reward"][1, 0].tolist() == [[2], [4], [6]]
    assert collector.metric.last_episode_reward == 6 + 12
    assert collector.collect_trajectory(Policy(), 1)["reward"].shape == (2, 3, 1)


def test_rewards_keep_their_dtype_and_one_number_each_is_enough() -> None:
    env = Counting([2, 4])
    step = env.step
    env.step = lambda action: (lambda s, r, d, i: (s, r[:, 0].double(), d[:, 0], i))(
        *step(action)
    )  # type: ignore
    found = Collector(env, flatten=False).collect_experience(Policy(), 4)
    assert (found["reward"].shape, found["reward"].dtype) == ((2, 2, 1), torch.float64)
    assert found["done"].tolist() == [[[False], [False]], [[True], [False]]]


def test_an_environment_may_keep_what_it_got_and_gave() -> None:
    env = Counting([9])
    env.state = torch.zeros(1, 3)
    kept: list[Any] = []
    step = env.step
    env.step = lambda action: (kept.append((action, action.tolist())), step(action))[1]  # type: ignore[func-returns-value]
    collector, policy = Collector(env), Policy()
    for _ in range(3):
        collector.collect_experience(policy, 3)
    assert [action.tolist() for action, _ in kept] == [before for _, before in kept]


# --- policies -------------------------------------------------------------------------------------


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def act(self, obs: torch.Tensor, deterministic: bool = False) -> Any:
        return torch.zeros(len(obs), 1), {"log_prob": self.layer(obs)}


@pytest.mark.parametrize("kind", ["experience", "trajectory"])
def test_what_a_policy_returns_with_a_graph_can_be_learned_from(kind: str) -> None:
    policy, collector = Linear(), Collector(Counting([2, 150]))
    found = (
        collector.collect_experience(policy, 10)
        if kind == "experience"
        else collector.collect_trajectory(policy, 2)
    )
    assert torch.allclose(found["log_prob"], policy.layer(found["state"]))
    found["log_prob"].sum().backward()
    assert torch.allclose(policy.layer.weight.grad, found["state"].sum(0, keepdim=True))  # type: ignore[arg-type]
    with torch.no_grad():
        assert not collector.collect_experience(policy, 10)["log_prob"].requires_grad
    assert collector.collect_experience(policy, 10)["log_prob"].requires_grad
    again = Collector(Counting([5]))
    with torch.no_grad():
        again.collect_experience(policy, 3)
    assert again.collect_experience(policy, 3)["log_prob"].requires_grad


def test_a_policy_may_use_the_memory_of_its_outputs_again() -> None:
    memory = torch.zeros(1, 1)

    class Reusing(Linear):
        def act(self, obs: torch.Tensor, deterministic: bool = False) -> Any:
            action, out = super().act(obs)
            return action, {"log_prob": memory.detach().copy_(out["log_prob"])}

    policy = Reusing()
    found = Collector(Counting([9])).collect_experience(policy, 5)
    assert found["log_prob"].requires_grad
    assert torch.allclose(found["log_prob"], policy.layer(found["state"]))
    assert len(found["log_prob"].unique()) == 5


def test_policies_may_take_turns_and_change_what_they_return() -> None:
    collector, calls = Collector(Counting([4])), []

    def act(obs: torch.Tensor, deterministic: bool = False) -> Any:
        calls.append(obs.tolist())
        more = {"value": obs[:, :1]} if len(calls) > 3 else {}
        return torch.zeros(1, 2, dtype=torch.int32), more

    changing = SimpleNamespace(act=act)
    assert "value" not in collector.collect_experience(changing, 3, bootstrap=False)
    found = collector.collect_experience(changing, 3, bootstrap=False)
    assert (found["value"].tolist(), found["action"].dtype, len(calls)) == (
        [[4.0]] * 3,
        torch.int32,
        6,
    )
    assert collector.collect_experience(Policy(), 2)["action"].dtype == torch.int64
    assert [state for [state] in calls] == [[4, 1, t] for t in range(4)] + [
        [4, 2, 0],
        [4, 2, 1],
    ]
    assert collector.collect_experience(changing, 1)["state"].tolist() == [[4, 3, 0]]
    changing.act = lambda obs, deterministic: (torch.zeros(1, 1), {"other": obs})
    assert "other" in collector.collect_experience(changing, 2)
    changing.act = lambda obs, deterministic: None
    with pytest.raises(BadPolicyOutput, match="NoneType"):
        collector.collect_experience(changing, 1)


def test_what_a_policy_returns_may_not_change_within_a_trajectory() -> None:
    rows = iter(range(999))

    def act(obs: torch.Tensor, deterministic: bool = False) -> Any:
        return torch.zeros(1, 1), {"value": obs[:, :1]} if next(rows) >= 128 else {}

    collector = Collector(Counting([200]))
    with pytest.raises(BadPolicyOutput, match="at the row before"):
        collector.collect_trajectory(SimpleNamespace(act=act))
    assert len(collector.collect_trajectory(SimpleNamespace(act=act))["value"]) == 200


def test_an_error_of_the_policy_when_it_is_asked_for_the_last_value() -> None:
    def act(obs: torch.Tensor, deterministic: bool | None = None) -> Any:
        if deterministic is None:
            raise ValueError("no value")
        return torch.zeros(1, 1), {"value": obs[:, :1]}

    collector = Collector(Counting([5]))
    with pytest.raises(PolicyError, match="no value when it was asked") as caught:
        collector.collect_experience(SimpleNamespace(act=act), 3)
    assert isinstance(caught.value.__cause__, ValueError)
    assert "next call continues" in str(caught.value)
    found = caught.value.experience  # type: ignore[attr-defined]
    assert list(found) == ["state", "action", "next_state", "reward", "done", "value"]
    assert found["next_state"].tolist() == [[5, 1, 1], [5, 1, 2], [5, 1, 3]]
    assert collector.collect_experience(Policy(), 2)["state"].tolist() == [
        [5, 1, 3],
        [5, 1, 4],
    ]


ONE = torch.ones(2, 1)


@pytest.mark.parametrize(
    ("last", "message"),
    [
        ({}, "for the last states, and .*'value'"),
        ({"value": torch.ones(1)}, r"'value': \(\(1,\)"),
        ({"value": torch.ones(2, 3)}, r"'value': \(\(2, 3\)"),
        ({"value": ONE.long()}, "torch.int64"),
        (None, r"expected \(action, dict\)"),
    ],
    ids=["absent", "short", "wide", "dtype", "none"],
)
@pytest.mark.parametrize("flatten", [True, False])
def test_a_wrong_last_value_loses_no_step(
    last: Any, message: str, flatten: bool
) -> None:
    outputs = iter([{"value": ONE}] * 2 + [last])
    policy = SimpleNamespace(
        act=lambda obs, deterministic=None: (torch.zeros(2, 1), next(outputs))
    )
    collector = Collector(Counting([5, 9]), flatten=flatten)
    with pytest.raises(BadPolicyOutput, match=message) as caught:
        collector.collect_experience(policy, 4)
    found = caught.value.experience  # type: ignore[attr-defined]
    assert list(found) == ["state", "action", "next_state", "reward", "done", "value"]
    times = [[0, 0], [1, 1]]
    assert found["state"][..., 2].reshape(2, 2).tolist() == times
    assert found["reward"].shape == ((4, 1) if flatten else (2, 2, 1))
    after = collector.collect_experience(Policy(), 2)
    assert after["state"][..., 2].flatten().tolist() == [2, 2]
    assert collector.metric.collected_steps == 6


def test_a_value_has_to_be_one_number_for_each_environment() -> None:
    def collected(value: torch.Tensor, bootstrap: bool, collector: Any) -> Any:
        policy = SimpleNamespace(
            act=lambda obs, deterministic=None: (torch.zeros(2, 1), {"value": value})
        )
        return policy, collector.collect_experience(policy, 4, bootstrap)

    env = Counting([9, 9])
    collector = Collector(env)
    with pytest.raises(BadPolicyOutput, match=r"\(2, 2\), expected \(2, 1\)"):
        collected(torch.ones(2, 2), True, collector)
    assert env.actions == []  # before the first step
    policy, found = collected(torch.ones(2, 2), False, collector)
    assert found["value"].shape == (4, 2)
    with pytest.raises(BadPolicyOutput, match="bootstrap=False"):
        collector.collect_experience(policy, 4)
    assert len(env.actions) == 2
    _, found = collected(torch.tensor([3.0, 4.0]), True, Collector(Counting([9, 2])))
    assert found["last_value_est"].tolist() == [[3], [0]]


def test_tensors_are_the_callers_own_and_so_are_those_of_the_policy() -> None:
    seen: list[Any] = []

    def act(obs: torch.Tensor, deterministic: bool = False) -> Any:
        seen.append((obs, obs.tolist()))
        return torch.zeros(1, 1), {"value": obs[:, :1].clone()}

    policy, collector = SimpleNamespace(act=act), Collector(Counting([5]))
    first = collector.collect_experience(policy, 4)
    before = {name: tensor.tolist() for name, tensor in first.items()}
    second = collector.collect_experience(policy, 4)
    assert {name: tensor.tolist() for name, tensor in first.items()} == before
    assert all(obs.tolist() == values for obs, values in seen)
    for tensor in second.values():
        tensor.zero_()
    assert collector.collect_experience(policy, 2)["state"].tolist() == [
        [5, 2, 3],
        [5, 2, 4],
    ]


def test_a_policy_that_changes_its_input_does_not_change_what_is_recorded() -> None:
    policy = SimpleNamespace(
        act=lambda obs, deterministic: (obs.zero_()[:, :1].clone(), {})
    )
    found = Collector(Counting([3])).collect_experience(policy, 3)
    assert found["state"].tolist() == [[3, 1, 0], [3, 1, 1], [3, 1, 2]]


def test_musters_heads_are_policies() -> None:
    def collected() -> Any:
        torch.manual_seed(0)
        head = muster.policies.categorical(nn.Linear(2, 10).double())
        return head, Collector(
            SyncVectorEnv([lambda: CountingGym(4)] * 3)
        ).collect_experience(head, 60)

    (head, found), (_, again) = collected(), collected()
    assert list(found) == [
        "state",
        "action",
        "next_state",
        "reward",
        "done",
        "log_prob",
    ]
    assert found["action"].shape == found["log_prob"].shape == (60, 1)
    expected = head.distribution(found["state"].double()).log_prob(
        found["action"][:, 0]
    )
    assert torch.allclose(found["log_prob"][:, 0], expected.float(), atol=1e-5)
    assert torch.equal(found["action"], again["action"])
    assert len(found["action"].unique()) > 3


# --- the tracker, and what goes wrong -------------------------------------------------------------


class Logger:
    """As prt_rl's."""

    def __init__(self) -> None:
        self.lines: list[Any] = []

    def should_log(self, iteration: int) -> bool:
        return True

    def log_scalar(self, name: str, value: float, iteration: int | None = None) -> None:
        self.lines.append((name, value, iteration))


def test_the_logger_hears_of_every_episode_with_the_steps_collected_until_then() -> (
    None
):
    logger = Logger()
    Collector(Counting([2, 4]), logger).collect_experience(Policy(), 9)
    assert [
        (value, at) for name, value, at in logger.lines if name == "episode_length"
    ] == [
        (2, 4),
        (2, 8),
        (4, 8),
    ]
    assert [value for name, value, _ in logger.lines if name == "episode_number"] == [
        1,
        2,
        3,
    ]


def test_an_error_of_the_logger_loses_nothing() -> None:
    def fail(metrics: Any, step: int) -> None:
        raise OSError("disk full")

    collector = Collector(Counting([2]), fail)
    with pytest.raises(HookError, match="disk full") as caught:
        collector.collect_experience(Policy(), 3)
    assert caught.value.experience["state"].tolist() == [
        [2, 1, 0],
        [2, 1, 1],
        [2, 2, 0],
    ]  # type: ignore[attr-defined]
    assert collector.metric.collected_steps == 3
    with pytest.raises(HookError) as caught:
        collector.collect_experience(Policy(), 1)
    assert caught.value.experience["state"].tolist() == [[2, 2, 1]]  # type: ignore[attr-defined]
    assert collector.collect_experience(Policy(), 1)["state"].tolist() == [[2, 3, 0]]


def failing_at(row: int, working: Any, error: Any) -> Any:
    """A method that works until a call, in which it raises ``error`` or returns what it gives."""
    count = iter(range(999))

    def method(*args: Any, **kwargs: Any) -> Any:
        if next(count) != row:
            return working(*args, **kwargs)
        if isinstance(error, BaseException):
            raise error
        return error(*working(*args, **kwargs))

    return method


NAN = float("nan")


@pytest.mark.parametrize(
    ("who", "error", "kind"),
    [
        ("env", ValueError("broken"), EnvError),
        ("env", KeyboardInterrupt(), KeyboardInterrupt),
        ("env", lambda s, r, d, i: (s, r * NAN, d, i), BadEnvOutput),
        ("policy", ValueError("broken"), PolicyError),
        ("policy", lambda a, values: (a, {}), BadPolicyOutput),
    ],
)
@pytest.mark.parametrize("flatten", [True, False])
def test_the_steps_before_an_error_are_its_experience(
    who: str, error: Any, kind: Any, flatten: bool
) -> None:
    env, policy = Counting([2, 5]), Policy()
    collector = Collector(env, flatten=flatten)
    collector.collect_experience(policy, 2)
    method = "step" if who == "env" else "act"
    owner: Any = env if who == "env" else policy
    setattr(owner, method, failing_at(3, getattr(owner, method), error))
    with pytest.raises(kind) as caught:
        collector.collect_experience(policy, 20)
    found: Any = caught.value.experience
    lead = (6,) if flatten else (3, 2)
    assert {name: rows.shape for name, rows in found.items()} == {
        name: (*lead, 3 if name in ("state", "next_state") else 1)
        for name in ("state", "action", "next_state", "reward", "done", "value")
    } | {"log_prob": (*lead, 1)}
    by_row = {name: rows.reshape(3, 2, -1) for name, rows in found.items()}
    assert by_row["state"].tolist() == [
        [[2, 1, 1], [5, 1, 1]],
        [[2, 2, 0], [5, 1, 2]],
        [[2, 2, 1], [5, 1, 3]],
    ]
    assert by_row["next_state"][..., 2].tolist() == [[2, 2], [1, 3], [2, 4]]
    ended = [[True, False], [False, False], [True, False]]
    assert by_row["done"][..., 0].tolist() == ended
    assert torch.equal(by_row["reward"][..., 0], by_row["next_state"][..., 2] + EIGHTHS)
    assert torch.equal(
        by_row["value"][..., 0],
        100 + 10 * by_row["state"][..., 0] + by_row["state"][..., 2],
    )
    assert collector.metric.collected_steps == 8
    after = collector.collect_experience(policy, 4)
    assert after["state"].reshape(2, 2, 3)[..., 2].tolist() == [[0, 0], [1, 1]]
    assert collector.metric.collected_steps == 12


EIGHTHS = torch.arange(2) / 8


def test_a_graph_ends_with_the_last_complete_step() -> None:
    env, policy = Counting([9]), Linear()
    env.step = failing_at(3, env.step, ValueError("broken"))  # type: ignore[method-assign]
    with pytest.raises(EnvError) as caught:
        Collector(env).collect_experience(policy, 9)
    found = caught.value.experience  # type: ignore[attr-defined]
    assert torch.allclose(found["log_prob"], policy.layer(found["state"]))
    found["log_prob"].sum().backward()
    assert torch.equal(policy.layer.weight.grad, found["state"].sum(0, keepdim=True))  # type: ignore[arg-type]


@pytest.mark.parametrize(("row", "expected"), [(1, []), (140, [(2, 70), (3, 46)])])
def test_whole_trajectories_before_an_error_are_its_experience(
    row: int, expected: list[tuple[int, int]]
) -> None:
    env, policy = Counting([2, 3]), Policy()
    collector = Collector(env)
    policy.act = failing_at(row, policy.act, ValueError("broken"))  # type: ignore[method-assign]
    with pytest.raises(PolicyError, match=f"at row {row} of the call") as caught:
        collector.collect_trajectory(policy, 400)
    found = caught.value.experience  # type: ignore[attr-defined]
    states = found["state"].tolist() if found else []
    for length, count in expected:
        assert [state for state in states if state[0] == length] == [
            [length, k + 1, t] for k in range(count) for t in range(length)
        ]
    assert len(states) == sum(length * count for length, count in expected)
    assert len(collector.collect_trajectory(policy, 2)["state"]) == 5


def test_an_error_of_the_policy_says_what_the_next_call_does() -> None:
    env = SyncVectorEnv([lambda: CountingGym(9)] * 2)
    wide = muster.policies.categorical(nn.Linear(3, 10))
    changing = SimpleNamespace(act=lambda obs, deterministic: 1 / 0)
    for policy, cause in ((wide, RuntimeError), (changing, ZeroDivisionError)):
        with pytest.raises(
            PolicyError,
            match=r"at row 0 of the call: .* states of shape \(2, 2\) .*float32.* next call resets",
        ) as caught:
            Collector(env).collect_experience(policy, 4)
        assert "again from there" not in str(caught.value)
        assert isinstance(caught.value.__cause__, cause)
        assert caught.value.experience == {}  # type: ignore[attr-defined]


def test_outputs_of_an_earlier_error_are_not_used() -> None:
    answers: list[Any] = [(torch.ones(1, 1), {})] * 2
    answers += [(torch.ones(1, 1), {"value": ONE[:1]}), None]
    answers += [(torch.zeros(1, 1), {})] * 2
    left = iter(answers)
    policy = SimpleNamespace(act=lambda obs, deterministic: next(left))
    env = Counting([9])
    collector = Collector(env)
    for message in ("at the row before", "NoneType"):
        with pytest.raises(BadPolicyOutput, match=message):
            collector.collect_experience(policy, 4)
    assert collector.collect_experience(policy, 2)["action"].tolist() == [[0], [0]]
    assert env.actions == [[[1]], [[1]], [[0]], [[0]]]


@pytest.mark.parametrize("row", [0, 3])
@pytest.mark.parametrize("who", ["env", "policy"])
def test_after_an_error_all_environments_begin_anew(who: str, row: int) -> None:
    env, policy = Counting([3, 5]), Policy()
    collector = Collector(env)
    collector.collect_experience(policy, 2)
    owner, method = (env, "step") if who == "env" else (policy, "act")
    working, count = getattr(owner, method), iter(range(99))

    def failing(*args: Any, **kwargs: Any) -> Any:
        if next(count) == row:
            raise ValueError("broken")
        return working(*args, **kwargs)

    setattr(owner, method, failing)
    with pytest.raises(
        EnvError if who == "env" else PolicyError, match="broken"
    ) as caught:
        collector.collect_experience(policy, 20)
    assert isinstance(caught.value.__cause__, ValueError)
    assert collector.metric.collected_steps == 2 + 2 * row
    found = collector.collect_experience(policy, 6)
    assert found["state"][:, 2].tolist() == [0, 0, 1, 1, 2, 2]
    assert collector.metric.last_episode_length == 3


def test_impossible_numbers_and_policies_are_refused() -> None:
    collector = Collector(Counting([2]))
    for arguments in (
        {"num_trajectories": 1, "min_num_steps": 1},
        {"num_trajectories": 0},
        {"min_num_steps": -1},
    ):
        with pytest.raises(BadOption, match="num_trajectories|min_num_steps"):
            collector.collect_trajectory(Policy(), **arguments)
    with pytest.raises(BadOption, match="num_steps=0"):
        collector.collect_experience(Policy(), 0)
    for policy in (nn.Linear(2, 2), Policy, None):
        with pytest.raises(BadOption, match=r"act\(state"):
            collector.collect_experience(policy)
    with pytest.raises(BadOption, match="categorical"):
        collector.collect_experience(muster.policies.categorical(nn.Linear(3, 2)))
    assert collector.collect_experience(Policy(), 2)["state"].tolist() == [
        [2, 1, 0],
        [2, 1, 1],
    ]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (torch.zeros(2, 1), "expected \\(action, dict\\)"),
        ((torch.zeros(2, 1), None), "expected \\(action, dict\\)"),
        ((torch.zeros(2, 1), {"action": torch.zeros(2)}), "without 'action'"),
        ((torch.zeros(2, 1), {"reward": torch.zeros(2)}), "'reward'.*has already"),
        ((torch.zeros(2, 1), {"value": 1.0}), "'value' as float"),
        ((torch.zeros(2, 1), {7: torch.zeros(2)}), "the key 7, expected texts"),
        ((torch.zeros(2, 1), {("a", "b"): torch.zeros(2)}), "the key .*expected texts"),
        ((torch.zeros(2, 1), {"x": torch.eye(2).to_sparse()}), "'x' as a sparse"),
        ((torch.zeros(3, 1), {}), r"\(3, 1\)"),
        ((torch.zeros(2, 1), {"value": torch.zeros(())}), "value"),
    ],
)
def test_outputs_that_cannot_be_recorded_are_refused(
    returned: Any, message: str
) -> None:
    policy = SimpleNamespace(act=lambda obs, deterministic: returned)
    with pytest.raises(BadPolicyOutput, match=message):
        Collector(Counting([2, 2])).collect_experience(policy, 4)


@pytest.mark.parametrize(
    "action",
    [
        torch.zeros(2),
        torch.zeros(2, 1),
        torch.zeros(2, 2, dtype=torch.int64),
        torch.tensor([[99], [0]]),
    ],
)
def test_actions_that_gymnasium_environments_cannot_take_are_refused(
    action: torch.Tensor,
) -> None:
    policy = SimpleNamespace(act=lambda obs, deterministic: (action, {}))
    with pytest.raises(
        BadPolicyOutput, match="action of shape|action for env 0 .*: 99 is above"
    ):
        Collector(SyncVectorEnv([lambda: CountingGym(2)] * 2)).collect_experience(
            policy, 4
        )


@pytest.mark.parametrize(
    "later",
    [
        {"value": torch.zeros(2, 2)},
        {"value": torch.zeros(2, 1).long()},
        {},
        {"other": torch.zeros(2, 1)},
    ],
)
def test_outputs_may_not_change_from_step_to_step(later: Any) -> None:
    extras = iter([{"value": torch.zeros(2, 1)}] * 2 + [later] * 9)
    policy = SimpleNamespace(
        act=lambda obs, deterministic: (torch.zeros(2, 1), next(extras))
    )
    with pytest.raises(BadPolicyOutput, match="at row 2, and .* at the row before"):
        Collector(Counting([2, 2])).collect_experience(policy, 8)


@pytest.mark.parametrize(
    ("method", "change", "message"),
    [
        ("step", lambda s, r, d, i: (s, r, d), "tuple of 3"),
        ("step", lambda s, r, d, i: (s[:1], r, d, i), "state of shape"),
        ("step", lambda s, r, d, i: (s.numpy(), r, d, i), "ndarray, expected a tensor"),
        ("step", lambda s, r, d, i: (s.to(torch.complex64), r, d, i), "complex64"),
        ("step", lambda s, r, d, i: (s, r[:1], d, i), "rewards of shape"),
        ("step", lambda s, r, d, i: (s, r * float("nan"), d, i), "nan"),
        ("step", lambda s, r, d, i: (s, r[:, :0], d, i), r"rewards of shape \(2, 0\)"),
        ("step", lambda s, r, d, i: (s, r + 0j, d, i), "rewards .*complex64"),
        ("step", lambda s, r, d, i: (s, None, d, i), "rewards of type NoneType"),
        ("step", lambda s, r, d, i: (s, ["a"], d, i), "rewards of type list"),
        ("step", lambda s, r, d, i: (s, r, d[:1], i), "1 done flags for 2"),
        ("step", lambda s, r, d, i: (s, r, d + NAN, i), "nan as done flag of env.* 0"),
        ("step", lambda s, r, d, i: (s, r, [0, 0.5], i), "0.5 as done flag of env.* 1"),
        ("step", lambda s, r, d, i: (s, r, None, i), "done flags of type NoneType"),
        ("reset_index", lambda s, i: s, "expected \\(state, info\\)"),
        ("reset_index", lambda s, i: (s[:2], i), "state of shape"),
        ("reset", lambda s, i: (s[:1], i), "state of shape"),
        ("reset", lambda s, i: (s.tolist(), i), "list, expected a tensor"),
        ("reset", lambda s, i: (s.bfloat16(), i), r"bfloat16.*return state.float\(\)"),
        ("reset", lambda s, i: (s.to_sparse(), i), r"sparse.*state.to_dense\(\)"),
    ],
)
def test_values_that_cannot_be_recorded_are_refused(
    method: str, change: Any, message: str
) -> None:
    env = Counting([2, 5])
    original = getattr(env, method)
    setattr(env, method, lambda *args: change(*original(*args)))
    with pytest.raises(BadEnvOutput, match=message):
        Collector(env).collect_experience(Policy(), 8)


@pytest.mark.parametrize(
    ("kept", "later", "value", "expected"),
    [
        (torch.int8, torch.int64, 300, None),
        (torch.uint8, torch.int64, -1, None),
        (torch.float16, torch.float32, 1e6, None),
        (torch.int8, torch.int64, 100, 100),
        (torch.float16, torch.float32, 100.5, 100.5),
        (torch.float32, torch.int64, 300, 300),
        (torch.float32, torch.float64, 0.5, 0.5),
    ],
)
def test_states_are_cast_if_their_values_stay(
    kept: Any, later: Any, value: float, expected: float | None
) -> None:
    env = Counting([9, 9])
    reset, step = env.reset, env.step
    env.reset = lambda: (reset()[0].to(kept), {})  # type: ignore[assignment, method-assign]
    env.step = (
        lambda a: (  # type: ignore[method-assign]
            torch.full((2, 3), value, dtype=later),
            *step(a)[1:],
        )
    )
    policy = SimpleNamespace(act=lambda obs, deterministic: (torch.zeros(2, 1), {}))
    if expected is None:
        with pytest.raises(BadEnvOutput, match=f"dtype {later}, expected"):
            Collector(env).collect_experience(policy, 4)
        return
    found = Collector(env).collect_experience(policy, 4)
    assert found["next_state"].dtype is kept
    assert found["next_state"].tolist() == [[expected] * 3] * 4


@pytest.mark.parametrize("flags", [[1, 0], [1.0, 0.0], [True, False]])
def test_done_flags_may_be_numbers(flags: list[Any]) -> None:
    env = Counting([9, 9])
    step = env.step
    env.step = lambda a: (*step(a)[:2], flags, {})  # type: ignore[assignment, method-assign]
    found = Collector(env, flatten=False).collect_experience(Policy(), 4)
    assert found["done"][..., 0].tolist() == [[True, False]] * 2


def test_rewards_may_not_change_their_shape() -> None:
    env = Counting([9])
    step = env.step
    env.step = lambda a: (
        lambda s, r, d, i: (s, r.repeat(1, int(s[0, 2]) // 2 + 1), d, i)
    )(*step(a))  # type: ignore
    with pytest.raises(BadEnvOutput, match=r"rewards of shape \(1, 2\)"):
        Collector(env).collect_experience(Policy(), 4)


def test_environments_that_cannot_be_used_are_refused_with_a_reason() -> None:
    class NoIndex:
        def __init__(self, lengths: list[int]) -> None:
            env = Counting(lengths)
            self.get_num_envs, self.reset, self.step = (
                env.get_num_envs,
                env.reset,
                env.step,
            )

    assert len(Collector(NoIndex([2])).collect_experience(Policy(), 5)["state"]) == 5
    with pytest.raises(UnsupportedEnv, match="reset_index"):
        Collector(NoIndex([2, 3])).collect_experience(Policy(), 6)
    with pytest.raises(UnsupportedEnv, match="last step of its episode"):
        Collector(Wrapped([2, 3], autoreset_mode=AutoresetMode.SAME_STEP))
    with pytest.raises(UnsupportedEnv, match="one tensor"):
        Collector(gymnasium.make("Blackjack-v1"))
    with pytest.raises(UnsupportedEnv):
        Collector(object())
    with pytest.raises(UnsupportedEnv, match=r"the class Counting.*Counting\(\.\.\.\)"):
        Collector(Counting)
    for count in (None, 0, -1, 2.5, "2", True):
        env = Counting([2])
        env.get_num_envs = lambda count=count: count  # type: ignore
        with pytest.raises(
            UnsupportedEnv, match=rf"Counting.get_num_envs\(\) returned {count!r}"
        ):
            Collector(env)


def test_nothing_of_prt_rl_is_imported() -> None:
    code = "import sys, muster.compat.prt_rl; assert not [m for m in sys.modules if m.startswith('prt_rl')]"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
