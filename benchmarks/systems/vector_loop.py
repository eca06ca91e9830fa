"""A CleanRL-style loop: Gymnasium's vector environments, a plain module, storage tensors ``[T,
B]``.
"""

from __future__ import annotations

import gymnasium
import torch
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from benchmarks.nets import PlainPolicy
from benchmarks.workloads import Workload


class _Loop:
    """The rollout part of cleanrl/ppo.py, without its value head; next observations are not stored
    there.
    """

    def __init__(self, workload: Workload, envs: gymnasium.vector.VectorEnv) -> None:  # type: ignore[type-arg]
        T, B = workload.T, workload.B
        single = workload.make()
        self.T, self.B, self.envs = T, B, envs
        self.agent = PlainPolicy(single).eval()
        obs, _ = envs.reset(seed=0)
        action_shape = single.action_space.shape or ()
        kind = torch.int64 if self.agent.discrete else torch.float32
        self.obs = torch.zeros((T, *obs.shape), dtype=torch.from_numpy(obs).dtype)
        self.actions = torch.zeros((T, B, *action_shape), dtype=kind)
        self.logprobs, self.rewards, self.dones = (
            torch.zeros((T, B)) for _ in range(3)
        )
        self.next_obs, self.next_done = torch.tensor(obs), torch.zeros(B)

    def rollout(self) -> int:
        for step in range(self.T):
            self.obs[step] = self.next_obs
            self.dones[step] = self.next_done
            with torch.no_grad():
                action, extras = self.agent(self.next_obs)
            self.actions[step] = action
            self.logprobs[step] = extras["action_log_prob"]
            obs, reward, terminations, truncations, _ = self.envs.step(action.numpy())
            self.rewards[step] = torch.tensor(reward)
            self.next_obs = torch.tensor(obs)
            self.next_done = torch.tensor(
                terminations | truncations, dtype=torch.float32
            )
        return self.T * self.B

    def close(self) -> None:
        self.envs.close()


class Sync(_Loop):
    def __init__(self, workload: Workload) -> None:
        super().__init__(workload, SyncVectorEnv(workload.factories()))


class Async(_Loop):
    """One process per environment, observations in shared memory (Gymnasium's default)."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload, AsyncVectorEnv(workload.factories()))
