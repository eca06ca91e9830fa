"""Muster's Collector with random actions, a plain module, and its own heads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gymnasium

from benchmarks.nets import PlainPolicy, is_discrete, trunk
from benchmarks.workloads import Workload
from muster import Collector, Execution, policies


def head_for(env: gymnasium.Env) -> Any:  # type: ignore[type-arg]
    """The head that is the same policy as ``PlainPolicy``."""
    net = trunk(env)
    return policies.categorical(net) if is_discrete(env) else policies.gaussian(net)


class Collecting:
    """Iterates over a ``Collector`` with the environments of a workload, or those of ``options``."""

    def __init__(self, workload: Workload, policy: Any, **options: Any) -> None:
        self.frames = workload.frames
        envs = {
            "create_env_fn": workload.make,
            "num_envs": None if workload.B == 1 else workload.B,
        }
        given: dict[str, Any] = {
            **envs,
            "frames_per_batch": workload.frames,
            "seed": 0,
            **options,
        }
        self.collector: Any = Collector(policy=policy, **given)
        self.batches: Iterator[Any] = iter(self.collector)

    def rollout(self) -> int:
        next(self.batches)
        return self.frames

    def close(self) -> None:
        self.collector.shutdown()


class Random(Collecting):
    def __init__(self, workload: Workload) -> None:
        super().__init__(workload, None)


class Compact(Collecting):
    def __init__(self, workload: Workload) -> None:
        super().__init__(workload, None, compact_obs=True)


class Plain(Collecting):
    def __init__(self, workload: Workload) -> None:
        super().__init__(workload, PlainPolicy(workload.make()).eval())


class Heads(Collecting):
    def __init__(self, workload: Workload) -> None:
        super().__init__(workload, head_for(workload.make()))


class HeadsEager(Collecting):
    def __init__(self, workload: Workload) -> None:
        super().__init__(
            workload, head_for(workload.make()), execution=Execution(executor=False)
        )
