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
    """A configuration of a collector.

    Attributes:
        num_envs: B, the environments of each group.
        from_vector: the factory makes a vector environment, so the collector gets no option ``num_envs``.
        groups: number of groups.
        T: time steps per batch.
        workers: number of processes or threads; 0: this process collects.
        backend: kind of workers.
        inference: "worker": the policy runs in every worker; else once, in this process, see ``CentralInference``.
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
        """The setup in words, without numbers."""
        if not self.workers:
            return "in process"
        return f"{self.backend}, {self.inference if isinstance(self.inference, str) else 'alternating server'}"

    @property
    def collector_class(self) -> type[Collector | MultiSyncCollector]:
        """The collector class for ``options()``."""
        return MultiSyncCollector if self.workers else Collector

    def options(self) -> dict[str, Any]:
        """Keyword arguments of the collector, without its defaults."""
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
        """Make the collector. ``options`` are added to those of the setup, or replace them."""
        several = isinstance(create_env_fn, (list, tuple))
        factories = [create_env_fn] * self.groups if self.workers and not several else create_env_fn
        return self.collector_class(factories, policy, **{**self.options(), **options})


def grid(
    load: Load, cores: float, totals: Sequence[int], frames: int, *, groups: int | None, policy: bool
) -> list[Setup]:
    """Return the setups to time, with ``frames`` frames per batch, for each total number of environments.

    They collect in process, or with 2 workers up to twice the cores, and with as many as keep the cores busy. Threads,
    which share one core, are in the grid if the environment waits. Central inference is in the grid with a policy.
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
