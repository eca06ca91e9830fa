"""Environments, policies and hooks that worker processes of TorchRL's collectors import."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from tensordict.nn import TensorDictModuleBase
from torch import nn
from torchrl.envs import SerialEnv
from torchrl.testing import mocking_classes as mocks

IDS = ("collector", "traj_ids")


def counting(max_steps: int = 3) -> Any:
    """Its observation is the number of steps in the episode, which ends after ``max_steps``."""
    return mocks.CountingEnv(max_steps=max_steps)


def two_counting() -> Any:
    return SerialEnv(2, counting)


def heterogeneous() -> Any:
    return mocks.HeterogeneousCountingEnv(max_steps=3)


def broken() -> Any:
    raise OSError("no such simulator")


ENVS = [partial(counting, 3), partial(counting, 4)]  # one for each of two workers


class Weighted(TensorDictModuleBase):
    """Counts on, and says with which weight it acted; a state below ``next`` goes from step to step."""

    in_keys = ["observation"]  # noqa: RUF012
    out_keys = ["action", "weight", ("next", "hidden")]  # noqa: RUF012

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([value]))
        self.name = "weighted"

    def forward(self, td: Any) -> Any:
        count = td["observation"]
        td["action"] = torch.ones_like(count)
        td["weight"] = self.weight.expand(count.shape).clone()
        td["next", "hidden"] = count.float() + self.weight
        return td

    def doubled(self, number: int = 1) -> int:
        return 2 * number


class WithoutKeys(nn.Module):
    """Recognised by its argument."""

    def forward(self, tensordict: Any) -> Any:
        return tensordict.set("action", torch.ones_like(tensordict["observation"]))


class ByArgument(nn.Module):
    """Wrapped by the name of its argument."""

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(observation)


class NotWrapped(nn.Module):
    """Its arguments are no keys."""

    def forward(self, one: Any, other: Any) -> Any:
        return one


def weighted(value: float) -> Any:
    return Weighted(value)


def acting(env: Any = None) -> Any:
    return Weighted()


def ones(td: Any) -> Any:
    return td.set("action", torch.ones_like(td["observation"], dtype=torch.int8))


class Noted:
    """A hook that leaves a key in the batch, or counts its calls."""

    def __init__(self, mark: int) -> None:
        self.mark, self.calls = mark, 0

    def __call__(self, batch: Any = None) -> None:
        self.calls += 1
        if batch is not None:
            batch.set("mark", torch.full((*batch.shape, 1), self.mark * self.calls))


class Privately:
    """Postprocessing that leaves a private key."""

    def __call__(self, batch: Any) -> Any:
        return batch.set("_private", torch.zeros(batch.shape)).set("seen", torch.ones(batch.shape))
