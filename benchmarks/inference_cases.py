"""What central inference is measured on.

Imports no torch: the workers that step these environments have none.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import gymnasium
import numpy as np
from numpy.typing import NDArray

from benchmarks import workers_envs
from benchmarks.envs import FRAMES, burn, register
from benchmarks.workloads import WORKLOADS, Workload

COST = f"{__name__}:MusterBench/Cost-v0"
CORES = 2  # that the busy cases are made for
Kind = Literal["burns", "sleeps", "heads", "convolutional"]


def spend(seconds: float, sleeps: bool) -> None:
    """Of this thread's CPU time, or of somebody else's."""
    if sleeps:
        time.sleep(seconds)  # noqa: TID251 (a simulator or a GPU)
    elif seconds:
        burn(seconds)


class CostEnv(gymnasium.Env[NDArray[np.float32], Any]):
    """Steps that take a given time.

    Args:
        step_s: of the CPU, or asleep.
        reset_s: asleep: a simulator that starts anew.
        lengths: of the shortest and the longest episode, drawn from the environment's own
            generator.
    """

    def __init__(
        self,
        step_s: float = 0.0,
        *,
        sleeps: bool = False,
        reset_s: float = 0.0,
        lengths: tuple[int, int] = (200, 200),
    ) -> None:
        self.observation_space = gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self._obs, self._left = np.zeros(4, np.float32), 0
        self._step_s, self._sleeps, self._reset_s, self._lengths = (
            step_s,
            sleeps,
            reset_s,
            lengths,
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> Any:
        super().reset(seed=seed)
        low, high = self._lengths
        self._left = int(self.np_random.integers(low, high + 1))
        if self._reset_s:
            spend(self._reset_s, sleeps=True)
        return self._obs, {}

    def step(
        self, action: Any
    ) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        spend(self._step_s, self._sleeps)
        self._left -= 1
        return self._obs, 1.0, False, self._left <= 0, {}


gymnasium.register(COST.partition(":")[2], entry_point=f"{__name__}:CostEnv")


@dataclass(frozen=True)
class Case(Workload):
    """A workload for ``workers`` workers with ``B // workers`` environments each.

    Args:
        keywords: of the environment.
        policy: what a call of the policy does.
        call_s, row_s: what it costs: each call, and each environment in it.
        train_s: of the user's CPU time, for every batch.
        systems: names in ``inference_systems``.
        seconds: of a slice, relative to the others.
    """

    workers: int = 8
    keywords: Mapping[str, Any] = field(default_factory=dict)
    policy: Kind = "burns"
    call_s: float = 0.0
    row_s: float = 0.0
    train_s: float = 0.0
    systems: tuple[str, ...] = ()
    seconds: float = 1.0

    def make(self) -> gymnasium.Env[Any, Any]:
        register()
        return gymnasium.make(self.env_id, **self.keywords)

    @property
    def spends_cores(self) -> bool:
        """Environments and policy compete for ``CORES`` cores."""
        return self.policy == "burns" and not self.keywords.get("sleeps")


PARTS = ("bare-all", "bare-half", "calls-all", "calls-half")  # of a limit
PLACES = ("worker", "server", "alternating")
RESETS = ("worker", "worker-wait", "server", "server-wait")
DYNAMIC = (
    "free-worker",
    "free-threads",
    "free-server-0",
    "free-server-1ms",
    "free-server-3ms",
    "free-threads-server",
)
_BUSY = {"step_s": 200e-6}
_SLOW = {"step_s": 5e-3, "sleeps": True}
_RESETS = {"step_s": 200e-6, "reset_s": 0.05}


def _wake(workers: int) -> Case:
    systems = ("lines", *PLACES[: 2 if workers == 1 else 3])
    what = f"{workers} x 1 env that does nothing, nor does the policy"
    return Case(
        f"nothing-{workers}", COST, workers, 1024, what, workers, systems=systems
    )


def _forward(workers: int, envs: int, policy: Kind = "burns") -> Case:
    name = f"2ms{'' if policy == 'burns' else '-asleep'}-{workers}x{envs}"
    what = f"{workers} workers x {envs} envs of 200 us, one call of the policy {policy} 2 ms"
    return Case(
        name,
        COST,
        workers * envs,
        32,
        what,
        workers,
        _BUSY,
        policy,
        call_s=2e-3,
        systems=(*PARTS, *PLACES),
    )


def _equal(
    name: str, what: str, env: Mapping[str, Any], workers: int, B: int, **policy: Any
) -> Case:
    return Case(
        f"equal-{name}",
        COST,
        B,
        32,
        what,
        workers,
        env,
        systems=(*PARTS, *PLACES[1:]),
        **policy,
    )


def _slow_resets(name: str, T: int, lengths: tuple[int, int]) -> Case:
    low, high = lengths
    steps = f"{low}..{high}" if high > low else str(low)
    what = f"2 x 2 envs of 200 us, resets of 50 ms, episodes of {steps} steps, 100 ms to train"
    env = {**_RESETS, "lengths": lengths}
    return Case(
        f"resets-{name}",
        COST,
        4,
        T,
        what,
        2,
        env,
        train_s=0.1,
        systems=RESETS,
        seconds=3.0,
    )


def _dynamic(name: str, T: int, what: str, **policy: Any) -> Case:
    what = f"16 workers x 1 env that sleeps 0.5 to 5 ms, {what}"
    systems = ("bare-one", *DYNAMIC)
    return Case(
        f"first-ready-{name}",
        workers_envs.SLEEP,
        16,
        T,
        what,
        16,
        systems=systems,
        seconds=2.0,
        **policy,
    )


CASES = {
    case.name: case
    for case in (
        *(_wake(workers) for workers in (1, 2, 8)),
        *(_forward(*shape) for shape in ((8, 2), (4, 4), (8, 4), (2, 8))),
        _forward(8, 2, "sleeps"),
        _equal(
            "whole",
            "all asleep: envs 5 ms, all of them in one call 5 ms",
            _SLOW,
            4,
            4,
            policy="sleeps",
            row_s=1.25e-3,
        ),
        _equal(
            "half",
            "all asleep: envs 5 ms, half of them in a call 5 ms",
            _SLOW,
            4,
            4,
            policy="sleeps",
            row_s=2.5e-3,
        ),
        _equal(
            "busy",
            "8 x 2 envs of 200 us on two cores, 100 us of policy per env",
            _BUSY,
            8,
            16,
            row_s=100e-6,
        ),
        _equal(
            "call",
            "all asleep: envs 5 ms, any call 5 ms",
            _SLOW,
            4,
            4,
            policy="sleeps",
            call_s=5e-3,
        ),
        _slow_resets("aligned", 200, (200, 200)),
        _slow_resets("spread", 200, (100, 300)),
        _dynamic("heads", 64, "small network", policy="heads"),
        _dynamic("2ms", 16, "2 ms of CPU time per call", call_s=2e-3),
    )
}
CUDA_CASE = Case(
    "cuda-frames",
    FRAMES,
    64,
    64,
    "8 workers x 8 envs, 84x84x4 uint8, 20 us step; convolutional policy on a GPU",
    policy="convolutional",
    systems=(
        "bare-all",
        "calls-all",
        "cuda-server",
        "cuda-alternating",
        "cuda-graph",
        "cuda-worker",
    ),
)
WORKLOADS.update(CASES)
WORKLOADS[CUDA_CASE.name] = CUDA_CASE
