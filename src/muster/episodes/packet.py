"""What ended in a rollout on a device, on its way to the host."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from muster.episodes.record import NO_EPISODES, Episodes, PendingEpisodes
from muster.episodes.tensor_clock import (
    BAD_CELL,
    BAD_VALUE,
    COUNT,
    NO_CELL,
    EndedRows,
    episodes_of,
)
from muster.memory.arrivals import Arrival

if TYPE_CHECKING:
    import torch


class BadReward(NamedTuple):
    """A reward that is not finite, and its cell: row times number of environments, plus index."""

    cell: int
    value: float


class Packet:
    """The records of the episodes that ended in one rollout.

    1. When it is made, the number of records is on its way to the host.
    2. ``fetch`` starts a copy of so many records to the host. From then on the lane's ``ended`` may
       be overwritten.
    3. ``read`` returns them.

    ``fetch`` waits if the number has not arrived (``has_number``), ``read`` if the records have
    not. Threads may call it at the same time.

    Args:
        ended: the records on the device, and their number.
        arrival: of the number.
    """

    def __init__(
        self,
        ended: EndedRows,
        total_envs: int,
        arrival: Arrival,
    ) -> None:
        self._ended = ended
        self._total_envs = total_envs
        self._arrival = arrival
        self._lock = threading.Lock()
        self._taken: list[torch.Tensor] | None = None
        self._bad: BadReward | None = None
        self._episodes: Episodes | None = None

    @property
    def has_number(self) -> bool:
        """Whether ``fetch`` does not wait."""
        return self._taken is not None or self._arrival.has_come

    @property
    def has_records(self) -> bool:
        """Whether ``read`` does not wait."""
        if self._episodes is not None:
            return True
        return self._taken is not None and self._arrival.has_come

    def fetch(self) -> BadReward | None:
        """Start the copy of the records; return the first bad reward of the rollout."""
        with self._lock:
            if self._taken is None:
                self._arrival.wait()
                known = self._ended.known.numpy()
                if known[BAD_CELL] != NO_CELL:
                    value = known.view(np.float64)[BAD_VALUE]
                    self._bad = BadReward(int(known[BAD_CELL]), float(value))
                take = partial(self._ended.take, int(known[COUNT]))
                self._taken, self._arrival = self._arrival.then(take)
            return self._bad

    def read(self) -> Episodes:
        """Return the records."""
        self.fetch()
        with self._lock:
            if self._episodes is None:
                assert self._taken is not None
                self._arrival.wait()
                self._episodes = NO_EPISODES
                if len(self._taken[0]):
                    records = [column.numpy() for column in self._taken]
                    self._episodes = episodes_of(records, self._total_envs)
                self._taken = []
            return self._episodes

    def pending(self) -> PendingEpisodes:
        """Return the records as a sequence that reads them when they are used."""
        return PendingEpisodes(self.read, lambda: self.has_records)
