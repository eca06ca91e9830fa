"""Records of finished episodes, as objects or as columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import numpy as np
from typing_extensions import Self

from muster.keys import Key, mask_of, nested
from muster.memory.specs import OBJECT, Array


class EpisodeRecord(NamedTuple):
    """One finished episode. It may have started in an earlier batch.

    Attributes:
        traj_id: trajectory id, as in ``collector/traj_ids``.
        env_id: number of the environment over all groups.
        episode_return: undiscounted sum of rewards as stored (float32), added up in float64.
        length: number of steps.
        terminated, truncated: flags of the last step. An episode that ``reset()`` cuts has no
            record.
        info: fields of the last step's ``info`` that the option ``info`` stores and that were
            present; None without it. Where agents act at the same time, also ``"agent_returns"``,
            the return of each by name; where they take turns, ``"agent"``, the agent whose episode
            it is.
    """

    traj_id: int
    env_id: int
    episode_return: float
    length: int
    terminated: bool
    truncated: bool
    info: dict[str, Any] | None = None


@dataclass(frozen=True, eq=False)
class Episodes(Sequence[EpisodeRecord]):
    """Records of episodes as columns, in order of their ends. Record objects are made on access."""

    traj_id: Array
    env_id: Array
    episode_return: Array
    length: Array
    terminated: Array
    truncated: Array
    info: Array | None = None  # of dicts

    @overload
    def __getitem__(self, index: int) -> EpisodeRecord: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[EpisodeRecord]: ...
    def __getitem__(
        self,
        index: int | slice,
    ) -> EpisodeRecord | Sequence[EpisodeRecord]:
        if isinstance(index, slice):
            columns = [column[index].tolist() for column in self.columns()]
            return list(map(EpisodeRecord, *columns))
        return EpisodeRecord(*(column.item(index) for column in self.columns()))

    @property
    def would_wait(self) -> bool:
        """Whether a look at them would wait for a device."""
        return False

    def __len__(self) -> int:
        return len(self.traj_id)

    def __iter__(self) -> Iterator[EpisodeRecord]:
        return iter(self[:])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return list(self) == list(other)

    def state_dict(self) -> list[Any]:
        """Return the columns as plain data that shares no memory with them."""
        columns = []
        for column in self.columns():
            columns.append(column.tolist() if column.dtype == OBJECT else column.copy())
        return columns

    @classmethod
    def from_state(cls, state: Sequence[Any]) -> Self:
        """Restore ``state_dict()``."""
        columns = list(state)
        if len(columns) == len(NO_EPISODES.columns()) + 1:
            given = columns.pop()
            infos = np.empty(len(given), OBJECT)
            for row, info in enumerate(given):
                infos[row] = info
            columns.append(infos)
        return cls(*columns)

    def columns(self) -> tuple[Array, ...]:
        own = (
            self.traj_id,
            self.env_id,
            self.episode_return,
            self.length,
            self.terminated,
            self.truncated,
        )
        return own if self.info is None else (*own, self.info)


class PendingEpisodes(Episodes):
    """Records that are on their way from a device: the first look at them reads them, and waits if
    they have not arrived.

    Args:
        read: returns the records.
        have_arrived: returns whether ``read`` does not wait.
    """

    def __init__(
        self,
        read: Callable[[], Episodes],
        have_arrived: Callable[[], bool],
    ) -> None:
        vars(self)["source"] = (read, have_arrived)

    @property
    def would_wait(self) -> bool:
        """Whether a look at them would wait."""
        source = vars(self).get("source")
        if source is None:
            return False
        _, have_arrived = source
        return not have_arrived()

    def __getattr__(self, name: str) -> Any:
        columns = vars(self)
        source = columns.get("source")
        if source is not None and not name.startswith("_"):
            read, _ = source
            columns.update(vars(read()))
            columns.pop(
                "source", None
            )  # with the memory of the device that it refers to
        if name not in columns:
            raise AttributeError(name)
        return columns[name]

    def __reduce__(self) -> tuple[Any, ...]:
        return Episodes, self.columns()


NO_EPISODES = Episodes(
    traj_id=np.empty(0, np.int64),
    env_id=np.empty(0, np.int64),
    episode_return=np.empty(0, float),
    length=np.empty(0, np.int64),
    terminated=np.empty(0, bool),
    truncated=np.empty(0, bool),
)
"""Where none has ended."""


def join_episodes(parts: Sequence[Episodes]) -> Episodes:
    """Join the episodes of several groups, group by group; pending ones are read when the result
    is used.
    """
    if len(parts) == 1 and type(parts[0]) is Episodes and len(parts[0].traj_id):
        return parts[0]  # the usual case
    pending = [part for part in parts if isinstance(part, PendingEpisodes)]
    if pending and len(parts) == 1:
        return pending[0]
    if any(part.would_wait for part in pending):
        return PendingEpisodes(
            lambda: _join(parts), lambda: not any(part.would_wait for part in pending)
        )
    return _join(parts)


def _join(parts: Sequence[Episodes]) -> Episodes:
    parts = [part for part in parts if len(part)]
    if not parts:
        return NO_EPISODES
    if len(parts) == 1:
        return parts[0]
    columns = zip(*(part.columns() for part in parts), strict=True)
    return Episodes(*map(np.concatenate, columns))


def info_records(columns: Mapping[Key, Sequence[Any] | Array], n: int) -> Array:
    """Return the infos of ``n`` steps as dicts, from columns of values and of flags by name, ``[n,
    ...]`` each.
    """
    records = np.empty(n, OBJECT)
    fields = []
    for path, values in columns.items():
        present = columns.get(mask_of(path))
        if present is not None:
            fields.append((path, values, present))
    for row in range(n):
        found = {
            path: _plain(values[row])
            for path, values, present in fields
            if present[row]
        }
        records[row] = nested(found)
    return records


def _plain(value: Any) -> Any:
    """Return a number or text unchanged, an array as a copy."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.copy()
    return value
