"""Stable-Baselines3: PPO's ``collect_rollouts`` over a DummyVecEnv."""

from __future__ import annotations

from typing import Any

import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.vec_env import DummyVecEnv

from benchmarks.nets import PlainPolicy
from benchmarks.workloads import Workload


class _ActorOnly(ActorCriticPolicy):
    """The plain policy where SB3 expects an actor and a critic: its own critic would be work nobody
    else does.
    """

    plain: PlainPolicy

    def forward(self, obs: Any, deterministic: bool = False) -> Any:
        if obs.ndim == 4:
            obs = obs.permute(
                0, 2, 3, 1
            )  # SB3 moves the channels of images to the front
        action, extras = self.plain(obs)
        return action, torch.zeros(len(obs), 1), extras["action_log_prob"]

    def predict_values(self, obs: Any) -> torch.Tensor:
        return torch.zeros(len(obs), 1)


class _Nothing(BaseCallback):
    def _on_step(self) -> bool:
        return True


class SB3:
    def __init__(self, workload: Workload) -> None:
        single = workload.make()
        self.frames, self.T = workload.frames, workload.T
        self.envs = DummyVecEnv(workload.factories())
        images = len(single.observation_space.shape or ()) == 3
        small = {"net_arch": [1]} if images else {}  # SB3's own layers are never called
        self.ppo: Any = PPO(
            _ActorOnly,
            self.envs,
            n_steps=self.T,
            batch_size=self.frames,
            policy_kwargs=small,
        )
        self.ppo.policy.plain = PlainPolicy(single)
        _, self.callback = self.ppo._setup_learn(
            total_timesteps=10**12, callback=_Nothing()
        )

    def rollout(self) -> int:
        ppo = self.ppo
        ppo.collect_rollouts(
            ppo.env, self.callback, ppo.rollout_buffer, n_rollout_steps=self.T
        )
        return self.frames

    def close(self) -> None:
        self.envs.close()
