"""The parts of a lane that a group reads and writes in every rollout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any

from muster.keys import IS_INIT, POLICY_VERSION, RESUMED, TRAJ_IDS, VALID, Key, next_of
from muster.memory.slots import Lane
from muster.rollout.marks import marks_of
from muster.rollout.values import quick_check

if TYPE_CHECKING:
    from muster.rollout.group import Group

TERMINATED, TRUNCATED, DONE = next_of(("terminated",)), next_of(("truncated",)), next_of(("done",))


class LaneViews:
    """The parts of a lane that a group reads and writes in every rollout; made once per slot.

    Attributes:
        next_rows: see ``NextObservations.columns_of``.
        carried: keys and rows of carried columns, and of these the first and the last one, ``[1, B,
            *shape]``.
        states: rows of carried columns that the environments do not write, and their values at a
            reset.
        marks: columns of ``marks_of``, and the values.
        fills: functions that fill these columns, and the values.
        is_fine: see ``quick_check``; None: every rollout needs ``first_bad_value``.
        mirrored: keys of columns to copy to the device after a rollout.
    """

    def __init__(self, group: Group, lane: Lane) -> None:
        data = lane.data
        arrays = lane.arrays
        columns = lane.layout.columns
        self.next_rows = group.next_obs.columns_of(lane)
        carried = [column for column in columns if column.carry]
        for column in carried:
            group.carry.of(column)  # allocates it
        rows_of = [(column.key, data[column.key]) for column in carried]
        self.carried = [(key, rows, rows[:1], rows[lane.T :]) for key, rows in rows_of]
        of_env = group.env.spec.carried_specs
        self.states = [(rows, key == IS_INIT) for key, rows in rows_of if key not in of_env]
        self.is_fine = quick_check(lane, group.env.spec, group.options.validate)
        values, places = marks_of(lane), (data, arrays) if lane.mirrored else (arrays,)
        self.marks = [
            (part[key], value) for part in places for key, value in values.items() if key in part
        ]
        if lane.mirrored:
            self.fills = [
                (getattr(rows, "fill_", None) or rows.fill, value) for rows, value in self.marks
            ]
        else:
            self.fills = _fills(lane, values)
        self.mirrored = [
            column.key for column in lane.layout.tensor_columns if column.host and lane.mirrored
        ]
        keys = group.env.spec.reward_key, DONE, TERMINATED, TRUNCATED, TRAJ_IDS
        self.flags = [arrays[key] for key in keys]
        self.version, self.valid, self.resumed = (
            arrays.get(POLICY_VERSION),
            arrays.get(VALID),
            arrays.get(RESUMED),
        )


def _fills(lane: Lane, values: Mapping[Key, bool]) -> list[tuple[Callable[[Any], Any], Any]]:
    """Return functions that fill the columns with these values, and the values: one for columns
    beside each other.
    """
    fills: list[tuple[Callable[[Any], Any], Any]] = []
    block: Any = lane.block
    offsets = lane.layout.offsets
    for value, columns in groupby(
        lane.layout.tensor_columns, key=lambda column: values.get(column.key)
    ):
        if value is not None:
            keys = [column.key for column in columns]
            end = offsets[keys[-1]] + lane.arrays[keys[-1]].nbytes
            fills.append((block[offsets[keys[0]] : end].fill, value))
    return fills
