"""How policy and environments start in a lane: chosen once, when a group is made.

- ``Together``: the policy acts for all environments, and then they are stepped.
- ``WhenReady``: the policy acts within a step, for the environments that are ready (asynchronous
  EnvPool).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from muster.capabilities import ActsWhenReady, Bypasses, capability
from muster.keys import Key
from muster.memory.slots import Lane
from muster.memory.specs import Array
from muster.protocols import Act, EnvBatch, Policy, Step
from muster.rng import GroupRng
from muster.rollout.acting import is_own, policy_error
from muster.rollout.progress import PHASE, Phase

if TYPE_CHECKING:
    import torch

Seen = Mapping[Key, "torch.Tensor"]


class Starting(Protocol):
    """How policy and environments start in a lane.

    Attributes:
        keeps_first_call: the first call of a policy is that for row 0.
    """

    keeps_first_call: bool

    def seen(self, obs: Seen) -> Seen:
        """Return the observations of the environments that the policy's first call acts for."""

    def start(
        self, policy: Policy, lane: Lane, rng: GroupRng, cells: Array
    ) -> tuple[Act, Step]:
        """Return the functions that act and step in the lane; ``cells`` show the phase."""


def starting_of(env: EnvBatch) -> Starting:
    """Return how policy and environments start in a lane of this env batch."""
    ready = capability(env, ActsWhenReady)
    if ready is None:
        return Together(env)
    return WhenReady(ready)


class Together:
    """Implements ``Starting``: the policy acts for all environments, and then they are stepped."""

    keeps_first_call = True

    def __init__(self, env: EnvBatch) -> None:
        self._env = env
        self._bypassing = capability(env, Bypasses)

    def seen(self, obs: Seen) -> Seen:
        return obs

    def start(
        self, policy: Policy, lane: Lane, rng: GroupRng, cells: Array
    ) -> tuple[Act, Step]:
        phase = cells[PHASE]
        cells[PHASE] = Phase.POLICY
        try:
            act = policy.start(lane, rng)
        except Exception as error:
            if is_own(policy, error):
                raise
            raise policy_error(policy, error) from error
        cells[PHASE] = phase
        step = self._env.start(lane)
        if self._bypassing is not None and self._env.spec.action_masks:
            step = self._allowing(self._bypassing, step, lane)
        return act, step

    def _allowing(self, bypassing: Bypasses, step: Step, lane: Lane) -> Step:
        """Let the masks of environments that are left out allow every action: policies act for them,
        too.
        """
        known, allowing = lane.cache.get(self, (None, None))
        if known is step:
            found: Step = allowing
            return found
        masks = [lane.data[key] for key in self._env.spec.action_masks.values()]

        def step_and_allow(t: int) -> Sequence[int] | None:
            finished = step(t)
            left_out = bypassing.bypassed
            if left_out:
                for rows in masks:
                    rows[t + 1, [*left_out]] = 1
            return finished

        lane.cache[self] = step, step_and_allow
        return step_and_allow


class WhenReady:
    """Implements ``Starting``: the policy acts within a step, for the environments that are ready."""

    keeps_first_call = False

    def __init__(self, env: ActsWhenReady) -> None:
        self._env = env
        self._last: Policy | None = None  # the policy of the last rollout

    def seen(self, obs: Seen) -> Seen:
        return {key: rows[self._env.ready_envs] for key, rows in obs.items()}

    def start(
        self, policy: Policy, lane: Lane, rng: GroupRng, cells: Array
    ) -> tuple[Act, Step]:
        written = [column.key for column in policy.columns()]
        prepare = partial(_acting_in_phase, policy, rng, cells)
        acted_last = self._last is policy
        self._last = policy
        step = self._env.start_ready(lane, prepare, written, acted_last=acted_last)
        return no_act, step


def no_act(t: int) -> None:
    """Do nothing: the action is there, or the step acts."""


def _acting_in_phase(policy: Policy, rng: GroupRng, cells: Array, lane: Lane) -> Act:
    """Prepare a policy that acts within steps. In an error of the policy, the phase is POLICY."""
    phase = cells[PHASE]
    cells[PHASE] = Phase.POLICY
    act = policy.start(lane, rng)
    cells[PHASE] = phase

    def act_in_phase(t: int) -> None:
        cells[PHASE] = Phase.POLICY
        act(t)
        cells[PHASE] = phase

    return act_in_phase
