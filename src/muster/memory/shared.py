"""Shared memory without a name: processes pass a descriptor to each other, so no file can remain in
``/dev/shm``.

On Linux it is a ``memfd``: only the machine's memory limits its size, and a seal prevents
shrinking, so no process can remove memory that others have mapped. Elsewhere it is an unlinked
temporary file.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
import tempfile
import weakref
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from muster.errors import SlotsExhausted
from muster.memory.specs import Array
from muster.utils.forks import Owner

_MAP_FIXED = 0x10
_PUNCH_HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE


class Arena:
    """Ranges of bytes in one block of memory that processes share.

    Only the process that created the arena allocates ranges; other processes view ranges by offset.
    Call ``allocate`` in one thread only; ``release`` may be called in any thread (finalizers). An
    arena uses a single descriptor.

    Attributes:
        fd: descriptor, owned by this object.
    """

    def __init__(
        self,
        fd: int,
        *,
        name: str = "",
        creator: bool = False,
    ) -> None:
        self.fd = fd
        self.name = name
        self._creator = Owner() if creator else None
        self._end = 0
        self._in_use: dict[int, int] = {}  # bytes by offset
        self._released: defaultdict[int, list[int]] = defaultdict(
            list
        )  # offsets by bytes
        self._mappings: weakref.WeakSet[_Mapping] = weakref.WeakSet()
        self._close = weakref.finalize(self, os.close, fd)

    @classmethod
    def create(cls, name: str) -> Arena:
        """Create an empty arena; ``name`` is its name in ``/proc``."""
        if sys.platform != "linux":
            with tempfile.TemporaryFile(prefix=name) as file:
                return cls(os.dup(file.fileno()), name=name, creator=True)
        import fcntl

        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        return cls(fd, name=name, creator=True)

    @classmethod
    def attach(cls, fd: int) -> Arena:
        """Open the arena of another process by its descriptor, which the new object owns."""
        return cls(fd)

    def allocate(self, nbytes: int) -> int:
        """Allocate ``nbytes`` zeros at the start of a page, if possible in a released range, and
        return the offset.

        Raises:
            SlotsExhausted: not enough memory is available. Writing to allocated memory never fails.
        """
        if self._creator is None or not self._creator.is_here():
            raise ValueError(
                "This process did not create the arena; only the one that did can allocate in it."
            )
        size = _pages(nbytes)
        reusable = self._released[size]
        offset = reusable[-1] if reusable else self._end
        room = _room()
        if size > room:  # allocating it would start the out-of-memory killer
            raise SlotsExhausted(self._lack(size, f"about {room:,} are available"))
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.fd, offset, size)
            elif offset == self._end:
                os.ftruncate(self.fd, offset + size)
        except OSError as error:
            raise SlotsExhausted(self._lack(size, str(error.strerror))) from error
        if offset != self._end:
            reusable.remove(offset)
        self._end = max(self._end, offset + size)
        self._in_use[offset] = size
        return offset

    def release(self, offset: int, nbytes: int) -> None:
        """Return the memory of an allocated range to the system; views of it read zeros from now
        on.
        """
        if self.fd < 0:  # called by the finalizer of a batch that outlived the arena
            return
        # in a fork: the parent still uses the range
        if self._creator is not None and not self._creator.is_here():
            return
        size = _pages(nbytes)
        if self._in_use.get(offset) != size:
            raise ValueError(
                f"There is no range of {size} bytes at {offset} in arena {self.name!r}."
            )
        del self._in_use[offset]
        if sys.platform == "linux":
            _call(
                "fallocate",
                self.fd,
                _PUNCH_HOLE,
                ctypes.c_int64(offset),
                ctypes.c_int64(size),
            )
        self._released[size].append(offset)

    def view(self, offset: int, nbytes: int) -> Array:
        """Return ``uint8 [nbytes]`` at ``offset`` (a multiple of the page size); it stays valid
        without the arena.
        """
        if offset < 0 or offset + nbytes > os.fstat(self.fd).st_size:
            raise ValueError(
                f"Bytes {offset} to {offset + nbytes} lie outside of arena {self.name!r}."
            )
        mapping = _Mapping(self.fd, offset, nbytes)
        self._mappings.add(mapping)
        return np.asarray(mapping)

    def isolate(self) -> None:
        """Make all views of this object private: other processes do not see later writes."""
        for mapping in list(self._mappings):
            mapping.isolate(self.fd)

    @property
    def is_open(self) -> bool:
        """Whether the descriptor is open; when the program exits, it may be closed before other
        objects.
        """
        return self._close.alive

    def close(self) -> None:
        """Close the descriptor; views stay valid. Idempotent."""
        self._close()
        self.fd = -1

    def _lack(self, size: int, why: str) -> str:
        return (
            f"{size:,} more bytes of shared memory were wanted, on top of"
            f" {sum(self._in_use.values()):,} in use: {why}. Keep fewer batches, or use fewer"
            " environments or a smaller frames_per_batch."
        )


class _Mapping:
    """A mapping of part of a file, which lives as long as an array over it.

    Python's own ``mmap`` (before 3.13) duplicates the descriptor for each mapping, so each slot
    would need one.
    """

    def __init__(
        self,
        fd: int,
        offset: int,
        nbytes: int,
    ) -> None:
        length = _pages(nbytes)
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        address = _call(
            "mmap",
            None,
            ctypes.c_size_t(length),
            protection,
            mmap.MAP_SHARED,
            fd,
            ctypes.c_int64(offset),
        )
        self._place = (
            ctypes.c_void_p(address),
            ctypes.c_size_t(length),
            protection,
            ctypes.c_int64(offset),
        )
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }
        end = weakref.finalize(
            self, _call, "munmap", ctypes.c_void_p(address), ctypes.c_size_t(length)
        )
        end.atexit = False  # arrays may be used until the process exits

    def isolate(self, fd: int) -> None:
        """See ``Arena.isolate``; the kernel copies pages when they are written."""
        address, length, protection, offset = self._place
        _call(
            "mmap",
            address,
            length,
            protection,
            mmap.MAP_PRIVATE | _MAP_FIXED,
            fd,
            offset,
        )


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    return libc


def _call(function: str, *args: Any) -> int:
    result: int = getattr(_libc(), function)(*args)
    if result in (-1, ctypes.c_void_p(-1).value):
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")
    return result


def _pages(nbytes: int) -> int:
    return -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE


def _room() -> int:
    """Return the number of bytes available in this machine and in the container (cgroup v2) of this
    process.
    """
    machine = _numbers("/proc/meminfo")
    room = sys.maxsize
    if "MemAvailable" in machine:
        room = (machine["MemAvailable"] + machine["SwapFree"]) * 1024
    used = _numbers("/sys/fs/cgroup/memory.stat")
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
    except (OSError, ValueError):  # no limit, or no such file
        return room
    return min(room, limit - used.get("anon", 0) - used.get("shmem", 0))


def _numbers(path: str) -> dict[str, int]:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return {}
    numbers = {}
    for line in lines:
        name, value, *_ = line.split()
        numbers[name.rstrip(":")] = int(value)
    return numbers
