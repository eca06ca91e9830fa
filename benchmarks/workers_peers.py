"""The peers with worker processes: as in ``systems/``, with the class exchanged that decides where
environments run.

TorchRL and PufferLib get two workers. The others know one process per environment only. Those that
can fork do: 64 interpreters that import torch anew would take minutes to start.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from benchmarks.systems import System
from benchmarks.systems.vector_loop import _Loop
from benchmarks.workloads import Workload


def torchrl(workload: Workload) -> System:
    """Two workers with a SerialEnv each."""
    from torchrl.collectors import MultiSyncCollector
    from torchrl.envs import GymWrapper, SerialEnv

    from benchmarks.systems import torchrl_

    half = replace(workload, B=workload.B // 2)

    def make() -> Any:
        return SerialEnv(
            half.B,
            lambda: GymWrapper(
                half.make(), categorical_action_encoding=True, from_pixels=False
            ),
        )

    def both(_: Any, actor: Any, *, frames_per_batch: int, **options: Any) -> Any:
        return MultiSyncCollector(
            [make] * 2, actor, frames_per_batch=2 * frames_per_batch, **options
        )

    with patch.object(torchrl_, "Collector", both):
        return torchrl_.TorchRL(half)


def tianshou(workload: Workload) -> System:
    from tianshou.env import SubprocVectorEnv

    from benchmarks.systems import tianshou_

    with patch.object(tianshou_, "DummyVectorEnv", SubprocVectorEnv):
        return tianshou_.Tianshou(workload)


def sb3(workload: Workload) -> System:
    from stable_baselines3.common.vec_env import SubprocVecEnv

    from benchmarks.systems import sb3_

    with patch.object(
        sb3_, "DummyVecEnv", functools.partial(SubprocVecEnv, start_method="fork")
    ):
        return sb3_.SB3(workload)


def puffer(workload: Workload) -> System:
    """Its multiprocessing backend, synchronous, under the loop of ``vector_loop``."""
    import pufferlib.emulation
    import pufferlib.vector

    from benchmarks.systems import puffer_

    class Two(puffer_._Envs):
        def __init__(self) -> None:
            make = functools.partial(
                pufferlib.emulation.GymnasiumPufferEnv, env_creator=workload.make
            )
            backend = pufferlib.vector.Multiprocessing
            self.envs = pufferlib.vector.make(
                make, backend=backend, num_envs=workload.B, num_workers=2, overwork=True
            )

    return _Loop(workload, Two())  # type: ignore[arg-type]
