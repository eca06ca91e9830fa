"""Policies that go wrong: the right error, nothing stepped, and the next call tries again."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import muster
from muster import Collector
from muster.errors import (
    BadEnvOutput,
    BadOption,
    BadPolicyOutput,
    MusterError,
    PolicyError,
)
from muster.testing import CountingEnv, SpaceEnv
from tests.fakes.faults import TwoArguments
from tests.tools import assert_accounted, collect, column, counting, recorded, stable

T = 5  # rows per batch


class Flaky:
    """Acts well, except at the calls ``at``, where it does what ``fault`` does."""

    def __init__(
        self,
        fault: Callable[[], Any],
        at: tuple[int, ...],
        good: Callable[[], Any] | None = None,
    ) -> None:
        self.fault, self.at, self.calls = fault, at, 0
        self.good = good or (lambda: torch.zeros(2, dtype=torch.int64))
        self.seen: list[list[float]] = []

    def __call__(self, obs: Any) -> Any:
        self.calls += 1
        self.seen.append(obs[:, 1].tolist())
        return self.fault() if self.calls - 1 in self.at else self.good()


def throw(error: Exception) -> Any:
    raise error


FAULTS: dict[str, tuple[Callable[[], Any], type[MusterError], str]] = {
    "error": (
        lambda: throw(ValueError("boom")),
        PolicyError,
        "raised ValueError at row {row} of the batch: boom",
    ),
    "two_arguments": (
        lambda: throw(TwoArguments(3, "why")),
        PolicyError,
        r"raised TwoArguments .*why \(3\)",
    ),
    "stop_iteration": (
        lambda: throw(StopIteration()),
        PolicyError,
        "raised StopIteration",
    ),
    "shape": (
        lambda: torch.zeros(3, dtype=torch.int64),
        BadPolicyOutput,
        r"action with shape \(3,\), expected \(2,\)",
    ),
    "scalar": (
        lambda: torch.tensor(0),
        BadPolicyOutput,
        r"action with shape \(\), expected \(2,\)",
    ),
    "one_hot": (
        lambda: torch.eye(2, dtype=torch.int64),
        BadPolicyOutput,
        r"\(2, 2\), expected \(2,\); .*argmax",
    ),
    "scores": (lambda: torch.rand(2, 2), BadPolicyOutput, "categorical"),
    "float": (
        lambda: torch.zeros(2),
        BadPolicyOutput,
        "action with dtype torch.float32, expected int64",
    ),
    "complex": (
        lambda: torch.zeros(2, dtype=torch.complex64),
        BadPolicyOutput,
        "torch.complex64, expected int64",
    ),
    "none": (lambda: None, BadPolicyOutput, "action as NoneType"),
    "string": (lambda: "left", BadPolicyOutput, "action as str"),
    "strings": (lambda: ["left", "right"], BadPolicyOutput, "action as list"),
    "dict": (lambda: {"action": torch.zeros(2)}, BadPolicyOutput, "action as dict"),
    "ragged": (lambda: [[1], [1, 2]], BadPolicyOutput, "action as list"),
    "object": (object, BadPolicyOutput, "action as object"),
    "three": (
        lambda: (torch.zeros(2).long(), {}, 3),
        BadPolicyOutput,
        r"a tuple of 3, expected an action, or \(action,",
    ),
    "extras_number": (
        lambda: (torch.zeros(2).long(), 3),
        BadPolicyOutput,
        "a tuple of 2, expected an action",
    ),
    "extras_list": (
        lambda: (torch.zeros(2).long(), [1]),
        BadPolicyOutput,
        "a tuple of 2, expected an action",
    ),
    "new_extras": (
        lambda: (torch.zeros(2).long(), {"v": torch.zeros(2)}),
        BadPolicyOutput,
        r"extras \['v'\].*were \[\]",
    ),
}


@pytest.mark.parametrize("at", [1, 2, 4, 5, 8])
@pytest.mark.parametrize("name", FAULTS)
def test_nothing_is_stepped_and_the_next_call_repeats(name, at):
    fault, kind, message = FAULTS[name]
    policy = Flaky(fault, (at,))
    factory, made = recorded(counting(4))
    with Collector(factory, policy, num_envs=2, frames_per_batch=2 * T) as collector:
        rewards: list[float] = []
        if at >= T:
            rewards += column(collector.rollout(), "next", "reward")[0]
        with pytest.raises(kind, match=message.format(row=at % T)) as caught:
            collector.rollout()
        assert "Flaky" in str(caught.value)
        assert [env.executed for env in made] == [at, at]
        assert collector.stats().in_flight == 2 * (at % T)
        assert_accounted(collector)
        while len(rewards) < 3 * T:
            rewards += column(collector.rollout(), "next", "reward")[0]
        assert_accounted(collector)
        assert collector.stats().discarded == {}
    assert rewards == [t % 4 + 1 for t in range(3 * T)]
    assert [env.executed for env in made] == [3 * T] * 2
    assert policy.seen[at] == policy.seen[at + 1], (
        "the call was repeated on the same observation"
    )
    assert policy.calls == 3 * T + 1


@pytest.mark.parametrize("name", sorted(FAULTS.keys() - {"new_extras"}))
def test_faults_at_the_very_first_call(name):
    fault, kind, message = FAULTS[name]
    factory, made = recorded(counting(4))
    with Collector(
        factory, Flaky(fault, (0, 1)), num_envs=2, frames_per_batch=2 * T
    ) as collector:
        for _ in range(2):
            with pytest.raises(kind, match=message.format(row=0)):
                collector.rollout()
            assert_accounted(collector)
        assert [env.executed for env in made] == [0, 0]
        assert column(collector.rollout(), "next", "reward") == [[1, 2, 3, 4, 1]] * 2
        assert [len(env.seeds) for env in made] == [2, 2], (
            "one reset at the beginning, one in the middle"
        )


def test_the_original_error_is_the_cause():
    with pytest.raises(PolicyError) as caught:
        collect(
            CountingEnv, lambda obs: throw(TwoArguments(3, "why")), frames_per_batch=T
        )
    assert isinstance(caught.value.__cause__, TwoArguments)


def test_errors_of_muster_itself_pass_through_unwrapped():
    error = BadOption("from inside")
    with pytest.raises(BadOption, match="from inside"):
        collect(CountingEnv, lambda obs: throw(error), frames_per_batch=T)


def test_a_failing_module_names_itself():
    net = torch.nn.Sequential(torch.nn.Linear(7, 2))
    with pytest.raises(
        PolicyError, match="policy Sequential raised RuntimeError.*shapes"
    ):
        collect(CountingEnv, net, frames_per_batch=T)


# --- extras ---------------------------------------------------------------------------------------


def extras(**values: Any) -> Callable[[], Any]:
    return lambda: (torch.zeros(2, dtype=torch.int64), values)


@pytest.mark.parametrize(
    ("later", "message"),
    [
        (extras(), r"the extras \[\], at its first call they were \['value'\]"),
        (lambda: torch.zeros(2, dtype=torch.int64), r"the extras \[\], at its first"),
        (
            extras(value=torch.zeros(2), more=torch.zeros(2)),
            r"the extras \['more', 'value'\]",
        ),
        (extras(valeu=torch.zeros(2)), r"the extras \['valeu'\]"),
        (extras(value=torch.zeros(2, 1)), r"value with shape \(2, 1\).* \(2,\)"),
        (extras(value=torch.zeros(())), r"value with shape \(\)"),
        (extras(value=None), "value as NoneType"),
        (extras(value="high"), "value as str"),
        (extras(value={"v": torch.zeros(2)}), "value as dict"),
    ],
    ids=stable,
)
@pytest.mark.parametrize("at", [1, 4])
def test_extras_must_stay_as_they_were(later, message, at):
    policy = Flaky(later, (at,), extras(value=torch.ones(2)))
    with Collector(
        counting(4), policy, num_envs=2, frames_per_batch=2 * T
    ) as collector:
        with pytest.raises(BadPolicyOutput, match=message):
            collector.rollout()
        batch = collector.rollout()
        assert column(batch, "next", "reward") == [[1, 2, 3, 4, 1]] * 2
        assert bool((batch["value"] == 1).all())


def test_floats_are_not_cut_to_integers():
    policy = Flaky(
        extras(value=torch.tensor([0.5, 0.5])), (2,), extras(value=torch.tensor([1, 2]))
    )
    with pytest.raises(
        BadPolicyOutput,
        match="dtype torch.float32, at its first call it was .* torch.int64",
    ):
        collect(counting(4), policy, num_envs=2, frames_per_batch=2 * T)


@pytest.mark.parametrize(
    "value", [torch.zeros(()), torch.zeros(3), torch.zeros(3, 2)], ids=stable
)
def test_extras_have_one_entry_per_environment_from_the_first_call(value):
    with pytest.raises(BadPolicyOutput, match=r"value with shape .* begin with \(2,\)"):
        collect(
            counting(),
            Flaky(extras(value=value), (0,)),
            num_envs=2,
            frames_per_batch=2 * T,
        )


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", [2, -1, 2**40])
@pytest.mark.parametrize("at", [0, 2, 4])
def test_discrete_actions_out_of_range(action, at):
    """Found at the end of the rollout: the row and all after it are taken back and counted."""
    policy = Flaky(lambda: torch.tensor([0, action]), (at,))
    with Collector(
        counting(9), policy, num_envs=2, frames_per_batch=2 * T
    ) as collector:
        with pytest.raises(
            BadPolicyOutput,
            match=rf"action for env 1 \(row {at} of the batch\): {action} is (above|below) the space's",
        ) as caught:
            collector.rollout()
        assert f"The {at} rows before it are kept" in str(caught.value)
        assert collector.stats().discarded == {"bad_policy_output": 2 * (T - at)}
        assert collector.stats().in_flight == 2 * at
        assert_accounted(collector)
        batch = collector.rollout()
        assert (
            column(batch, "next", "reward")
            == [[*range(1, at + 1), *range(1, T - at + 1)]] * 2
        )
        assert (
            column(batch, "next", "truncated") == [[t == at - 1 for t in range(T)]] * 2
        )
        assert_accounted(collector)


@pytest.mark.parametrize("action", [2, -1, 2**40])
def test_discrete_actions_out_of_range_in_a_batch_of_one_step(action):
    policy = Flaky(
        lambda: torch.tensor([0, action]), (2,), lambda: torch.tensor([0, 1])
    )
    with Collector(counting(9), policy, num_envs=2, frames_per_batch=2) as collector:
        assert [column(collector.rollout(), "next", "reward") for _ in range(2)] == [
            [[1], [1]],
            [[2], [2]],
        ]
        with pytest.raises(
            BadPolicyOutput,
            match=f"action for env 1 .*: {action} is (above|below) the space's",
        ):
            collector.rollout()
        assert collector.stats().discarded == {"bad_policy_output": 2}
        assert column(collector.rollout(), "next", "reward") == [[1], [1]]
        assert_accounted(collector)


def box_env() -> SpaceEnv:
    return SpaceEnv(spaces.Box(-1, 1, (2,)), spaces.Box(-1, 1, (3,)), length=9)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("mode", ["fast", "full"])
def test_continuous_actions_that_are_not_finite(value, mode):
    calls = []

    def policy(obs: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        action = torch.zeros(2, 3)
        action[1, 2] = value if len(calls) == 3 else 0.5
        return action

    with Collector(
        box_env, policy, num_envs=2, frames_per_batch=2 * T, validate=mode
    ) as collector:
        with pytest.raises(BadPolicyOutput, match="action for env 1.*not finite"):
            collector.rollout()
        assert collector.stats().in_flight == 4
        assert torch.isfinite(collector.rollout()["action"]).all()
        assert_accounted(collector)


@pytest.mark.parametrize("mode", ["off", "fast", "full"])
def test_continuous_actions_outside_their_space_are_found_by_full_validation_only(mode):
    policy = lambda obs: torch.full((3,), 1.5)  # noqa: E731
    with Collector(box_env, policy, frames_per_batch=T, validate=mode) as collector:
        if mode == "full":
            with pytest.raises(
                BadPolicyOutput,
                match=r"action for env 0 \(row 0 of the batch\): 1.5 is above the space's high 1.0\. ",
            ):
                collector.rollout()
        else:
            assert bool((collector.rollout()["action"] == 1.5).all())


def test_validate_off_still_checks_shapes():
    with pytest.raises(BadPolicyOutput, match="shape"):
        collect(
            counting(),
            lambda obs: torch.zeros(3).long(),
            frames_per_batch=T,
            validate="off",
        )


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool])
def test_integers_where_floats_are_expected(dtype):
    with pytest.raises(
        BadPolicyOutput, match=re.escape(f"dtype {dtype}, expected float32")
    ):
        collect(box_env, lambda obs: torch.zeros(3, dtype=dtype), frames_per_batch=T)


# --- composite actions ----------------------------------------------------------------------------

PARTS = spaces.Dict(
    {
        "a": spaces.Discrete(2),
        "b": spaces.Tuple((spaces.Discrete(2), spaces.Box(-1, 1, (2,)))),
    }
)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (
            {"a": 0},
            r"returned dict, expected action.b.0 in it: actions have the parts \['action.a', 'action.b.0'",
        ),
        ({"a": 0, "b": (0,)}, "expected action.b.1 in it"),
        (torch.tensor(0), "expected action.a in it"),
        (
            {"a": 0, "b": (0, torch.zeros(3))},
            r"action.b.1 with shape \(3,\), expected \(2,\)",
        ),
        (
            {"a": 0.5, "b": (0, torch.zeros(2))},
            "action.a with dtype torch.float32, expected int64",
        ),
        ({"a": None, "b": (0, torch.zeros(2))}, "action.a as NoneType"),
    ],
    ids=stable,
)
def test_parts_of_actions_are_named(action, message):
    env = SpaceEnv(spaces.Discrete(2), PARTS)
    with pytest.raises(BadPolicyOutput, match=message):
        collect(env, lambda obs: action, frames_per_batch=T)
    assert env.actions == []


# --- what is no policy ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy", [3, "ppo.pt", {}, [lambda obs: 0], torch.nn.Linear, object()], ids=stable
)
def test_what_is_no_policy_is_refused_at_construction(policy):
    factory, made = recorded(counting())
    with pytest.raises(BadOption, match="policy is .* expected None, an nn.Module"):
        Collector(factory, policy, frames_per_batch=T)
    assert [env.closed for env in made] == [1] * (
        policy != {}
    )  # an empty dict is refused before anything is made


def test_heads_that_do_not_fit_are_refused_at_construction():
    net = torch.nn.Linear(2, 2)
    with pytest.raises(BadOption, match="several parts"):
        Collector(
            lambda: SpaceEnv(spaces.Discrete(2), PARTS),
            muster.policies.categorical(net),
            frames_per_batch=T,
        )


def test_interrupts_in_a_policy_pass_through():
    def fault() -> Any:
        raise KeyboardInterrupt

    with Collector(
        counting(9), Flaky(fault, (3,)), num_envs=2, frames_per_batch=2 * T
    ) as collector:
        with pytest.raises(KeyboardInterrupt):
            collector.rollout()
        assert_accounted(collector)
        assert collector.stats().in_flight == 6
        collector.rollout()
        assert_accounted(collector)
        assert collector.stats().executed == 2 * T


def test_environments_are_closed_after_policy_errors():
    env = CountingEnv()
    with (
        pytest.raises(PolicyError),
        Collector(
            env, lambda obs: throw(ValueError()), frames_per_batch=T
        ) as collector,
    ):
        collector.rollout()
    assert env.closed == 1


@pytest.mark.parametrize("what", ["extra", "state"])
def test_an_output_that_rows_cannot_store_is_named(what: str) -> None:
    """NumPy has no bfloat16, which networks return under autocast."""

    def act(obs: torch.Tensor, state: Any = None) -> Any:
        value = torch.zeros(len(obs), 3, dtype=torch.bfloat16)
        action = torch.zeros(len(obs), dtype=torch.int64)
        return (action, {"score": value}) if what == "extra" else (action, {}, value)

    expected = r"returned .*has dtype torch.bfloat16.*return value.float\(\)"
    with (
        Collector(counting(), act, num_envs=2, frames_per_batch=2 * T) as c,
        pytest.raises(BadPolicyOutput, match=expected),
    ):
        c.next()


class Follows(gymnasium.Env[Any, Any]):
    """Returns its action as reward and observation, as a simulator does that goes on with NaN.

    ``broken_at``: the observation is NaN from this step on, whatever the action.
    """

    observation_space = gymnasium.spaces.Box(-9, 9, (2,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, broken_at: int = 1000) -> None:
        self.broken_at = broken_at
        self.t = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        observation = np.array(action, np.float32)
        if self.t >= self.broken_at:
            observation[1] = np.nan
        return observation, float(observation.sum()), False, False, {}


@pytest.mark.parametrize("mode", ["fast", "full"])
@pytest.mark.parametrize("frames", [2, 12])
def test_the_first_bad_value_is_the_cause_of_those_that_follow(mode, frames):
    calls = 0

    def act(observation: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        bad = float("nan") if calls == 4 else 0.5
        return torch.full_like(observation, bad)

    with (
        Collector(
            Follows, act, num_envs=2, frames_per_batch=frames, validate=mode
        ) as collector,
        pytest.raises(BadPolicyOutput, match="action for env 0.*nan is not finite"),
    ):
        for _ in range(6):
            collector.rollout()

    def copy(observation: torch.Tensor) -> torch.Tensor:
        return observation.clone()

    with (
        Collector(
            partial(Follows, 3),
            copy,
            num_envs=2,
            frames_per_batch=frames,
            validate=mode,
        ) as collector,
        pytest.raises(BadEnvOutput, match="Follows"),
    ):
        for _ in range(6):
            collector.rollout()
