"""Random steps before the first batch, so that environments do not run in step with each other
(``max_decorrelation_steps``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from muster.memory.slots import Lane, Layout, Slot
from muster.policies.random import RandomPolicy, sampler_of
from muster.policies.sampling import masks_of
from muster.protocols import Act
from muster.rng import GroupRng
from muster.rollout.columns import lane_columns
from muster.rollout.group import Group
from muster.rollout.loop import make_steps
from muster.rollout.progress import ACTING, KNOWN, STEPPING, Phase
from muster.rollout.request import RolloutRequest
from muster.rollout.tally import Tally

FIRST_STREAM = 1 << 20  # first stream for random steps; see ``GroupRng.stream``


def start_at_random(group: Group, which: Sequence[int]) -> None:
    """Make 1 to ``max_decorrelation_steps`` random steps in each environment of ``which``, after a
    reset.

    They are rollouts of one step, whose frames the first batch counts as discarded. Episodes that
    end are not recorded, and their environments are reset. Episodes that continue keep their steps
    and rewards. Environments with fewer steps join later: they are left out until then or, if the
    env batch cannot do that, reset again when they join. Call it in the group's context.
    """
    progress = group.progress
    env = group.env
    rng = group.rng.stream(FIRST_STREAM)
    steps = np.zeros(group.B, np.int64)
    drawn = 1 + rng.integers(group.random_start.most, size=group.B)
    steps[which] = drawn[which]
    most = int(steps.max())
    columns = lane_columns(env.spec, (), group.options)
    layout = Layout(1, group.B, columns, batch_shape=env.spec.batch_shape)
    lane = Slot(layout).lanes[0]
    streams = cast(GroupRng, _Streams(group.rng))
    masks = masks_of(env.spec)
    policy = _DrawingFrom(streams, sampler_of(env), env.spec.batch_shape, masks=masks)
    phase = progress.begin(Phase.RESET)
    tally = Tally()
    try:
        for left in range(most, 0, -1):
            if group.can.bypass.is_possible:
                absent = np.flatnonzero(steps < left).tolist()
            else:
                absent = []
                if left < most:
                    group.reset(np.flatnonzero(steps == left).tolist())
            request = RolloutRequest(
                number=0,
                group=group.number,
                lane=0,
                policy="random",
                version=0,
                absent=absent,
                is_random_start=True,
            )
            lane.restart()
            make_steps(group, policy, request, lane, tally)
            progress.cells[KNOWN] = tally.executed
            progress.cells[STEPPING] -= 1  # a change shows that the worker is alive
    finally:
        group.random_start.execute(tally.executed)
        group.closed()
        group.can.bypass.set(())
        for listener in group.reports.listeners:
            listener.lost_track(range(group.B))
    progress.cells[STEPPING] = progress.cells[ACTING]
    progress.begin(phase)


class _DrawingFrom(RandomPolicy):
    """A random policy that draws from these streams, not from its group's."""

    def __init__(self, streams: GroupRng, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._streams = streams

    def start(self, lane: Lane, rng: GroupRng) -> Act:
        return super().start(lane, self._streams)


class _Streams:
    """The streams of a ``GroupRng`` after ``FIRST_STREAM``."""

    def __init__(self, rng: GroupRng) -> None:
        self._rng = rng

    def stream(self, number: int) -> np.random.Generator:
        return self._rng.stream(FIRST_STREAM + 1 + number)
