"""PufferLib's serial backend under the loop of ``vector_loop``."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pufferlib.emulation
import pufferlib.vector

from benchmarks.systems.vector_loop import _Loop
from benchmarks.workloads import Workload


class _Envs:
    """PufferLib's functions under the names of a Gymnasium vector env."""

    def __init__(self, workload: Workload) -> None:
        make = functools.partial(
            pufferlib.emulation.GymnasiumPufferEnv, env_creator=workload.make
        )
        self.envs: Any = pufferlib.vector.make(
            make, backend=pufferlib.vector.Serial, num_envs=workload.B
        )

    def reset(self, seed: int) -> tuple[Any, Any]:
        obs, infos = self.envs.reset(seed)
        return obs.copy(), infos

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, infos = self.envs.step(action)
        return (
            obs,
            reward,
            terminated.astype(np.bool_),
            truncated.astype(np.bool_),
            infos,
        )

    def close(self) -> None:
        self.envs.close()


class Puffer(_Loop):
    def __init__(self, workload: Workload) -> None:
        super().__init__(workload, _Envs(workload))  # type: ignore[arg-type]
