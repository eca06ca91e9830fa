"""The parts of a lane that a group reads and writes in every rollout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muster.keys import IS_INIT, POLICY_VERSION, RESUMED, TRAJ_IDS, VALID, next_of
from muster.memory.slots import Lane
from muster.protocols import carried_specs
from muster.rollout.marks import marks_of
from muster.rollout.values import quick_check

if TYPE_CHECKING:
    from muster.rollout.group import Group

TERMINATED, TRUNCATED, DONE = next_of(("terminated",)), next_of(("truncated",)), next_of(("done",))


class LaneViews:
    """The parts of a lane that a group reads and writes in every rollout; made once per slot.

    Attributes:
        next_rows: see ``NextObservations.columns_of``.
        carried: keys and rows of carried columns.
        states: rows of carried columns that the environments do not write, and their values at a reset.
        marks: see ``marks_of``.
        fills: for each of ``marks``, a function that fills the column, and the value.
        is_fine: see ``quick_check``; None: every rollout needs ``first_bad_value``.
        mirrored: keys of columns to copy to the device after a rollout.
    """

    def __init__(self, group: Group, lane: Lane) -> None:
        data, arrays, columns = lane.data, lane.arrays, lane.layout.columns
        self.next_rows = group.next_obs.columns_of(lane)
        carried = [column for column in columns if column.carry]
        for column in carried:
            group.carry.of(column)  # allocates it
        self.carried = [(column.key, data[column.key]) for column in carried]
        of_env = carried_specs(group.env)
        own = [(key, rows) for key, rows in self.carried if key not in of_env]
        self.states = [(rows, key == IS_INIT) for key, rows in own]
        self.is_fine = quick_check(lane, group.env, group.options.validate)
        self.marks = marks_of(lane)
        self.fills = [(marks.fill if hasattr(marks, "fill") else marks.fill_, value) for marks, value in self.marks]
        self.mirrored = [column.key for column in lane.layout.tensor_columns if column.host and lane.mirrored]
        keys = group.env.reward_key, DONE, TERMINATED, TRUNCATED, TRAJ_IDS
        self.flags = [arrays[key] for key in keys]
        self.version, self.valid, self.resumed = arrays.get(POLICY_VERSION), arrays.get(VALID), arrays.get(RESUMED)
