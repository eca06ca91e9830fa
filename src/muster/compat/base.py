"""What the compat layers stand on: the environments of another system as one group, stepped by
Muster's loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from muster.episodes.rules import Rule
from muster.memory.slots import Lane, Layout, Slot
from muster.memory.specs import Array
from muster.protocols import EnvBatch, Policy
from muster.rng import GroupRng
from muster.rollout.columns import lane_columns
from muster.rollout.first_call import begin_episodes, prime
from muster.rollout.group import Group
from muster.rollout.loop import end_early, rollout
from muster.rollout.options import Execution, RolloutOptions
from muster.rollout.request import RolloutRequest

LANES_KEPT = 4  # for as many different numbers of rows


def borrowed(**options: Any) -> RolloutOptions:
    """``RolloutOptions`` for programs that seed generators and set threads themselves, and may need
    gradients.
    """
    execution = Execution(own_rng=False, inference_mode=False)
    return RolloutOptions(execution=execution, num_threads=None, **options)


class GroupRunner:
    """A group of all environments of a collector, stepped some rows at a time.

    ``group.reset`` begins new episodes.

    ``env_ids`` and ``total_envs`` say which environments these are; by default, all.
    """

    def __init__(
        self,
        envs: EnvBatch,
        options: RolloutOptions,
        *,
        rng: GroupRng,
        env_ids: Array | None = None,
        total_envs: int | None = None,
    ) -> None:
        B = envs.spec.num_envs
        self.group = Group(
            envs,
            env_ids=np.arange(B) if env_ids is None else env_ids,
            total_envs=B if total_envs is None else total_envs,
            rng=rng,
            options=options,
        )
        self._policy: Policy | None = None
        self._lanes: dict[int, Lane] = {}

    def begin_episodes(self) -> None:
        """Execute the resets that are due."""
        begin_episodes(self.group)

    def prime(self, policy: Policy) -> None:
        """Make the policy's first call; the next ``run`` uses its outputs for the first row."""
        prime(self.group, policy, 0)

    @property
    def is_lost(self) -> bool:
        """Whether the environments failed: all of them are reset before the next step."""
        return self.group.due.is_lost

    def end_early(self) -> None:
        """Keep the rows that an error in ``run`` has left, and go on after them."""
        end_early(self.group)

    def lane(self, policy: Policy, rows: int) -> Lane:
        """Memory for so many rows; the same once more for the same policy and number."""
        if policy is not self._policy:
            self._policy = policy
            self._lanes = {}
        if rows not in self._lanes:
            if len(self._lanes) >= LANES_KEPT:
                self._lanes.pop(next(iter(self._lanes)))
            columns = lane_columns(
                self.group.env.spec, policy.columns(), self.group.options
            )
            self._lanes[rows] = Slot(Layout(rows, self.group.B, columns)).lanes[0]
        return self._lanes[rows]

    def run(
        self,
        policy: Policy,
        lane: Lane,
        *,
        rule: Rule | None = None,
        watch: Callable[[Lane, int], object] | None = None,
        goes_on: bool = False,
    ) -> None:
        """Fill a lane until the rule has what it wants; ``done_steps`` says how far.

        Args:
            watch: called after every step with the lane and its row, which is complete.
            goes_on: after the rows that an error has left complete; else from the first row on.
        """
        if not goes_on:
            lane.restart()
        request = RolloutRequest(
            0, self.group.number, 0, "policy", version=0, rule=rule
        )
        rollout(self.group, policy, request, lane, watch=watch)
