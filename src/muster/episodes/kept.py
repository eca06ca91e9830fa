"""Rows of batches, kept until the episodes that they belong to are delivered or dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from muster.episodes.segment import take
from muster.memory.specs import Array

if TYPE_CHECKING:
    from tensordict import TensorDict


@dataclass(eq=False, slots=True)
class Span:
    """``length`` successive rows of a chunk. Does not refer to the chunk, so that no cycle keeps memory."""

    start: int
    length: int
    kept: bool = True


class CopiedRows:
    """A copy of the rows of one batch, ``[frames]``. It lives as long as an episode refers to it."""

    def __init__(self, rows: TensorDict) -> None:
        self.rows = rows
        self._spans: list[Span] = []
        self._live = 0  # rows in spans that are kept

    def keep(self, start: int, length: int) -> Span:
        """Keeps the rows from ``start`` on, for an episode."""
        span = Span(start, length)
        self._spans.append(span)
        self._live += length
        return span

    def drop(self, span: Span) -> None:
        """The rows are not needed any more; ``compact`` frees their memory."""
        span.kept = False
        self._live -= span.length

    def compact(self) -> None:
        """Copies the rows that are kept, if they are less than half and there is memory."""
        if not 0 < self._live * 2 < len(self.rows):
            return
        spans = [span for span in self._spans if span.kept]
        try:
            self.rows = take(self.rows, _row_numbers(spans))
        except (MemoryError, RuntimeError):  # the latter is torch's
            return
        self._spans = spans
        start = 0
        for span in spans:
            span.start = start
            start += span.length


def gather(parts: Sequence[tuple[CopiedRows, Span]]) -> tuple[TensorDict, Array]:
    """A TensorDict with the rows of these parts, and their numbers in it, part by part; only those rows are touched."""
    of_chunk: dict[CopiedRows, list[Span]] = {}
    for chunk, span in parts:
        of_chunk.setdefault(chunk, []).append(span)
    if len(of_chunk) == 1:
        return parts[0][0].rows, _row_numbers([span for _, span in parts])
    joined: Any = torch.cat([take(chunk.rows, _row_numbers(spans)) for chunk, spans in of_chunk.items()])
    moved: dict[Span, Span] = {}
    start = 0
    for spans in of_chunk.values():
        for span in spans:
            moved[span] = Span(start, span.length)
            start += span.length
    return joined, _row_numbers([moved[span] for _, span in parts])


def _row_numbers(spans: Sequence[Span]) -> Array:
    """``[rows]`` int64, span after span."""
    start = np.array([span.start for span in spans], np.int64)
    length = np.array([span.length for span in spans], np.int64)
    end = np.cumsum(length)
    numbers: Array = np.arange(end[-1]) + np.repeat(start - (end - length), length)
    return numbers
