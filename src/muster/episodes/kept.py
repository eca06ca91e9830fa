"""Rows of batches, kept until their episodes are delivered or dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from muster.episodes.segment import Cuts, cut_apart, equalize, take
from muster.keys import Key
from muster.memory.specs import Array

if TYPE_CHECKING:
    from tensordict import TensorDict


@dataclass(eq=False, slots=True)
class Span:
    """``length`` successive rows of a chunk.

    Has no reference to the chunk: a reference cycle would keep its memory.
    """

    start: int
    length: int
    kept: bool = True

    def drop(self) -> None:
        """Note that no episode needs the rows any more."""
        self.kept = False

    def move(self, start: int) -> None:
        """Note that the chunk has the rows from ``start`` on."""
        self.start = start


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
        span.drop()
        self._live -= span.length

    def compact(self) -> None:
        """Copy the kept rows and free the others, if fewer than half are kept and there is memory
        for it.
        """
        if not self._live or self._live * 2 >= len(self.rows):
            return
        spans = [span for span in self._spans if span.kept]
        try:
            self.rows = take(self.rows, _row_numbers(spans))
        except (MemoryError, RuntimeError):  # torch raises RuntimeError
            return
        self._spans = spans
        start = 0
        for span in spans:
            span.move(start)
            start += span.length


Parts = Sequence[tuple[CopiedRows, Span]]


def gather(parts: Parts) -> tuple[TensorDict, Array]:
    """Return a TensorDict with the rows of these parts, and their indices in it, part by part.

    Reads no others.
    """
    of_chunk: dict[CopiedRows, list[Span]] = {}
    for chunk, span in parts:
        of_chunk.setdefault(chunk, []).append(span)
    if len(of_chunk) == 1:
        ((chunk, spans),) = of_chunk.items()
        return chunk.rows, _row_numbers(spans)
    rows = []
    for chunk, spans in of_chunk.items():
        rows.append(take(chunk.rows, _row_numbers(spans)))
    equalize(rows)
    joined: Any = torch.cat(rows)
    moved: dict[Span, Span] = {}
    start = 0
    for spans in of_chunk.values():
        for span in spans:
            moved[span] = Span(start, span.length)
            start += span.length
    spans = [moved[span] for _, span in parts]
    return joined, _row_numbers(spans)


def cut_out(episodes: Sequence[Parts], hidden: Sequence[Key] = ()) -> list[TensorDict]:
    """Return the rows of each episode, ``[L]``, without the ``hidden`` columns.

    An episode of one part is a view of its chunk, which it keeps alive; others are copied, all
    together.
    """
    if not episodes:
        return []
    of_chunk: dict[CopiedRows, list[Span]] = {}
    for parts in episodes:
        for chunk, span in parts:
            of_chunk.setdefault(chunk, []).append(span)
    lengths: list[list[int]] = []
    number: dict[Span, int] = {}  # of its piece
    before = 0  # pieces of earlier chunks
    for chunk, spans in of_chunk.items():
        own: list[int] = []
        end = 0
        for span in sorted(spans, key=attrgetter("start")):
            if span.start > end:  # rows of others
                own.append(span.start - end)
            number[span] = before + len(own)
            own.append(span.length)
            end = span.start + span.length
        if end < len(chunk.rows):
            own.append(len(chunk.rows) - end)
        lengths.append(own)
        before += len(own)
    pieces = [[number[span] for _, span in parts] for parts in episodes]
    rows = [sum([span.length for _, span in parts]) for parts in episodes]
    batches = [chunk.rows for chunk in of_chunk]
    equalize(batches)
    return cut_apart(batches, Cuts(lengths, pieces, rows), hidden)


def _row_numbers(spans: Sequence[Span]) -> Array:
    """Return the indices of the spans' rows, span after span, ``[rows]`` int64."""
    start = np.array([span.start for span in spans], np.int64)
    length = np.array([span.length for span in spans], np.int64)
    end = np.cumsum(length)
    numbers: Array = np.arange(end[-1]) + np.repeat(start - (end - length), length)
    return numbers
