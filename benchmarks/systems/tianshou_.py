"""Tianshou's Collector over a DummyVectorEnv, filling a replay buffer of one rollout."""

from __future__ import annotations

from typing import Any

import torch
from tianshou.algorithm.modelfree.reinforce import ProbabilisticActorPolicy
from tianshou.data import Batch, Collector, VectorReplayBuffer
from tianshou.env import DummyVectorEnv
from torch import nn
from torch.distributions import Categorical, Independent, Normal

from benchmarks.nets import PlainPolicy
from benchmarks.workloads import Workload


class _Actor(nn.Module):
    def __init__(self, plain: PlainPolicy) -> None:
        super().__init__()
        self.plain = plain

    def forward(self, obs: Any, state: Any = None, info: Any = None) -> tuple[Any, Any]:
        out = self.plain.net(torch.as_tensor(obs))
        return (
            out
            if self.plain.discrete
            else (out, self.plain.log_std.exp().expand_as(out))
        ), state


class _WithLogProb(ProbabilisticActorPolicy):
    """Stores the log-probability, as the other systems do.

    Tianshou itself keeps gradients on; that costs it more.
    """

    @torch.no_grad()
    def forward(self, batch: Any, state: Any = None) -> Any:
        result = super().forward(batch, state)
        result.policy = Batch(action_log_prob=result.dist.log_prob(result.act))
        return result


def _categorical(logits: torch.Tensor) -> Categorical:
    return Categorical(logits=logits)


def _normal(mean_and_std: tuple[torch.Tensor, torch.Tensor]) -> Independent:
    return Independent(Normal(*mean_and_std), 1)


class Tianshou:
    def __init__(self, workload: Workload) -> None:
        single = workload.make()
        plain = PlainPolicy(single)
        policy = _WithLogProb(
            actor=_Actor(plain),  # type: ignore[arg-type]
            dist_fn=_categorical if plain.discrete else _normal,
            action_space=single.action_space,
            action_scaling=False,
            action_bound_method=None,
        )
        self.frames = workload.frames
        self.envs = DummyVectorEnv(workload.factories())
        self.collector: Any = Collector(
            policy, self.envs, VectorReplayBuffer(workload.frames, workload.B)
        )
        self.collector.reset()

    def rollout(self) -> int:
        return int(self.collector.collect(n_step=self.frames).n_collected_steps)

    def close(self) -> None:
        self.envs.close()
