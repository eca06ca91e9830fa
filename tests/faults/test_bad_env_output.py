"""Environments that go wrong: the right error, and not a frame lost or made up."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from muster import Collector, MultiAsyncCollector, MultiSyncCollector
from muster.envs.checks import FIX, Casts
from muster.errors import BadEnvOutput, EnvError, MusterError
from muster.testing import ChainEnv, CountingEnv, FaultyEnv, SpaceEnv
from tests.fakes.faults import TwoArguments, Unpicklable
from tests.fakes.without_torch import WideCounting
from tests.tools import (
    assert_accounted,
    assert_chain,
    collect,
    column,
    counting,
    recorded,
)
from tests.warned import warnings_are_errors

T = 6  # rows per batch
OBS = np.zeros(2, np.float32)


class Broken(Exception):
    """Cannot even say what it is."""

    def __str__(self) -> str:
        return "broken"


ERRORS: dict[str, Callable[[], Exception]] = {
    "plain": lambda: ValueError("boom"),
    "os": lambda: OSError(5, "boom"),
    "unpicklable": Unpicklable,
    "two_arguments": lambda: TwoArguments(3, "why"),
    "stop_iteration": lambda: StopIteration(7),
    "own": lambda: Broken(),
    "of_muster": lambda: MusterError("an environment that uses Muster inside"),
}

OUTPUTS: dict[str, tuple[dict[str, Any], str]] = {
    "obs_shape": (
        {"obs": np.zeros(3, np.float32)},
        r"observation is an array of shape \(3,\) and dtype float32.*\(2,\)",
    ),
    "obs_dims": (
        {"obs": np.zeros((1, 2), np.float32)},
        r"observation is an array of shape \(1, 2\)",
    ),
    "obs_scalar": ({"obs": np.float32(1)}, "observation is float32"),
    "obs_beyond": (
        {"obs": np.array([0.0, 1e39])},
        r"observation is an array of dtype float64.*dtype float32",
    ),
    "obs_complex": (
        {"obs": np.zeros(2, complex)},
        "observation is an array of dtype complex128",
    ),
    "obs_dates": (
        {"obs": np.zeros(2, "M8[s]")},
        "observation is an array of dtype datetime64",
    ),
    "obs_objects": (
        {"obs": np.zeros(2, object)},
        "observation is an array of dtype object",
    ),
    "obs_list": ({"obs": [0.0, 0.0]}, "observation is list"),
    "obs_none": ({"obs": None}, "observation is NoneType None"),
    "obs_string": ({"obs": "ab"}, "observation is str 'ab'"),
    "obs_dict": ({"obs": {"observation": OBS}}, "observation is dict"),
    "obs_tuple": ({"obs": (OBS, {})}, "observation is tuple"),
    "reward_none": ({"reward": None}, "reward is NoneType None, expected a number"),
    "reward_string": ({"reward": "1.0"}, "reward is str '1.0'"),
    "reward_array": ({"reward": np.zeros(2)}, r"reward is an array of shape \(2,\)"),
    "reward_one_of_one": (
        {"reward": np.ones((1, 1))},
        r"reward is an array of shape \(1, 1\)",
    ),
    "reward_one_string": (
        {"reward": np.array(["1"])},
        r"reward is an array of shape \(1,\)",
    ),
    "reward_complex": ({"reward": 1j}, "reward is complex"),
    "reward_list": ({"reward": [1.0]}, "reward is list"),
    "terminated_word": (
        {"terminated": "no"},
        "terminated is str 'no', expected a bool",
    ),
    "terminated_none": ({"terminated": None}, "terminated is NoneType"),
    "terminated_nan": ({"terminated": float("nan")}, "terminated is float nan"),
    "terminated_two": ({"terminated": 2}, "terminated is int 2"),
    "terminated_array": (
        {"terminated": np.array([True, False])},
        r"terminated is an array of shape \(2,\)",
    ),
    "truncated_word": ({"truncated": "False"}, "truncated is str 'False'"),
    "truncated_dict": ({"truncated": {}}, "truncated is dict"),
    "four": (
        {"all": (OBS, 1.0, False, {})},
        r"returned tuple of 4, expected \(observation, reward, terminated",
    ),
    "six": ({"all": (OBS, 1.0, False, False, {}, 0)}, "returned tuple of 6"),
    "nothing": ({"all": None}, "returned NoneType"),
    "array": ({"all": OBS}, "returned ndarray"),
    "number": ({"all": 3}, "returned int"),
}


def faulty(
    kind: str, which: int | None, **fault: Any
) -> tuple[Any, dict[str, Any], str]:
    """Environments of which one goes wrong: what to collect from, with which options, and the name
    to expect.
    """
    if kind == "single":
        return FaultyEnv(**fault), {"frames_per_batch": T}, "FaultyEnv[0]"
    count = iter(range(3))
    make = lambda: FaultyEnv(**fault) if next(count) == which else FaultyEnv(at=-1)  # noqa: E731
    return make, {"num_envs": 3, "frames_per_batch": 3 * T}, f"FaultyEnv[{which}]"


PLACES = [("single", None), ("stacked", 0), ("stacked", 2)]
STEPS = [
    0,
    1,
    2,
    3,
    T - 1,
    T,
    2 * T - 1,
]  # first, inside and last of an episode; last and first of a batch
EVERYWHERE = [(kind, which, at) for kind, which in PLACES for at in STEPS]


def check_goes_on(
    collector: Collector, at: int, executed_in_row: int, reason: str
) -> None:
    """After a fault at step ``at``: the rows before it are delivered, cut as truncated, and new
    episodes follow.
    """
    row, B = at % T, collector.options.num_envs or 1
    stats = collector.stats()
    assert stats.in_flight == row * B
    assert sum(stats.discarded.values()) == stats.discarded[reason] == executed_in_row
    assert_accounted(collector)
    batch = collector.rollout()
    batch = batch if batch.ndim == 2 else batch.unsqueeze(0)
    before = [(at - row + t) % 3 + 1 for t in range(row)]
    assert (
        column(batch, "next", "reward")
        == [before + [t % 3 + 1 for t in range(T - row)]] * B
    )
    assert column(batch, "observation") == [
        [[3, r - 1] for r in column(batch, "next", "reward")[b]] for b in range(B)
    ]
    assert column(batch, "next", "observation") == [
        [[3, r] for r in column(batch, "next", "reward")[b]] for b in range(B)
    ]
    reward, done = batch["next", "reward"][..., 0], batch["next", "done"][..., 0]
    ended = reward == 3
    assert torch.equal(batch["next", "terminated"][..., 0], ended)
    cut = torch.zeros_like(ended)
    if row:
        cut[:, row - 1] = ~ended[:, row - 1]
    assert torch.equal(batch["next", "truncated"][..., 0], cut)
    assert torch.equal(done, ended | cut)
    ids = batch["collector", "traj_ids"]
    assert torch.equal(ids[:, 1:] != ids[:, :-1], done[:, :-1])
    assert len(collector.episodes) == done.sum()
    assert collector.stats().in_flight == 0
    assert_accounted(collector)
    following = collector.rollout()
    following = following if following.ndim == 2 else following.unsqueeze(0)
    later = following["collector", "traj_ids"]
    assert torch.equal(later[:, 0] != ids[:, -1], done[:, -1])
    assert (later[:, -1] > ids[:, -1]).all()


def run_into(collector: Collector, at: int, error: type[MusterError]) -> MusterError:
    for _ in range(at // T):
        collector.rollout()
    with pytest.raises(error) as caught:
        collector.rollout()
    return caught.value


@pytest.mark.parametrize(("kind", "which", "at"), EVERYWHERE)
def test_errors_in_step_at_every_place(kind, which, at):
    env, options, name = faulty(kind, which, at=at, error=ERRORS["plain"])
    with Collector(env, None, **options) as collector:
        error = run_into(collector, at, EnvError)
        assert (
            f"{name}.step (row {at % T} of the batch) raised ValueError: boom"
            in str(error)
        )
        assert isinstance(error.__cause__, ValueError)
        check_goes_on(collector, at, which or 0, "env_error")


@pytest.mark.parametrize("name", ERRORS)
def test_errors_of_every_kind(name):
    env, options, who = faulty("stacked", 2, at=4, error=ERRORS[name])
    with Collector(env, None, **options) as collector:
        error = run_into(collector, 4, EnvError)
        assert who in str(error)
        assert type(error.__cause__) is type(ERRORS[name]())
        assert type(error.__cause__).__name__ in str(error)
        check_goes_on(collector, 4, 2, "env_error")


@pytest.mark.parametrize(("kind", "which", "at"), EVERYWHERE)
def test_bad_output_at_every_place(kind, which, at):
    env, options, name = faulty(
        kind, which, at=at, output={"obs": np.zeros(3, np.float32)}
    )
    with Collector(env, None, **options) as collector:
        error = run_into(collector, at, BadEnvOutput)
        assert (
            f"{name}.step (row {at % T} of the batch): observation is an array of shape (3,)"
            in str(error)
        )
        check_goes_on(collector, at, (which or 0) + 1, "bad_env_output")


@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.parametrize(("kind", "which"), [("single", None), ("stacked", 2)])
def test_bad_output_of_every_kind(name, kind, which):
    output, message = OUTPUTS[name]
    env, options, who = faulty(kind, which, at=4, output=output)
    with Collector(env, None, **options) as collector:
        error = run_into(collector, 4, BadEnvOutput)
        assert_matches(message, error)
        assert f"{who}.step (row 4 of the batch)" in str(error)
        assert "Fix the environment" in str(error)
        check_goes_on(collector, 4, (which or 0) + 1, "bad_env_output")


def assert_matches(pattern: str, error: BaseException) -> None:

    assert re.search(pattern, str(error)), f"{pattern!r} is not in {error}"


class Plain(CountingEnv):
    """The same environment on the general path: float actions."""

    def __init__(self, output: Any = None, at: int = -1) -> None:
        super().__init__()
        self.inner = FaultyEnv(at, output=output)
        self.action_space = spaces.Box(-1, 1, (1,))

    def reset(self, **options: Any) -> Any:
        return self.inner.reset(**options)

    def step(self, action: Any) -> Any:
        return self.inner.step(0)


@pytest.mark.parametrize("name", OUTPUTS)
def test_bad_output_of_every_kind_on_the_general_path(name):
    output, message = OUTPUTS[name]
    with Collector(lambda: Plain(output, 4), None, frames_per_batch=T) as collector:
        error = run_into(collector, 4, BadEnvOutput)
        assert_matches(message, error)
        assert "Plain[0].step (row 4 of the batch)" in str(error)
        check_goes_on(collector, 4, 1, "bad_env_output")


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", [np.nan, np.inf, -np.inf, np.float32("nan"), np.asarray(np.inf)], ids=str
)
@pytest.mark.parametrize("at", [0, 4, T - 1])
def test_rewards_that_are_not_finite(value, at):
    env, options, _ = faulty("stacked", 2, at=at, output={"reward": value})
    with Collector(env, None, **options) as collector:
        error = run_into(collector, at, BadEnvOutput)
        assert_matches(rf"FaultyEnv\[2\].*row {at}.*reward is -?(nan|inf)", error)
        check_goes_on(collector, at, 3 * (T - at), "bad_env_output")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_rewards_that_are_not_finite_in_a_batch_of_one_step(value):
    env, options, _ = faulty("stacked", 2, at=1, output={"reward": value})
    with Collector(env, None, **{**options, "frames_per_batch": 3}) as collector:
        assert collector.rollout()["next", "reward"].isfinite().all()
        with pytest.raises(
            BadEnvOutput, match=r"FaultyEnv\[2\].*reward is -?(nan|inf)"
        ):
            collector.rollout()
        assert collector.stats().discarded == {"bad_env_output": 3}
        assert collector.rollout()["next", "reward"].isfinite().all()
        assert_accounted(collector)


def test_validate_off_lets_values_through():
    env, options, _ = faulty("single", None, at=1, output={"reward": np.nan})
    with Collector(env, None, validate="off", **options) as collector:
        assert (
            collector.rollout()["next", "reward"][:, 0].isnan().tolist()
            == [False, True] + [False] * 4
        )


@pytest.mark.parametrize("mode", ["off", "fast", "full"])
def test_observations_outside_their_space_are_found_by_full_validation_only(mode):
    space = spaces.Box(-1.0, 1.0, (2,))

    class Outside(SpaceEnv):
        def _observe(self) -> Any:
            return np.array([0.0, 5.0 if self.t == 2 else 0.5], np.float32)

    collector = Collector(
        lambda: Outside(space, spaces.Discrete(2)),
        None,
        num_envs=2,
        frames_per_batch=2 * T,
        validate=mode,
    )
    with collector:
        if mode != "full":
            assert collector.rollout()["next", "observation"].max() == 5
            return
        with pytest.raises(
            BadEnvOutput,
            match=r"Outside\[0\] \(row 1 of the batch\): observation 5.0 is above the.*1.0",
        ):
            collector.rollout()
        assert_accounted(collector)


def test_full_validation_finds_nan_in_observations():
    env, options, _ = faulty(
        "stacked", 1, at=3, output={"obs": np.array([0, np.nan], np.float32)}
    )
    with Collector(env, None, validate="full", **options) as collector:
        with pytest.raises(
            BadEnvOutput,
            match=r"FaultyEnv\[1\] \(row 3 of the batch\): observation nan is not finite",
        ):
            collector.rollout()
        check_goes_on(collector, 3, 3 * (T - 3), "bad_env_output")


AWAY_FROM_ZERO = {
    "Discrete": spaces.Discrete(10, start=3),
    "Box(())": spaces.Box(3, 12, (), np.float32),
    "Box": spaces.Box(3, 12, (2, 2), np.float32),
    "Dict": spaces.Dict(
        {
            "a": spaces.Box(3, 12, (2,), np.float32),
            "b": spaces.MultiDiscrete([9, 9], start=[3, 3]),
        }
    ),
}


class AwayFromZero(CountingEnv):
    """Observes ``3 + t`` in a space without 0, and takes actions of such a space; ``bad``
    (environment, t) is 0.
    """

    def __init__(
        self, space: str, length: int, number: int = 0, bad: tuple[int, int] = (-1, -1)
    ) -> None:
        super().__init__(length)
        self.observation_space = AWAY_FROM_ZERO[space]
        self.action_space: Any = spaces.Discrete(2, start=5)
        self.number, self.bad = number, bad

    def _observe(self) -> Any:
        value = 0 if (self.number, self.t) == self.bad else 3 + self.t
        return _full(self.observation_space, value)


def _full(space: Any, value: int) -> Any:
    if isinstance(space, spaces.Dict):
        return {name: _full(part, value) for name, part in space.items()}
    return (
        value
        if isinstance(space, spaces.Discrete)
        else np.full(space.shape, value, space.dtype)
    )


def lengthening(space: str, bad: tuple[int, int] = (-1, -1)) -> Any:
    """A factory of environments with episodes of 2, 3, 4, ... steps."""
    return recorded(lambda i: AwayFromZero(space, 2 + i, i, bad))[0]


ABSENCES: dict[
    str, tuple[dict[str, Any], dict[str, Any]]
] = {  # options, and what is collected: a batch, or episodes
    "decorrelation": ({"max_decorrelation_steps": 3, "frames_per_batch": 40}, {}),
    "waiting": ({"reset_when_done": False, "frames_per_batch": 40}, {}),
    "waiting after random steps": (
        {
            "reset_when_done": False,
            "max_decorrelation_steps": 3,
            "frames_per_batch": 40,
        },
        {},
    ),
    "fewer episodes than environments": ({}, {"n_episode": 2}),
    "let go one by one": ({}, {"n_episode": 9}),
    "per_env": ({}, {"n_episode": 8, "rule": "per_env"}),
    "fair": ({}, {"n_episode": 6, "rule": "fair"}),
}


@pytest.mark.parametrize("case", ABSENCES)
@pytest.mark.parametrize("space", AWAY_FROM_ZERO)
def test_full_validation_leaves_out_rows_of_environments_that_are_not_stepped(
    space, case
):
    options, amount = ABSENCES[case]
    with Collector(
        lengthening(space), None, num_envs=4, validate="full", seed=1, **options
    ) as c:
        for _ in range(3):
            batch = c.collect_batch(**amount)[0] if amount else c.rollout()
            reward = batch["next", "reward"][
                ..., 0
            ]  # t, and 0 in rows of those who wait
            assert batch["next", "done"].any()
            leaves = [
                batch[key]
                for key in batch.keys(True, True)
                if {*key} & {"observation", "a", "b"} and "next" in key
            ]
            assert len(leaves) == (2 if space == "Dict" else 1)
            for leaf in leaves:
                assert (
                    leaf.reshape(*reward.shape, -1)[reward > 0][:, 0]
                    == 3 + reward[reward > 0]
                ).all()
            assert_accounted(c)


@pytest.mark.parametrize("t", [1, 2])
@pytest.mark.parametrize("space", AWAY_FROM_ZERO)
def test_full_validation_finds_what_is_wrong_beside_environments_that_are_not_stepped(
    space, t
):
    """Environment 0 has ended, 3 waits from the first row on, and environment 1 observes 0."""
    with Collector(
        lengthening(space, bad=(1, t)), None, num_envs=4, validate="full", seed=1
    ) as c:
        with pytest.raises(
            BadEnvOutput,
            match=rf"AwayFromZero\[1\] \(row {t - 1} of the batch\): .* 0.*below",
        ):
            c.collect(n_episode=2)
        assert_accounted(c)


def test_full_validation_of_actions_leaves_out_rows_of_environments_that_are_not_stepped():
    """Policies are asked about them, and what they answer is not used."""
    wanted = torch.tensor([5, 6, 0, 0])

    def policy(obs: torch.Tensor) -> torch.Tensor:
        return torch.where(obs > 0, wanted.clamp(5), wanted)

    with Collector(
        lengthening("Discrete"), policy, num_envs=4, validate="full", seed=1
    ) as c:
        assert c.collect(n_episode=2).n_collected_episodes == 2
        assert_accounted(c)


@pytest.mark.parametrize("mode", ["off", "fast", "full"])
def test_shapes_and_flags_are_checked_in_every_mode(mode):
    for output in (
        {"obs": np.zeros(2, complex)},
        {"terminated": "no"},
        {"reward": None},
    ):
        env, options, _ = faulty("single", None, at=1, output=output)
        with (
            Collector(env, None, validate=mode, **options) as collector,
            pytest.raises(BadEnvOutput),
        ):
            collector.rollout()


# --- values in another dtype or shape, which are cast ---------------------------------------------

CASTS: dict[
    str, tuple[dict[str, Any], str, str]
] = {  # what it is at step 4, the warning, and the refusal
    "float64": (
        {"obs": np.array([3, 2.0])},
        "observation has dtype float64, but its space says float32",
        r"observation is an array of dtype float64 \(shape \(2,\)\), which validate='full' does not cast, but its",
    ),
    "float16": (
        {"obs": np.array([3, 2], np.float16)},
        "observation has dtype float16",
        "dtype float16.*'full'",
    ),
    "int": (
        {"obs": np.array([3, 2], np.int32)},
        "observation has dtype int32",
        "dtype int32.*'full'",
    ),
    "uint8": (
        {"obs": np.array([3, 2], np.uint8)},
        "observation has dtype uint8",
        "dtype uint8.*'full'",
    ),
    "reward": (
        {"reward": np.array([2.0])},
        r"the reward has shape \(1,\), expected a number",
        r"reward is an array of shape \(1,\) and dtype float64, expected a number: validate='full'",
    ),
    "int reward": (
        {"reward": np.array([2])},
        "the reward has shape",
        r"shape \(1,\) and dtype int64.*'full'",
    ),
}


def plain_or_general(
    path: str, output: Any, at: int, *, always: bool = False
) -> Callable[[], Any]:
    class Other(FaultyEnv):
        def _answer(
            self, names: tuple[str, ...], values: tuple[Any, ...], *, faulty: bool
        ) -> Any:
            return super()._answer(
                names, values, faulty=faulty or (always and "reward" in names)
            )

    class General(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Other(at, output=output)

    return General if path == "general" else lambda: Other(at, output=output)


@pytest.mark.parametrize("name", CASTS)
@pytest.mark.parametrize("path", ["plain", "general"])
@pytest.mark.parametrize(("num_envs", "which"), [(None, 0), (3, 0), (3, 1), (3, 2)])
def test_what_keeps_its_values_is_cast_with_one_warning(name, path, num_envs, which):
    """Reward 2 at t = 1, of an observation that is [3, 2]: step 4 of episodes of three."""
    output, warning, _ = CASTS[name]
    factories = iter(
        [
            plain_or_general(path, output, 4 if i == which else -1)
            for i in range(num_envs or 1)
        ]
    )
    options = {"num_envs": num_envs, "frames_per_batch": T * (num_envs or 1)}
    with Collector(lambda: next(factories)(), None, **options) as collector:
        with pytest.warns(UserWarning, match=warning) as caught:
            batches = [collector.rollout(), collector.rollout()]
        (said,) = (str(w.message) for w in caught)
        assert said.endswith(
            "Fix the environment, or correct its space with a gymnasium wrapper."
        )
        assert collector._engine.groups[0].env.executed_in_row == 0
        for batch in batches:
            batch = batch if batch.ndim == 2 else batch.unsqueeze(0)
            rewards = [1, 2, 3, 1, 2, 3]
            assert (
                batch["observation"].dtype
                == batch["next", "reward"].dtype
                == torch.float32
            )
            assert column(batch, "next", "reward") == [rewards] * (num_envs or 1)
            assert column(batch, "next", "observation") == [
                [[3, r] for r in rewards]
            ] * (num_envs or 1)
            assert column(batch, "next", "terminated") == [
                [r == 3 for r in rewards]
            ] * (num_envs or 1)
        assert_accounted(collector)
        assert collector.stats().executed == collector.stats().frames


@pytest.mark.parametrize("at", range(8))
def test_a_row_that_is_cast_in_the_middle_gives_every_environment_its_own_action(at):
    """Both paths: the first batch begins on the plain one."""

    class Narrow(ChainEnv):
        def step(self, action: Any) -> Any:
            obs, *rest = super().step(action)
            self.steps = getattr(self, "steps", -1) + 1
            return (
                obs.astype(np.int32) if self.number == 1 and self.steps == at else obs,
                *rest,
            )

    numbers = iter(range(3))

    def make() -> Narrow:
        env = Narrow()
        env.number = next(numbers)
        return env

    with pytest.warns(
        UserWarning,
        match="Narrow: observation has dtype int32, but its space says int64",
    ):
        batch = collect(make, None, num_envs=3, frames_per_batch=24, seed=0)
    assert_chain(batch)


@pytest.mark.parametrize("name", CASTS)
@pytest.mark.parametrize("path", ["plain", "general"])
def test_full_validation_casts_nothing(name, path):
    output, _, message = CASTS[name]
    with Collector(
        plain_or_general(path, output, 4), None, frames_per_batch=T, validate="full"
    ) as collector:
        error = run_into(collector, 4, BadEnvOutput)
        assert_matches(message, error)
        check_goes_on(collector, 4, 1, "bad_env_output")


@pytest.mark.parametrize("path", ["plain", "general"])
def test_a_reset_is_cast_as_a_step_is(path):
    class Wide(CountingEnv):
        def _observe(self) -> Any:
            return super()._observe().astype(np.float64)

    class WideGeneral(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.inner: Any = Wide()

    make = Wide if path == "plain" else WideGeneral
    with Collector(make, None, num_envs=2, frames_per_batch=2 * T) as collector:
        with pytest.warns(UserWarning, match="observation has dtype float64") as caught:
            batches = [collector.rollout() for _ in range(3)]
        assert len(caught) == 1
        for batch in batches:
            assert column(batch, "observation") == [[[3, t % 3] for t in range(T)]] * 2
            assert (
                column(batch, "next", "observation")
                == [[[3, t % 3 + 1] for t in range(T)]] * 2
            )
    with Collector(make, None, frames_per_batch=T, validate="full") as collector:
        with pytest.raises(
            BadEnvOutput,
            match=r"\[0\]\.reset: observation is an array of dtype float64",
        ):
            collector.rollout()
        assert_accounted(collector)


def check_goes_on_after(collector: Collector) -> None:
    run_into(collector, 4, BadEnvOutput)
    check_goes_on(collector, 4, 1, "bad_env_output")


@pytest.mark.parametrize("path", ["plain", "general"])
@pytest.mark.parametrize(
    "output", [{"obs": np.array([0.0, 1e39])}, {"reward": np.array(["1"])}]
)
def test_what_loses_its_value_is_refused_after_casts_too(path, output):
    """All steps before the bad one have been cast."""

    class Wide(FaultyEnv):
        def _answer(
            self, names: tuple[str, ...], values: tuple[Any, ...], *, faulty: bool
        ) -> Any:
            obs, *rest = super()._answer(names, values, faulty=faulty)
            return (obs.astype(np.float64), *rest)

        def step(self, action: int) -> Any:
            obs, reward, *rest = super().step(action)
            return (
                obs,
                np.array([reward]) if isinstance(reward, float) else reward,
                *rest,
            )

    class General(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Wide(4, output=output)

    make = General if path == "general" else lambda: Wide(4, output=output)
    with (
        Collector(make, None, frames_per_batch=T) as collector,
        pytest.warns(UserWarning, match="It is cast"),
    ):
        check_goes_on_after(collector)


@pytest.mark.parametrize(
    ("value", "space", "stored"),
    [
        (np.array([1.0, 2.0]), spaces.Box(0, 9, (2,), np.uint8), [1, 2]),
        (np.array([1, 2], np.int64), spaces.Box(0, 9, (2,), np.uint8), [1, 2]),
        (np.array([True, False]), spaces.MultiBinary(2), [1, 0]),
        (np.array(2), spaces.Box(0, 9, ()), 2.0),
        (2.0, spaces.Discrete(3), 2),
        (np.array([1.0, 2**24 + 1]), spaces.Box(0, np.inf, (2,)), [1.0, 2.0**24]),
        (np.array([np.nan, np.inf]), spaces.Box(-np.inf, np.inf, (2,)), None),
        (np.array([1.5, 2.0]), spaces.Box(0, 9, (2,), np.uint8), BadEnvOutput),
        (np.array([-1.0, 2.0]), spaces.Box(0, 9, (2,), np.uint8), BadEnvOutput),
        (np.array([256, 2]), spaces.Box(0, 9, (2,), np.uint8), BadEnvOutput),
        (np.array([np.nan, 2.0]), spaces.Box(0, 9, (2,), np.int64), BadEnvOutput),
        (np.array([2.0**63, 2.0]), spaces.Box(0, 9, (2,), np.int64), BadEnvOutput),
        (np.array([-1, 2]), spaces.Box(0, 9, (2,), np.uint64), BadEnvOutput),
        (2.5, spaces.Discrete(3), BadEnvOutput),
        (np.array([1e39, 0.0]), spaces.Box(-np.inf, np.inf, (2,)), BadEnvOutput),
        (
            np.array([65_520, 0.0]),
            spaces.Box(-np.inf, np.inf, (2,), np.float16),
            BadEnvOutput,
        ),
        (np.array(["1", "2"]), spaces.Box(-np.inf, np.inf, (2,)), BadEnvOutput),
    ],
    ids=str,
)
def test_which_values_can_be_cast(value, space, stored):
    class Odd(SpaceEnv):
        def _observe(self) -> Any:
            return value

    with Collector(
        lambda: Odd(space, spaces.Discrete(2)), None, frames_per_batch=T
    ) as collector:
        if stored is BadEnvOutput:
            with pytest.raises(BadEnvOutput, match=r"Odd\[0\].reset: observation is"):
                collector.rollout()
            return
        with pytest.warns(UserWarning, match="Odd: observation has dtype"):
            batch = collector.rollout()
        expected = torch.as_tensor(value if stored is None else stored).to(
            batch["observation"].dtype
        )
        assert torch.equal(
            batch["observation"].nan_to_num(7),
            expected.expand_as(batch["observation"]).nan_to_num(7),
        )
        assert batch["observation"].numpy().dtype == space.dtype


@pytest.mark.skipif(sys.platform == "win32", reason="no worker processes")
@pytest.mark.parametrize(
    "options", [{"backend": "threads"}, {}, {"inference": "server"}], ids=str
)
def test_all_workers_together_give_one_warning_in_the_user_s_process(options):
    policy = Greedy() if options.get("inference") else None
    with MultiSyncCollector(
        [WideCounting] * 2,
        policy,
        num_workers=2,
        num_envs=2,
        frames_per_batch=4 * T,
        **options,
    ) as collector:
        with pytest.warns(
            UserWarning, match="WideCounting: observation has dtype float64"
        ) as caught:
            batches = [collector.rollout() for _ in range(3)]
        assert len(caught) == 1
        for batch in batches:
            assert (
                column(batch, "observation")
                == [[[[3, t % 3] for t in range(T)]] * 2] * 2
            )
        assert_accounted(collector)


def test_every_collector_warns():
    for _ in range(2):
        with pytest.warns(
            UserWarning, match="WideCounting: observation has dtype float64"
        ):
            collect(WideCounting, None, frames_per_batch=T)


class Greedy(torch.nn.Module):
    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return obs[..., 0].long() % 2


@pytest.mark.parametrize(
    "make",
    [
        Collector,
        partial(MultiSyncCollector, backend="threads"),
        partial(MultiAsyncCollector, backend="threads"),
    ],
    ids=["here", "sync", "async"],
)
def test_a_warning_that_is_an_error_loses_nothing(make):
    with (
        warnings_are_errors(),
        make([WideCounting], None, frames_per_batch=T) as collector,
    ):
        with pytest.raises(UserWarning, match="observation has dtype float64"):
            collector.rollout()
        assert_accounted(collector)
        for number in range(2):
            batch = collector.rollout()
            assert column(batch.reshape(-1), "next", "reward") == [1, 2, 3, 1, 2, 3]
            assert (
                batch["collector", "traj_ids"].reshape(-1).tolist()
                == [2 * number] * 3 + [2 * number + 1] * 3
            )
            assert len(collector.episodes) == 2
        stats = collector.stats()
        assert (stats.frames, sum(stats.discarded.values())) == (2 * T, 0)
        assert_accounted(collector)


def test_a_cause_is_noted_once():
    casts = Casts("Env")
    for _ in range(3):
        casts.note("a is b")
    assert casts.take_warnings() == [f"Env: a is b. It is cast. {FIX}"]
    casts.note("a is b")
    assert casts.take_warnings() == []


# --- nested observations --------------------------------------------------------------------------

NESTED = spaces.Dict(
    {
        "a": spaces.Box(-1, 1, (2,)),
        "b": spaces.Tuple((spaces.Discrete(3), spaces.Box(-1, 1, (2,)))),
    }
)
GOOD = {"a": OBS, "b": (1, OBS)}


@pytest.mark.parametrize(
    ("obs", "message"),
    [
        (
            {"a": OBS},
            r"observation: expected the keys \['a', 'b'\], missing \['b'\], unknown \[\]",
        ),
        ({**GOOD, "c": 1}, r"missing \[\], unknown \['c'\]"),
        ({**GOOD, 3: 1}, r"unknown \['3'\]"),
        ({"a": OBS, "b": (1,)}, "b: expected a tuple of 2, got tuple of 1"),
        ({"a": OBS, "b": OBS}, "b: expected a tuple of 2, got ndarray"),
        (
            {"a": OBS, "b": (1, np.zeros(3, np.float32))},
            r"b.1 is an array of shape \(3,\).*its space says shape \(2,\)",
        ),
        ({"a": OBS, "b": (1.5, OBS)}, "b.0 is float 1.5"),
        ({"a": OBS.tolist(), "b": (1, OBS)}, "a is list"),
        (OBS, "observation: expected a dict with the keys .* got ndarray"),
        (None, "observation: expected a dict .* got NoneType"),
    ],
    ids=str,
)
@pytest.mark.parametrize("on_reset", [False, True])
def test_nested_observations_name_the_leaf(obs, message, on_reset):
    class Nested(SpaceEnv):
        calls = 0

        def _observe(self) -> Any:
            Nested.calls += 1
            return obs if Nested.calls == (1 if on_reset else 3) else GOOD

    with Collector(
        lambda: Nested(NESTED, spaces.Discrete(2)), None, frames_per_batch=T
    ) as collector:
        with pytest.raises(BadEnvOutput, match=message) as caught:
            collector.rollout()
        assert f"Nested[0].{'reset' if on_reset else 'step (row 1'}" in str(
            caught.value
        )
        assert collector.rollout()["b", "0"].tolist() == [1] * T
        assert_accounted(collector)


# --- resets and constructors ----------------------------------------------------------------------


RESETS: dict[str, tuple[dict[str, Any], type[MusterError], str]] = {
    "error": (
        {"error": ERRORS["two_arguments"]},
        EnvError,
        r"reset raised TwoArguments: why \(3\)",
    ),
    "obs": (
        {"output": {"obs": np.zeros(3, np.float32)}},
        BadEnvOutput,
        r"reset: observation is an array of shape \(3,\)",
    ),
    "info": (
        {"output": {"info": None}},
        BadEnvOutput,
        r"reset returned NoneType None as info, expected a dict",
    ),
    "no_info": ({"output": {"all": OBS}}, BadEnvOutput, "reset returned ndarray"),
    "none": ({"output": {"all": None}}, BadEnvOutput, "reset returned NoneType"),
}


@pytest.mark.parametrize("name", RESETS)
@pytest.mark.parametrize(("kind", "which"), PLACES)
@pytest.mark.parametrize("number", [0, 1, 2, 4])
def test_faults_in_reset(name, kind, which, number):
    """Reset 0 comes before the first row, resets 1 and 3 inside a batch, resets 2 and 4 after its
    last row.
    """
    fault, kind_of_error, message = RESETS[name]
    env, options, who = faulty(kind, which, at=number, on_reset=True, **fault)
    with Collector(env, None, **options) as collector:
        rewards: list[Any] = []
        failures: list[MusterError] = []
        while len(rewards) < 4:
            try:
                batch = collector.rollout()
            except MusterError as error:
                failures.append(error)
                assert_accounted(collector)
            else:
                batch = batch if batch.ndim == 2 else batch.unsqueeze(0)
                rewards.append(batch)
                assert_accounted(collector)
        (failure,) = failures
        assert isinstance(failure, kind_of_error)
        assert_matches(message, failure)
        assert f"{who}.reset" in str(failure)
        joined = torch.cat([batch.clone() for batch in rewards], -1)
        B = joined.shape[0]
        assert (
            column(joined, "next", "reward") == [[t % 3 + 1 for t in range(4 * T)]] * B
        )
        assert (
            column(joined, "next", "terminated")
            == [[t % 3 == 2 for t in range(4 * T)]] * B
        )
        assert not joined["next", "truncated"].any()
        ids = joined["collector", "traj_ids"]
        assert torch.equal(ids[:, 1:] != ids[:, :-1], joined["next", "done"][:, :-1, 0])
        assert collector.stats().episodes == 8 * B
        assert (
            collector.stats().discarded == {}
            or sum(collector.stats().discarded.values()) == 0
        )


def test_errors_in_a_constructor_are_the_cause():
    def make() -> Any:
        raise TwoArguments(3, "no display")

    with pytest.raises(
        EnvError, match=r"making env 0 from make raised TwoArguments: no display \(3\)"
    ) as caught:
        Collector(make, None, frames_per_batch=T)
    assert isinstance(caught.value.__cause__, TwoArguments)


def test_an_environment_that_never_works_fails_every_time_and_counts_nothing():
    class Never(CountingEnv):
        def step(self, action: int) -> Any:
            raise ValueError("never")

    with Collector(Never, None, frames_per_batch=T) as collector:
        for _ in range(3):
            with pytest.raises(EnvError, match="never"):
                collector.rollout()
        stats = collector.stats()
        assert (stats.executed, stats.frames, stats.in_flight, stats.episodes) == (
            0,
            0,
            0,
            0,
        )


def test_several_faults_in_one_batch():
    class Often(CountingEnv):
        def step(self, action: int) -> Any:
            if self.executed in (2, 3, 5):
                self.executed += 1
                raise ValueError("again")
            return super().step(action)

    with Collector(
        lambda: Often(9), None, frames_per_batch=T, max_frames_per_traj=2
    ) as collector:
        for _ in range(3):
            with pytest.raises(EnvError):
                collector.rollout()
        batch = collector.rollout()
        assert column(batch, "next", "reward") == [1, 2, 1, 1, 2, 1]
        assert column(batch, "next", "step_count") == [1, 2, 1, 1, 2, 1]
        assert column(batch, "next", "truncated") == [
            False,
            True,
            True,
            False,
            True,
            False,
        ]
        assert column(batch, "collector", "traj_ids") == [0, 0, 1, 2, 2, 3]
        assert_accounted(collector)


# --- interrupts and iteration ---------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize(("kind", "which"), PLACES)
def test_interrupts_pass_through_and_nothing_is_lost(kind, which, error):
    env, options, _ = faulty(kind, which, at=4, error=error)
    with Collector(env, None, **options) as collector:
        with pytest.raises(error) as caught:
            collector.rollout()
        assert type(caught.value) is error
        check_goes_on(collector, 4, which or 0, "interrupted")


def test_the_next_loop_goes_on_after_an_error():
    make = lambda: FaultyEnv(4, error=ERRORS["plain"])  # noqa: E731
    with Collector(make, None, frames_per_batch=3, total_frames=9) as collector:
        batches = []
        with pytest.raises(EnvError):
            batches.extend(collector)
        while collector.stats().frames < 9:
            batches.extend(collector)
        assert [column(batch, "next", "reward") for batch in batches][-2:] == [
            [1, 1, 2],
            [3, 1, 2],
        ]
        assert collector.stats().frames == 9


def test_a_fault_in_one_group_keeps_what_the_others_did():
    factories = [counting(), lambda: FaultyEnv(4, error=ERRORS["plain"]), counting()]
    with Collector(factories, None, frames_per_batch=3 * T) as collector:
        with pytest.raises(EnvError):
            collector.rollout()
        assert collector.stats().in_flight == T + 4
        assert_accounted(collector)
        batch = collector.rollout()
        assert column(batch, "next", "reward") == [
            [1, 2, 3, 1, 2, 3],
            [1, 2, 3, 1, 1, 2],
            [1, 2, 3, 1, 2, 3],
        ]
        assert collector.stats().executed == 3 * T
        assert_accounted(collector)


def test_a_fault_in_a_vector_environment_does_not_poison_the_next_batch():
    make = lambda: SyncVectorEnv(  # noqa: E731
        [counting(), lambda: FaultyEnv(4, error=ERRORS["plain"])]
    )
    with Collector(make, None, frames_per_batch=2 * T) as collector:
        with pytest.raises(EnvError):
            collector.rollout()
        assert column(collector.rollout(), "next", "reward") == [[1, 2, 3, 1, 1, 2]] * 2
        assert_accounted(collector)


# --- what was executed ----------------------------------------------------------------------------


def test_a_step_whose_info_says_nothing_about_lives_was_executed():
    class NoInfo(CountingEnv):
        def step(self, action: int) -> Any:
            *rest, info = super().step(action)
            return *rest, ("no dict" if self.executed == 5 else info)

    count = iter(range(2))
    make = lambda: NoInfo(9) if next(count) == 1 else CountingEnv(9)  # noqa: E731
    with Collector(
        make, None, num_envs=2, frames_per_batch=2 * T, traj_done_key="over"
    ) as collector:
        with pytest.raises(BadEnvOutput, match="returned an info that is str"):
            collector.rollout()
        collector.rollout()
        assert collector.stats().discarded == {"bad_env_output": 2}
        assert collector.stats().executed == sum(
            env.unwrapped.executed for env in collector.env
        )
        assert_accounted(collector)


def test_a_step_of_a_vector_environment_without_last_observations_was_executed():
    class Hides(SyncVectorEnv):
        muster_exact = True
        steps = 0

        def step(self, actions: Any) -> Any:
            self.steps += self.num_envs
            *rest, info = super().step(actions)
            return *rest, {
                key: value
                for key, value in info.items()
                if self.steps > 10 or key != "final_obs"
            }

    make = lambda: Hides([counting()] * 2, autoreset_mode=AutoresetMode.SAME_STEP)  # noqa: E731
    with Collector(make, None, frames_per_batch=2 * T) as collector:
        with pytest.raises(BadEnvOutput, match="without info"):
            collector.rollout()
        while collector.stats().frames < 2 * T:
            try:
                collector.rollout()
            except BadEnvOutput:
                assert_accounted(collector)
        assert collector.stats().executed == collector.env.steps
        assert_accounted(collector)


def test_what_cannot_be_shown_is_still_the_environments_fault():
    class Unshowable:
        def __repr__(self) -> str:
            raise ZeroDivisionError

    env, options, who = faulty("stacked", 2, at=4, output={"reward": Unshowable()})
    with Collector(env, None, **options) as collector:
        error = run_into(collector, 4, BadEnvOutput)
        assert (
            f"{who}.step (row 4 of the batch): reward is Unshowable <could not be shown: ZeroDivisionError>"
            in str(error)
        )
        check_goes_on(collector, 4, 3, "bad_env_output")
