"""The public contract on every kind of environment Muster takes; and on environments that break it."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics

from muster.testing import ChainEnv, CountingEnv, EnvContract, SpaceEnv

EVERYTHING = spaces.Dict(
    {
        "image": spaces.Box(0, 255, (3, 4), np.uint8),
        "parts": spaces.Tuple(
            (spaces.Discrete(3, start=-1), spaces.MultiBinary((2, 2)))
        ),
        "goal": spaces.Dict(
            {"x": spaces.Box(-1, 1, (), np.float64), "n": spaces.MultiDiscrete([2, 3])}
        ),
    }
)
OBJECTS = spaces.Dict(
    {
        "words": spaces.Text(5),
        "many": spaces.Sequence(spaces.Box(0, 1, (2,))),
        "graph": spaces.Graph(spaces.Box(0, 1, (2,)), spaces.Discrete(2)),
    }
)


class TestCounting(EnvContract):
    def make_env(self) -> Any:
        return CountingEnv(noise=True)


class TestReusedArrays(EnvContract):
    def make_env(self) -> Any:
        return CountingEnv(noise=True, reuse=True)


class TestOneStepEpisodes(EnvContract):
    def make_env(self) -> Any:
        return CountingEnv(1)


class TestEndlessEpisodes(EnvContract):
    def make_env(self) -> Any:
        return CountingEnv(10**9)


class TestChain(EnvContract):
    num_envs = 3

    def make_env(self) -> Any:
        return ChainEnv()


class TestUnbatched(EnvContract):
    num_envs = None

    def make_env(self) -> Any:
        return ChainEnv()


class TestEverySpace(EnvContract):
    def make_env(self) -> Any:
        return SpaceEnv(EVERYTHING, EVERYTHING)


class TestObjects(EnvContract):
    steps = 8

    def make_env(self) -> Any:
        return SpaceEnv(OBJECTS, spaces.Discrete(2))


class TestContinuousActions(EnvContract):
    def make_env(self) -> Any:
        return gymnasium.make("MountainCarContinuous-v0", max_episode_steps=9)


class TestCartPole(EnvContract):
    steps = 60

    def make_env(self) -> Any:
        return gymnasium.make("CartPole-v1")


class OfVectors(EnvContract):
    num_envs = None
    mode = AutoresetMode.NEXT_STEP

    def make_env(self) -> Any:
        return SyncVectorEnv([ChainEnv] * 2, autoreset_mode=self.mode)


class TestNextStep(OfVectors):
    pass


class TestSameStep(OfVectors):
    mode = AutoresetMode.SAME_STEP


class TestDisabled(OfVectors):
    mode = AutoresetMode.DISABLED


@pytest.mark.filterwarnings("ignore:.*the infos 'episode' are wrong")
class TestWrappedVectors(OfVectors):
    def make_env(self) -> Any:
        return RecordEpisodeStatistics(super().make_env())


class TestVectorOfEverySpace(OfVectors):
    mode = AutoresetMode.SAME_STEP

    def make_env(self) -> Any:
        return SyncVectorEnv(
            [lambda: SpaceEnv(EVERYTHING, EVERYTHING)] * 2, autoreset_mode=self.mode
        )


class TestAsync(OfVectors):
    def make_env(self) -> Any:
        return AsyncVectorEnv([ChainEnv] * 2, context="fork")


class TestCartPoleVector(OfVectors):
    steps = 60

    def make_env(self) -> Any:
        return gymnasium.make_vec("CartPole-v1", num_envs=3, vectorization_mode="sync")


class TestCartPoleVectorized(TestCartPoleVector):
    def make_env(self) -> Any:
        return gymnasium.make_vec("CartPole-v1", num_envs=3)


# --- the contract finds environments that break it ------------------------------------------------


class Unseeded(CountingEnv):
    """Draws from a generator that no seed reaches."""

    rng = np.random.default_rng()

    def _observe(self) -> Any:
        return np.array([self.length, self.rng.random()], np.float32)


class Infinite(CountingEnv):
    def step(self, action: int) -> Any:
        obs, _, *rest = super().step(action)
        return obs, np.inf, *rest


class Timed(CountingEnv):
    """Keeps a clock of its own over episodes, which a new environment begins anew: harmless."""

    def _observe(self) -> Any:
        return np.array([self.length, self.executed], np.float32)


def broken_rules(make: Any) -> set[str]:
    contract = EnvContract()
    contract.make_env = make  # type: ignore[method-assign]
    found = set()
    for name in dir(EnvContract):
        if name.startswith("test_"):
            try:
                getattr(contract, name)()
            except Exception:  # noqa: BLE001 (whatever it is, the rule is broken)
                found.add(name)
    return found


def test_the_contract_finds_environments_that_ignore_seeds():
    assert broken_rules(Unseeded) == {
        "test_the_same_seed_gives_the_same_data",
        "test_neither_the_size_of_batches_nor_their_layout_changes_the_data",
    }


def test_the_contract_finds_rewards_that_are_not_finite():
    assert "test_rewards_are_finite_numbers" in broken_rules(Infinite)


@pytest.mark.parametrize(
    "make", [Timed, partial(CountingEnv, 2, truncate=True)], ids=["timed", "truncating"]
)
def test_the_contract_lets_good_environments_pass(make):
    assert broken_rules(make) == set()


def test_the_contract_asks_for_an_environment():
    with pytest.raises(NotImplementedError):
        EnvContract().make_env()
