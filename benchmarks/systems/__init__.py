"""Every system that can be measured: one file per library, one class per way of using it."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Protocol

from benchmarks.workloads import Workload


class System(Protocol):
    """Built once per workload, in a process of its own: ``Cls(workload)``."""

    def rollout(self) -> int:
        """Collect about ``workload.frames`` frames; returns how many."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Entry:
    """Where a system lives and what it needs.

    Args:
        path: ``module:Class``.
        needs: modules that must be importable; the first interpreter that has them all runs the
            system.
        quick: part of ``--quick``.
        home: systems of the same home share a process, so that not even the layout of its memory
            differs between Muster and its limit; empty for a process of its own.
        children: works in processes of its own, whose CPU time is not seen.
    """

    path: str
    label: str
    needs: tuple[str, ...] = ("torch", "gymnasium")
    quick: bool = False
    home: str = ""
    children: bool = False

    def build(self, workload: Workload) -> System:
        module, _, name = self.path.partition(":")
        system: System = getattr(
            importlib.import_module(f"benchmarks.systems.{module}"), name
        )(workload)
        return system


def _here(path: str, label: str, *, quick: bool = True) -> Entry:
    return Entry(
        path, label, ("torch", "gymnasium", "tensordict"), quick, home="muster"
    )


SYSTEMS = {
    "bare": _here("bare:Bare", "bare env.step loop"),
    "limit-plain": _here("bare:LimitPlain", "bare loop + plain module"),
    "limit-heads": _here("heads_limit:LimitHeads", "bare loop + Muster's heads"),
    "muster-random": _here("muster_:Random", "Muster, random actions"),
    "muster-compact": _here(
        "muster_:Compact", "Muster, random actions, compact_obs", quick=False
    ),
    "muster-plain": _here("muster_:Plain", "Muster, plain module"),
    "muster-eager": _here(
        "muster_:HeadsEager", "Muster, heads, executor off", quick=False
    ),
    "muster-heads": _here("muster_:Heads", "Muster, heads and executor"),
    "sync-vector": Entry(
        "vector_loop:Sync", "gymnasium SyncVectorEnv, CleanRL-style loop", quick=True
    ),
    "async-vector": Entry(
        "vector_loop:Async",
        "gymnasium AsyncVectorEnv, CleanRL-style loop",
        children=True,
    ),
    # pandas: without it TorchRL searches the disk for it at every forward, which is nobody's normal
    # installation.
    "torchrl": Entry(
        "torchrl_:TorchRL", "TorchRL Collector", ("torchrl", "gymnasium", "pandas")
    ),
    "tianshou": Entry("tianshou_:Tianshou", "Tianshou Collector", ("tianshou",)),
    "sb3": Entry(
        "sb3_:SB3", "Stable-Baselines3 collect_rollouts", ("stable_baselines3",)
    ),
    "rllib": Entry(
        "rllib_:RLlib",
        "RLlib SingleAgentEnvRunner",
        ("ray", "torch", "gymnasium", "tree"),
    ),
    "pufferlib": Entry(
        "puffer_:Puffer", "PufferLib Serial, CleanRL-style loop", ("pufferlib", "torch")
    ),
}
