"""Replay buffers: anything with ``extend`` or ``add``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

PATIENCE = 100.0  # seconds; importing torch can take long on a busy machine


class Extends:
    """Keeps batches, of which it refuses the first so many; others can wait for them."""

    def __init__(self, refuses: int = 0) -> None:
        self.batches: list[Any] = []
        self._refuses, self._changed = refuses, threading.Condition()

    def extend(self, batch: Any) -> None:
        self._refuses -= 1
        if self._refuses >= 0:
            raise OSError("full")
        with self._changed:
            self.batches.append(batch)
            self._changed.notify_all()

    def until(self, number: int) -> None:
        self.until_true(lambda: len(self.batches) >= number)

    def until_true(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, PATIENCE)


class Adds:
    """Keeps transitions. It refuses those beyond ``room``, until that is changed."""

    def __init__(self, room: int | None = None) -> None:
        self.room, self.rows = room, list[Any]()

    def add(self, row: Any) -> None:
        if self.room is not None and len(self.rows) >= self.room:
            raise OSError("full")
        self.rows.append(row)
