"""Rows and cells of a lane without a transition: those after an episode that no other follows, and
after a stop.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from muster.env_spec import EnvSpec
from muster.episodes.clock import AgentClock
from muster.episodes.record import info_records
from muster.keys import (
    AGENT,
    DONE,
    FLAGS,
    INFO,
    NEXT_OBS_VALID,
    SEED,
    TERMINATED,
    TRAJ_DONE,
    TRAJ_IDS,
    TRUNCATED,
    VALID,
    Key,
    next_of,
)
from muster.memory.slots import Lane
from muster.memory.specs import Array, Specs

if TYPE_CHECKING:
    import torch
else:
    from muster.utils import lazy_torch as torch

NEVER = 1 << 62
CACHE_BYTES = (
    1 << 18
)  # pieces of this size are still in the CPU's cache when they are copied


@dataclass
class Final:
    """Observations after row ``t`` of the environments ``envs``, if the next row does not contain
    them.
    """

    t: int
    envs: Sequence[int]
    leaves: dict[Key, Array]


class NextObservations:
    """Writes ``next`` observations of one rollout: copies the rows after each step, in pieces,
    before resets overwrite them.

    Args:
        keys: keys of observations.
        columns: columns of ``next`` observations, and the rows that are copied into them; empty: the
            lane has none of them.
        every: number of rows that are copied at once.

    Attributes:
        finals: observations that are in no row.
        due: the row after which the next copy is due.
    """

    def __init__(
        self, keys: Sequence[Key], columns: Sequence[tuple[Any, Any]], every: int
    ) -> None:
        self._keys = keys
        self._columns = columns
        self._every = every
        self._copied = 0
        self.due = every - 1
        self.finals: list[Final] = []

    def copy(self, end: int) -> None:
        """Copy the rows before ``end`` that have not been copied yet."""
        begin = self._copied
        self._copied = end
        self.due = end + self._every - 1
        if begin < end:
            for after, before in self._columns:
                if end - begin == len(after):
                    after[...] = before
                else:
                    after[begin:end] = before[begin:end]

    def keep(
        self, lane: Lane, t: int, envs: Sequence[int], known: Collection[int]
    ) -> None:
        """Keep the observations after row ``t`` of ``envs``, except those of ``known``
        environments.
        """
        index = [i for i in envs if i not in known]
        leaves = {key: lane.arrays[key][t + 1, index].copy() for key in self._keys}
        self.finals.append(Final(t, index, leaves))

    def take_finals(self) -> list[Final]:
        """Return and forget the observations that are in no row."""
        finals = self.finals
        if finals:
            self.finals = []
        return finals

    def infos(self, lane: Lane, over: Array, begin: int = 0) -> Array:
        """Return the infos of the last steps of episodes as dicts, in order.

        ``over``: ``[n, B]``, in rows from ``begin`` on.
        """
        t, env = over.nonzero()
        t += begin
        keys = [key for key in self._keys if key[0] == INFO]
        if self._columns:
            columns = {key[1:]: lane.arrays[next_of(key)][t, env] for key in keys}
            return info_records(columns, len(t))
        cells: dict[tuple[int, int], tuple[dict[Key, Array], int]] = {}
        for final in self.finals:
            for place, i in enumerate(final.envs):
                cells[final.t, i] = (final.leaves, place)
        found = [cells[cell] for cell in zip(t.tolist(), env.tolist(), strict=True)]
        by_field = {}
        for key in keys:
            by_field[key[1:]] = [leaves[key][place] for leaves, place in found]
        return info_records(by_field, len(t))

    def take_back(self, begin: int) -> None:
        """Discard the rows from ``begin`` on, which are not complete."""
        self._copied = min(self._copied, begin)
        self.due = self._copied + self._every - 1
        self.finals = [final for final in self.finals if final.t < begin]


def marks_of(lane: Lane) -> dict[Key, bool]:
    """Return the columns of flags and marks, with their values in valid rows without an end."""
    values = dict.fromkeys((*FLAGS, *map(next_of, FLAGS), TRAJ_DONE), False)
    values[NEXT_OBS_VALID] = True
    values[VALID] = True
    return {key: value for key, value in values.items() if key in lane.data}


def nested_truncations(specs: Specs) -> list[Key]:
    """Return the nested ``truncated`` flags among observations that have a ``done`` beside them."""
    flags = [key for key, spec in specs.items() if len(key) > 1 and spec.dtype == bool]
    truncated = [key for key in flags if key[-1] == "truncated"]
    return [key for key in truncated if (*key[:-1], "done") in specs]


def mark_end(
    lane: Lane, t: int, env_spec: EnvSpec, *, limited: bool, there: bool = False
) -> None:
    """For ``set_truncated``: mark the last row ``t`` as truncated where no episode ended.

    Nested flags are marked in the ``next`` columns only, since the episode continues. The root is
    not marked if only nested flags can be truncated.

    Args:
        limited: ``max_frames_per_traj`` is set, so the root can be truncated, too.
        there: the rows are completed on the device.
    """
    nested = nested_truncations(env_spec.observation_specs)
    pairs = []
    for key in nested:
        done_key = (*key[:-1], "done")
        pairs.append((next_of(key), next_of(done_key)))
    if TRUNCATED in env_spec.flags or limited or not nested:
        pairs.append((next_of(TRUNCATED), next_of(DONE)))
    for truncated, done in pairs:
        if truncated in lane.data:
            on_host = truncated in lane.arrays and not there
            data = lane.arrays if on_host else lane.data
            data[truncated][t] |= ~data[done][t]
            data[done][t] = True


def end_agents(lane: Lane, n: int, clock: AgentClock) -> None:
    """Truncate the current episodes of all agents in the first ``n`` rows; the environments will be
    reset.

    Each agent's last row is marked. An agent without a row starts a new trajectory.
    """
    agents = lane.arrays[AGENT][:n]
    terminated = lane.arrays[next_of(TERMINATED)][:n]
    truncated = lane.arrays[next_of(TRUNCATED)][:n]
    for b in range(lane.B):
        for agent in range(len(clock.agents)):
            rows = np.flatnonzero(agents[:, b] == agent)
            if len(rows):
                last = rows[-1]
                truncated[last, b] |= not terminated[last, b]
            else:
                clock.abandon([b], agent)


def cut_after_end(lane: Lane, done: Array, reward_key: Key) -> Array:
    """Discard steps after the end of each environment's first episode (``reset_when_done=False``).

    They were made only because the episodes of other environments continued.

    Args:
        done: done flags of the stepped rows, ``[n, B]``; changed in place.

    Returns:
        mask of the discarded cells, ``[n, B]``.
    """
    late = np.zeros_like(done)
    np.logical_or.accumulate(done[:-1], axis=0, out=late[1:])
    done[late] = False
    for key in (reward_key, next_of(TERMINATED), next_of(TRUNCATED)):
        lane.arrays[key][: len(done)][late] = 0
    return late


def blank(lane: Lane, valid: Array, *, repeat_flags: bool) -> None:
    """Write zeros (None for objects, id -1, not valid) into all cells but the ``valid`` ones (``[n,
    B]``, first rows).

    Args:
        repeat_flags: repeat the flags of an ended episode up to the end of the lane.
    """
    cells = np.ones((lane.T, lane.B), bool)
    cells[: len(valid)] = ~valid
    for column in lane.layout.columns:
        source = lane.arrays if column.host else lane.data
        data = source[column.key][: lane.T]
        value: Any = 0 if column.is_tensor else None
        if column.key in (TRAJ_IDS, SEED):
            value = -1
        where: Any = cells
        if not isinstance(data, np.ndarray):
            where = torch.from_numpy(cells).to(data.device)
        data[where] = value
    if not repeat_flags:
        return
    for flag in FLAGS:
        ended = np.logical_or.accumulate(lane.arrays[next_of(flag)], axis=0)
        for key in (flag, next_of(flag)):
            lane.arrays[key][cells] = ended[cells]


def mark_valid(
    lane: Lane,
    n: int,
    late: Array | None,
    *,
    repeat_flags: bool,
    shared: tuple[Array, int, int] | None,
) -> tuple[int, int]:
    """Blank the cells without a transition, and write the column of valid cells.

    Args:
        late: mask of cells without a transition among the n stepped rows, ``[n, B]``; None: all
            have one.
        repeat_flags: see ``blank``.
        shared: indices of the environments among those that share a batch, their number, and the
            number of frames of the batch; cells beyond it are not valid. None: no limit.

    Returns:
        number of valid cells, and number of cells beyond the limit.
    """
    valid = np.ones((n, lane.B), bool) if late is None else ~late
    surplus = 0
    if late is not None or n < lane.T:
        blank(lane, valid, repeat_flags=repeat_flags)
    if shared is not None:
        places, sharing, limit = shared
        places_in_batch = np.arange(n)[:, None] * sharing + places
        beyond = valid & (places_in_batch >= limit)
        surplus = int(beyond.sum())
        valid &= ~beyond
    if VALID in lane.arrays:
        lane.arrays[VALID][:n] = valid
    return int(valid.sum()), surplus
