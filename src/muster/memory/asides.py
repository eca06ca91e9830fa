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
        self._places = np.zeros(
            cells, np.int32
        )  # place + 1 in the store of each cell; 0: none
        self._free: list[int] = []
        self._store = {
            key: zeros((FEWEST, *leaf.shape), leaf) for key, leaf in leaves.items()
        }
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
        self._free += (part[part > 0] - 1).tolist()
        part[...] = 0

    def put_into(self, rows: Mapping[Key, Rows], cells: Array) -> None:
        """Replace the rows, ``[n, *shape]``, whose cell has an observation here."""
        places = self._places.take(cells)
        (index,) = places.nonzero()
        if not len(index):
            return
        kept = places[index] - 1
        for key, here in rows.items():
            scatter(gathered(self._store[key], kept), here, index)

    def of_cells(self, cells: Array) -> tuple[Array, dict[Key, Rows]]:
        """Return those of ``cells`` that have an observation here, by their places, and these."""
        places = self._places[cells]
        (index,) = places.nonzero()
        kept = places[index] - 1
        return index, {key: gathered(rows, kept) for key, rows in self._store.items()}

    def _take_places(self, n: int) -> Array:
        """Return ``n`` free places."""
        reused = min(n, len(self._free))
        places = [self._free.pop() for _ in range(reused)]
        places += range(self._used, self._used + n - reused)
        self._used += n - reused
        for key, rows in self._store.items():
            if self._used > len(rows):
                grown = zeros((max(2 * len(rows), self._used), *rows.shape[1:]), rows)
                grown[: len(rows)] = rows
                self._store[key] = grown
        return np.array(places, np.int64)
