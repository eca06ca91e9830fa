"""Observations that are kept aside: those after the last step of an episode, which no row has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from muster.keys import Key
from muster.memory.native import Rows, gathered, scatter, zeros
from muster.memory.specs import Array

FEWEST = 16


class Asides:
    """The observations after some of the cells of a ring, whose next row has another episode.

    Args:
        cells: number of cells of the ring.
        leaves: one row of each observation, ``[*shape]``: its shape and kind.
    """

    def __init__(self, cells: int, leaves: Mapping[Key, Rows]) -> None:
        # place + 1 in the store of each cell; 0: none
        self._places = np.zeros(cells, np.int32)
        self._free: list[int] = []
        self._store: dict[Key, Rows] = {}
        for key, leaf in leaves.items():
            self._store[key] = zeros((FEWEST, *leaf.shape), leaf)
        self._used = 0  # places that were ever used

    def __len__(self) -> int:
        return self._used - len(self._free)

    @property
    def nbytes(self) -> int:
        """Size of the store."""
        return sum(int(rows.nbytes) for rows in self._store.values())

    def keep(self, cells: Array, leaves: Mapping[Key, Any]) -> None:
        """Keep an observation for each of ``cells``, ``[n, *shape]`` per leaf."""
        places = self._take_places(len(cells))
        for key, rows in leaves.items():
            scatter(rows, self._store[key], places)
        self._places[cells] = places + 1  # last: others may read

    def has(self, cells: Array) -> Array:
        """Return which of ``cells`` have an observation here."""
        found: Array = self._places[cells] > 0
        return found

    def drop(self, first: int, end: int) -> None:
        """Forget those of the cells from ``first`` to ``end``."""
        if not len(self):
            return
        part = self._places[first:end]
        if not part.any():
            return
        places = part[part > 0] - 1
        self._free += places.tolist()
        part[...] = 0

    def put_into(self, rows: Mapping[Key, Rows], cells: Array) -> None:
        """Replace the rows, ``[n, *shape]``, whose cell has an observation here."""
        places = self._places.take(cells)
        (index,) = places.nonzero()
        if not len(index):
            return
        kept = places[index] - 1
        for key, here in rows.items():
            there = gathered(self._store[key], kept)
            scatter(there, here, index)

    def of_cells(self, cells: Array) -> tuple[Array, dict[Key, Rows]]:
        """Return those of ``cells`` that have an observation here, by their places, and these."""
        places = self._places[cells]
        (index,) = places.nonzero()
        kept = places[index] - 1
        leaves = {}
        for key, rows in self._store.items():
            leaves[key] = gathered(rows, kept)
        return index, leaves

    def nearest(self, key: Key, cells: Array) -> Rows:
        """Return the observations that are kept for ``cells``, ``[n, *shape]``.

        For a cell that has none any more, since its row is being overwritten, it is another one: the
        caller reads without the lock, and discards what was overwritten.
        """
        places = self._places[cells]
        kept = np.maximum(places, 1) - 1
        return gathered(self._store[key], kept)

    def _take_places(self, n: int) -> Array:
        """Return ``n`` free places."""
        reused = min(n, len(self._free))
        places = [self._free.pop() for _ in range(reused)]
        used = self._used + n - reused
        places += range(self._used, used)
        self._used = used
        for key, rows in self._store.items():
            if used > len(rows):
                size = max(2 * len(rows), used)
                grown = zeros((size, *rows.shape[1:]), rows)
                grown[: len(rows)] = rows
                self._store[key] = grown
        return np.array(places, np.int64)
