"""The bare loop with Muster's own heads, called once per time step: what their collector could
reach at most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.systems.bare import BareWithPolicy, cells_of
from benchmarks.systems.muster_ import head_for
from benchmarks.workloads import Workload
from muster import keys
from muster.envs.stacked import StackedEnvs
from muster.memory.slots import Lane, Layout
from muster.memory.specs import Column
from muster.policies.adapt import adapt
from muster.rng import GroupRng


class LimitHeads(BareWithPolicy):
    """Observations go into the rows of a lane, since that is where a head reads; actions come out
    of its rows.
    """

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        batched = workload.B > 1
        stacked = StackedEnvs(self.envs)
        ((self.obs_key, obs_spec),) = stacked.spec.observation_specs.items()
        ((self.action_key, action_spec),) = stacked.spec.action_specs.items()
        self.rng = GroupRng(0)
        spec = replace(stacked.spec, batch_shape=(workload.B,) if batched else ())
        self.head: Any = adapt(head_for(self.envs[0]), spec)
        first = torch.from_numpy(self.obs if batched else self.obs[0])
        self.head.first({self.obs_key: first}, self.rng)
        columns = (
            Column(self.obs_key, obs_spec.shape, obs_spec.dtype, carry=True),
            Column(self.action_key, action_spec.shape, action_spec.dtype),
            Column(keys.LOG_PROB, (), np.dtype(np.float32)),
        )
        layout = Layout(
            workload.T, workload.B, columns, batch_shape=None if batched else ()
        )
        self.lane = Lane(layout, np.zeros(layout.nbytes, np.uint8))
        self.rows = list(self.lane.arrays[self.obs_key])
        self.rows[0][...] = self.obs
        self.cells = [cells_of(row) for row in self.rows]
        actions = list(self.lane.arrays[self.action_key])
        self.actions: list[Callable[[], Any]] = [
            row.tolist
            if action_spec.dtype.kind == "i" and not action_spec.shape
            else row.copy
            for row in actions
        ]

    def rollout(self) -> int:
        cells, actions, steps = self.cells, self.actions, self.steps
        self.rows[0][...] = self.rows[-1]
        with torch.no_grad():
            act = self.head.start(self.lane, self.rng)
            for t in range(self.T):
                act(t)
                for (step, reset), action, cell in zip(
                    steps, actions[t](), cells[t + 1], strict=True
                ):
                    obs, _, terminated, truncated, _ = step(action)
                    if terminated or truncated:
                        obs, _ = reset()
                    cell[:] = obs
        return self.frames
