"""An adapter with ``spec``, ``reset``, ``start``, ``objects`` and ``close``, and no capability."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from muster import Collector
from muster.env_spec import EnvSpec
from muster.errors import BadOption
from muster.keys import ACTION, OBSERVATION, REWARD, next_of
from muster.memory.slots import Lane
from muster.memory.specs import ArraySpec
from muster.protocols import EnvBatch, Step
from muster.testing import EnvContract

LENGTHS = np.array([3, 5])
FIVE = {"spec", "reset", "start", "objects", "close"}


class PlainEnvs(EnvBatch):
    """Two environments that observe the step of the episode and the last action."""

    def __init__(self) -> None:
        observed = {OBSERVATION: ArraySpec((2,), np.dtype(np.float32))}
        low, high = np.asarray(0), np.asarray(2)
        actions = {ACTION: ArraySpec((), np.dtype(np.int64), low, high)}
        self.spec = EnvSpec("Plain", 2, (2,), observed, actions)
        self._t = np.zeros(2, np.int64)
        self._object = object()

    def reset(
        self,
        arrays: Mapping[Any, Any],
        row: int,
        which: Sequence[int],
        seeds: Sequence[int] | None,
    ) -> None:
        self._t[which] = 0
        arrays[OBSERVATION][row, which] = 0

    def start(self, lane: Lane) -> Step:
        arrays = lane.arrays
        terminated = arrays[next_of(("terminated",))]

        def step(t: int) -> Sequence[int] | None:
            self._t += 1
            arrays[OBSERVATION][t + 1, :, 0] = self._t
            arrays[OBSERVATION][t + 1, :, 1] = arrays[ACTION][t]
            arrays[REWARD][t] = self._t
            finished: list[int] = np.flatnonzero(self._t == LENGTHS).tolist()
            terminated[t, finished] = True
            return finished or None

        return step

    def objects(self) -> Sequence[object]:
        return [self._object]

    def close(self) -> None:
        pass


class TestPlainAdapter(EnvContract):
    num_envs = None

    def make_env(self) -> PlainEnvs:
        return PlainEnvs()


def test_it_has_these_five_and_nothing_else():
    public = {
        name
        for name in {*vars(PlainEnvs), *vars(PlainEnvs())}
        if not name.startswith("_")
    }
    assert public == FIVE


@pytest.mark.parametrize("option", [{"info": True}, {"traj_done_key": "over"}])
def test_options_that_need_a_capability_are_refused(option):
    with pytest.raises(BadOption, match="Plain"):
        Collector(PlainEnvs, None, frames_per_batch=4, **option)


def test_a_limit_and_waiting_for_the_batch_need_no_capability():
    with Collector(
        PlainEnvs,
        None,
        frames_per_batch=12,
        max_frames_per_traj=2,
        reset_when_done=False,
    ) as collector:
        batch = collector.rollout()
    assert batch["next", "step_count"][..., :2, 0].tolist() == [[1, 2], [1, 2]]
    assert batch["collector", "valid"].sum() == 4
