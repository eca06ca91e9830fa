"""What a ring has at its places: rows of all columns, and what is known of each cell."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from muster.keys import Key
from muster.memory.asides import Asides
from muster.memory.frames import Frames
from muster.memory.native import Read, Rows, reader
from muster.memory.sample_arrays import SampleArrays
from muster.memory.slots import as_tensor, torch_dtype
from muster.memory.specs import Array, Column


def is_stack(shape: Sequence[int], stack: int) -> bool:
    """Return whether an observation of this shape is a stack of so many frames."""
    if stack <= 1 or len(shape) <= 1:
        return False
    return shape[0] == stack


class StoredRows:
    """The rows at the places of a ring. There is one place more than ``places``, for the observation
    after the last one.

    A row of one environment is a *cell*, at the place ``place of the row * B + environment``.

    Args:
        columns, num_envs, device: see ``Ring``.
        places: number of rows.
        stack: number of frames of stacked observations; 1: there are none.
        arrays: for samples.

    Attributes:
        observed: keys of the observations.
        data: rows of each column by place, ``[places + 1, B, *shape]``; of stacks, the newest frames.
            Arrays, or tensors on a device.
        reads: the functions that gather the rows of each column by the places of their cells,
            ``[n, *shape]``, flags and rewards ``[n, 1]``.
        to_tensor: makes a tensor of what they return, over the same memory.
        stacked: keys of observations that are stacks.
        frames: the stacks; None: there are none.
        asides: observations after the last steps of episodes.
        episodes: number of the episode of each cell in its environment, ``[places, B]``.
        begins: whether the environment's episode begins with the cell, ``[places, B]``.
        breaks: cells that continue an episode whose step before them is not in the row before them;
            None: there never was one.
        masked: cells that are no transition; None: there never was one.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        num_envs: int,
        places: int,
        device: torch.device | None,
        stack: int,
        arrays: SampleArrays,
    ) -> None:
        self.columns = tuple(columns)
        self.B = num_envs
        self.places = places
        self.device = device
        self.to_tensor: Callable[[Rows], torch.Tensor] = as_tensor
        if device is None:
            self.to_tensor = torch.from_numpy
        observed_columns = [c for c in columns if c.role == "observation"]
        self.observed = [column.key for column in observed_columns]
        self.stacked: list[Key] = []
        for column in observed_columns:
            if is_stack(column.shape, stack):
                self.stacked.append(column.key)
        self.data: dict[Key, Rows] = {}
        self.reads: dict[Key, Read] = {}
        for column in columns:
            shape = column.shape
            if column.key in self.stacked:
                shape = shape[1:]
            rows = self._zeros((places + 1, num_envs, *shape), column.dtype)
            self.data[column.key] = rows
            ones = [1] * column.trailing
            cells = rows.reshape(((places + 1) * num_envs, *shape, *ones))
            self.reads[column.key] = reader(cells, arrays)
        self.frames: Frames | None = None
        if self.stacked:
            newest = {key: self.data[key] for key in self.stacked}
            self.frames = Frames(stack, newest, arrays)
            for key in self.stacked:
                self.reads[key] = self._reader_of_stacks(self.frames, key)
        leaves = {}
        for column in observed_columns:
            leaves[column.key] = self._zeros(column.shape, column.dtype)
        self.asides = Asides(places * num_envs, leaves)
        self.episodes = np.zeros((places, num_envs), np.int64)
        self.begins = np.zeros((places, num_envs), bool)
        self.breaks: Array | None = None
        self.masked: Array | None = None

    @property
    def tensors(self) -> dict[Key, torch.Tensor]:
        """The rows of each column as tensors, over the same memory; see ``data``."""
        return {key: as_tensor(rows) for key, rows in self.data.items()}

    @property
    def row_bytes(self) -> int:
        """Size of a row."""
        of_columns = sum(int(rows[0].nbytes) for rows in self.data.values())
        known_of_cells = 10 * self.B
        return of_columns + known_of_cells

    def nbytes(self, rows: int) -> int:
        """Return the size of so many rows, and of what is kept aside."""
        used = min(rows, self.places + 1)
        size = self.asides.nbytes
        for column in self.data.values():
            size += int(column[:used].nbytes)
        if self.frames is not None:
            size += self.frames.wholes.nbytes
        return size

    # --- writing ----------------------------------------------------------------------------------

    def put(
        self,
        first: int,
        rows: Mapping[Key, Any],
        last: Mapping[Key, Any],
        fresh: Array,
    ) -> int:
        """Write rows from place ``first`` on, and return their number.

        Args:
            rows, last: see ``Ring.write``.
            fresh: in which environments the first row does not follow the one before it, ``[B]``.
        """
        n = 0
        if self.frames is not None:
            self.frames.write(first, rows, last, fresh)
        for key, given in rows.items():
            n = len(given)
            newest = given
            if key in self.stacked:
                newest = given[:, :, -1]
            self.data[key][first : first + n] = newest
        for key, given in last.items():
            newest = given
            if key in self.stacked:
                newest = given[:, -1]
            self.data[key][first + n] = newest
        return n

    def make_maskable(self) -> Array:
        """Return ``masked``, from now on an array."""
        if self.masked is None:
            self.masked = np.zeros((self.places, self.B), bool)
        return self.masked

    def make_breakable(self) -> Array:
        """Return ``breaks``, from now on an array."""
        if self.breaks is None:
            self.breaks = np.zeros((self.places, self.B), bool)
        return self.breaks

    # --- reading ----------------------------------------------------------------------------------

    def is_transition(self, places: Array) -> Array:
        """Return which of the readable cells at ``places`` are transitions."""
        if self.masked is None:
            return np.ones(places.shape, bool)
        found: Array = ~self.masked.reshape(-1)[places]
        return found

    def is_break(self, places: Array) -> Array:
        """Return which of the readable cells at ``places`` are ``breaks``."""
        if self.breaks is None:
            return np.zeros(places.shape, bool)
        found: Array = self.breaks.reshape(-1)[places]
        return found

    def on_device(self, values: Array) -> Any:
        """Return an array as an index for ``reads``: a tensor on the device of the rows, or as it
        is.
        """
        if self.device is None:
            return values
        return torch.from_numpy(values).to(self.device)

    def of(self, key: Key, places: Array) -> Rows:
        """Return the rows of a column at places of cells, ``[n, *shape]``: copies."""
        return self.reads[key](self.on_device(places), 0)

    def observations(self, places: Array) -> dict[Key, Rows]:
        """Return the observations at places of cells."""
        index = self.on_device(places)
        found = {}
        for key in self.observed:
            found[key] = self.reads[key](index, 0)
        return found

    def next_observations(self, places: Array) -> dict[Key, Rows]:
        """Return the observations after the cells at ``places``."""
        # those kept aside last: they are there before another row takes the place of theirs
        found = self.observations(places + self.B)
        self.asides.put_into(found, places)
        return found

    def parts(self, first: int, end: int) -> list[slice]:
        """Return the places of rows from ``first`` to ``end``: one part, or two around the seam."""
        if end <= first:
            return [slice(0, 0)]
        begin = first % self.places
        stop = begin + end - first
        if stop <= self.places:
            return [slice(begin, stop)]
        before = slice(begin, self.places)
        after = slice(0, stop - self.places)
        return [before, after]

    def _zeros(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Rows:
        if self.device is None:
            return np.zeros(shape, dtype)  # pages come when written
        return torch.zeros(
            tuple(shape),
            dtype=torch_dtype(dtype),
            device=self.device,
        )

    def _reader_of_stacks(self, frames: Frames, key: Key) -> Read:
        def read(index: Any, _: int) -> Rows:
            if self.device is not None:
                index = index.cpu().numpy()
            return frames.of(key, index)

        return read
