"""Policies that show their weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Actor(nn.Module):
    """Acts 1 where the time step is at least its weight, and shows the weight."""

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([value]))

    def forward(self, obs: torch.Tensor) -> Any:
        weight = self.weight[0].expand(obs.shape[:-1])
        return (obs[..., 1] >= weight).long(), {"weight": weight}


class Two(nn.Module):
    """An actor, and a critic of the same shape, which shows its own."""

    def __init__(self, actor: float = 1.0, critic: float = 0.0) -> None:
        super().__init__()
        self.actor, self.critic = Actor(actor), Actor(critic)

    def forward(self, obs: torch.Tensor) -> Any:
        action, extras = self.actor(obs)
        return action, {**extras, "value": self.critic(obs)[1]["weight"]}
