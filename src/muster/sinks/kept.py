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
        self.first, self.last = self.owner.min(), self.owner.max()
        self.gone = np.count_nonzero(self.owner == GONE)

    def find(self, numbers: Array) -> Array:
        """Places of the rows of these episodes."""
        if numbers.max() < self.first or self.last < numbers.min():
            return np.empty(0, np.int64)
        return np.flatnonzero(np.isin(self.owner, numbers))

    def let_go(self, places: Array) -> None:
        self.owner[places] = GONE
        self.gone += len(places)


class KeptRows:
    """Copies of rows, by the number of their episode. Rows of an episode are in the order in which they came."""

    def __init__(self) -> None:
        self._chunks: list[_Chunk] = []

    def add(self, batch: TensorDict, rows: Array, owner: Array) -> None:
        """Copy ``rows`` of a batch; each belongs to the episode ``owner``, not below 0."""
        if len(rows):
            self._chunks.append(_Chunk(take(batch, rows), owner))

    def pop(self, numbers: Array) -> tuple[TensorDict, Array]:
        """All rows of these episodes, in some order, and their owners; they are not kept any more."""
        parts, owners = [], []
        for chunk in self._chunks:
            here = chunk.find(numbers)
            if len(here):
                parts.append(take(chunk.rows, here))
                owners.append(chunk.owner[here])
                chunk.let_go(here)
        return _join(parts), np.concatenate(owners)

    def drop(self, number: int) -> None:
        """Do not keep the rows of an episode."""
        for chunk in self._chunks:
            chunk.let_go(chunk.find(np.array(number)))

    def release(self) -> None:
        """Give back the memory of rows that are no longer needed; a chunk is copied when half of it is."""
        chunks, self._chunks = self._chunks, []
        for chunk in chunks:
            if chunk.gone * 2 <= len(chunk.owner):
                self._chunks.append(chunk)
            elif chunk.gone < len(chunk.owner):
                live = np.flatnonzero(chunk.owner != GONE)
                self._chunks.append(_Chunk(take(chunk.rows, live), chunk.owner[live]))

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
