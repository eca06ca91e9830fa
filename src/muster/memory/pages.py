"""Large blocks of host memory, which go back to the system with the last reference to them.

glibc takes blocks of up to 32 MB from its heap once one of them was freed, and the heap shrinks at its
end only: after a user has dropped a hundred batches, their memory would stay as long as the newest one.
"""

from __future__ import annotations

import mmap
import sys

import numpy as np

from muster.memory.specs import Array

LARGE = 1 << 20


def zeros(nbytes: int) -> Array:
    """Return zeros, ``uint8 [nbytes]``, at the start of a page if they are large."""
    if nbytes < LARGE or sys.platform == "win32":
        return np.zeros(nbytes, np.uint8)
    # private: a fork of this process has a copy of its own
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    block: Array = np.frombuffer(mmap.mmap(-1, nbytes, flags=flags), np.uint8)
    return block
