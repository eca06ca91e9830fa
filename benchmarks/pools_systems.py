"""EnvPool's CartPoles: stepped alone, with a network, and by Muster. Importing this makes them known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.nets import PlainPolicy
from benchmarks.systems import SYSTEMS
from benchmarks.systems.muster_ import Collecting, head_for
from benchmarks.workers_systems import Crewed
from benchmarks.workloads import WORKLOADS, Workload

THREADS = 1  # of a pool


def pool_of(case: Workload) -> Any:
    import envpool

    return envpool.make_gymnasium(case.env_id, num_envs=case.B, num_threads=THREADS, seed=0)


class Loop:
    """A pool in a loop that stores nothing; finished environments are reset in EnvPool's own next step.

    Args:
        acts: call ``PlainPolicy`` in every step; else the same actions are repeated.
    """

    def __init__(self, case: Workload, *, acts: bool) -> None:
        self.frames, self.T, self.pool = case.frames, case.T, pool_of(case)
        self.module = PlainPolicy(case.make()).eval() if acts else None
        self.obs, _ = self.pool.reset()
        self.actions = np.random.default_rng(0).integers(2, size=case.B, dtype=np.int32)

    def rollout(self) -> int:
        with torch.inference_mode():
            for _ in range(self.T):
                if self.module is not None:
                    self.actions = self.module(torch.from_numpy(self.obs))[0].numpy().astype(np.int32)
                self.obs, *_ = self.pool.step(self.actions)
        return self.frames

    def close(self) -> None:
        self.pool.close()


class Muster(Collecting):
    """Muster's ``Collector`` with heads, or with random actions."""

    def __init__(self, case: Workload, *, acts: bool) -> None:
        policy = head_for(case.make()) if acts else None
        super().__init__(case, policy, create_env_fn=lambda: pool_of(case), num_envs=None)


def _entry(name: str, label: str, *, acts: bool) -> Crewed:
    needs = ("torch", "gymnasium", "tensordict", "envpool")
    return Crewed(f"pools_systems:{name}", label, needs, home="muster", children=False, options={"acts": acts})


POOLS = {
    "pools-bare": _entry("Loop", "EnvPool, the same actions", acts=False),
    "pools-loop": _entry("Loop", "EnvPool, plain module, nothing stored", acts=True),
    "pools-random": _entry("Muster", "Muster, random actions", acts=False),
    "pools-heads": _entry("Muster", "Muster, heads", acts=True),
}
SYSTEMS.update(POOLS)


@dataclass(frozen=True)
class Case(Workload):
    """A pool of CartPoles."""

    systems: tuple[str, ...] = tuple(POOLS)


CASES = {
    case.name: case
    for B in (64, 256)
    for case in [Case(f"pools-{B}", "CartPole-v1", B, 128, f"EnvPool of {B} CartPoles, {THREADS} thread")]
}
WORKLOADS.update(CASES)
