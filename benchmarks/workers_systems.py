"""Systems with processes or threads of their own, and sleeping environments; importing this module
makes them known.
"""

from __future__ import annotations

import importlib
import multiprocessing
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks import workers_envs
from benchmarks.systems import SYSTEMS, Entry, System
from benchmarks.workloads import WORKLOADS, Workload


@dataclass(frozen=True)
class Crewed(Entry):
    """A system whose work is done by processes or threads of its own; ``path`` is a module of
    ``benchmarks``.

    Args:
        children: always true here.
        options: keyword arguments of the class.
        ahead: works ahead of whoever takes its rollouts, so that a slice must not begin with what
            lies ready.
    """

    children: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    ahead: bool = False

    def build(self, workload: Workload) -> System:
        module, _, name = self.path.partition(":")
        made = getattr(importlib.import_module(f"benchmarks.{module}"), name)
        system: System = made(workload, **self.options)
        return system


class BareTwice:
    """``Bare`` in two or more processes at once, each with its share of the environments; none
    waits for another.
    """

    AHEAD = 2  # rollouts

    def __init__(self, workload: Workload, processes: int = 2) -> None:
        self.frames = workload.frames
        share = replace(workload, B=workload.B // processes)
        context = multiprocessing.get_context("fork")
        self.pipes, self.processes = [], []
        for _ in range(processes):
            here, there = context.Pipe()
            process = context.Process(target=_roll, args=(share, there), daemon=True)
            process.start()
            self.pipes.append(here)
            self.processes.append(process)
            for _ in range(self.AHEAD):
                here.send_bytes(b"go")

    def rollout(self) -> int:
        for pipe in self.pipes:
            pipe.recv_bytes()
            pipe.send_bytes(b"go")
        return self.frames

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
            process.join()


def _roll(workload: Workload, pipe: Any) -> None:
    bare = SYSTEMS["bare"].build(workload)
    while True:
        pipe.recv_bytes()
        bare.rollout()
        pipe.send_bytes(b"done")


def bare_one(workload: Workload) -> System:
    """The bare loop of one of the workload's environments."""
    return SYSTEMS["bare"].build(replace(workload, B=1))


def _muster(kind: str, label: str, *, ahead: bool = False, **options: Any) -> Crewed:
    needs = ("torch", "gymnasium", "tensordict")
    return Crewed(
        "workers_muster:WorkerPool",
        label,
        needs,
        True,
        "muster-workers",
        options={"kind": kind, **options},
        ahead=ahead,
    )


_SYNC, _FREE = "MultiSyncCollector", "MultiAsyncCollector"
_EACH: dict[str, Any] = {"groups": None, "heads": True}  # a group per environment

PAIRS = {
    "bare-2": Crewed(
        "workers_systems:BareTwice",
        "bare env.step loop, 2 processes",
        quick=True,
        home="muster",
        ahead=True,
    ),
    "muster-sync-plain": _muster(_SYNC, "Muster MultiSync, plain module", heads=False),
    "muster-sync-heads": _muster(_SYNC, "Muster MultiSync, heads", heads=True),
    "muster-free-plain": _muster(
        _FREE, "Muster MultiAsync, plain module", heads=False, ahead=True
    ),
    "muster-free-heads": _muster(
        _FREE, "Muster MultiAsync, heads", heads=True, ahead=True
    ),
    "torchrl-2": Crewed(
        "workers_peers:torchrl",
        "TorchRL MultiSyncCollector",
        ("torchrl", "gymnasium", "pandas"),
    ),
    "tianshou-2": Crewed(
        "workers_peers:tianshou", "Tianshou SubprocVectorEnv", ("tianshou",)
    ),
    "sb3-2": Crewed(
        "workers_peers:sb3", "Stable-Baselines3 SubprocVecEnv", ("stable_baselines3",)
    ),
    "pufferlib-2": Crewed(
        "workers_peers:puffer",
        "PufferLib Multiprocessing",
        ("pufferlib", "psutil", "torch"),
    ),
}
SLEEPERS = {
    "bare-one": Crewed(
        "workers_systems:bare_one",
        "bare loop of one env",
        quick=True,
        home="muster",
        children=False,
    ),
    "sleep-sync-threads": _muster(
        _SYNC, "Muster MultiSync, threads", backend="threads", **_EACH
    ),
    "sleep-sync-processes": _muster(_SYNC, "Muster MultiSync, processes", **_EACH),
    "sleep-free-threads": _muster(
        _FREE, "Muster MultiAsync, threads", ahead=True, backend="threads", **_EACH
    ),
    "sleep-free-processes": _muster(
        _FREE, "Muster MultiAsync, processes", ahead=True, **_EACH
    ),
}
SLEEP_WORKLOAD = Workload(
    "sleep-16", workers_envs.SLEEP, 16, 64, "16 envs whose step waits 0.5 to 5 ms"
)

SYSTEMS.update(PAIRS | SLEEPERS)
WORKLOADS[SLEEP_WORKLOAD.name] = SLEEP_WORKLOAD
