"""The table of episodes of a recording, with their rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from muster.episodes.segment import cut
from muster.memory.specs import Array


@dataclass(frozen=True)
class Piece:
    """Rows ``start`` to ``stop`` (exclusive) of environment ``env`` in batch ``batch``."""

    batch: int
    env: int
    start: int
    stop: int


@dataclass(frozen=True)
class Episode:
    """An entry of the table of episodes.

    ``env`` is the index of its first piece in the flattened batch dimensions. ``episode_return`` is the undiscounted
    sum of the recorded rewards in float64 (nan if a reward is not a single number). ``complete``: the recording has all
    of its frames, from the first to the last; otherwise length and return are those of a part.
    """

    traj_id: int
    env: int
    length: int
    episode_return: float
    terminated: bool
    truncated: bool
    complete: bool
    pieces: tuple[Piece, ...] = field(repr=False)

    @property
    def start(self) -> tuple[int, int]:
        """Batch and row of the first frame."""
        return self.pieces[0].batch, self.pieces[0].start

    @property
    def end(self) -> tuple[int, int]:
        """Batch and row of the last frame."""
        return self.pieces[-1].batch, self.pieces[-1].stop - 1


@dataclass(frozen=True)
class Rows:
    """The columns of one batch that identify episodes; all ``[E, T]``, environments flattened."""

    batch: int
    ids: Array
    reward: Array  # float64
    done: Array
    terminated: Array
    truncated: Array
    is_init: Array | None
    follows: bool  # no rows are missing between the previous batch (or the start of the collection) and this one


class _Part(NamedTuple):
    piece: Piece
    total: float  # sum of its rewards
    begins: bool
    done: bool
    terminated: bool
    truncated: bool
    gaps: int  # number of gaps in the recording before it


def find_episodes(batches: Iterable[Rows]) -> tuple[Episode, ...]:
    """Return the episodes in the order of their first frames (batch, row, env).

    Pieces with the same trajectory id are one episode, in whichever environment, worker or chunk they are.
    """
    found: dict[int, list[_Part]] = {}
    gaps = 0
    for rows in batches:
        gaps += not rows.follows
        pieces = cut(rows.ids, np.ones(rows.ids.shape, bool), np.zeros(rows.ids.shape, bool))
        for first, length in zip(pieces.first.tolist(), pieces.length.tolist(), strict=True):
            env, start = divmod(first, rows.ids.shape[1])
            part = _part(rows, Piece(rows.batch, env, start, start + length), gaps)
            found.setdefault(int(rows.ids[env, start]), []).append(part)
    table = [_episode(traj_id, parts) for traj_id, parts in found.items()]
    return tuple(sorted(table, key=lambda e: (*e.start, e.env)))


def _part(rows: Rows, piece: Piece, gaps: int) -> _Part:
    env, start, stop = piece.env, piece.start, piece.stop
    # A change of id within a batch is a reset. The batch's start is a reset if no rows are missing before it.
    begins = start > 0 or rows.follows if rows.is_init is None else bool(rows.is_init[env, start])
    return _Part(
        piece,
        float(rows.reward[env, start:stop].sum()),
        begins,
        bool(rows.done[env, stop - 1]),
        bool(rows.terminated[env, stop - 1]),
        bool(rows.truncated[env, stop - 1]),
        gaps,
    )


def _episode(traj_id: int, parts: Sequence[_Part]) -> Episode:
    whole = all(before.done or before.gaps == after.gaps for before, after in pairwise(parts))
    pieces, last = tuple(part.piece for part in parts), parts[-1]
    return Episode(
        traj_id=traj_id,
        env=pieces[0].env,
        length=sum(piece.stop - piece.start for piece in pieces),
        episode_return=sum(part.total for part in parts),
        terminated=last.terminated,
        truncated=last.truncated,
        complete=parts[0].begins and last.done and whole,
        pieces=pieces,
    )
