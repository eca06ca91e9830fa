"""Batches of TorchRL environments in plain tensor operations, as simulators on a GPU are."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torchrl.data import Binary, Bounded, Composite, Unbounded
from torchrl.envs import EnvBase


class Pendulums(EnvBase):
    """B pendulums whose state is in the TensorDict: a step reads it from there.

    An episode ends after a number of steps that depends on the environment, or where it is fast.
    The first angle of an episode depends on the last one: no random numbers are drawn.
    """

    def __init__(self, B: int = 4, device: str | None = None) -> None:
        super().__init__(device=device, batch_size=[B])
        lead = torch.Size([B])
        one = Unbounded((B, 1), device=device)
        self.observation_spec = Composite(
            th=one,
            thdot=one.clone(),
            steps=Unbounded((B, 1), dtype=torch.int64),
            shape=lead,
        )
        self.state_spec = self.observation_spec.clone()
        self.action_spec = Bounded(-2.0, 2.0, (B, 1), device=device)
        self.reward_spec = Unbounded((B, 1), device=device)
        flag = Binary(1, (B, 1), dtype=torch.bool, device=device)
        self.done_spec = Composite(
            done=flag, terminated=flag.clone(), truncated=flag.clone(), shape=lead
        )
        self.most = torch.arange(B, device=device)[:, None] % 3 + 5
        self.begin = torch.linspace(-1, 1, B, device=device)[:, None]

    def _set_seed(self, seed: int | None) -> None:
        self.begin = torch.linspace(-1, 1, len(self.most), device=self.device)[:, None]
        self.begin = self.begin + (0 if seed is None else seed % 7) / 10

    def _reset(self, tensordict: Any = None, **options: Any) -> Any:
        zero = torch.zeros_like(self.begin)
        steps = torch.zeros_like(self.most)
        found = {"th": self.begin.clone(), "thdot": zero, "steps": steps}
        return TensorDict(found, self.batch_size, device=self.device)

    def _step(self, tensordict: Any) -> Any:
        th, thdot = tensordict["th"], tensordict["thdot"]
        push = tensordict["action"].clamp(-2, 2)
        thdot = thdot + (15 * th.sin() + 3 * push) * 0.05
        th = th + thdot * 0.05
        steps = tensordict["steps"] + 1
        ended = thdot.abs() > 3
        cut = steps >= self.most
        found = {"th": th, "thdot": thdot, "steps": steps, "reward": -th.square()}
        found |= {"terminated": ended, "truncated": cut, "done": ended | cut}
        return TensorDict(found, self.batch_size, device=self.device)


class Walkers(EnvBase):
    """B random walks that keep their state, and are reset by mask."""

    def __init__(
        self, B: int = 4, device: str | None = None, *, noise: bool = False
    ) -> None:
        super().__init__(device=device, batch_size=[B])
        lead = torch.Size([B])
        self.observation_spec = Composite(
            observation=Unbounded((B, 2), device=device), shape=lead
        )
        self.action_spec = Bounded(-1.0, 1.0, (B, 1), device=device)
        self.reward_spec = Unbounded((B, 1), device=device)
        flag = Binary(1, (B, 1), dtype=torch.bool, device=device)
        self.done_spec = Composite(done=flag, terminated=flag.clone(), shape=lead)
        self.noise = noise
        self.generator = torch.Generator(device or "cpu")
        self.state = torch.zeros(B, 2, device=device)

    def _set_seed(self, seed: int | None) -> None:
        if seed is not None:
            self.generator.manual_seed(seed)

    def fresh(self) -> torch.Tensor:
        """The state at the start of an episode."""
        begun = torch.zeros_like(self.state)
        if self.noise:
            begun[:, 0].uniform_(generator=self.generator)
        return begun

    def _reset(self, tensordict: Any = None, **options: Any) -> Any:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        fresh = self.fresh()
        self.state = fresh if mask is None else torch.where(mask, fresh, self.state)
        return TensorDict(
            {"observation": self.state}, self.batch_size, device=self.device
        )

    def _step(self, tensordict: Any) -> Any:
        move = tensordict["action"]
        self.state = torch.cat([self.state[:, :1] + move, self.state[:, 1:] + 1], 1)
        ended = (self.state[:, :1].abs() > 1.5) | (self.state[:, 1:] >= 9)
        found = {"observation": self.state, "reward": self.state[:, :1] * 0.3}
        found |= {"terminated": ended, "done": ended.clone()}
        return TensorDict(found, self.batch_size, device=self.device)


class Forgetful(Walkers):
    """Resets all environments, whatever the mask says."""

    def _reset(self, tensordict: Any = None, **options: Any) -> Any:
        return super()._reset(None)


class Looking(Walkers):
    """Looks at the mask, which waits for the device."""

    def _reset(self, tensordict: Any = None, **options: Any) -> Any:
        if tensordict is not None and tensordict["_reset"].all():
            tensordict = None
        return super()._reset(tensordict)
