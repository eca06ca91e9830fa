"""Log messages about workers and nodes that take long to make their environments."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

SLOW_S = 5.0  # seconds after which a construction logs what it waits for
SLOW_AGAIN_S = 30.0  # seconds after which it logs the same again
_log = logging.getLogger(__name__)


class SlowConstruction:
    """Logs what is missing after ``SLOW_S``, again when it changes, and again after
    ``SLOW_AGAIN_S``.

    Args:
        missing: returns a description of what is missing; empty if nothing is.
    """

    def __init__(self, missing: Callable[[], str]) -> None:
        self._missing = missing
        self._begun = time.monotonic()
        self._logged = ""  # what was logged last
        self._next = self._begun + SLOW_S
        self._again = 0.0  # time at which the same is logged again

    def look(self) -> None:
        """Log what is missing, if it is time."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + SLOW_S
        missing = self._missing()
        if missing and (missing != self._logged or now >= self._again):
            _log.warning("Waiting for %s (%.0f s so far).", missing, now - self._begun)
            self._logged = missing
            self._again = now + SLOW_AGAIN_S


def listed(noun: str, numbers: Sequence[int]) -> str:
    """Return "worker 3" or "workers 3, 5", with at most ten numbers."""
    shown = ", ".join(map(str, numbers[:10]))
    if len(numbers) > 10:
        shown += ", ..."
    if len(numbers) == 1:
        return f"{noun} {shown}"
    return f"{noun}s {shown}"
