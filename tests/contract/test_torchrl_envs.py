"""The public contract on TorchRL environments."""

from __future__ import annotations

from typing import Any

import pytest

from muster import Collector
from muster.testing import EnvContract

torchrl = pytest.importorskip("torchrl")

from torchrl.envs import Compose, GymEnv, InitTracker, RewardSum, SerialEnv, TransformedEnv  # noqa: E402
from torchrl.testing import mocking_classes as mocks  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


class TestGymEnv(EnvContract):
    steps = 60

    def make_env(self) -> Any:
        return GymEnv("CartPole-v1")


class TestUnbatchedGymEnv(EnvContract):
    num_envs = None
    steps = 60

    def make_env(self) -> Any:
        return GymEnv("Pendulum-v1")


class TestTransformedEnv(EnvContract):
    steps = 60

    def make_env(self) -> Any:
        return TransformedEnv(GymEnv("CartPole-v1"), Compose(RewardSum(), InitTracker()))


class TestSerialEnv(EnvContract):
    num_envs = None
    steps = 60

    def make_env(self) -> Any:
        return SerialEnv(3, lambda: GymEnv("CartPole-v1"))


class TestNested(EnvContract):
    def make_env(self) -> Any:
        return mocks.NestedCountingEnv(max_steps=3)


class TestMultiKey(EnvContract):
    def make_env(self) -> Any:
        return mocks.MultiKeyCountingEnv(max_steps=3)


class TestBatchedMultiKey(EnvContract):
    num_envs = None

    def make_env(self) -> Any:
        return mocks.MultiKeyCountingEnv(max_steps=3, batch_size=(2,))


class TestText(EnvContract):
    steps = 8

    def make_env(self) -> Any:
        return mocks.CountingEnvWithString(max_steps=3)


class TestAgents(EnvContract):
    steps = 12

    def make_env(self) -> Any:
        return mocks.MultiAgentCountingEnv(n_agents=2, max_steps=3)


def test_episodes_have_the_columns_of_batches() -> None:
    """Rollouts have all flags; those that the environment does not have are shown nowhere."""
    episodes: list[Any] = []
    options: dict[str, Any] = {
        "frames_per_batch": 64,
        "seed": 0,
        "on_episode_done": episodes.append,
    }
    with Collector(lambda: mocks.CountingEnv(max_steps=3), None, **options) as collector:
        batch = collector.next()
    assert ("next", "truncated") not in batch.keys(True)
    assert episodes
    assert all(set(episode.keys(True, True)) == set(batch.keys(True, True)) for episode in episodes)
