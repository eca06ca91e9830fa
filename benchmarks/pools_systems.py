"""EnvPool's CartPoles: stepped alone, with a network, and by Muster.

Importing this makes them known.
"""

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


def pool_of(case: Case) -> Any:
    import envpool

    options = {
        "num_envs": case.B,
        "batch_size": case.batch_size,
        "num_threads": THREADS,
        "seed": 0,
    }
    return envpool.make_gymnasium(case.env_id, **options)


class Loop:
    """A pool in a loop that stores nothing; finished environments are reset in EnvPool's own next
    step.

    An asynchronous pool is stepped by ``send`` and ``recv``.

    Args:
        acts: call ``PlainPolicy`` in every step; else the same actions are repeated.
    """

    def __init__(self, case: Case, *, acts: bool) -> None:
        self.frames, self.pool = case.frames, pool_of(case)
        size = case.batch_size or case.B
        self.steps = case.frames // size
        self.module = PlainPolicy(case.make()).eval() if acts else None
        self.actions = np.random.default_rng(0).integers(2, size=size, dtype=np.int32)
        self.pool.async_reset()
        self.obs, *_, self.info = self.pool.recv()

    def rollout(self) -> int:
        with torch.inference_mode():
            for _ in range(self.steps):
                if self.module is not None:
                    self.actions = (
                        self.module(torch.from_numpy(self.obs))[0]
                        .numpy()
                        .astype(np.int32)
                    )
                self.obs, *_, self.info = self.pool.step(
                    self.actions, self.info["env_id"]
                )
        return self.frames

    def close(self) -> None:
        self.pool.close()


class Muster(Collecting):
    """Muster's ``Collector`` with heads, or with random actions."""

    def __init__(self, case: Case, *, acts: bool) -> None:
        policy = head_for(case.make()) if acts else None
        super().__init__(
            case, policy, create_env_fn=lambda: pool_of(case), num_envs=None
        )


def _entry(name: str, label: str, *, acts: bool) -> Crewed:
    needs = ("torch", "gymnasium", "tensordict", "envpool")
    return Crewed(
        f"pools_systems:{name}",
        label,
        needs,
        home="muster",
        children=False,
        options={"acts": acts},
    )


POOLS = {
    "pools-bare": _entry("Loop", "EnvPool, the same actions", acts=False),
    "pools-loop": _entry("Loop", "EnvPool, plain module, nothing stored", acts=True),
    "pools-random": _entry("Muster", "Muster, random actions", acts=False),
    "pools-heads": _entry("Muster", "Muster, heads", acts=True),
}
SYSTEMS.update(POOLS)


@dataclass(frozen=True)
class Case(Workload):
    """A pool of CartPoles; asynchronous with a ``batch_size``."""

    batch_size: int = 0
    systems: tuple[str, ...] = tuple(POOLS)


def _case(B: int, batch_size: int = 0) -> Case:
    label = f"EnvPool of {B} CartPoles, {THREADS} thread"
    if not batch_size:
        return Case(f"pools-{B}", "CartPole-v1", B, 128, label)
    name, label = f"pools-{B}-async-{batch_size}", f"{label}, batch_size={batch_size}"
    return Case(name, "CartPole-v1", B, 128, label, batch_size=batch_size)


CASES = {
    case.name: case for case in (_case(64), _case(256), _case(64, 32), _case(256, 128))
}
WORKLOADS.update(CASES)
