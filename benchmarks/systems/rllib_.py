"""RLlib's SingleAgentEnvRunner in this process, with PPO's own module of the same sizes."""

from __future__ import annotations

import logging
import os
from typing import Any

os.environ.setdefault("RAY_DEDUP_LOGS", "0")

from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from ray.tune.registry import register_env

from benchmarks.workloads import Workload


class RLlib:
    """Samples with exploration: actions drawn, log-probabilities stored in the episodes."""

    def __init__(self, workload: Workload) -> None:
        logging.getLogger("ray").setLevel(logging.ERROR)
        if len(workload.make().observation_space.shape or ()) == 3:
            raise NotImplementedError(
                "RLlib's default module for images is a CNN, not this benchmark's network"
            )
        register_env(workload.name, lambda _: workload.make())
        self.frames = workload.frames
        config = (
            PPOConfig()
            .environment(workload.name)
            .framework("torch")
            .env_runners(
                num_env_runners=0,
                num_envs_per_env_runner=workload.B,
                rollout_fragment_length=workload.T,
            )
            .rl_module(
                model_config=DefaultModelConfig(
                    fcnet_hiddens=[64, 64], fcnet_activation="tanh"
                )
            )
        )
        self.runner: Any = SingleAgentEnvRunner(config=config)

    def rollout(self) -> int:
        return sum(map(len, self.runner.sample(num_timesteps=self.frames)))

    def close(self) -> None:
        self.runner.stop()
