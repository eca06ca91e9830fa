"""Steps into a Tianshou buffer, by its public ``add``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tianshou
from tianshou.data import PrioritizedReplayBuffer, ReplayBufferManager

from muster.dialects.tianshou.episodes import Taken

TESTED = "2.0.1"
"""Of Tianshou: whose ``add`` takes several steps of one environment in one call, which is not documented."""

ADDS = ReplayBufferManager.add, PrioritizedReplayBuffer.add


def takes_many(buffer: Any) -> bool:
    """Whether one ``add`` may get several steps of each environment.

    A buffer with an ``add`` of its own may look at rows, and gets them one by one.
    """
    own = isinstance(buffer, ReplayBufferManager) and type(buffer).add in ADDS
    return own and tianshou.__version__ == TESTED


def add(buffer: Any, taken: Taken) -> None:
    """Add steps; the buffer is then as if every row had been added by itself."""
    for begin, end in _parts(buffer, taken) if takes_many(buffer) else taken.pieces():
        buffer.add(taken.batch[begin:end], buffer_ids=taken.env[begin:end])


def _parts(buffer: Any, taken: Taken) -> Iterator[tuple[int, int]]:
    """Where each part begins and ends, in none of which a ring overwrites what it has just got.

    The first row of all is a part: memory is made for what it has.
    """
    most, row = int(np.diff(buffer.subbuffer_edges).min()), 0
    while row < taken.rows:
        rows = most if hasattr(buffer, "obs") else 1
        begin, end = np.searchsorted(taken.t, [row, row + rows]).tolist()
        yield begin, end
        row += rows
