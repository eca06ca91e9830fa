"""Muster's collectors of several workers."""

from __future__ import annotations

from typing import Any

import muster
from benchmarks.nets import PlainPolicy
from benchmarks.systems.muster_ import head_for
from benchmarks.workloads import Workload


class WorkerPool:
    """``groups`` groups over as many workers; rollouts of the length of everybody else's.

    Args:
        kind: ``"MultiSyncCollector"`` or ``"MultiAsyncCollector"``.
        heads: Muster's heads, else the plain module.
        groups: None for one per environment.
        options: of the collector.
    """

    def __init__(
        self,
        workload: Workload,
        kind: str,
        heads: bool,
        groups: int | None = 2,
        **options: Any,
    ) -> None:
        groups = groups or workload.B
        envs = workload.B // groups
        self.batches_per_rollout = 1 if "Sync" in kind else groups
        self.collector: Any = getattr(muster, kind)(
            [workload.make] * groups,
            head_for(workload.make()) if heads else PlainPolicy(workload.make()).eval(),
            num_envs=None if envs == 1 else envs,
            frames_per_batch=workload.frames // self.batches_per_rollout,
            seed=0,
            **options,
        )
        self.batches: Any = iter(self.collector)

    def rollout(self) -> int:
        return sum(next(self.batches).numel() for _ in range(self.batches_per_rollout))

    def close(self) -> None:
        self.collector.shutdown()
