"""Values of next observations, evaluated by the policy that acted, with RNG and recurrent state
restored.

If a rollout ends within an episode, or an episode was truncated, learners need the value of the
true next observation (not of the one after the reset): V(s_T) in n-step returns and GAE (Schulman
et al. 2016).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from muster.errors import BadOption, PolicyError, described
from muster.keys import AGENT, IS_INIT, TERMINATED, TRAJ_IDS, TRUNCATED, Key, next_of
from muster.memory.slots import Lane, Layout, Slot
from muster.memory.specs import Array, Column
from muster.protocols import Policy
from muster.rng import GroupRng
from muster.rollout.acting import is_own
from muster.rollout.context import RolloutContext
from muster.rollout.group import Group
from muster.rollout.loop import RolloutRecorder, rollout
from muster.rollout.progress import Phase
from muster.rollout.request import Bootstrap, RolloutOutcome, RolloutRequest
from muster.rollout.running import places_of
from muster.rollout.tally import Tally

# keys of a lane's cache
SPARE = "bootstrap"
KEPT = "bootstrap: kept states"
COMPLETE = "bootstrap: complete"
# keys of values in the outputs of policies
VALUES: tuple[Key, ...] = (("state_value",), ("value",))


@dataclass
class BootstrapRows:
    """Rows that need values: ``t`` and ``env`` of the steps before them, ``[k]``, and their
    columns.

    Attributes:
        rows: observations and recurrent states by key, ``[k, *shape]``.
        last: index of each environment's last row, ``[B]``; -1: no row.
        values: values of the rows, ``[k]``; None: not evaluated yet.
    """

    t: Array
    env: Array
    last: Array
    rows: dict[Key, Any]
    columns: tuple[Column, ...]
    values: Array | None = None

    def fill(self, values: Array) -> None:
        """Set the values of all rows."""
        self.values = values


def check_bootstrap(
    columns: Sequence[Column], observed: Collection[Key], *, reset_when_done: bool
) -> None:
    """Raise ``BadOption`` if values cannot be evaluated with these columns."""
    if not any(column.key in VALUES for column in columns):
        names = " or ".join(repr(key[0]) for key in VALUES)
        raise BadOption(
            f"bootstrap: the policy gives no {names}. Let it return one beside its action, as in"
            " (action, {'state_value': value}), or leave bootstrap out"
        )
    if AGENT in observed:
        raise BadOption(
            "bootstrap evaluates the last row of each environment, and agents that take turns have"
            " one each: compute the values of ('next', 'observation') in the learner"
        )
    is_recurrent = any(
        column.carry and column.key not in observed for column in columns
    )
    if is_recurrent and not reset_when_done:
        raise BadOption(
            "bootstrap: reset_when_done=False forgets recurrent states at the ends of episodes"
        )


class NextRows:
    """The next observations and states of a rollout, also of its rows before an error, for their
    values.

    It is a ``ResetListener`` of the rollout: recurrent states are kept before a reset overwrites
    them.

    Args:
        wanted: "last": those after the last row of each environment; "truncations": also those
            after truncations.
    """

    def __init__(self, group: Group, lane: Lane, wanted: Bootstrap) -> None:
        self._group = group
        self._lane = lane
        self._wanted = wanted
        of_env = group.env.spec.carried_specs
        carried = [column.key for column in lane.layout.columns if column.carry]
        self._states = [key for key in carried if key not in of_env]
        self._kept: dict[tuple[int, int], dict[Key, Any]]
        self._kept = lane.cache.setdefault(KEPT, {})
        # the rollout writes these rows again
        for cell in list(self._kept):
            row, _ = cell
            if row >= lane.done_steps:
                del self._kept[cell]

    def before_reset(
        self, row: int, which: Sequence[int], seeds: Sequence[int] | None
    ) -> None:
        """Keep the recurrent states of environments ``which`` in ``row``."""
        if row == 0:
            return
        for i in which:
            # else it is reset again after an error: ``row`` has the new states
            if (row - 1, i) not in self._kept:
                states = {
                    key: _copy(self._lane.data[key][row, i]) for key in self._states
                }
                self._kept[row - 1, i] = states

    def lost_track(self, which: Sequence[int]) -> None:
        """Nothing: that happens outside of rollouts."""

    def gather(self, limit: int | None, places: tuple[Array, int]) -> BootstrapRows:
        """Return the ``wanted`` rows of a complete rollout, without their values.

        Args:
            limit, places: see ``RolloutRequest.limit`` and ``places_of``.
        """
        lane = self._lane
        n = lane.done_steps
        terminated = lane.arrays[next_of(TERMINATED)][:n]
        truncated = lane.arrays[next_of(TRUNCATED)][:n]
        ids = lane.arrays[TRAJ_IDS][:n]
        shown = ids >= 0
        if limit is not None:
            indices, sharing = places
            places_in_batch = np.arange(n)[:, None] * sharing + indices
            shown &= places_in_batch < limit
        last = np.full(lane.B, -1)
        if n:
            newest = n - 1 - shown[::-1].argmax(axis=0)
            last = np.where(shown.any(axis=0), newest, -1)
        cells = np.zeros(ids.shape, bool)
        envs = np.flatnonzero(last >= 0)
        cells[last[envs], envs] = True
        if self._wanted == "truncations":
            cells |= truncated
        t, env = np.nonzero(cells & shown & ~terminated)
        observed = self._group.env.spec.observation_specs
        rows: dict[Key, Any] = {
            key: _copy(lane.data[next_of(key)][t, env]) for key in observed
        }
        for key in self._states:
            rows[key] = _copy(lane.data[key][t + 1, env])
            for place, cell in enumerate(zip(t.tolist(), env.tolist(), strict=True)):
                if key == IS_INIT:
                    rows[key][place] = False
                elif cell in self._kept:
                    rows[key][place] = self._kept[cell][key]
        return BootstrapRows(t, env, last, rows, lane.layout.columns)


def rollout_and_values(
    group: Group,
    policy: Policy,
    request: RolloutRequest,
    lane: Lane,
    wanted: Bootstrap,
    tally: Tally,
    valued_by: Policy | None,
    recorder: RolloutRecorder | None = None,
) -> tuple[RolloutOutcome, BootstrapRows]:
    """Run ``rollout`` unless it is complete, and return its outcome and the ``wanted`` rows.

    Args:
        valued_by: evaluates the rows; None: the caller has to fill in their values.
        recorder: see ``rollout``.
    """
    if lane.done_steps == 0:
        lane.cache.pop(COMPLETE, None)
    rows = NextRows(group, lane, wanted)
    outcome: RolloutOutcome | None = lane.cache.get(COMPLETE)
    if outcome is None:
        outcome = rollout(
            group, policy, request, lane, tally, listener=rows, recorder=recorder
        )
        # the group's clock has advanced, and must not do so again if the values fail
        lane.cache[COMPLETE] = outcome
    phase = group.progress.begin(Phase.POLICY)
    made = rows.gather(request.limit, places_of(group, request))
    if valued_by is not None:
        _evaluate(group, lane, made, valued_by)
    group.progress.begin(phase)
    return outcome, made


def _evaluate(group: Group, lane: Lane, made: BootstrapRows, policy: Policy) -> None:
    if not len(made.t):
        made.fill(np.empty(0, np.float32))
        return
    if SPARE not in lane.cache:
        shape = group.env.spec.acting_shape
        B = math.prod(shape)
        lane.cache[SPARE] = spare_lane(made.columns, B, shape, group.env.spec.device)
    around = group.contexts.usual
    if not policy.draws_globally:
        around = RolloutContext(group.rng, group.options, own_rng=False, inference=True)
    fill_values(made, policy, group.rng, lane.cache[SPARE], around)


def spare_lane(
    columns: tuple[Column, ...],
    B: int,
    batch_shape: tuple[int, ...],
    device: Any = None,
) -> Lane:
    """Allocate a lane with one row of these columns."""
    layout = Layout(1, B, columns, batch_shape=batch_shape)
    slot = Slot(layout, "heap" if device is None else device)
    return slot.lanes[0]


def fill_values(
    made: BootstrapRows,
    policy: Policy,
    rng: GroupRng,
    lane: Lane,
    around: AbstractContextManager[None],
) -> None:
    """Evaluate the policy with one row of ``lane`` at a time; restores the random streams.

    Args:
        around: context in which the policy runs.
    """
    key = next(column.key for column in made.columns if column.key in VALUES)
    B = lane.B
    values = np.zeros(len(made.t), np.float32)
    with rng.unmoved(), around:
        for begin in range(0, len(made.t), B):
            k = min(B, len(made.t) - begin)
            for name, rows in made.rows.items():
                lane.data[name][0, :k] = rows[begin : begin + k]
                if k < B:
                    lane.data[name][0, k:] = rows[begin]
            lane.begin_at(0)
            _ask(policy, lane, rng)
            found = lane.tensors[key][0].reshape(B)
            values[begin : begin + k] = found[:k].cpu().numpy()
    made.fill(values)  # all values or none


def _ask(policy: Policy, lane: Lane, rng: GroupRng) -> None:
    try:
        policy.start(lane, rng)(0)
    except Exception as error:
        if is_own(policy, error):
            raise
        raise PolicyError(
            f"policy {policy.name} raised"
            f" {described(error, ' for the values of next observations (bootstrap)')}. No"
            " environment was stepped since; the next call tries again."
        ) from error


def _copy(rows: Any) -> Any:
    return rows.clone() if hasattr(rows, "clone") else np.array(rows)
