"""File systems in memory that only this process, and those that it starts, can see."""

from __future__ import annotations

import ctypes
import os


def own_mounts() -> None:
    """From now on what this process mounts is seen by no other.

    Raises:
        OSError: not allowed.
    """
    libc, new_mounts, all_private = (
        ctypes.CDLL(None, use_errno=True),
        0x20000,
        1 << 14 | 1 << 18,
    )
    if libc.unshare(new_mounts) or libc.mount(None, b"/", None, all_private, None):
        raise OSError(ctypes.get_errno(), "this needs root")


def mount(place: str, size: str = "50%") -> None:
    """An empty file system of that size.

    Raises:
        OSError: not allowed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", place.encode(), b"tmpfs", 0, f"size={size}".encode()):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
