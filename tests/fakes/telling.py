"""Policies and environments that say who they are, for workers and nodes that differ."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from muster.testing import CountingEnv


class Telling(nn.Module):
    """Acts with 0, and tells its number and its weight in the columns ``number`` and ``weight``."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.number = number
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, obs: torch.Tensor) -> Any:
        ones = torch.ones(obs.shape[:-1])
        return ones.long() * 0, {
            "number": ones * self.number,
            "weight": ones * self.weight.detach(),
        }

    def where(self) -> str:
        """The device of the weights."""
        return str(self.weight.device)


def telling(number: int) -> Any:
    """A function that makes such a policy."""
    return partial(Telling, number)


def made_with(length: int = 3, **options: Any) -> CountingEnv:
    """A counting environment; keyword arguments of the worker or node set its episodes' length."""
    return CountingEnv(length, **options)


class Counts(nn.Module):
    """Counts its steps in the recurrent state, ``[B, 2]``, from the learned state ``h0`` on, and
    shows what it got in the column ``seen``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.h0 = nn.Parameter(torch.tensor([5.0, 70.0]))

    def forward(self, obs: torch.Tensor, state: Any) -> Any:
        return torch.zeros(obs.shape[:-1], dtype=torch.long), {"seen": state}, state + 1
