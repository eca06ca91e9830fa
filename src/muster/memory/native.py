"""Rows as they are kept: arrays in host memory, tensors on a device.

NumPy gathers small rows in a quarter of the time of ``index_select``, and uses no threads.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from muster.memory.specs import Array

Rows = Any  # an array, or a tensor on a device
Read = Callable[[Any, int], Rows]  # rows at an index, gathered along dimension 0
# Bytes of gathered rows whose memory is used again. Such memory goes back to the system, and a new page
# costs as much as copying two; much larger ones should not be kept.
LEAST_KEPT = 1 << 18
MOST_KEPT = 1 << 25
KEPT = 8  # observations and next observations of four samples
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


class _Lent(NamedTuple):
    """Memory of gathered rows.

    Attributes:
        memory: bytes.
        array: the array over it that was returned last; it is gone when all views of it are.
    """

    memory: Array
    array: weakref.ref[Array]


class LargeRows:
    """Gathers large rows into memory that is used again when nothing refers to it any more.

    Args:
        rows: ``[places, *shape]``.
    """

    def __init__(self, rows: Array) -> None:
        self._rows = rows
        self._shape = rows.shape[1:]
        self._row_bytes = rows[0].nbytes
        # Weak references without callbacks: a Ctrl-C that comes in a callback is lost.
        self._lent: deque[_Lent] = deque(maxlen=KEPT)

    def read(self, index: Array, axis: int) -> Array:
        """Return the rows at an index, ``[n, *shape]``. Several threads may do so at the same time."""
        size = index.size * self._row_bytes
        if not LEAST_KEPT <= size <= MOST_KEPT:
            return self._rows.take(index, axis)
        memory = self._unused(size)
        if memory is None:
            memory = np.empty(size, np.uint8)
        # All views have this array as their base, however many views are between: NumPy takes the last
        # array of a chain, and the memory is behind a memoryview.
        array = np.frombuffer(memory.data, self._rows.dtype)
        self._lent.append(_Lent(memory, weakref.ref(array)))
        out = array.reshape(*index.shape, *self._shape)
        # "raise" would gather into a copy first; all indices are places
        return self._rows.take(index, axis, out, "clip")

    def _unused(self, size: int) -> Array | None:
        """Return memory of so many bytes that nothing refers to; None: there is none."""
        for _ in range(len(self._lent)):
            try:
                lent = self._lent.popleft()  # no other thread has it now
            except IndexError:
                return None
            if lent.array() is not None:
                self._lent.append(lent)
            elif lent.memory.nbytes == size:
                return lent.memory
        return None


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
