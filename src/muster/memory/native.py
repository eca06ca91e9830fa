"""Rows as they are kept: arrays in host memory, tensors on a device.

NumPy gathers small rows in a quarter of the time of ``index_select``, and uses no threads.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from muster.memory.specs import Array

Rows = Any  # an array, or a tensor on a device
Read = Callable[[Any, int], Rows]  # rows at an index, gathered along dimension 0
# Bytes of gathered rows whose memory is used again. glibc gives back what is larger to the system, and
# a new page costs as much as copying two; much larger ones should not be kept.
LEAST_KEPT = 1 << 18
MOST_KEPT = 1 << 26
KEPT = 4  # observations and next observations of two samples
SMALL_ROW = 1 << 10  # bytes; of smaller ones, few samples are that large


def zeros(shape: Sequence[int], like: Rows) -> Rows:
    """Return zeros of this shape, of the kind of other rows."""
    if isinstance(like, np.ndarray):
        return np.zeros(shape, like.dtype)  # pages come when written
    return like.new_zeros(tuple(shape))


def reader(rows: Rows) -> Read:
    """Return the function that gathers rows: ``read(index, 0)``. The index of rows on a device is a
    tensor there.
    """
    if not isinstance(rows, np.ndarray):
        return lambda index, _: rows.index_select(0, index)
    if rows[0].nbytes < SMALL_ROW or rows.dtype.hasobject:
        return rows.take
    return LargeRows(rows).read


class LargeRows:
    """Gathers large rows into memory that is used again as soon as nothing refers to it.

    Args:
        rows: ``[places, *shape]``.
    """

    def __init__(self, rows: Array) -> None:
        self._rows = rows
        self._shape = rows.shape[1:]
        self._row_bytes = rows[0].nbytes
        self._free: deque[Array] = deque(maxlen=KEPT)

    def read(self, index: Array, axis: int) -> Array:
        """Return the rows at an index, ``[n, *shape]``. Several threads may do so at the same time."""
        size = index.size * self._row_bytes
        if not LEAST_KEPT <= size <= MOST_KEPT:
            return self._rows.take(index, axis)
        out = self._memory(size).reshape(*index.shape, *self._shape)
        # "raise" would gather into a copy first; all indices are places
        return self._rows.take(index, axis, out, "clip")

    def _memory(self, size: int) -> Array:
        """Return an array of so many bytes. Its memory is free when it and all views of it are gone."""
        while True:
            try:
                memory = self._free.pop()
            except IndexError:
                memory = np.empty(size, np.uint8)
            if memory.nbytes == size:
                break
        # All views have this array as their base, however many views are between: NumPy takes the last
        # array of a chain, and the memory is behind a memoryview.
        array = np.frombuffer(memory.data, self._rows.dtype)
        weakref.finalize(array, self._free.append, memory).atexit = False
        return array


def as_index(index: Array, rows: Rows) -> Any:
    """Return an index for ``reader(rows)``."""
    if isinstance(rows, np.ndarray):
        return index
    return torch.from_numpy(index).to(rows.device)


def gathered(rows: Rows, index: Array) -> Rows:
    """Return copies of some rows."""
    if isinstance(rows, np.ndarray):
        return rows.take(index, 0)
    return rows.index_select(0, as_index(index, rows))


def scatter(rows: Any, there: Rows, index: Array) -> None:
    """Copy rows, of any kind, to some rows of ``there``."""
    if isinstance(there, np.ndarray):
        there[index] = rows.cpu().numpy() if isinstance(rows, torch.Tensor) else rows
        return
    given = torch.as_tensor(rows).to(there.device)
    there.index_copy_(0, torch.from_numpy(index).to(there.device), given)
