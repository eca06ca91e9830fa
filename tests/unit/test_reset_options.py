"""A seed among the arguments of resets: Muster's option is named, not the environment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import pytest
from gymnasium import spaces

from muster import Collector, MultiSyncCollector
from muster.errors import BadOption
from muster.testing import CountingEnv, TorchCartPole

REMEDY = r"seed=3 was given as an argument of the environments' reset.*collector.set_seed\(3\)"

CALLS: dict[str, Callable[[Any], Any]] = {
    "reset": lambda c: c.reset(seed=3),
    "reset of one": lambda c: c.reset([0], seed=3),
    "collect": lambda c: c.collect(
        n_step=4, reset_before_collect=True, reset_kwargs={"seed": 3}
    ),
    "collect_batch": lambda c: c.collect_batch(
        n_episode=2, reset_kwargs={"seed": 3, "options": {}}
    ),
}


class Noted(CountingEnv):
    """Notes the arguments of its resets."""

    def __init__(self) -> None:
        super().__init__(3)
        self.resets: list[Any] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.resets.append((seed, options))
        return super().reset(seed=seed, options=options)


@pytest.mark.parametrize("call", CALLS)
def test_a_seed_is_refused_with_the_method_that_sets_it(call):
    made: list[Noted] = []

    def make() -> Noted:
        made.append(Noted())
        return made[-1]

    with Collector(make, None, num_envs=2, frames_per_batch=4) as collector:
        with pytest.raises(BadOption, match=REMEDY) as info:
            CALLS[call](collector)
        assert info.value.phase is None, "no environment is blamed"
        collector.set_seed(3)
        collector.rollout()
        assert [env.resets[-1] for env in made] == [(3, None), (4, None)]
        collector.reset(options={"a": 1})
        collector.rollout()
        assert [env.resets[-1] for env in made] == [(None, {"a": 1})] * 2


def pettingzoo_env() -> Any:
    from pettingzoo import ParallelEnv

    class Alone(ParallelEnv):
        def __init__(self) -> None:
            self.metadata = {"name": "alone"}
            self.possible_agents = ["a"]

        def observation_space(self, agent: str) -> Any:
            return spaces.Box(0, 1, (1,))

        def action_space(self, agent: str) -> Any:
            return spaces.Discrete(2)

        def reset(self, seed: Any = None, options: Any = None) -> Any:
            self.agents = ["a"]
            return {"a": self.observation_space("a").sample()}, {"a": {}}

    return Alone()


ENVS: dict[str, Callable[[], Any]] = {
    "vector": lambda: gymnasium.vector.SyncVectorEnv([CountingEnv] * 2),
    "tensors": lambda: TorchCartPole(2),
    "PettingZoo": pettingzoo_env,
}


@pytest.mark.parametrize("kind", ENVS)
def test_every_kind_of_environment_refuses_it(kind):
    with (
        Collector(ENVS[kind](), None, frames_per_batch=4) as collector,
        pytest.raises(BadOption, match=REMEDY),
    ):
        collector.reset(seed=3)


@pytest.mark.parametrize("call", ["reset", "collect"])
def test_workers_refuse_it(call):
    options = {"num_envs": 2, "frames_per_batch": 8, "backend": "threads"}
    with MultiSyncCollector([CountingEnv] * 2, None, **options) as collector:
        with pytest.raises(BadOption, match=REMEDY):
            CALLS[call](collector)
        assert collector.rollout().numel() == 8


def test_nothing_was_done_when_it_is_refused():
    for call in CALLS.values():
        made: list[Noted] = []

        def make(made: list[Noted] = made) -> Noted:
            made.append(Noted())
            return made[-1]

        with Collector(make, None, num_envs=2, frames_per_batch=4) as collector:
            collector.rollout()
            before = [len(env.resets) for env in made]
            with pytest.raises(BadOption, match=REMEDY):
                call(collector)
            assert collector.rollout()["observation"][:, 0, 1].tolist() == [2, 2], (
                "in the same episode"
            )
            assert [len(env.resets) for env in made] == [n + 1 for n in before], (
                "after its end"
            )


def test_torchrls_layer_takes_a_seed():
    envs = pytest.importorskip("torchrl.envs")
    from muster.compat.torchrl import Collector as TorchRLCollector

    with (
        pytest.raises(BadOption, match=REMEDY),
        Collector(envs.GymEnv("CartPole-v1"), None) as collector,
    ):
        collector.reset(seed=3)
    collector = TorchRLCollector(
        envs.GymEnv("CartPole-v1"), None, frames_per_batch=4, total_frames=-1
    )
    collector.reset(seed=3)
    first = next(iter(collector))["observation"][0].clone()
    collector.shutdown()
    assert first.tolist() == pytest.approx(
        gymnasium.make("CartPole-v1").reset(seed=3)[0].tolist()
    )
