"""Priorities of cells, and drawing in proportion to them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from muster.memory.specs import Array

WIDTH = 16  # children of a node
# the power of a priority of 0, which can still be raised later
TINY = float(np.finfo(np.float64).tiny)


class Priorities:
    """A tree of sums: each level has the sums of ``WIDTH`` entries of the level below it.

    The lowest level has ``priority ** alpha`` of each place, and 0 where nothing can be drawn.

    Args:
        places: number of places.
        alpha: see ``ReplayMemory``.

    Attributes:
        largest: largest priority so far.
    """

    def __init__(self, places: int, alpha: float) -> None:
        self._alpha = alpha
        self.largest = 1.0
        self._levels: list[Array] = []
        size = places
        while True:
            padded = -(-size // WIDTH) * WIDTH
            self._levels.append(np.zeros(padded))
            if padded == WIDTH:
                break
            size = padded // WIDTH

    @property
    def total(self) -> float:
        """Sum over all places."""
        return float(self._levels[-1].sum())

    def of(self, places: Array) -> Array:
        """Return ``priority ** alpha`` of places."""
        found: Array = self._levels[0][places]
        return found

    def add(self, places: Array, priority: float) -> None:
        """Let places be drawn, with this priority."""
        self._set(places, priority**self._alpha)

    def forget(self, places: Array) -> None:
        """Let places never be drawn."""
        self._set(places, 0.0)

    def update(self, places: Array, priorities: Array) -> None:
        """Set the priorities of places that can be drawn."""
        known = self._levels[0][places] > 0
        if not known.any():
            return
        given = priorities[known]
        self.largest = max(self.largest, float(given.max()))
        powers = np.maximum(given**self._alpha, TINY)
        self._set(places[known], powers)

    def draw(self, n: int, rng: np.random.Generator) -> Array:
        """Draw places in proportion to ``priority ** alpha``, with replacement."""
        left = rng.random(n) * self.total
        node = np.zeros(n, np.int64)
        for level in reversed(self._levels):
            children = level.reshape(-1, WIDTH)[node]
            sums = children.cumsum(1)
            most = np.nextafter(sums[:, -1], 0.0)
            left = np.minimum(left, most)  # rounding
            is_before = sums <= left[:, None]
            child = is_before.sum(1)
            previous = np.maximum(child - 1, 0)
            before = sums[np.arange(n), previous]
            left = left - np.where(child > 0, before, 0.0)
            node = node * WIDTH + child
        return node

    def restore(
        self,
        largest: float,
        places: Array,
        powers: Array,
        alpha: float,
    ) -> None:
        """Set ``priority ** alpha`` of places, and the largest priority.

        Args:
            largest: the priority.
            places: the places.
            powers: of each of them.
            alpha: of ``powers``.

        Raises:
            ValueError: these are no priorities, or not to be told for the ``alpha`` of this tree.
        """
        if powers.shape != places.shape:
            raise ValueError(
                f"it has {powers.size} priorities of {places.size} transitions"
            )
        if alpha != self._alpha:
            powers = _raised(powers, alpha, self._alpha)
        every = np.append(powers, largest)
        if not np.isfinite(every.sum()) or every.min() < 0:
            raise ValueError("it has priorities that are negative or not finite")
        self.largest = largest
        self._set(places, powers)

    def _set(self, places: Array, values: Any) -> None:
        if not len(places):
            return
        self._levels[0][places] = values
        nodes = places
        for below, level in pairwise(self._levels):
            nodes = np.unique(nodes // WIDTH)
            children = below.reshape(-1, WIDTH)[nodes]
            level[nodes] = children.sum(1)


def _raised(powers: Array, alpha: float, wanted: float) -> Array:
    """Return ``priority ** wanted`` for ``priority ** alpha``, and 0 for 0."""
    if alpha == 0:
        raise ValueError(
            f"it has alpha=0, which does not tell the priorities for alpha={wanted}"
        )
    with np.errstate(over="ignore", invalid="ignore"):
        raised = np.maximum(powers ** (wanted / alpha), TINY)
    return np.where(powers == 0, 0.0, raised)
