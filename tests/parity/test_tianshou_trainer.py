"""Tianshou's trainers, unchanged, on the compat layer's collectors and on Tianshou's own."""

from __future__ import annotations

import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

pytest.importorskip("tianshou")

from tianshou import data
from tianshou.algorithm import DQN, PPO, Reinforce
from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import PrioritizedVectorReplayBuffer, VectorReplayBuffer
from tianshou.env import DummyVectorEnv
from tianshou.trainer import OffPolicyTrainerParams, OnPolicyTrainerParams
from tianshou.utils.logger.logger_base import LazyLogger
from tianshou.utils.net.common import Net
from tianshou.utils.net.discrete import DiscreteActor, DiscreteCritic

from muster.compat import tianshou as compat
from tests.parity.tianshou_tools import assert_same, contents

UNEQUAL = "time", "timing", "speed", "lens"


class Log(LazyLogger):
    """Keeps all that a trainer logs, but for what depends on the clock, and for the lengths of
    episodes: Tianshou counts the steps that are still in the buffer, which on-policy trainers empty
    in the middle of episodes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Any] = []
        self.training_interval = self.test_interval = self.update_interval = (
            self.info_interval
        ) = 1

    def prepare_dict_for_logging(self, data: dict[str, Any]) -> dict[str, Any]:
        return {
            key: value
            for key, value in data.items()
            if not any(word in key for word in UNEQUAL)
        }

    def write(self, step_type: str, step: int, data: dict[str, Any]) -> None:
        self.lines.append((step_type, step, data))


def cartpoles(n: int) -> DummyVectorEnv:
    envs = DummyVectorEnv([lambda: gymnasium.make("CartPole-v1") for _ in range(n)])
    envs.seed(3)
    return envs


def net(outputs: int = 0) -> Net:
    return Net(state_shape=(4,), action_shape=outputs, hidden_sizes=(32,))


def dqn() -> Any:
    policy = DiscreteQLearningPolicy(
        model=net(2),
        action_space=gymnasium.spaces.Discrete(2),
        eps_training=0.3,
        eps_inference=0.05,
    )
    return DQN(
        policy=policy,
        optim=AdamOptimizerFactory(lr=1e-3),
        gamma=0.9,
        n_step_return_horizon=3,
        target_update_freq=50,
    )


def actor() -> DiscreteActorPolicy:
    return DiscreteActorPolicy(
        actor=DiscreteActor(preprocess_net=net(), action_shape=2, softmax_output=False),
        action_space=gymnasium.spaces.Discrete(2),
    )


def ppo() -> Any:
    critic = DiscreteCritic(preprocess_net=net())
    return PPO(policy=actor(), critic=critic, optim=AdamOptimizerFactory(lr=1e-3))


def reinforce() -> Any:
    return Reinforce(policy=actor(), optim=AdamOptimizerFactory(lr=1e-3))


OFF = {
    "max_epochs": 2,
    "epoch_num_steps": 300,
    "collection_step_num_env_steps": 10,
    "update_step_num_gradient_steps_per_sample": 0.1,
    "batch_size": 32,
}
ON = {
    "max_epochs": 2,
    "epoch_num_steps": 200,
    "update_step_num_repetitions": 2,
    "batch_size": 64,
}


def train(
    module: Any, make: Any, params: Any, options: dict[str, Any], buffer: Any
) -> dict[str, Any]:
    """Everything that a training run leaves behind."""
    torch.manual_seed(1)
    np.random.seed(1)
    algorithm, log = make(), Log()
    collector = module.Collector(
        algorithm, cartpoles(4), buffer, exploration_noise=True
    )
    test = module.Collector(algorithm, cartpoles(3), exploration_noise=True)
    if make is dqn:
        collector.reset()
        collector.collect(n_episode=6, random=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        info = algorithm.run_training(
            params(
                training_collector=collector,
                test_collector=test,
                test_step_num_episodes=5,
                logger=log,
                show_progress=False,
                verbose=False,
                **options,
            )
        )
    return {
        "buffer": contents(collector.buffer),
        "weights": {
            key: value.numpy()
            for key, value in algorithm.state_dict().items()
            if hasattr(value, "numpy")
        },
        "log": log.lines,
        "best": (
            info.best_score,
            info.train_step,
            info.train_episode,
            info.test_step,
            info.test_episode,
        ),
        "counters": [
            (int(c.collect_step), int(c.collect_episode)) for c in (collector, test)
        ],
    }


@pytest.mark.parametrize("buffer", [VectorReplayBuffer, PrioritizedVectorReplayBuffer])
def test_dqn_learns_the_same_from_the_same_data(buffer: Any) -> None:
    kwargs = (
        {"alpha": 0.6, "beta": 0.4} if buffer is PrioritizedVectorReplayBuffer else {}
    )
    ours, theirs = (
        train(module, dqn, OffPolicyTrainerParams, OFF, buffer(400, 4, **kwargs))
        for module in (compat, data)
    )
    assert_same(ours, theirs)
    assert ours["best"][1] >= 600


@pytest.mark.parametrize("make", [ppo, reinforce])
@pytest.mark.parametrize(
    "amount",
    [{"collection_step_num_env_steps": 100}, {"collection_step_num_episodes": 6}],
)
def test_on_policy_trainers_learn_the_same(make: Any, amount: dict[str, int]) -> None:
    options = {"collection_step_num_env_steps": None, **amount, **ON}
    ours, theirs = (
        train(module, make, OnPolicyTrainerParams, options, VectorReplayBuffer(2000, 4))
        for module in (compat, data)
    )
    assert_same(ours, theirs)
