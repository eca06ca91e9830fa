"""EnvPools give the transitions of their environments, without the steps in which they reset
themselves.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from muster.envs.envpool import EnvPoolVectorEnv, adapt, takes
from muster.errors import BadOption, MusterError, UnsupportedEnv
from muster.testing import CountingEnv, EnvContract
from tests.fakes.chains import OneWayChain
from tests.fakes.envpool import DMEnvPool, GymnasiumEnvPool
from tests.tools import assert_same, collect, column, counting
from tests.warned import warnings_are_errors

Chain = partial(OneWayChain, "truncated")
UNSEEDED = pytest.mark.filterwarnings("ignore:EnvPool cannot be seeded")


def pool(make: Any = Chain, num_envs: int = 3, **options: Any) -> Any:
    return lambda: EnvPoolVectorEnv(GymnasiumEnvPool(make, num_envs, **options))


def real(name: str, **options: Any) -> Any:
    envpool = pytest.importorskip("envpool")
    return EnvPoolVectorEnv(
        envpool.make_gymnasium(name, **{"num_envs": 3, "seed": 0, **options})
    )


class Kinds(OneWayChain):
    """The chain in a Dict with the kinds of leaves that EnvPool returns in dtypes of its own."""

    def __init__(self) -> None:
        super().__init__("truncated")
        parts = {
            "chain": self.observation_space,
            "n": spaces.Discrete(7),
            "b": spaces.MultiBinary((2,)),
        }
        self.observation_space = spaces.Dict(
            {**parts, "deep": spaces.Dict({"t": spaces.Box(0, 99, (), np.float64)})}
        )

    def _parts(self, obs: Any) -> Any:
        bits = np.array([obs[2] % 2, obs[1] % 2], np.int8)
        return {
            "chain": obs,
            "n": np.int64(obs[2] % 7),
            "b": bits,
            "deep": {"t": np.array(float(obs[1]))},
        }

    def reset(self, **options: Any) -> Any:
        obs, info = super().reset(**options)
        return self._parts(obs), info

    def step(self, action: Any) -> Any:
        obs, *rest = super().step(action)
        return self._parts(obs), *rest


@UNSEEDED
class OfPools(EnvContract):
    num_envs = None


class TestFake(OfPools):
    def make_env(self) -> Any:
        return pool(seed=3)()


class TestFakeOfAllKindsOutOfOrder(OfPools):
    def make_env(self) -> Any:
        return pool(Kinds, shuffled=True)()


class TestCartPole(OfPools):
    steps = 60

    def make_env(self) -> Any:
        return real("CartPole-v1", max_episode_steps=20)


class TestFrozenLake(OfPools):
    def make_env(self) -> Any:
        return real("FrozenLake-v1")


class TestPendulum(OfPools):
    def make_env(self) -> Any:
        return real("Pendulum-v1", max_episode_steps=7)


class TestLunarLander(OfPools):
    """Bounds of observations that are not meant."""

    def make_env(self) -> Any:
        return real("LunarLander-v3", max_episode_steps=15)


class TestMiniGrid(OfPools):
    def make_env(self) -> Any:
        return real("MiniGrid-Empty-5x5-v0", max_episode_steps=9, num_threads=2)


class TestGraphColoring(OfPools):
    """Dict observations with Discrete and MultiBinary parts."""

    def make_env(self) -> Any:
        return real("GraphColoring-v1")


# --- transitions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [{}, {"max_frames_per_traj": 3}], ids=["whole", "cut"])
@pytest.mark.parametrize("make", [Chain, Kinds], ids=["box", "dict"])
@pytest.mark.parametrize("shuffled", [False, True])
def test_the_transitions_are_those_of_the_single_environments(make, shuffled, cut):
    options = {"frames_per_batch": 90, "seed": 5, "batches": 2, **cut}
    alone = collect(make, num_envs=3, **options)
    assert_same(collect(pool(make, seed=5, shuffled=shuffled), **options), alone)
    assert alone["next", "terminated"].any()
    assert alone["next", "truncated"].any()


def test_only_finished_environments_are_reset_and_none_is_stepped_for_it():
    env = pool(counting(2))()
    got = collect(env, frames_per_batch=12)
    assert column(got, "next", "reward") == [[1, 2, 1, 2]] * 3
    assert env.pool.resets == [[0, 1, 2]] * 3
    lengths = iter([2, 3, 9])
    env = pool(lambda: CountingEnv(next(lengths)))()
    collect(env, frames_per_batch=12)
    assert env.pool.resets == [[0, 1, 2], [0], [1], [0]]


def test_a_masked_reset_returns_all_rows_and_changes_none_that_were_returned():
    env = pool(counting(9))()
    env.reset()
    stepped = env.step(np.zeros(3, np.int64))[0]
    obs, info = env.reset(options={"reset_mask": np.array([True, False, True])})
    assert obs[:, 1].tolist() == [0, 1, 0]
    assert info["env_id"].tolist() == [0, 2]
    assert stepped[:, 1].tolist() == [1, 1, 1]


def test_rows_of_other_environments_are_refused():
    with pytest.raises(
        MusterError,
        match=r"GymnasiumEnvPool returned the environments \[1 2 3\], expected \[0 1 2\]",
    ):
        collect(pool(foreign=True), frames_per_batch=9)


def test_the_transitions_of_a_real_pool_are_those_of_its_own_loop_without_the_steps_that_reset():
    rows = 400
    act = lambda obs: (obs[:, 2] + obs[:, 3] / 2 > 0).astype(np.int64)  # noqa: E731
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "EnvPool")
        make = partial(
            real, "CartPole-v1", num_envs=4, seed=3, max_episode_steps=30, num_threads=2
        )
        pool = make().pool
        batch = collect(
            make,
            lambda obs: torch.from_numpy(act(obs.numpy())),
            frames_per_batch=4 * rows,
            seed=3,
        )
    obs, _ = pool.reset()
    over, expected = np.zeros(4, bool), [[] for _ in range(4)]
    for _ in range(rows):
        after, reward, terminated, truncated, _ = pool.step(act(obs))
        for i in np.flatnonzero(~over):
            expected[i].append(
                (
                    *obs[i].tolist(),
                    *after[i].tolist(),
                    reward[i],
                    terminated[i],
                    truncated[i],
                )
            )
        over, obs = terminated | truncated, after
    after = batch["next"]
    for i, steps in enumerate(expected):
        columns = [
            batch["observation"],
            after["observation"],
            after["reward"],
            after["terminated"],
            after["truncated"],
        ]
        assert (
            torch.cat([c[i].double() for c in columns], -1)[: len(steps)].tolist()
            == np.array(steps).tolist()
        )
    assert after["done"].sum() > 40


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_bounds_by_which_none_are_meant_are_left_out_and_others_kept(dtype):
    tiny, most = np.finfo(dtype).tiny, np.finfo(dtype).max
    low, high = (
        np.array([tiny, 0, tiny, -1], dtype),
        np.array([most, most, 1, 1], dtype),
    )

    def make() -> Any:
        env = CountingEnv()
        env.observation_space = spaces.Dict(
            {"x": spaces.Box(low, high, dtype=dtype), "n": spaces.Discrete(2)}
        )
        env.action_space = spaces.Box(low, high, dtype=dtype)
        return env

    env = pool(make)()
    for space in (env.single_observation_space["x"], env.single_action_space):
        assert space.low.tolist() == [-np.inf, 0, tiny, -1]
        assert space.high.tolist() == [np.inf, most, 1, 1]
        assert space.dtype == dtype
    assert env.single_observation_space["n"] == spaces.Discrete(2)


# --- seeds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"seed": 7}, {"env_seed": [7, 8, 9]}], ids=["seed", "list"]
)
def test_the_seed_that_the_pool_was_made_with_is_taken_without_a_word(options):
    with warnings_are_errors():
        collect(pool(**options), frames_per_batch=9, seed=7)
        collect(pool(**options), frames_per_batch=9)


def test_another_seed_is_reported_once():
    env = pool(seed=7)()
    with pytest.warns(
        UserWarning,
        match=r"made with the seeds \[7, 8, 9\].*although \[1, 2, 3\]... were asked for",
    ):
        env.reset(seed=1)
    with warnings_are_errors():
        env.reset(seed=[4, 4, 4])


def test_the_pools_own_seed_comes_too_late_once_it_runs():
    env = pool(seed=7)()
    env.reset(seed=7)
    with pytest.warns(UserWarning, match="cannot be seeded after it was made"):
        env.reset(seed=7)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            DMEnvPool,
            "DMEnvPool is not of type 'gymnasium': make it with envpool.make_gymnasium",
        ),
        (
            partial(GymnasiumEnvPool, Chain, 4, batch_size=2),
            "asynchronous: it steps batch_size=2 of num_envs=4.*leave",
        ),
        (
            partial(GymnasiumEnvPool, Chain, max_num_players=2),
            "up to 2 players.*PettingZoo",
        ),
    ],
    ids=["dm", "async", "players"],
)
def test_pools_that_cannot_be_collected_from_are_refused(make, message):
    with pytest.raises(UnsupportedEnv, match=message):
        EnvPoolVectorEnv(make())


def test_real_pools_that_cannot_be_collected_from_are_refused():
    envpool = pytest.importorskip("envpool")
    for made, message in [
        (envpool.make_dm("CartPole-v1", num_envs=2), "not of type 'gymnasium'"),
        (
            envpool.make_gymnasium("CartPole-v1", num_envs=4, batch_size=2),
            "asynchronous",
        ),
        (envpool.make_gymnasium("TicTacToe-v1", num_envs=2), "players"),
    ]:
        assert takes(made)
        with pytest.raises(UnsupportedEnv, match=message):
            EnvPoolVectorEnv(made)


def test_options_are_refused():
    with pytest.raises(BadOption, match=r"reset_mask only, not \['x'\]"):
        pool()().reset(options={"x": 1})


def test_pools_are_recognised_and_nothing_else():
    assert takes(GymnasiumEnvPool(Chain))
    assert takes(DMEnvPool())
    assert not any(map(takes, (CountingEnv(), GymnasiumEnvPool, pool()(), None)))


def test_only_one_makes_a_batch():
    pools = [GymnasiumEnvPool(Chain) for _ in range(2)]
    assert adapt(pools[:1], None).spec.num_envs == 3
    with pytest.raises(
        BadOption, match="num_envs=2 was given, but GymnasiumEnvPool is a batch"
    ):
        adapt(pools, None)


def test_closing_closes_the_pool_once():
    env = pool()()
    env.close()
    env.close()
    assert env.pool.closes == 1
