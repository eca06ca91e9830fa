"""What is measured: the environments, how many of them, and how long a rollout is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium

from benchmarks import envs


@dataclass(frozen=True)
class Workload:
    """One row of the tables.

    Args:
        env_id: for ``gymnasium.make``; every system steps the same wrapped environment.
        B: environments.
        T: steps per rollout, for all systems that have rollouts.
    """

    name: str
    env_id: str
    B: int
    T: int
    describe: str

    def make(self) -> gymnasium.Env[Any, Any]:
        envs.register()
        return gymnasium.make(self.env_id)

    def factories(self) -> list[Callable[[], gymnasium.Env[Any, Any]]]:
        return [self.make] * self.B

    @property
    def frames(self) -> int:
        """Frames per rollout."""
        return self.B * self.T


WORKLOADS = {
    w.name: w
    for w in (
        Workload("cartpole-1", "CartPole-v1", 1, 512, "one CartPole"),
        Workload("cartpole-8", "CartPole-v1", 8, 256, "8 CartPoles"),
        Workload("cartpole-64", "CartPole-v1", 64, 128, "64 CartPoles"),
        Workload(
            "frames-8",
            envs.FRAMES,
            8,
            128,
            "8 envs, 84x84x4 uint8 observation, 20 us step",
        ),
        Workload(
            "pendulum-8", "Pendulum-v1", 8, 256, "8 Pendulums (continuous actions)"
        ),
        Workload(
            "busy-1", envs.BUSY, 1, 256, "one env whose step costs 200 us of CPU time"
        ),
        Workload(
            "busy-8", envs.BUSY, 8, 64, "8 envs whose step costs 200 us of CPU time"
        ),
    )
}
