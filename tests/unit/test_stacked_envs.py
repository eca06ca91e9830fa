"""Single environments, stacked: what can be given, and what reaches which row."""

from __future__ import annotations

import sys
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from muster import Collector, policies
from muster.errors import BadOption, EnvError, UnsupportedEnv
from muster.policies import tanh_gaussian
from muster.testing import CountingEnv
from tests.tools import assert_same, collect, column, counting, recorded, stable

# --- what can be given ----------------------------------------------------------------------------


def test_num_envs_one_has_a_batch_dimension():
    assert collect(counting(), frames_per_batch=4, num_envs=1).batch_size == (1, 4)
    assert collect(CountingEnv(), frames_per_batch=4, num_envs=1).batch_size == (1, 4)


def test_an_env_id():
    batch = collect("CartPole-v1", frames_per_batch=20, seed=0)
    assert batch["observation"].shape == (20, 4)
    assert collect("CartPole-v1", frames_per_batch=20, num_envs=2).batch_size == (2, 10)


def test_an_env_id_that_imports_a_module(tmp_path, monkeypatch):
    (tmp_path / "muster_test_ids.py").write_text(
        "import gymnasium\n"
        "gymnasium.register('MusterCounting-v0', 'muster.testing:CountingEnv', kwargs={'length': 2})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with Collector(
        "muster_test_ids:MusterCounting-v0", None, frames_per_batch=3
    ) as collector:
        assert column(collector.rollout(), "next", "reward") == [1, 2, 1]
        assert "MusterCounting-v0" in repr(collector)
    del gymnasium.registry["MusterCounting-v0"], sys.modules["muster_test_ids"]


def test_groups_have_a_leading_dimension_and_global_env_ids():
    batch = collect([counting(2), counting(3)], frames_per_batch=8, num_envs=2)
    assert batch.batch_size == (2, 2, 2)
    assert batch.names == [None, None, "time"]
    assert column(batch, "observation")[1][0] == [[3, 0], [3, 1]]
    assert batch["collector", "traj_ids"][..., 0].tolist() == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("source", "options", "error", "message"),
    [
        (3, {}, UnsupportedEnv, "of type int, expected an env id"),
        ({}, {}, UnsupportedEnv, "dict"),
        (lambda: 3, {}, UnsupportedEnv, "returned int, expected"),
        (lambda: None, {"num_envs": 2}, UnsupportedEnv, "returned NoneType"),
        ([], {}, BadOption, "empty list"),
        (
            CountingEnv(),
            {"num_envs": 3},
            BadOption,
            "num_envs=3 was given with one environment object",
        ),
        ("NoSuchEnv-v0", {}, EnvError, "NoSuchEnv-v0.*NameNotFound"),
        ([counting(), counting(2), 7], {}, UnsupportedEnv, "of type int"),
    ],
    ids=stable,
)
def test_what_is_no_environment_is_refused(source, options, error, message):
    with pytest.raises(error, match=message):
        Collector(source, None, frames_per_batch=12, **options)


def test_one_object_for_several_places_is_refused():
    env = CountingEnv()
    with pytest.raises(UnsupportedEnv, match="same object twice"):
        Collector(lambda: env, None, frames_per_batch=4, num_envs=2)
    with pytest.raises(BadOption, match="same environment object twice"):
        Collector([env, env], None, frames_per_batch=4)


def test_unequal_spaces_are_refused_by_name():
    noisy = iter([False, False, True])
    with pytest.raises(
        UnsupportedEnv,
        match=r"observation_space of env 2 is Box.*\(3,\).* and that of env 0 is .*\(2,",
    ):
        Collector(
            lambda: CountingEnv(noise=next(noisy)), None, frames_per_batch=6, num_envs=3
        )
    with (
        pytest.raises(BadOption, match="groups of create_env_fn differ"),
        Collector(
            [counting(), counting(noise=True)], None, frames_per_batch=6
        ) as collector,
    ):
        collector.rollout()


class CannotClose(CountingEnv):
    def close(self) -> None:
        raise OSError("it cannot be closed")


@pytest.mark.parametrize(
    ("policy", "options", "match"),
    [
        (None, {"frames_per_batch": -3}, "frames_per_batch=-3"),
        (policies.gaussian(torch.nn.Linear(2, 2)), {}, "gaussian"),
        (None, {"compile_env": True}, "compile_env"),
    ],
)
def test_a_refusal_is_not_replaced_by_an_error_of_closing(policy, options, match):
    with pytest.raises(BadOption, match=match):
        Collector(CannotClose, policy, num_envs=2, **{"frames_per_batch": 8, **options})


def test_an_error_of_making_is_not_replaced_by_one_of_closing():
    made = iter([CannotClose, CannotClose])
    with pytest.raises(EnvError, match="making env 2.*StopIteration"):
        Collector(lambda: next(made)(), None, num_envs=3, frames_per_batch=9)


def test_a_failing_factory_closes_what_was_made():
    def make(i: int) -> CountingEnv:
        if i == 2:
            raise OSError("no display")
        return CountingEnv()

    factory, made = recorded(make)
    with pytest.raises(
        EnvError, match="making env 2 from factory raised OSError: no display"
    ) as caught:
        Collector(factory, None, frames_per_batch=6, num_envs=3)
    assert isinstance(caught.value.__cause__, OSError)
    assert [env.closed for env in made] == [1, 1]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"frames_per_batch": 4, "policy": 3}, BadOption),
        (
            {"frames_per_batch": 4, "policy": tanh_gaussian(torch.nn.Identity())},
            BadOption,
        ),
    ],
    ids=stable,
)
def test_a_refused_collector_closes_its_environments(options, error):
    factory, made = recorded(counting())
    with pytest.raises(error):
        Collector(factory, options.pop("policy", None), num_envs=2, **options)
    assert [env.closed for env in made] == [1, 1]


# --- what reaches which row -----------------------------------------------------------------------


@pytest.mark.parametrize("num_envs", [None, 3])
def test_environments_that_reuse_their_observation_array(num_envs):
    frames = 10 * (num_envs or 1)
    fresh = collect(counting(4), frames_per_batch=frames, num_envs=num_envs, seed=0)
    reused = collect(
        counting(4, reuse=True), frames_per_batch=frames, num_envs=num_envs, seed=0
    )
    assert_same(fresh, reused)


@pytest.mark.parametrize(
    "number",
    [int, float, bool, np.float64, np.float32, np.int8, np.asarray],
    ids=stable,
)
def test_rewards_of_any_kind_of_number(number):
    class Rewards(CountingEnv):
        def step(self, action: int) -> Any:
            obs, reward, *rest = super().step(action)
            return obs, number(reward == 2), *rest

    assert column(collect(Rewards, frames_per_batch=3), "next", "reward") == [0, 1, 0]


@pytest.mark.parametrize(
    "flag",
    [bool, int, np.bool_, np.int8, np.asarray, lambda x: np.asarray(x, np.uint8)],
    ids=stable,
)
def test_flags_of_any_kind_of_bool(flag):
    class Flags(CountingEnv):
        def step(self, action: int) -> Any:
            obs, reward, terminated, truncated, info = super().step(action)
            return obs, reward, flag(terminated), flag(truncated), info

    for truncate in (False, True):
        batch = collect(lambda t=truncate: Flags(2, truncate=t), frames_per_batch=4)
        assert column(batch, "next", "terminated") == [False, not truncate] * 2
        assert column(batch, "next", "truncated") == [False, truncate] * 2


def test_both_flags_at_once_are_one_end():
    class Both(CountingEnv):
        def step(self, action: int) -> Any:
            obs, reward, terminated, _, info = super().step(action)
            return obs, reward, terminated, terminated, info

    with Collector(lambda: Both(2), None, frames_per_batch=4) as collector:
        batch = collector.rollout()
        assert (
            column(batch, "next", "terminated")
            == column(batch, "next", "truncated")
            == [False, True] * 2
        )
        assert [(e.terminated, e.truncated) for e in collector.episodes] == [
            (True, True)
        ] * 2


def test_environments_may_change_the_action_they_get():
    class Clipping(gymnasium.Env[Any, Any]):
        observation_space = spaces.Box(-1, 1, (1,))
        action_space = spaces.Box(-1, 1, (2,))

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            return np.zeros(1, np.float32), {}

        def step(self, action: Any) -> Any:
            action[:] = 9.0
            return np.zeros(1, np.float32), 0.0, False, False, {}

    for num_envs in (None, 2):
        batch = collect(
            Clipping, frames_per_batch=4, num_envs=num_envs, validate="full"
        )
        assert batch["action"].abs().max() <= 1
