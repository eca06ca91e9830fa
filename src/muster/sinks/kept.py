"""Rows of batches, kept until the episodes that they belong to are taken or dropped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from muster.memory.specs import Array
from muster.sinks.plain import from_plain, to_plain
from muster.sinks.rows import take

if TYPE_CHECKING:
    from tensordict import TensorDict

GONE = -1  # in the place of an episode's number: the row is not needed any more


@dataclass
class _Chunk:
    """Rows of one batch, and the number of the episode that each belongs to; ``gone`` of them are not needed any more.

    ``first`` and ``last`` bound the numbers, so that what waits for long is not searched all the time.
    """

    rows: TensorDict
    owner: Array

    def __post_init__(self) -> None:
        self.first, self.last = self.owner[self.owner != GONE].min(), self.owner.max()
        self.gone = np.count_nonzero(self.owner == GONE)

    def find(self, numbers: Array) -> Array:
        """Places of the rows of these episodes."""
        if numbers.max() < self.first or self.last < numbers.min():
            return np.empty(0, np.int64)
        return np.flatnonzero(np.isin(self.owner, numbers))

    def let_go(self, places: Array) -> None:
        self.owner[places] = GONE
        self.gone += len(places)

    def compacted(self) -> _Chunk:
        """Without the rows that are gone; as it is, if there is no memory for a copy now."""
        live = np.flatnonzero(self.owner != GONE)
        try:
            return _Chunk(take(self.rows, live), self.owner[live])
        except (MemoryError, RuntimeError):  # the latter is torch's
            return self


Places = list[tuple[_Chunk, Array]]


class KeptRows:
    """Copies of rows, by the number of their episode. Rows of an episode are in the order in which they came.

    Whatever copies or joins rows does so before anything is changed: if it fails, all is as it was.
    """

    def __init__(self) -> None:
        self._chunks: list[_Chunk] = []

    def add(self, rows: TensorDict, owner: Array) -> None:
        """Keep rows, which nobody else writes into; each belongs to the episode ``owner``, or is ``GONE`` already."""
        if (owner != GONE).any():
            self._chunks.append(_Chunk(rows, owner))

    def copy(self, numbers: Array) -> tuple[TensorDict, Array, Places]:
        """All rows of these episodes, in some order, their owners, and where they lie, for ``let_go``."""
        places = [(chunk, here) for chunk in self._chunks if len(here := chunk.find(numbers))]
        owners = [chunk.owner[here] for chunk, here in places]
        return _join([take(chunk.rows, here) for chunk, here in places]), np.concatenate(owners), places

    def let_go(self, places: Places) -> None:
        """Do not keep these rows."""
        for chunk, here in places:
            chunk.let_go(here)

    def drop(self, number: int) -> None:
        """Do not keep the rows of an episode."""
        for chunk in self._chunks:
            chunk.let_go(chunk.find(np.array(number)))

    def release(self) -> None:
        """Give back the memory of rows that are no longer needed; a chunk is copied when half of it is."""
        kept = []
        for chunk in self._chunks:
            if chunk.gone * 2 <= len(chunk.owner):
                kept.append(chunk)
            elif chunk.gone < len(chunk.owner):
                kept.append(chunk.compacted())
        self._chunks = kept

    def state_dict(self) -> dict[str, Any]:
        """Tensors and lists that share no memory with what is handed out."""
        chunks = [chunk.rows for chunk in self._chunks]
        return {
            "owner": torch.from_numpy(np.concatenate([np.empty(0, np.int64), *(c.owner for c in self._chunks)])),
            "rows": to_plain(_join(chunks)) if chunks else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep what was kept then."""
        owner = state["owner"].numpy().copy()
        self._chunks = [_Chunk(from_plain(state["rows"]), owner)] if len(owner) else []


def _join(parts: list[TensorDict]) -> TensorDict:
    joined: Any = torch.cat(parts) if len(parts) > 1 else parts[0]
    return joined
