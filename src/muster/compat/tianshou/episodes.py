"""Steps that were made, and the episodes that they are part of."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from muster.memory.specs import Array


class Taken(NamedTuple):
    """Steps: ``batch`` has Tianshou's keys, ``[M, ...]``, by row and then by environment; ``t`` and ``env`` are
    ``[M]``.
    """

    t: Array
    env: Array
    rows: int
    batch: Any

    def pieces(self) -> Iterator[tuple[int, int]]:
        if self.rows == 1:
            return iter([(0, len(self.env))])
        ends = np.searchsorted(self.t, np.arange(self.rows + 1)).tolist()
        return itertools.pairwise(ends)


class Ended(NamedTuple):
    """An episode, and the row (of those looked at) in which it ended."""

    t: int
    env: int
    total: Any
    steps: int


class Going(NamedTuple):
    """Rewards (``[N]`` or ``[N, agents]``) and steps (``[N]``) so far of the episodes that go on."""

    totals: Array
    steps: Array

    @classmethod
    def of(cls, totals: list[Any], steps: list[int]) -> Going:
        if any(isinstance(total, np.ndarray) for total in totals):
            totals = list(np.broadcast_arrays(*totals))
        return cls(np.array(totals), np.array(steps))

    def forget(self, which: list[int]) -> None:
        self.totals[which], self.steps[which] = 0, 0

    def after(self, taken: Taken) -> tuple[Going, list[Ended]]:
        """What goes on after these steps, and what ended in them, by time.

        Rewards are added one by one and in their own precision, as Tianshou's buffers do it.
        """
        rew, done, N = taken.batch.rew, taken.batch.done, len(self.steps)
        totals = np.zeros((N, *rew.shape[1:]), rew.dtype if rew.dtype.kind == "f" else float)
        totals += self.totals if self.totals.ndim == rew.ndim else self.totals.reshape(N, 1)
        going, ended = Going(totals, self.steps.copy()), list[Ended]()
        for t, (begin, end) in enumerate(taken.pieces()):
            which = taken.env[begin:end] if end - begin < N else slice(None)
            going.totals[which] += rew[begin:end]
            going.steps[which] += 1
            if done[begin:end].any():
                over = taken.env[begin:end][done[begin:end]].tolist()
                ended += [Ended(t, env, going.totals[env].copy(), int(going.steps[env])) for env in over]
                going.forget(over)
        return going, ended
