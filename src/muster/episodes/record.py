"""Records of finished episodes, one by one or as columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, overload

import numpy as np

from muster.memory.specs import Array


class EpisodeRecord(NamedTuple):
    """One finished episode, also where it began in an earlier batch.

    Attributes:
        traj_id: as in ``collector/traj_ids``.
        env_id: number of the environment over all groups.
        episode_return: undiscounted sum of rewards as stored (float32), added up in float64.
        length: steps.
        terminated, truncated: how it ended. What ``reset()`` cuts has no record.
    """

    traj_id: int
    env_id: int
    episode_return: float
    length: int
    terminated: bool
    truncated: bool


@dataclass(frozen=True, eq=False)
class Episodes(Sequence[EpisodeRecord]):
    """Records of episodes as columns, in order of their ends; records are made when looked at."""

    traj_id: Array
    env_id: Array
    episode_return: Array
    length: Array
    terminated: Array
    truncated: Array

    @overload
    def __getitem__(self, index: int) -> EpisodeRecord: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[EpisodeRecord]: ...
    def __getitem__(self, index: int | slice) -> EpisodeRecord | Sequence[EpisodeRecord]:
        columns = (c[index].tolist() for c in self.columns())
        return list(map(EpisodeRecord, *columns)) if isinstance(index, slice) else EpisodeRecord(*columns)

    def __len__(self) -> int:
        return len(self.traj_id)

    def __iter__(self) -> Iterator[EpisodeRecord]:
        return iter(self[:])

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    def columns(self) -> tuple[Array, ...]:
        return self.traj_id, self.env_id, self.episode_return, self.length, self.terminated, self.truncated


NO_EPISODES = Episodes(*(np.empty(0, d) for d in (np.int64, np.int64, float, np.int64, bool, bool)))
"""Where none has ended."""


def join_episodes(parts: Sequence[Episodes]) -> Episodes:
    """The episodes of several groups, group by group."""
    if len(parts) == 1:
        return parts[0]
    columns = zip(*(part.columns() for part in parts), strict=True)
    return Episodes(*map(np.concatenate, columns)) if parts else NO_EPISODES
