"""The order in which processes see each other's stores to shared memory.

x86 processors keep the order of stores, and that of loads. ARM64 keeps neither: without a fence, a
process can see the number of a question before the observations that were written before it.
"""

from __future__ import annotations

import platform
import threading

# keeps the order of stores and of loads
IS_ORDERED = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")


def fence() -> None:
    """Order everything that this thread has stored and loaded before everything that it does after
    this.

    A lock is released by an instruction that no earlier store or load passes, and taken by one that
    no later store or load passes. ARM64 keeps the order of a release and the acquire after it (Arm
    Architecture Reference Manual, barrier-ordered-before), and on x86 each is a locked instruction.
    """
    lock = threading.Lock()
    lock.acquire()
    lock.release()
    lock.acquire()


def keep_order() -> None:
    """Keep the order of earlier and later stores, and of earlier and later loads.

    Costs nothing on x86.
    """
    if not IS_ORDERED:
        fence()
