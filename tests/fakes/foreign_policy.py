"""A policy that raises everything in turn."""

from __future__ import annotations

from typing import Any

import torch

from tests.fakes.foreign import ALL, ROWS, T


class TroubledPolicy(torch.nn.Module):
    """Action: the state, modulo 5.

    Before it acts on environment 1 it raises all of ``ALL``, in some rows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.raised, self.done = 0, -1

    def forward(self, obs: Any) -> torch.Tensor:
        rows = obs.reshape(-1, 6)
        mine = rows[rows[:, 0] == 1]
        total = int(mine[0, 4]) if len(mine) else -1
        if total > self.done and total % T in ROWS and self.raised < len(ALL):
            self.raised, self.done = self.raised + 1, total
            list(ALL.values())[self.raised - 1]()
        return obs[..., 5] % 5
