"""The table of episodes of a recording, with their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from muster.episodes.segment import NEVER, cut
from muster.keys import DONE, REWARD, TERMINATED, TRAJ_IDS, TRUNCATED, Key, next_of
from muster.memory.specs import Array

if TYPE_CHECKING:
    from tensordict import TensorDict

IS_INIT: Key = ("collector", "is_init")


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

    ``env`` is the index of its first piece in the flattened batch dimensions. ``episode_return`` is
    the undiscounted sum of the recorded rewards in float64 (nan if a reward is not a single
    number). ``complete``: the recording has all of its frames, from the first to the last;
    otherwise length and return are those of a part.
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
        last = self.pieces[-1]
        return last.batch, last.stop - 1


class Recorded(Protocol):
    """What exports read of a recording.

    Attributes:
        directory: path of its directory.
        meta: the user's metadata.
        keys: keys of its batches.
        episodes: the table of episodes.
    """

    directory: Path
    meta: dict[str, Any]

    @property
    def keys(self) -> list[Key]: ...

    @property
    def episodes(self) -> tuple[Episode, ...]: ...

    def batch(self, i: int) -> TensorDict:
        """Return batch ``i``."""


def find_episodes(
    batches: Iterable[tuple[Mapping[Key, Array], bool]],
) -> tuple[Episode, ...]:
    """Return the episodes in the order of their first frames (batch, row, env).

    Pieces with the same trajectory id are one episode, in whichever environment, worker or chunk
    they are. ``batches`` has the columns of each batch, ``[E, T]`` with environments flattened; and
    False if rows are missing before it. Padding is in no episode.
    """
    # with its last done flag, and the number of gaps before it
    parts: dict[int, list[tuple[Episode, bool, int]]] = {}
    gaps = 0
    for number, (rows, follows) in enumerate(batches):
        gaps += not follows
        ids = rows[TRAJ_IDS]
        is_init = rows.get(IS_INIT)
        none_ended = np.zeros(ids.shape, bool)
        pieces = cut(ids, ids != NEVER, none_ended)
        begins_at = pieces.rows[pieces.first]
        for first, length in zip(
            begins_at.tolist(), pieces.length.tolist(), strict=True
        ):
            env, start = divmod(first, ids.shape[1])
            stop = start + length
            last = (env, stop - 1)
            if is_init is not None:
                begins = bool(is_init[env, start])
            else:
                # A change of id within a batch is a reset. The batch's start is a reset if no rows
                # are missing before.
                begins = start > 0 or follows
            part = Episode(
                traj_id=int(ids[env, start]),
                env=env,
                length=length,
                episode_return=float(rows[REWARD][env, start:stop].sum()),
                terminated=bool(rows[next_of(TERMINATED)][last]),
                truncated=bool(rows[next_of(TRUNCATED)][last]),
                complete=begins,
                pieces=(Piece(number, env, start, stop),),
            )
            done = bool(rows[next_of(DONE)][last])
            parts.setdefault(part.traj_id, []).append((part, done, gaps))
    episodes = [_joined(of_episode) for of_episode in parts.values()]
    episodes.sort(key=lambda episode: (*episode.start, episode.env))
    return tuple(episodes)


def _joined(parts: Sequence[tuple[Episode, bool, int]]) -> Episode:
    """Join the parts of an episode, of which ``complete`` says whether it is the beginning."""
    whole = True
    for (_, ended, gaps), (_, _, later_gaps) in pairwise(parts):
        whole = whole and (ended or gaps == later_gaps)
    first, _, _ = parts[0]
    last, done, _ = parts[-1]
    return replace(
        last,
        env=first.env,
        length=sum(part.length for part, _, _ in parts),
        episode_return=sum(part.episode_return for part, _, _ in parts),
        complete=first.complete and done and whole,
        pieces=tuple(part.pieces[0] for part, _, _ in parts),
    )


def cut_out(episode: Episode, batch: Callable[[int], TensorDict]) -> TensorDict:
    """Return the rows of an episode. ``batch`` returns a batch of the recording by number."""
    pieces = []
    for piece in episode.pieces:
        rows = batch(piece.batch)
        time = time_dim(rows.names)
        outer = [size for dim, size in enumerate(rows.shape) if dim != time]
        index: list[Any] = []
        if outer:
            index = [int(n) for n in np.unravel_index(piece.env, outer)]
        index.insert(time, slice(piece.start, piece.stop))
        pieces.append(rows[tuple(index)])
    found: TensorDict = pieces[0]
    if len(pieces) > 1:
        found = torch.cat(pieces)
    found.names = ["time"]
    return found


def time_dim(names: Sequence[str | None]) -> int:
    """Return the dimension of time of batches whose dimensions have these names."""
    if "time" not in names:
        return len(names) - 1
    return names.index("time")
