"""Rows of batches, kept until their episodes are delivered or dropped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from muster.episodes.segment import equalize, split, take
from muster.keys import Key
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

    def views(self, spans: Sequence[Span], hidden: Sequence[Key]) -> dict[Span, TensorDict]:
        """Return views of the rows of each span, without the ``hidden`` columns."""
        lengths: list[int] = []
        places: dict[Span, int] = {}
        end = 0
        for span in sorted(spans, key=lambda span: span.start):
            if span.start > end:  # rows of others
                lengths.append(span.start - end)
            places[span] = len(lengths)
            lengths.append(span.length)
            end = span.start + span.length
        if end < len(self.rows):
            lengths.append(len(self.rows) - end)
        parts = _views(self.rows, lengths, hidden)
        return {span: parts[place] for span, place in places.items()}

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


Parts = Sequence[tuple[CopiedRows, Span]]


def gather(parts: Parts) -> tuple[TensorDict, Array]:
    """Return a TensorDict with the rows of these parts, and their indices in it, part by part. Reads no others."""
    of_chunk: dict[CopiedRows, list[Span]] = {}
    for chunk, span in parts:
        of_chunk.setdefault(chunk, []).append(span)
    if len(of_chunk) == 1:
        return parts[0][0].rows, _row_numbers([span for _, span in parts])
    rows = [take(chunk.rows, _row_numbers(spans)) for chunk, spans in of_chunk.items()]
    equalize(rows)
    joined: Any = torch.cat(rows)
    moved: dict[Span, Span] = {}
    start = 0
    for spans in of_chunk.values():
        for span in spans:
            moved[span] = Span(start, span.length)
            start += span.length
    return joined, _row_numbers([moved[span] for _, span in parts])


def cut_out(episodes: Sequence[Parts], hidden: Sequence[Key] = ()) -> list[TensorDict]:
    """Return the rows of each episode, ``[L]``, without the ``hidden`` columns.

    An episode of one part is a view of its chunk, which it keeps alive; others are copied, all together.
    """
    several = [parts for parts in episodes if len(parts) > 1]
    copies: Iterator[TensorDict] = iter(())
    if several:
        copied = take(*gather([part for parts in several for part in parts]))
        copies = iter(_views(copied, [sum(span.length for _, span in parts) for parts in several], hidden))
    of_chunk: dict[CopiedRows, list[Span]] = {}
    for parts in episodes:
        if len(parts) == 1:
            of_chunk.setdefault(parts[0][0], []).append(parts[0][1])
    views: dict[Span, TensorDict] = {}
    for chunk, spans in of_chunk.items():
        views |= chunk.views(spans, hidden)
    return [views[parts[0][1]] if len(parts) == 1 else next(copies) for parts in episodes]


def _views(rows: TensorDict, lengths: list[int], hidden: Sequence[Key]) -> Sequence[TensorDict]:
    shown = rows.exclude(*hidden)
    shown.names = ["time"]
    return split(shown, lengths)


def _row_numbers(spans: Sequence[Span]) -> Array:
    """Return the indices of the spans' rows, span after span, ``[rows]`` int64."""
    start = np.array([span.start for span in spans], np.int64)
    length = np.array([span.length for span in spans], np.int64)
    end = np.cumsum(length)
    numbers: Array = np.arange(end[-1]) + np.repeat(start - (end - length), length)
    return numbers
