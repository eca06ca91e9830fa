"""The parts of a lane that a group reads and writes in every rollout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import groupby
from typing import Any

from muster.keys import IS_INIT, POLICY_VERSION, RESUMED, SEED, TRAJ_IDS, VALID, Key, next_of
from muster.memory.slots import Lane
from muster.protocols import EnvBatch
from muster.rollout.abilities import writes_next
from muster.rollout.carry import Carry
from muster.rollout.marks import CACHE_BYTES, NEVER, marks_of
from muster.rollout.options import RolloutOptions
from muster.rollout.values import quick_check, quick_row_check

TERMINATED = next_of(("terminated",))
TRUNCATED = next_of(("truncated",))
DONE = next_of(("done",))


class LaneViews:
    """The parts of a lane that a group reads and writes in every rollout; made once per slot.

    Attributes:
        observed: keys of the columns that the environments carry on.
        next_rows: columns of ``next`` observations, and the rows that are copied into them.
        copied_every: number of rows that are copied at once; these are still in the CPU's cache.
        carried: keys and rows of carried columns, and of these the first and the last one, ``[1, B,
            *shape]``.
        states: rows of carried columns that the environments do not write, and their values at a
            reset.
        marks: columns of ``marks_of``, and the values.
        fills: functions that fill these columns, and the values; those of a device if the rows are
            there.
        host_fills: the same for the arrays of columns on a device.
        is_fine: see ``quick_check``; None: every rollout needs ``first_bad_value``.
        row_is_fine: see ``quick_row_check``; None: every row needs ``first_bad_value``.
        mirrored: keys of columns to copy to the device after a rollout.
    """

    def __init__(self, env: EnvBatch, carry: Carry, options: RolloutOptions, lane: Lane) -> None:
        data = lane.data
        arrays = lane.arrays
        columns = lane.layout.columns
        of_env = env.spec.carried_specs
        self.observed = list(of_env)
        self.next_rows: list[tuple[Any, Any]] = []
        self.copied_every = NEVER
        if not (writes_next(env) or options.compact_obs):
            for key in of_env:
                self.next_rows.append((data[next_of(key)], data[key][1:]))
            row_bytes = sum(carry[key].nbytes for key in of_env)
            self.copied_every = max(1, CACHE_BYTES // max(row_bytes, 1))
        carried = [column for column in columns if column.carry]
        self.carried: list[tuple[Key, Any, Any, Any]] = []
        self.states: list[tuple[Any, bool]] = []
        for column in carried:
            carry.of(column)  # allocates it
            key = column.key
            rows = data[key]
            self.carried.append((key, rows, rows[:1], rows[lane.T :]))
            if key not in of_env:
                self.states.append((rows, key == IS_INIT))
        self.is_fine = quick_check(lane, env.spec, options.validate)
        self.row_is_fine = quick_row_check(lane, env.spec, options.validate)
        values = marks_of(lane)
        self.marks: list[tuple[Any, Any]] = []
        parts = (data, arrays) if lane.mirrored else (arrays,)
        for part in parts:
            for key, value in values.items():
                if key in part:
                    self.marks.append((part[key], value))
        self.fills = _fills(lane, values)
        self.host_fills: list[tuple[Callable[[Any], Any], Any]] = []
        if lane.mirrored:
            self.host_fills = [(arrays[key].fill, values[key]) for key in values if key in arrays]
        self.mirrored: list[Key] = []
        if lane.mirrored:
            self.mirrored = [column.key for column in lane.layout.tensor_columns if column.host]
        keys = (env.spec.reward_key, DONE, TERMINATED, TRUNCATED, TRAJ_IDS)
        self.flags = [arrays[key] for key in keys]
        self.version = arrays.get(POLICY_VERSION)
        self.valid = arrays.get(VALID)
        self.resumed = arrays.get(RESUMED)
        self.version_there = data.get(POLICY_VERSION)
        self.resumed_there = data.get(RESUMED)
        self.seed = arrays.get(SEED)


def _fills(lane: Lane, values: Mapping[Key, bool]) -> list[tuple[Callable[[Any], Any], Any]]:
    """Return functions that fill the columns with these values, and the values: one for columns
    beside each other.
    """
    fills: list[tuple[Callable[[Any], Any], Any]] = []
    block: Any = lane.block
    offsets = lane.layout.offsets
    runs = groupby(lane.layout.tensor_columns, key=lambda column: values.get(column.key))
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
