"""Policies whose rollouts are recorded as graphs, on the CPU and on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Sampling(nn.Module):
    """Draws from the global generator, and returns an extra."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, obs: torch.Tensor) -> Any:
        log_probs = self.net(obs).log_softmax(-1)
        action = (log_probs - torch.empty_like(log_probs).exponential_().log()).argmax(
            -1
        )
        return action, {"value": log_probs.gather(-1, action[:, None])[:, 0]}


class Recurrent(nn.Module):
    """Has a state of ``hidden`` numbers."""

    def __init__(self, hidden: int, device: str = "cpu") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell = nn.GRUCell(4, hidden).to(device)
        self.head = nn.Linear(hidden, 2).to(device)

    def forward(self, obs: torch.Tensor, state: torch.Tensor | None) -> Any:
        state = self.cell(obs, state)
        return self.head(state).argmax(-1), state


class Chooses(nn.Module):
    """A module for TensorDicts: logits, and an action drawn with torch's generator."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, obs: torch.Tensor) -> Any:
        logits = self.net(obs)
        noise = torch.rand_like(logits)
        return (logits + noise).argmax(-1), logits
