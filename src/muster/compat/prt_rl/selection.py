"""Which trajectories ``collect_trajectory`` returns, and which resets can wait; both as rules of the loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from muster.episodes.rules import Fair, PerEnv, Rule
from muster.memory.slots import Lane


class Segment(NamedTuple):
    """A whole trajectory: rows ``begin`` to ``end`` of one environment, counted from the first row of the call."""

    env: int
    begin: int
    end: int


class Selection:
    """Chooses whole trajectories; all environments go on until the last one is there. Implements ``Rule``.

    Either ``trajectories``: as many from each environment, the rest from the first to end one more (one from each of
    the first environments if there are more of these); or, in the order of ends, until they have ``min_steps``.
    """

    def __init__(self, num_envs: int, trajectories: int | None, min_steps: int = 0) -> None:
        self._rule: Rule | None = None
        if trajectories is not None:
            self._rule = (PerEnv if trajectories < num_envs else Fair)(trajectories, num_envs)
        self.biased = self._rule is None or self._rule.biased
        self._missing = min_steps
        self._begun = [0] * num_envs
        self.lane: Lane
        self.before = 0
        self.segments: list[Segment] = []

    def ended(self, which: Sequence[int]) -> list[int]:
        end = self.before + self.lane.done_steps
        for i in (counted := self._first_of(which, end) if self._rule is None else self._rule.ended(which)):
            self.segments.append(Segment(i, self._begun[i], end))
        for i in which:
            self._begun[i] = end
        return counted

    def awaits(self, env_id: int) -> bool:
        return not self.complete

    @property
    def complete(self) -> bool:
        return self._missing <= 0 if self._rule is None else self._rule.complete

    def _first_of(self, which: Sequence[int], end: int) -> list[int]:
        counted = []
        for i in which:
            if self._missing > 0:
                counted.append(i)
                self._missing -= end - self._begun[i]
        return counted


class LastRow:
    """Lets resets after the last row of a lane wait for the next call, as prt_rl does. Implements ``Rule``."""

    biased = False

    def __init__(self, lane: Lane) -> None:
        self._lane = lane

    def ended(self, which: Sequence[int]) -> list[int]:
        return list(which)

    def awaits(self, env_id: int) -> bool:
        return True

    @property
    def complete(self) -> bool:
        return self._lane.done_steps == self._lane.T
