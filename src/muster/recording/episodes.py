"""Which rows of a recording are which episode."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

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
    """One row of the table of episodes.

    ``env`` is the place in the flattened batch dimensions, of the first piece. ``episode_return`` is the
    undiscounted sum of the recorded rewards in float64 (nan if a reward is not one number). ``complete``: its
    first and its last frame and all between them are in the recording; otherwise length and return are of a part.
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
    """The columns of one batch that tell episodes apart; all ``[E, T]``, environments flattened."""

    batch: int
    ids: Array
    reward: Array  # float64
    done: Array
    terminated: Array
    truncated: Array
    is_init: Array | None
    follows: bool  # nothing is missing between this batch and the one before (or the start of the collection)


@dataclass
class _Open:
    """An episode that is being put together."""

    begun: bool
    gaps: int  # in the recording, before its last piece
    holes: bool = False
    ended: bool = False
    terminated: bool = False
    truncated: bool = False
    episode_return: float = 0.0
    pieces: list[Piece] = field(default_factory=list)

    def close(self, traj_id: int) -> Episode:
        return Episode(
            traj_id=traj_id,
            env=self.pieces[0].env,
            length=sum(piece.stop - piece.start for piece in self.pieces),
            episode_return=self.episode_return,
            terminated=self.terminated,
            truncated=self.truncated,
            complete=self.begun and self.ended and not self.holes,
            pieces=tuple(self.pieces),
        )


def find_episodes(batches: Iterable[Rows]) -> tuple[Episode, ...]:
    """The episodes in the order of their first frames (batch, row, env).

    Pieces belong together by their trajectory id alone, whichever environment, worker or chunk they are in.
    """
    found: dict[int, _Open] = {}
    gaps = 0
    for rows in batches:
        gaps += not rows.follows
        pieces = cut(rows.ids, np.ones(rows.ids.shape, bool), np.zeros(rows.ids.shape, bool))
        for first, length in zip(pieces.first.tolist(), pieces.length.tolist(), strict=True):
            env, start = divmod(first, rows.ids.shape[1])
            _add(found, rows, Piece(rows.batch, env, start, start + length), gaps)
    table = [episode.close(traj_id) for traj_id, episode in found.items()]
    return tuple(sorted(table, key=lambda e: (*e.start, e.env)))


def _add(found: dict[int, _Open], rows: Rows, piece: Piece, gaps: int) -> None:
    traj_id = int(rows.ids[piece.env, piece.start])
    episode = found.get(traj_id)
    if episode is None:
        # A change of id within a batch is a reset. At its start it is one if nothing can be missing before it.
        begun = piece.start > 0 or rows.follows
        if rows.is_init is not None:
            begun = bool(rows.is_init[piece.env, piece.start])
        episode = found[traj_id] = _Open(begun, gaps)
    episode.holes |= not episode.ended and episode.gaps != gaps
    episode.gaps = gaps
    last = piece.env, piece.stop - 1
    episode.pieces.append(piece)
    episode.episode_return += float(rows.reward[piece.env, piece.start : piece.stop].sum())
    episode.ended = bool(rows.done[last])
    episode.terminated, episode.truncated = bool(rows.terminated[last]), bool(rows.truncated[last])
