"""Environments on tensors whose resets replace what no step does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from tests.fakes.hiding_envs import push
from tests.fakes.torch_envs import Walk


class Goals(Walk):
    """Each reset draws goals, and makes a dict and an object anew; no step replaces any of them."""

    def start(self) -> None:
        self.goal = torch.zeros(self.num_envs, device=self.device)
        self.make_parts()

    def make_parts(self) -> None:
        self.task = {"gain": [self.goal * 0.1], "name": "easy"}
        self.part = SimpleNamespace(value=(self.goal + 1, self.goal - 1))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        found = super().reset(seed=seed, options=options)
        everywhere = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        where = (options or {}).get("reset_mask", everywhere)
        self.goal = torch.where(where, self.drawn(), self.goal)
        self.make_parts()
        return found

    def drawn(self) -> torch.Tensor:
        return torch.rand(self.num_envs, generator=self.generator, device=self.device)

    def keep(self, state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        extra = self.goal + self.task["gain"][0] + self.part.value[0]
        return state + push(0.1 * extra)

    def get_state(self) -> dict[str, Any]:
        state = {"state": self.state, "goal": self.goal}
        saved = {name: value.numpy().copy() for name, value in state.items()}
        return {**saved, "drawn": self.generator.get_state().numpy().copy()}

    def set_state(self, state: dict[str, Any]) -> None:
        self.state = torch.from_numpy(state["state"].copy())
        self.goal = torch.from_numpy(state["goal"])
        self.make_parts()
        self.generator.set_state(torch.from_numpy(state["drawn"]))
