"""Arrays for samples, whose memory is used again: new pages of the system cost as much as copying two."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from muster.memory import pages
from muster.memory.specs import Array
from muster.utils.loans import Loans

# bytes of an array whose memory is kept
LEAST = 1 << 18
MOST = 1 << 25
# arrays whose memory is kept, and bytes of all of these
MOST_ARRAYS = 32
MOST_BYTES = 1 << 28


class SampleArrays:
    """The arrays of the samples of one memory. Several threads may use it."""

    def __init__(self) -> None:
        self._loans: Loans[Array] = Loans(MOST_ARRAYS)

    @property
    def nbytes(self) -> int:
        """Size of what is kept, in use or not."""
        return sum(memory.nbytes for memory in self._loans.all())

    def array(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        """Return an array with any values, which is the caller's."""
        count = math.prod(shape)
        size = count * dtype.itemsize
        if not LEAST <= size <= MOST:
            return np.empty(shape, dtype)
        room = 1 << (size - 1).bit_length()  # those of about this size share memory
        free = self._loans.ended(lambda memory: memory.nbytes == room, 1)
        if free:
            (memory,) = free
        else:
            memory = pages.zeros(room)
            while self._loans and self.nbytes + room > MOST_BYTES:
                self._loans.forget_oldest()
        # All views have this array as their base, however many views are between: NumPy takes the
        # last array of a chain, and the memory is behind a memoryview.
        array = np.frombuffer(memory.data, dtype, count)
        self._loans.lend(memory, array)
        return array.reshape(shape)

    def forget(self) -> None:
        """Keep no memory."""
        while self._loans:
            self._loans.forget_oldest()
