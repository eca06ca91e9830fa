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


class Moody(nn.Module):
    """Shows what it sees through batch normalisation and dropout, whose results depend on the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.frozen = (
            nn.BatchNorm1d(3),
            nn.Dropout(0.5),
            nn.Dropout().eval(),
        )

    def forward(self, obs: torch.Tensor) -> Any:
        seen = self.frozen(self.drop(self.norm(obs.reshape(-1, 3)))).reshape(obs.shape)
        return (obs[..., 1] >= 1).long(), {"seen": seen}

    def evaluated(self, obs: torch.Tensor) -> torch.Tensor:
        """What it shows in evaluation mode."""
        mean, variance = self.norm.running_mean, self.norm.running_var
        assert mean is not None
        assert variance is not None
        scaled = (obs - mean) / (variance + self.norm.eps).sqrt()
        return (scaled * self.norm.weight + self.norm.bias).detach()

    def modes(self) -> list[bool]:
        return [module.training for module in self.modules()]
