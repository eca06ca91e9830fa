"""Environments that are no ``gymnasium.Env``, or whose ``reset`` takes no seed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import Wrapper, spaces
from gymnasium.vector import AutoresetMode, VectorEnv

from muster import Collector, Evaluator, MultiSyncCollector
from muster.errors import BadEnvOutput, UnsupportedEnv
from muster.testing import CountingEnv, EnvContract
from tests.fakes.coroutines import Awaited
from tests.tools import assert_same, collect, column
from tests.warned import warnings_are_errors


class PlainEnv:
    """The methods and spaces of ``CountingEnv``, and nothing else of a ``gymnasium.Env``."""

    def __init__(self, length: int = 3) -> None:
        self._inner = CountingEnv(length)
        self.observation_space = self._inner.observation_space
        self.action_space = self._inner.action_space

    def reset(
        self, *, seed: int | None = None, options: Any = None
    ) -> tuple[Any, dict[str, Any]]:
        return self._inner.reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        return self._inner.step(action)


class Unseeded(CountingEnv):
    """Its ``reset`` takes no argument."""

    def reset(self) -> Any:  # type: ignore[override]
        return super().reset()


class SeededApart(Unseeded):
    """Its seed is set by a method, as in gym before 0.26."""

    given: tuple[int, ...] = ()

    def seed(self, seed: int) -> None:
        self.given = (*self.given, seed)


class TestPlainEnv(EnvContract):
    def make_env(self) -> PlainEnv:
        return PlainEnv()


@pytest.mark.parametrize("num_envs", [None, 2])
def test_a_plain_environment_gives_the_same_data_as_a_gymnasium_env(num_envs):
    options = {"frames_per_batch": 8, "num_envs": num_envs, "seed": 0}
    assert_same(collect(PlainEnv, **options), collect(CountingEnv, **options))


def test_a_plain_environment_object_and_workers():
    assert column(collect(PlainEnv(2), frames_per_batch=3), "next", "reward") == [
        1,
        2,
        1,
    ]
    options = {"num_envs": 2, "frames_per_batch": 16, "seed": 0, "backend": "threads"}
    with MultiSyncCollector([PlainEnv] * 2, None, **options) as collector:
        found = collector.next()
    with MultiSyncCollector([CountingEnv] * 2, None, **options) as collector:
        assert_same(found, collector.next())


@pytest.mark.parametrize("make", [PlainEnv, SeededApart])
def test_they_are_evaluated(make):
    with Evaluator(make, None, episodes=3, num_envs=2) as evaluator:
        assert evaluator.evaluate().lengths.tolist() == [3, 3, 3]


def test_a_plain_batch_of_environments_is_refused():
    class PlainBatch(PlainEnv):
        num_envs = 4

    with pytest.raises(UnsupportedEnv, match="like gymnasium.Env"):
        collect(PlainBatch, frames_per_batch=8)


def test_values_of_the_old_api_are_refused():
    class Old(PlainEnv):
        def reset(self) -> Any:  # type: ignore[override]
            return super().reset()[0]

    with pytest.raises(
        BadEnvOutput, match=r"Old\[0\].reset returned ndarray, expected \(obs"
    ):
        collect(Old, frames_per_batch=8)


# --- seeds ----------------------------------------------------------------------------------------


def test_a_reset_without_a_seed_is_called_without_it_and_warned_of_once():
    with pytest.warns(UserWarning, match="Unseeded.reset takes no seed") as caught:
        batch = collect(lambda: Unseeded(2), frames_per_batch=8, num_envs=2, seed=3)
    assert column(batch, "next", "reward") == [[1, 2, 1, 2]] * 2
    assert len([one for one in caught if "takes no seed" in str(one.message)]) == 1


def test_a_method_seed_gets_the_seed():
    with Collector(
        SeededApart, None, num_envs=2, frames_per_batch=16, seed=3
    ) as collector:
        collector.next()
        assert [env.given for env in collector.env] == [(3,), (4,)]


def test_a_keyword_dict_takes_a_seed():
    class Keywords(CountingEnv):
        def reset(self, **keywords: Any) -> Any:
            return super().reset(**keywords)

    with Collector(Keywords, None, frames_per_batch=8, seed=5) as collector:
        collector.next()
        assert collector.env.seeds[0] == 5


def test_coroutines_without_a_seed():
    class AwaitedUnseeded(Awaited):
        async def reset(self) -> Any:  # type: ignore[override]
            return await super().reset()

    with pytest.warns(UserWarning, match="takes no seed"):
        batch = collect(
            lambda: AwaitedUnseeded(CountingEnv(2)), frames_per_batch=3, seed=0
        )
    assert column(batch, "next", "reward") == [1, 2, 1]


class OwnBatch(VectorEnv):
    """Two counting environments; ``reset`` takes options only."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012
    num_envs = 2
    single_observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    single_action_space = spaces.Discrete(2)
    observation_space = spaces.Box(-np.inf, np.inf, (2, 1), np.float32)
    action_space = spaces.MultiDiscrete([2, 2])

    def reset(self, *, options: Any = None) -> Any:  # type: ignore[override]
        return np.zeros((2, 1), np.float32), {}

    def step(self, actions: Any) -> Any:
        never = np.zeros(2, bool)
        return np.ones((2, 1), np.float32), np.ones(2), never, never, {}


def test_vector_environments_without_a_seed():
    with pytest.warns(UserWarning, match="OwnBatch.reset takes no seed"):
        batch = collect(OwnBatch, frames_per_batch=4, seed=0)
    assert column(batch, "next", "reward") == [[1, 1], [1, 1]]


def test_a_wrapper_that_passes_a_seed_on_says_whose_fault_it_is():
    with pytest.raises(Exception, match="unexpected keyword argument 'seed'"):
        collect(lambda: Wrapper(Unseeded()), frames_per_batch=4)


def test_without_a_seed_there_is_nothing_to_warn_of():
    with warnings_are_errors():
        batch = collect(lambda: Unseeded(2), frames_per_batch=3)
    assert column(batch, "next", "reward") == [1, 2, 1]


def without_seed(base: type, made: Any) -> Any:
    class NoSeed(base):  # type: ignore[misc]
        def reset(self, options: Any = None) -> Any:
            return self.env.reset(options=options)

    return NoSeed(made)


def test_agents_without_a_seed():
    from pettingzoo.classic import rps_v2, tictactoe_v3
    from pettingzoo.utils.wrappers import BaseParallelWrapper, BaseWrapper

    for make in (
        lambda: without_seed(BaseParallelWrapper, rps_v2.parallel_env()),
        lambda: without_seed(BaseWrapper, tictactoe_v3.env()),
    ):
        with pytest.warns(UserWarning, match="reset takes no seed"):
            batch = collect(make, frames_per_batch=4, seed=0)
        assert batch.numel() >= 4
