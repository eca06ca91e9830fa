"""An environment that fails when the test orders it to.

Its module imports little: each worker process imports it.
"""

from __future__ import annotations

import mmap
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np

from muster.testing import OracleEnv

RAISE, EXIT, INTERRUPT = 1, 2, 3  # what an environment does in its next step, once


def orders(path: Path) -> np.ndarray:
    """What the environments are to do next, ``int64 [environments]``, shared with all processes."""
    with open(path, "r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0), np.int64)


class Shared:
    """What environments share with the test: no part of their state."""

    def __init__(self, orders: np.ndarray) -> None:
        self.orders = orders
        self.counts: Any = None


class ObedientEnv(OracleEnv):
    """Fails in its next step if it is told to."""

    def __init__(self, folder: Path, first: int, count: int) -> None:
        self.shared = Shared(orders(folder / "orders"))
        super().__init__(folder / "counts", first, count)

    @property
    def _cells(self) -> Any:
        return self.shared.counts

    @_cells.setter
    def _cells(self, counts: Any) -> None:
        self.shared.counts = counts

    def step(self, action: Any) -> Any:
        orders = self.shared.orders
        order = int(orders[self.number])
        orders[self.number] = 0
        if order == RAISE:
            raise RuntimeError("as ordered")
        if order == EXIT:
            os._exit(3)
        if order == INTERRUPT:
            signal.raise_signal(signal.SIGINT)
        return super().step(action)

    def get_state(self) -> dict[str, Any]:
        return {"now": self._now, "run": self.run}

    def set_state(self, state: dict[str, Any]) -> None:
        self._now = state["now"]
        self.run = state["run"]
