"""Setups of a collector, and the grid of them that ``tune`` times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from muster.collectors.auto import MOST_WORKERS, Load, busy_workers
from muster.collectors.base import BaseCollector
from muster.collectors.collector import Collector
from muster.collectors.multi import MultiSyncCollector
from muster.collectors.multi_options import CentralInference


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One way to collect.

    Attributes:
        num_envs: B, the environments of each group.
        from_vector: the environments of a group are made together (a vector environment), so ``num_envs`` is no option.
        groups: number of groups.
        T: time steps of a batch.
        workers: processes or threads; 0: this process collects.
        backend: kind of workers.
        inference: where the policy runs: in every worker, or once in this process.
    """

    num_envs: int
    from_vector: bool = False
    groups: int = 1
    T: int = 128
    workers: int = 0
    backend: Literal["processes", "threads"] = "processes"
    inference: Literal["worker", "server"] | CentralInference = "worker"

    @property
    def frames(self) -> int:
        """Frames of one batch."""
        return self.groups * self.num_envs * self.T

    @property
    def kind(self) -> str:
        """In words, without numbers."""
        if not self.workers:
            return "in process"
        return f"{self.backend}, {self.inference if isinstance(self.inference, str) else 'alternating server'}"

    @property
    def collector_class(self) -> type[Collector | MultiSyncCollector]:
        """The class whose constructor takes ``options()``."""
        return MultiSyncCollector if self.workers else Collector

    def options(self) -> dict[str, Any]:
        """Keywords of the collector, without those that are its defaults."""
        chosen: dict[str, Any] = {"num_workers": self.workers} if self.workers not in (0, self.groups) else {}
        if not self.from_vector:
            chosen["num_envs"] = self.num_envs
        chosen["frames_per_batch"] = self.frames
        if self.workers:
            defaults = Setup(num_envs=1)
            names = ("backend", "inference")
            chosen |= {n: getattr(self, n) for n in names if getattr(self, n) != getattr(defaults, n)}
        return chosen

    def make(self, create_env_fn: Any, policy: Any = None, **options: Any) -> BaseCollector:
        """The collector. ``options`` are further ones, and may replace those of the setup."""
        several = isinstance(create_env_fn, (list, tuple))
        factories = [create_env_fn] * self.groups if self.workers and not several else create_env_fn
        return self.collector_class(factories, policy, **{**self.options(), **options})


def grid(
    load: Load, cores: float, totals: Sequence[int], frames: int, *, groups: int | None, policy: bool
) -> list[Setup]:
    """The setups to time, of ``frames`` frames per batch, for each total number of environments.

    In process, then 2 workers up to twice the cores, and as many as keep the cores busy. Threads are in the grid where
    the environment waits: threads share one core. Central inference is in it where there is a policy.
    """
    wanted = {2, max(1, math.floor(cores)), 2 * max(1, math.floor(cores)), busy_workers(load, cores)} - {1}
    backends: tuple[Literal["processes", "threads"], ...] = ("processes", "threads") if load.waits else ("processes",)
    inferences: list[Literal["worker", "server"] | CentralInference] = ["worker"]
    if policy:
        inferences += ["server", CentralInference(alternating=True)]
    found: list[Setup] = []
    for total in dict.fromkeys(totals):
        most = min(MOST_WORKERS, groups or max(1, total // load.env_batch))
        for workers in sorted({0} | {min(n, most) for n in wanted if most > 1}):
            n = groups or workers or 1
            if total % n or load.env_batch not in (1, total // n):
                continue
            common: dict[str, Any] = {
                "num_envs": total // n,
                "from_vector": load.env_batch > 1,
                "groups": n,
                "T": max(1, round(frames / total)),
                "workers": workers,
            }
            if not workers:
                found.append(Setup(**common))
                continue
            found += [
                Setup(**common, backend=backend, inference=inference)
                for backend in backends
                for inference in inferences
            ]
    return found
