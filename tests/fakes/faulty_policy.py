"""A policy that goes wrong once."""

from __future__ import annotations

from typing import Any

import torch

from tests.fakes.faults import first_time


class FaultyPolicy(torch.nn.Module):
    """Chooses action 1; goes wrong in its call of number ``at``, once: where ``mark`` does not
    exist yet.
    """

    def __init__(self, mark: str, do: Any, at: int = 0) -> None:
        super().__init__()
        self.mark, self.do, self.at, self.calls = mark, do, at, 0
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > self.at and first_time(self.mark):
            self.do(None)
        return torch.ones(obs.shape[:-1], dtype=torch.int64)
