"""Environments, policies and hooks that worker processes of TorchRL's collectors import."""

from __future__ import annotations

import multiprocessing
import os
import signal
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


class Diverged(Exception):
    """Pickled as it is, it cannot be unpickled: its constructor takes other arguments than those it
    passes on.
    """

    def __init__(self, simulator: str, code: int) -> None:
        super().__init__(f"{simulator} diverged")
        self.code = code


def fail(how: str) -> Any:
    """Raise, or end this process."""
    if how == "own":
        raise Diverged("simulator", 7)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        os._exit(7)
    raise {
        "value": ValueError,
        "eof": EOFError,
        "pipe": BrokenPipeError,
        "system exit": SystemExit,
    }[how]("of the test")


class Failing(mocks.CountingEnv):
    """Fails in a method, in that number of its calls."""

    def __init__(self, method: str, how: str, call: int = 1) -> None:
        super().__init__(max_steps=2)
        self.method, self.how, self.left = method, how, call

    def fail_in(self, method: str) -> None:
        if method == self.method:
            self.left -= 1
            if not self.left:
                fail(self.how)

    def _step(self, tensordict: Any) -> Any:
        self.fail_in("step")
        return super()._step(tensordict)

    def _reset(self, tensordict: Any = None, **options: Any) -> Any:
        self.fail_in("reset")
        return super()._reset(tensordict, **options)

    def _set_seed(self, seed: Any) -> None:
        self.fail_in("set_seed")
        super()._set_seed(seed)


class FailingPolicy(nn.Module):
    """Acts as ``WithoutKeys``, and fails in that number of its calls, in workers only."""

    def __init__(self, how: str, call: int) -> None:
        super().__init__()
        self.how, self.left = how, call

    def forward(self, tensordict: Any) -> Any:
        self.left -= multiprocessing.parent_process() is not None
        if not self.left:
            fail(self.how)
        return tensordict.set("action", torch.ones_like(tensordict["observation"]))


class FailingHook:
    """Fails when it is called."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __call__(self, batch: Any = None) -> None:
        fail(self.how)


ENVS = [partial(counting, 3), partial(counting, 4)]  # one for each of two workers


class Weighted(TensorDictModuleBase):
    """Counts on, and says with which weight it acted; a state below ``next`` goes from step to
    step.
    """

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


class Deep(TensorDictModuleBase):
    """Says with which weights and buffers it acted: all have the same value but for ``fixed``,
    which is not saved.
    """

    in_keys = ["observation"]  # noqa: RUF012
    out_keys = ["action", "weight", "fixed"]  # noqa: RUF012

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(2, 2), nn.Tanh(), nn.BatchNorm1d(2, affine=False)
        )
        self.register_buffer("fixed", torch.full((1,), value + 0.5), persistent=False)
        with torch.no_grad():
            for tensor in self.state_dict(keep_vars=True).values():
                tensor.fill_(value)

    def forward(self, td: Any) -> Any:
        count = td["observation"]
        values = torch.cat(
            [tensor.flatten().float() for tensor in self.state_dict().values()]
        )
        assert (values == values[0]).all(), "torn weights"
        td["weight"] = values[0].expand(count.shape).clone()
        td["fixed"] = self.fixed.expand(count.shape).clone()
        return td.set("action", torch.ones_like(count))


def weighted(value: float) -> Any:
    return Weighted(value)


def right(obs: torch.Tensor) -> torch.Tensor:
    """A policy on observations, for CartPole."""
    return (obs[..., 2] > 0).long()


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
        return batch.set("_private", torch.zeros(batch.shape)).set(
            "seen", torch.ones(batch.shape)
        )
