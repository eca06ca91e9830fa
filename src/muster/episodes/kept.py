"""Rows of batches, kept until their episodes are delivered or dropped."""

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
    """``length`` successive rows of a chunk. Has no reference to the chunk: a reference cycle would keep its memory."""

    start: int
    length: int
    kept: bool = True


class CopiedRows:
    """A copy of the rows of one batch, ``[frames]``. Episodes with rows in it refer to it."""

    def __init__(self, rows: TensorDict) -> None:
        self.rows = rows
        self._spans: list[Span] = []
        self._live = 0  # number of rows in kept spans

    def keep(self, start: int, length: int) -> Span:
        """Keep the rows from ``start`` on, for an episode."""
        span = Span(start, length)
        self._spans.append(span)
        self._live += length
        return span

    def drop(self, span: Span) -> None:
        """Mark the rows as unneeded; ``compact`` frees their memory."""
        span.kept = False
        self._live -= span.length

    def compact(self) -> None:
        """Copy the kept rows and free the others, if fewer than half are kept and there is memory for it."""
        if not 0 < self._live * 2 < len(self.rows):
            return
        spans = [span for span in self._spans if span.kept]
        try:
            self.rows = take(self.rows, _row_numbers(spans))
        except (MemoryError, RuntimeError):  # torch raises RuntimeError
            return
        self._spans = spans
        start = 0
        for span in spans:
            span.start = start
            start += span.length


def gather(parts: Sequence[tuple[CopiedRows, Span]]) -> tuple[TensorDict, Array]:
    """Return a TensorDict with the rows of these parts, and their indices in it, part by part. Reads no others."""
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
    """Return the indices of the spans' rows, span after span, ``[rows]`` int64."""
    start = np.array([span.start for span in spans], np.int64)
    length = np.array([span.length for span in spans], np.int64)
    end = np.cumsum(length)
    numbers: Array = np.arange(end[-1]) + np.repeat(start - (end - length), length)
    return numbers
