"""Rollouts that are complete and not delivered, as plain data, for the state of a collector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from muster.episodes.record import Episodes
from muster.marks import Final
from muster.memory.slots import Lane, Layout, Slot
from muster.memory.specs import OBJECT, Array, Column
from muster.sources.messages import Report

PARTS = "group", "frames", "rows", "version", "path", "dropped", "elsewhere"  # of a report that are plain already


def to_plain(slot: Slot, reports: Sequence[Report]) -> dict[str, Any]:
    """A full slot and the reports on its lanes. Shares no memory with the slot."""
    layout = slot.layout
    columns = [{f.name: getattr(column, f.name) for f in fields(Column)} for column in layout.columns]
    return {
        "T": layout.T,
        "B": layout.B,
        "batch_shape": layout.batch_shape,
        "columns": [{**column, "dtype": column["dtype"].str} for column in columns],
        "lanes": [_lane(lane, report) for lane, report in zip(slot.lanes, reports, strict=True)],
        "reports": [_report(report) for report in reports],
    }


def layout_of(saved: Mapping[str, Any]) -> Layout:
    """The layout of the slot."""
    columns = tuple(Column(**{**column, "dtype": np.dtype(column["dtype"])}) for column in saved["columns"])
    return Layout(saved["T"], saved["B"], columns, len(saved["lanes"]), batch_shape=saved["batch_shape"])


def write(saved: Mapping[str, Any], slot: Slot) -> None:
    """Write the lanes into a slot of this layout."""
    for lane, arrays in zip(slot.lanes, saved["lanes"], strict=True):
        for key, rows in arrays.items():
            lane.arrays[key][...] = cells_of(rows) if isinstance(rows, list) else rows


def report_of(saved: Mapping[str, Any], number: int) -> Report:
    """The report, as that on order ``number``; its steps are in the account already."""
    return Report(
        number,
        **{name: saved[name] for name in PARTS},
        episodes=None if saved["episodes"] is None else Episodes(*saved["episodes"]),
        finals=[Final(f["t"], f["envs"], {k: _leaf(v) for k, v in f["leaves"].items()}) for f in saved["finals"]],
        entered=True,
    )


def _lane(lane: Lane, report: Report) -> dict[Any, Any]:
    arrays = lane.arrays | report.objects
    return {column.key: plain(arrays[column.key]) for column in lane.layout.columns}


def _report(report: Report) -> dict[str, Any]:
    finals = [
        {"t": f.t, "envs": [int(i) for i in f.envs], "leaves": {key: plain(leaf) for key, leaf in f.leaves.items()}}
        for f in report.finals
    ]
    episodes = None if report.episodes is None else [column.copy() for column in report.episodes.columns()]
    return {**{name: getattr(report, name) for name in PARTS}, "episodes": episodes, "finals": finals}


def plain(array: Array) -> Any:
    """A copy; of objects ``[rows, B]`` or ``[B]`` as lists."""
    return array.tolist() if array.dtype == OBJECT else array.copy()


def cells_of(rows: list[list[Any]]) -> Array:
    """``[rows, B]``, also of objects that NumPy would take for arrays."""
    cells = np.empty((len(rows), len(rows[0])), OBJECT)
    for t, row in enumerate(rows):
        for b, cell in enumerate(row):
            cells[t, b] = cell
    return cells


def _leaf(values: list[Any] | Array) -> Array:
    return cells_of([values]).reshape(-1) if isinstance(values, list) else values
