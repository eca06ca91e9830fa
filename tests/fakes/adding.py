"""A policy for ``OracleEnv`` whose actions depend on its weight."""

from __future__ import annotations

import torch


class Adds(torch.nn.Module):
    """Adds its weight to the state of the environment: the action tells which weights have acted."""

    def __init__(self) -> None:
        super().__init__()
        self.added = torch.nn.Parameter(torch.zeros(()))

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return (obs[..., 5] + self.added.long()) % 5
