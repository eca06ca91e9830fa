"""Why ``terminated`` and ``truncated`` are two flags: the same data, three ways to bootstrap, one right value.

A walker goes right until it stands at a wall, where every further step pays 1. The task never ends by
itself, so the first state is worth ``GAMMA**WALL / (1 - GAMMA)``; a time limit cuts every episode after
10 steps. Run it: ``python examples/truncation.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.wrappers import TimeLimit
from tensordict import TensorDict
from torch import Tensor

from muster import Collector

GAMMA, LIMIT, WALL = 0.9, 10, 5


class Walk(gymnasium.Env):
    """One step to the right each time, up to the wall. The observation is the position."""

    observation_space = gymnasium.spaces.Box(0, WALL, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.position = 0
        return np.array([0], np.float32), {}

    def step(self, action: int) -> Any:
        reward = float(self.position == WALL)
        self.position = min(self.position + 1, WALL)
        return np.array([self.position], np.float32), reward, False, False, {}


def right(batch: TensorDict, value: Tensor) -> Tensor:
    """Cut by the clock: go on from the true next observation, which Muster keeps even where an episode ends."""
    return value[states(batch["next", "observation"])] * ~batch["next", "terminated"].squeeze(-1)


def as_terminated(batch: TensorDict, value: Tensor) -> Tensor:
    """The first classic mistake: to treat the time limit as the end of the world."""
    return value[states(batch["next", "observation"])] * ~batch["next", "done"].squeeze(-1)


def from_reset(batch: TensorDict, value: Tensor) -> Tensor:
    """The second: the row after a cut holds the *next* episode's first observation."""
    following = torch.cat([batch["observation"][:, 1:], batch["observation"][:, :1]], dim=1)
    return value[states(following)] * ~batch["next", "terminated"].squeeze(-1)


def states(observation: Tensor) -> Tensor:
    return observation.squeeze(-1).long()


def value_of_start(bootstrap: Callable[[TensorDict, Tensor], Tensor], batch: TensorDict, sweeps: int = 300) -> float:
    """Tabular TD(0), every state set to the mean of its targets, until nothing changes."""
    here, reward = states(batch["observation"]).flatten(), batch["next", "reward"].flatten()
    visits = torch.bincount(here, minlength=WALL + 1)
    value = torch.zeros(WALL + 1)
    for _ in range(sweeps):
        target = reward + GAMMA * bootstrap(batch, value).flatten()
        value = torch.bincount(here, target, minlength=WALL + 1) / visits
    return float(value[0])


def main() -> dict[str, float]:
    """Print and return the true value of the first state and the three estimates."""
    with Collector(
        lambda: TimeLimit(Walk(), LIMIT), None, num_envs=4, frames_per_batch=400, total_frames=400, seed=0
    ) as collector:
        batch = next(iter(collector))
    results = {
        "truth": GAMMA**WALL / (1 - GAMMA),
        "right": value_of_start(right, batch),
        "as_terminated": value_of_start(as_terminated, batch),
        "from_reset": value_of_start(from_reset, batch),
    }
    print(f"value of the first state, analytic:                {results['truth']:.3f}")
    print(f"bootstrap from next/observation where truncated:   {results['right']:.3f}")
    print(f"wrong: truncated treated as terminated:            {results['as_terminated']:.3f}")
    print(f"wrong: bootstrap from the reset observation:       {results['from_reset']:.3f}")
    return results


if __name__ == "__main__":
    main()
