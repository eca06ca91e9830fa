"""Locks that are waited for with a deadline, and released whatever a signal handler raises."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def while_held(
    lock: threading.Lock, seconds: float, function: Callable[[bool], Result]
) -> Result:
    """Call a function while a lock is held, and return its result.

    Args:
        seconds: deadline for the lock.
        function: its argument says whether the lock is held: False after the deadline.
    """
    held: list[bool] = []
    try:
        # One call of C: handlers run before it or after it, when it is known whether the lock is
        # held. (After ``lock.acquire()`` a handler could raise before its result is stored, and the
        # lock would stay held.)
        held.extend(map(lock.acquire, (True,), (seconds,)))
        return function(held[0])
    finally:
        if held and held[0]:
            lock.release()
