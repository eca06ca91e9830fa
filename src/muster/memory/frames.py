"""Stacks of frames that are stored once: each row has its newest frame, the others are in the rows
before.

A stack follows the one before it if its frames but the newest are the frames of that one but the
oldest. Where it does not (an episode begins), it is kept aside whole. The *depth* of a cell is the
number of rows since then, at most ``size - 1``: with this depth all its frames are in rows.

Rows are compared when they are written, so that what is read is always what was written, whatever the
environments do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from muster.keys import Key
from muster.memory.asides import Asides
from muster.memory.native import Read, Rows, as_index, gathered, reader, scatter, zeros
from muster.memory.sample_arrays import SampleArrays
from muster.memory.specs import Array


class Frames:
    """The stacks of a ring.

    Args:
        size: number of frames of a stack; the first dimension of an observation.
        frames: newest frames by key and place, ``[places + 1, B, *frame shape]``.
        arrays: for samples.
    """

    def __init__(
        self, size: int, frames: Mapping[Key, Rows], arrays: SampleArrays
    ) -> None:
        self.size = size
        self._frames = dict(frames)
        first = next(iter(frames.values()))
        self._places = len(first) - 1
        self._B = first.shape[1]
        shape = (self._places + 1, self._B)
        self.depth = np.full(shape, size - 1, np.int16)
        whole = {}
        self._reads: dict[Key, Read] = {}
        for key, rows in frames.items():
            frame_shape = rows.shape[2:]
            whole[key] = zeros((size, *frame_shape), rows)
            self._reads[key] = reader(rows.reshape(-1, *frame_shape), arrays)
        self.wholes = Asides(self.depth.size, whole)

    def write(
        self,
        first: int,
        rows: Mapping[Key, Any],
        last: Mapping[Key, Any],
        fresh: Array,
    ) -> None:
        """Note which stacks follow those before them.

        Args:
            first: place of the first row. What follows the row before it was given as ``last`` then.
            rows: stacks ``[n, B, size, ...]``; other columns are ignored.
            last: what follows the last of them, ``[B, size, ...]``.
            fresh: the first row does not follow the one before it, ``[B]``.
        """
        mine = {key: rows[key] for key in self._frames}
        after = {key: last[key] for key in self._frames}
        n = len(next(iter(mine.values())))
        follows = np.ones((n, self._B), bool)
        for key, stacks in mine.items():
            for t in range(n):
                later = after[key]
                if t + 1 < n:
                    later = stacks[t + 1]
                follows[t] &= _follows(later, stacks[t])
        if first == 0:  # it was at the end, as what follows the last place
            self._copy(self._places, 0)
        begins = np.flatnonzero(fresh)
        if len(begins):
            whole = {key: stacks[0, begins] for key, stacks in mine.items()}
            self._keep(first, begins, whole)
        for t in range(n):
            place = first + t + 1
            self._drop(place)
            deeper = self.depth[place - 1] + 1
            self.depth[place] = np.minimum(deeper, self.size - 1)
            others = np.flatnonzero(~follows[t])
            if not len(others):
                continue
            whole = {}
            for key, stacks in mine.items():
                if t + 1 < n:
                    whole[key] = stacks[t + 1, others]
                else:
                    whole[key] = after[key][others]
            self._keep(place, others, whole)

    def of(self, key: Key, cells: Array) -> Rows:
        """Return the stacks at places of cells, ``[n, size, ...]``."""
        deepest = self.size - 1
        depth = self.depth.reshape(-1)[cells]
        depth = depth.astype(np.int64)
        rows_back = np.arange(self.size)[::-1]
        back = np.minimum(rows_back, depth[:, None])
        index = self._before(cells[:, None], back)
        frames = self._frames[key]
        place_of_each = as_index(index.reshape(-1), frames)
        stacks = self._reads[key](place_of_each, 0)
        stacks = stacks.reshape(len(cells), self.size, *frames.shape[2:])
        short = np.flatnonzero(depth < deepest)
        if not len(short):
            return stacks
        depth = depth[short]
        begins = self._before(cells[short], depth)
        wholes = self.wholes.nearest(key, begins)
        for d in range(deepest):
            mine = np.flatnonzero(depth == d)
            if len(mine):
                whole = gathered(wholes, mine)
                older = whole[:, d:deepest]
                scatter(older, stacks[:, : deepest - d], short[mine])
        return stacks

    def restore(
        self,
        place: int,
        depth: Array,
        stacks: Mapping[Key, Rows],
    ) -> None:
        """Note what follows the newest row, at ``place``."""
        self.depth[place] = depth
        envs = np.flatnonzero(depth == 0)
        whole = {key: rows[envs] for key, rows in stacks.items()}
        self._keep(place, envs, whole)

    def copy_to_end(self) -> None:
        """Note at the extra place what is noted at the first one, the row of which it is, too."""
        self._copy(0, self._places)

    def _before(self, cells: Array, rows: Array) -> Array:
        """Return the places of cells some rows before those at ``cells``."""
        found: Array = cells - rows * self._B
        cells_in_all = self._places * self._B
        return np.where(found < 0, found + cells_in_all, found)

    def _drop(self, place: int) -> None:
        first = place * self._B
        self.wholes.drop(first, first + self._B)

    def _keep(
        self,
        place: int,
        envs: Array,
        stacks: Mapping[Key, Any],
    ) -> None:
        """Keep stacks whole."""
        cells = place * self._B + envs
        earlier = cells[self.wholes.has(cells)]
        for cell in earlier.tolist():
            self.wholes.drop(cell, cell + 1)
        self.wholes.keep(cells, stacks)
        self.depth[place, envs] = 0

    def _copy(self, place: int, to: int) -> None:
        """Copy what is noted at a place."""
        self._drop(to)
        self.depth[to] = self.depth[place]
        cells = place * self._B + np.arange(self._B)
        index, stacks = self.wholes.of_cells(cells)
        self.wholes.keep(to * self._B + index, stacks)


def _follows(later: Any, earlier: Any) -> Array:
    """Return which stacks, ``[n, size, ...]``, follow others."""
    equal = later[:, :-1] == earlier[:, 1:]
    found: Any = equal.reshape(len(equal), -1).all(1)
    if not isinstance(found, np.ndarray):
        found = found.cpu().numpy()
    follows: Array = found
    return follows
