"""Batches of environments on tensors that keep their state in every way that simulators do."""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode


class Walk:
    """B random walks: the base of the environments below.

    An episode ends where the position leaves [-3, 3], or after ``max_steps`` steps. The actions are
    0 (left) and 1 (right). Subclasses say in ``keep`` how a step keeps its state.
    """

    max_steps = 9

    def __init__(
        self,
        num_envs: int = 4,
        device: torch.device | str = "cpu",
        autoreset: AutoresetMode = AutoresetMode.SAME_STEP,
    ) -> None:
        self.num_envs = num_envs
        self.device = torch.device(device)
        self.metadata = {"autoreset_mode": autoreset}
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.single_action_space = spaces.Discrete(2)
        self.muster_exact = True
        self.generator = torch.Generator(self.device)
        self.state = torch.zeros(num_envs, 2, device=self.device)
        self.start()

    def start(self) -> None:
        """Make what ``keep`` uses."""

    def keep(self, state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        """Keep a new state, and return it; it may be changed."""
        return state

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.generator.manual_seed(seed)
        everywhere = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        self.state = self.fresh(
            (options or {}).get("reset_mask", everywhere), self.state
        )
        return self.state.clone(), {}

    def fresh(self, where: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Return the state with new episodes somewhere."""
        drawn = (
            torch.rand(self.num_envs, generator=self.generator, device=self.device)
            - 0.5
        )
        begun = torch.stack([drawn, torch.zeros_like(drawn)], 1)
        return torch.where(where[:, None], begun, state)

    def step(self, action: torch.Tensor) -> Any:
        noise = torch.rand(self.num_envs, generator=self.generator, device=self.device)
        position = self.state[:, 0] + action * 2.0 - 1.0 + 0.1 * noise
        state = torch.stack([position, self.state[:, 1] + 1], 1)
        state = self.keep(state, action)
        terminated = state[:, 0].abs() > 3
        truncated = state[:, 1] >= self.max_steps
        info: dict[str, Any] = {}
        reward = state[:, 0] * 0.5
        obs = state.clone()
        if self.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP:
            info["final_obs"] = obs
            state = self.fresh(terminated | truncated, state)
            obs = state.clone()
        self.state = state
        return obs, reward, terminated, truncated, info

    def close(self) -> None:
        pass


class Remembers(Walk):
    """Keeps the state before the last step under another name, and views of both."""

    def start(self) -> None:
        self.before = self.state
        self.position = self.state[:, 0]

    def keep(self, state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        state = state + 0.01 * (self.before.abs() > 1)
        self.before = self.state
        self.position = self.before[:, 0]
        return state


class Nested(Walk):
    """Keeps tensors in a tuple, a dict, a list, a deque, a dataclass and a closure."""

    @dataclass
    class Part:
        speed: torch.Tensor
        label: str = "part"

    def start(self) -> None:
        zero = torch.zeros(self.num_envs, device=self.device)
        self.pair = (zero.clone(), zero.clone())
        self.named = {"far": zero.clone(), "inner": {"near": zero.clone()}}
        self.rows = [zero.clone(), zero.clone()]
        self.past = deque([zero.clone() for _ in range(3)], maxlen=3)
        self.part = self.Part(zero.clone())
        self.count = _counter(zero.clone())

    def keep(self, state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        self.pair = (state[:, 0] * 0.1, self.pair[0])
        inner = {"near": self.named["inner"]["near"] * 0.5 + state[:, 0]}
        self.named = {"far": self.pair[1] + 1, "inner": inner}
        self.rows[0] = self.rows[1] + 0.25
        self.rows[1] = self.rows[0] * 0.5
        self.past.append(state[:, 0].clone())
        self.part = self.Part(self.part.speed + self.past[0])
        extra = (
            self.pair[1] + self.named["inner"]["near"] + self.rows[1] + self.part.speed
        )
        return state + 1e-3 * torch.stack(
            [extra + self.count(), torch.zeros_like(extra)], 1
        )


def _counter(count: torch.Tensor) -> Any:
    def counted() -> torch.Tensor:
        nonlocal count
        count = count * 0.9 + 1
        return count

    return counted


class InPlace(Walk):
    """Changes one tensor in place, and keeps a constant that an attribute refers to at times."""

    def start(self) -> None:
        self.total = torch.zeros(self.num_envs, device=self.device)
        self.blank = torch.zeros(self.num_envs, device=self.device)
        self.shown = self.blank

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.shown = self.blank
        return super().reset(seed=seed, options=options)

    def keep(self, state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        self.total += state[:, 0]
        self.total.mul_(0.9)
        self.shown = self.total * 0.1 + self.blank
        return state + 1e-3 * self.shown[:, None]


class Expanded(Walk):
    """Has expanded tensors, of which all entries are one: a constant, and one that is replaced."""

    def start(self) -> None:
        one = torch.ones(1, device=self.device)
        self.gravity = (one * 0.01).expand(self.num_envs)
        self.first = one.expand(self.num_envs)

    def keep(self, state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        state = state + (self.gravity * self.first)[:, None]
        self.first = state[:1, 0].expand(self.num_envs)
        return state


class Blown(Walk):
    """Reads numbers of an array, of its class and of a tensor in host memory in every step."""

    gravity = 0.1

    def start(self) -> None:
        self.wind = np.zeros(2)
        self.scale = torch.ones((), device="cpu")

    def keep(self, state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        push = float(self.wind[0]) + type(self).gravity * 0.1 + self.scale * 0.01
        return state + push


class Counts(Walk):
    """Counts its steps in Python."""

    def start(self) -> None:
        self.counter = 0

    def keep(self, state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        self.counter += 1
        return state + 0.01 * (self.counter % 2)


class CountsForAll(Walk):
    """Counts the steps of all environments of its class."""

    steps = 0

    def keep(self, state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        type(self).steps += 1
        return state


class Logs(Walk):
    """Appends to a list in every step."""

    def start(self) -> None:
        self.history: list[torch.Tensor] = []

    def keep(self, state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        self.history.append(state)
        return state


class OnHost(Walk):
    """Changes an array of NumPy in every step."""

    def start(self) -> None:
        self.visits = np.zeros(3)

    def keep(self, state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        self.visits += 1
        return state


class DrawsOnHost(Walk):
    """Draws from NumPy's global generator."""

    def keep(self, state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        return state + 0.01 * np.random.rand()


class DrawsItsOwn(Walk):
    """Draws from a generator of NumPy of its own."""

    def start(self) -> None:
        self.random = np.random.default_rng(0)

    def keep(self, state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        return state + 0.01 * self.random.random()


class Synchronizes(Walk):
    """Asks for a number of the device."""

    def keep(self, state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        if state[:, 0].abs().max().item() > 1e9:
            raise ValueError("far away")
        return state


class HidesState(Walk):
    """Has state where Python cannot look: in an object of a C library."""

    def start(self) -> None:
        self.handle = hashlib.sha256()

    def keep(self, state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        self.handle.update(b"a step")
        return state + 1e-3 * self.handle.digest()[0]


class Elsewhere(Walk):
    """Computes on the memory of its tensors, but not with torch: like a library with own kernels."""

    def keep(self, state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        array = state.numpy()
        array += 0.01 * np.abs(array)
        return state


class MakesGenerators(Walk):
    """Has another generator after every step."""

    def keep(self, state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        other = torch.Generator(self.device)
        other.set_state(self.generator.get_state())
        self.generator = other
        return state


class Grows(Walk):
    """Keeps a tensor that grows."""

    def start(self) -> None:
        self.past = torch.zeros(1, device=self.device)

    def keep(self, state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        self.past = torch.cat([self.past, state[:1, 0]])
        return state


class Masked(Walk):
    """Observations with an action mask: after a step to one side, that side is forbidden at times."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.single_observation_space = spaces.Dict(
            {
                "action_mask": spaces.Box(0, 1, (2,), np.int8),
                "where": spaces.Box(-np.inf, np.inf, (2,), np.float32),
            }
        )

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        obs, info = super().reset(seed=seed, options=options)
        return self._shown(obs), info

    def step(self, action: torch.Tensor) -> Any:
        obs, reward, terminated, truncated, info = super().step(action)
        if "final_obs" in info:
            info["final_obs"] = self._shown(info["final_obs"])
        return self._shown(obs), reward, terminated, truncated, info

    def _shown(self, obs: torch.Tensor) -> Any:
        allowed = torch.stack([obs[:, 0] > -1, obs[:, 0] <= 1], 1).to(torch.int8)
        return {"action_mask": allowed, "where": obs}
