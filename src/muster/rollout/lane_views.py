"""The parts of a lane that a group reads and writes in every rollout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

from muster.keys import (
    IS_INIT,
    POLICY_VERSION,
    RESUMED,
    SEED,
    TRAJ_IDS,
    VALID,
    Key,
    next_of,
)
from muster.memory.slots import Lane
from muster.memory.specs import Array
from muster.protocols import EnvBatch
from muster.rollout.abilities import writes_next
from muster.rollout.carry import Carry
from muster.rollout.marks import CACHE_BYTES, NEVER, marks_of
from muster.rollout.options import RolloutOptions
from muster.rollout.values import quick_check

TERMINATED = next_of(("terminated",))
TRUNCATED = next_of(("truncated",))
DONE = next_of(("done",))

Rows = Any  # arrays, or tensors on a device
Fill = Callable[[Any], Any]


@dataclass(frozen=True)
class LaneViews:
    """The parts of a lane that a group reads and writes in every rollout; made once per slot.

    Parts of ``lane.arrays`` are made when they are used first: of rows on a device, most rollouts
    need no memory of the host.

    Attributes:
        arrays: those of the lane.
        reward_key: see ``EnvSpec``.
        observed: keys of the columns that the environments carry on.
        next_rows: columns of ``next`` observations, and the rows that are copied into them.
        copied_every: number of rows that are copied at once; these are still in the CPU's cache.
        carried: keys and rows of carried columns, and of these the first and the last one, ``[1, B,
            *shape]``.
        states: rows of carried columns that the environments do not write, and their values at a
            reset.
        marked: values of ``marks_of``.
        marks: these columns, and the values; ``marks_there``: those that are not arrays.
        fills: functions that fill these columns, and the values; those of a device if the rows are
            there.
        host_fills: the same for the arrays of columns on a device.
        is_fine: see ``quick_check``; None: every rollout needs ``first_bad_value``.
        mirrored: keys of columns to copy to the device after a rollout.
        flags: arrays of reward, done, terminated, truncated and ids.
        version, valid, resumed, seed: arrays of columns; None: the lane does not have them.
        version_there, resumed_there: the same columns where the rows are.
    """

    arrays: dict[Key, Array]
    reward_key: Key
    observed: list[Key]
    next_rows: list[tuple[Rows, Rows]]
    copied_every: int
    carried: list[tuple[Key, Rows, Rows, Rows]]
    states: list[tuple[Rows, bool]]
    marked: dict[Key, bool]
    marks_there: list[tuple[Rows, bool]]
    fills: list[tuple[Fill, bool]]
    is_fine: Callable[[], bool] | None
    mirrored: list[Key]
    version_there: Rows
    resumed_there: Rows

    @cached_property
    def marks(self) -> list[tuple[Rows, bool]]:
        """See ``LaneViews``."""
        return [*self.marks_there, *self._marks_here]

    @cached_property
    def host_fills(self) -> list[tuple[Fill, bool]]:
        """See ``LaneViews``."""
        if not self.mirrored:
            return []
        return [(array.fill, value) for array, value in self._marks_here]

    @cached_property
    def _marks_here(self) -> list[tuple[Array, bool]]:
        return [
            (self.arrays[key], value)
            for key, value in self.marked.items()
            if key in self.arrays
        ]

    @cached_property
    def flags(self) -> list[Array]:
        """See ``LaneViews``."""
        keys = (self.reward_key, DONE, TERMINATED, TRUNCATED, TRAJ_IDS)
        return [self.arrays[key] for key in keys]

    @cached_property
    def version(self) -> Array | None:
        """See ``LaneViews``."""
        return self.arrays.get(POLICY_VERSION)

    @cached_property
    def valid(self) -> Array | None:
        """See ``LaneViews``."""
        return self.arrays.get(VALID)

    @cached_property
    def resumed(self) -> Array | None:
        """See ``LaneViews``."""
        return self.arrays.get(RESUMED)

    @cached_property
    def seed(self) -> Array | None:
        """See ``LaneViews``."""
        return self.arrays.get(SEED)


def views_of(
    lane: Lane, env: EnvBatch, carry: Carry, options: RolloutOptions
) -> LaneViews:
    """Return the parts of a lane for a group with these environments; ``carry`` gets memory for the
    carried columns.
    """
    data = lane.data
    of_env = env.spec.carried_specs
    next_rows = []
    copied_every = NEVER
    if not (writes_next(env) or options.compact_obs):
        for key in of_env:
            next_rows.append((data[next_of(key)], data[key][1:]))
        row_bytes = sum(carry[key].nbytes for key in of_env)
        copied_every = max(1, CACHE_BYTES // max(row_bytes, 1))
    carried = []
    states = []
    for column in lane.layout.columns:
        if not column.carry:
            continue
        carry.of(column)  # allocates it
        key = column.key
        rows = data[key]
        carried.append((key, rows, rows[:1], rows[lane.T :]))
        if key not in of_env:
            states.append((rows, key == IS_INIT))
    values = marks_of(lane)
    marks_there: list[tuple[Rows, bool]] = []
    mirrored: list[Key] = []
    if lane.mirrored:
        marks_there = [(data[key], value) for key, value in values.items()]
        mirrored = [column.key for column in lane.layout.tensor_columns if column.host]
    return LaneViews(
        arrays=lane.arrays,
        reward_key=env.spec.reward_key,
        observed=list(of_env),
        next_rows=next_rows,
        copied_every=copied_every,
        carried=carried,
        states=states,
        marked=values,
        marks_there=marks_there,
        fills=_fills(lane, values),
        is_fine=quick_check(lane, env.spec, options.validate),
        mirrored=mirrored,
        version_there=data.get(POLICY_VERSION),
        resumed_there=data.get(RESUMED),
    )


def _fills(lane: Lane, values: Mapping[Key, bool]) -> list[tuple[Fill, bool]]:
    """Return functions that fill the columns with these values, and the values: one for columns
    beside each other.
    """
    fills: list[tuple[Fill, bool]] = []
    block: Any = lane.block
    offsets = lane.layout.offsets
    runs = groupby(
        lane.layout.tensor_columns, key=lambda column: values.get(column.key)
    )
    for value, columns in runs:
        if value is None:
            continue
        keys = [column.key for column in columns]
        last = keys[-1]
        first = offsets[keys[0]]
        end = offsets[last] + _nbytes(lane, last)
        part = block[first:end]
        fills.append((part.fill_ if lane.mirrored else part.fill, value))
    return fills


def _nbytes(lane: Lane, key: Key) -> int:
    rows: Any = lane.data[key]
    return int(rows.nbytes)
