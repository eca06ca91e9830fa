"""The ends of episodes within a rollout: what happens to an environment whose episode has ended.

One object is chosen when the request is known, and called for every row with an end:

- ``ResetNow``: the environment is reset, and its next episode begins in the next row.
- ``WaitForBatch`` (``reset_when_done=False``): it waits for the next batch.
- ``ChosenByRule`` (``collect(n_episode=)``): a rule counts episodes. Environments that it does not
  await are left out, and the rollout ends with the last episode that it needs.

An environment that only lost a life goes on without a reset, whatever the object.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from muster.capabilities import Bypasses, capability
from muster.episodes.rules import Rule
from muster.keys import Key
from muster.memory.objects import copied
from muster.memory.slots import Lane
from muster.memory.specs import Array
from muster.protocols import EnvBatch
from muster.rollout.marks import NEVER, cut_after_end


class Bypass:
    """Leaves environments of a group out of steps, if its env batch can do that.

    Attributes:
        is_possible: whether it can.
        is_used: some environments are left out.
    """

    def __init__(self, env: EnvBatch) -> None:
        self._bypassing = capability(env, Bypasses)
        self.is_possible = self._bypassing is not None
        self.is_used = False

    def set(self, which: Collection[int]) -> None:
        """Leave these environments, and no others, out of all following steps."""
        if self._bypassing is not None:
            self.is_used = bool(which)
            self._bypassing.bypass(which)


class Waiting:
    """The environments that make no more steps in a rollout, and wait for a later one.

    If the env batch cannot leave them out, they are stepped, and these steps are discarded.

    Args:
        absent: environments that make no step at all.

    Attributes:
        since: row at which each environment ended.
        absent: see above.
        is_idle: no environment waits.
    """

    def __init__(self, env: EnvBatch, bypass: Bypass, absent: Collection[int]) -> None:
        self._env = env
        self._bypass = bypass
        self.absent = absent
        self.since: dict[int, int] = {}
        self.is_idle = not absent
        # next observations of environments that only lost a life
        self._kept: dict[int, dict[Key, Any]] = {}
        if absent or bypass.is_used:
            bypass.set(absent)

    def add(
        self, lane: Lane, t: int, which: Sequence[int], going_on: Collection[int] = ()
    ) -> bool:
        """Add environments that ended at row ``t``; those in ``going_on`` continue without a reset.

        Returns:
            whether all environments wait.
        """
        self.is_idle = False
        new = [i for i in which if i not in self.since]
        self.since.update(dict.fromkeys(new, t))
        if self._bypass.is_possible:
            specs = self._env.spec.carried_specs
            for i in new:
                if i in going_on:
                    self._kept[i] = {
                        key: copied(lane.arrays[key][t + 1, i]) for key in specs
                    }
            masks = self._env.spec.action_masks.values()
            for key, spec in specs.items():
                if spec.is_tensor:
                    lane.arrays[key][t + 1, new] = 1 if key in masks else 0
            self._bypass.set(self.all)
        return len(self.since) + len(self.absent) == lane.B

    def resume(self, carry: Mapping[Key, Any]) -> list[int]:
        """Write the next observations of environments that continue into the carried rows.

        Return these environments.
        """
        for i, leaves in self._kept.items():
            for key, value in leaves.items():
                carry[key][0, i] = value
        return list(self._kept)

    def take_back(self, row: int) -> None:
        """Remove what was added in ``row`` or later: these rows are not complete."""
        self.since = {i: t for i, t in self.since.items() if t < row}
        self._kept = {i: leaves for i, leaves in self._kept.items() if i in self.since}
        self._bypass.set(self.all)

    @property
    def all(self) -> Collection[int]:
        """The environments that need no steps."""
        return {*self.since, *self.absent}

    def without_transition(self, n: int) -> Array | None:
        """Return a mask of the cells without a transition, ``[n, B]``; None: all have one."""
        if not self.since and not self.absent:
            return None
        mask = np.zeros((n, self._env.spec.num_envs), bool)
        for i, t in self.since.items():
            mask[t + 1 :, i] = True
        mask[:, list(self.absent)] = True
        return mask

    def executed(self, begin: int, end: int) -> int:
        """Return the number of environment steps in rows ``begin`` to ``end`` (exclusive)."""
        steps = (end - begin) * (self._env.spec.num_envs - len(self.absent))
        if self.since and self._bypass.is_possible:
            for t in self.since.values():
                steps -= max(0, end - max(begin, t + 1))
        return steps


class StepLimit:
    """The rows at which environments reach ``max_frames_per_traj``.

    Args:
        limit: number of steps of an episode.
        steps: steps of the current episodes before the rollout, ``[B]``.
        absent: environments that make no steps.
    """

    def __init__(self, limit: int, steps: Array, absent: Collection[int]) -> None:
        self._limit = limit
        self._rows = limit - 1 - steps
        self._rows[list(absent)] = NEVER

    def reached(self, t: int) -> list[int]:
        """Return the environments whose episode has the limit after row ``t``."""
        which: list[int] = np.flatnonzero(self._rows <= t).tolist()
        return which

    def let_go(self, which: Sequence[int]) -> None:
        """Forget environments that make no more steps."""
        self._rows[which] = NEVER

    def restart(self, which: Sequence[int], row: int) -> None:
        """Begin new episodes in ``row``."""
        self._rows[which] = row - 1 + self._limit

    @property
    def next(self) -> int:
        """The next row at which an environment reaches the limit."""
        return int(self._rows.min())


class Decision(NamedTuple):
    """What follows the ends of episodes at a row.

    Attributes:
        reset: environments that are reset into the next row.
        restart: environments that continue with a new episode of the agent, without a reset.
        is_over: the rollout is over.
    """

    reset: Sequence[int]
    restart: Sequence[int]
    is_over: bool = False


class Ends(Protocol):
    """Decides what happens at the ends of episodes of one rollout.

    Attributes:
        leaves_out: environments make no steps after an end, or after the last one that counts.
        waits: a finished environment waits for the next batch, also if the user resets it.
        repeats_flags: the flags of an ended episode are repeated up to the end of the lane.
    """

    leaves_out: bool
    waits: bool
    repeats_flags: bool

    def decide(
        self, lane: Lane, t: int, over: Sequence[int], going_on: Sequence[int]
    ) -> Decision:
        """Decide on the environments whose episode is ``over`` after row ``t``, and on those that
        only lost a life (``going_on``).
        """

    def without_transition(
        self, lane: Lane, done: Array, waiting: Waiting
    ) -> Array | None:
        """Return a mask of the stepped cells without a transition, ``[n, B]``; None: all have one.

        Args:
            done: done flags of the stepped rows; those after an end may be cleared.
            waiting: the environments that wait.
        """


class ResetNow:
    """Environments are reset when they end."""

    leaves_out = False
    waits = False
    repeats_flags = False

    def decide(
        self, lane: Lane, t: int, over: Sequence[int], going_on: Sequence[int]
    ) -> Decision:
        return Decision(over, going_on)

    def without_transition(
        self, lane: Lane, done: Array, waiting: Waiting
    ) -> Array | None:
        return waiting.without_transition(len(done))


RESET_NOW = ResetNow()


class WaitForBatch:
    """Environments that end wait for the next batch; the rollout ends when all of them wait."""

    repeats_flags = True

    def __init__(
        self, waiting: Waiting, bypass: Bypass, limit: StepLimit | None, reward: Key
    ) -> None:
        self._waiting = waiting
        self._limit = limit
        self._reward = reward
        self.leaves_out = bypass.is_possible
        self.waits = bypass.is_possible

    def decide(
        self, lane: Lane, t: int, over: Sequence[int], going_on: Sequence[int]
    ) -> Decision:
        ended = sorted({*over, *going_on})
        all_wait = self._waiting.add(lane, t, ended, going_on)
        if not all_wait and not self.leaves_out:
            return Decision(
                over, going_on
            )  # they are stepped on, and these steps are discarded
        if self._limit is not None:
            self._limit.let_go(ended)
        return Decision((), (), all_wait)

    def without_transition(
        self, lane: Lane, done: Array, waiting: Waiting
    ) -> Array | None:
        return cut_after_end(lane, done, self._reward)


class ChosenByRule:
    """A rule counts the episodes that end; what it does not decide is decided by ``others``."""

    def __init__(
        self,
        rule: Rule,
        others: Ends,
        waiting: Waiting,
        bypass: Bypass,
        limit: StepLimit | None,
    ) -> None:
        self._rule = rule
        self._others = others
        self._waiting = waiting
        self._limit = limit
        self._bypass = bypass
        self.leaves_out = bypass.is_possible
        self.waits = others.waits
        self.repeats_flags = others.repeats_flags

    def decide(
        self, lane: Lane, t: int, over: Sequence[int], going_on: Sequence[int]
    ) -> Decision:
        self._rule.ended(over)
        complete = self._rule.complete
        if self._others.repeats_flags:
            decision = self._others.decide(lane, t, over, going_on)
            return Decision((), (), True) if complete else decision
        let_go = unneeded_by(self._rule, over, self._bypass)
        if not let_go:
            return Decision(over, going_on, complete)
        all_wait = self._waiting.add(lane, t, let_go)
        if self._limit is not None:
            self._limit.let_go(let_go)
        rest = [i for i in over if i not in let_go]
        return Decision(rest, going_on, complete or all_wait)

    def without_transition(
        self, lane: Lane, done: Array, waiting: Waiting
    ) -> Array | None:
        return self._others.without_transition(lane, done, waiting)


def unneeded_by(rule: Rule, which: Sequence[int], bypass: Bypass) -> list[int]:
    """Return those of ``which`` that need no more steps: all, after the last episode that counts;
    before it, only if they can be left out.
    """
    if rule.complete:
        return list(which)
    if not bypass.is_possible:
        return []
    return [i for i in which if not rule.awaits(i)]
