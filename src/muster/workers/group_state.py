"""The state of groups, and of complete, undelivered rollouts, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from operator import index
from typing import Any

import numpy as np

from muster.capabilities import KeepsState, capability
from muster.episodes.record import Episodes
from muster.errors import BadCheckpoint
from muster.keys import dotted
from muster.memory.slots import Lane, Layout, Slot, SlotState, as_tensor
from muster.memory.specs import OBJECT, Array, Column
from muster.protocols import Outputs, Policy
from muster.rollout.bootstrap import BootstrapRows
from muster.rollout.group import FirstCall, Group
from muster.rollout.marks import Final
from muster.workers.messages import RolloutResult

# fields of a result that are plain data already
PARTS = "group", "frames", "rows", "version", "path", "dropped"


def take(group: Group, acting: str | None) -> dict[str, Any]:
    """Return the state that a group carries between rollouts, without the state of its
    environments.
    """
    keeping = capability(group.env, KeepsState)
    return {
        "acting": acting,
        "clock": group.clock.state_dict(),
        "rng": group.rng.state_dict(),
        "call": None if group.first_call is None else _call_state(group.first_call),
        "carry": {key: _plain(row) for key, row in group.carry.items()},
        "pending": list(group.pending),
        "seeds": dict(group.due.seeds),
        "agent_returns": None if group.agent_returns is None else group.agent_returns.state_dict(),
        "seeding": group.seeding.state_dict(),
        "started": group.random_start.is_over,
        "unreported": group.random_start.unreported,
        "adapter": {} if keeping is None else keeping.snapshot(),
    }


def load(
    group: Group, state: dict[str, Any], reasons: list[str | None], policy: Policy | None
) -> dict[int, str]:
    """Restore a state from ``take``, in which ``policy`` acted last.

    Args:
        reasons: for every environment object, the reason why it was not restored, or None.

    Returns:
        the environments that start new episodes (global numbers), each with the reason.
    """
    group.clock.load_state_dict(state["clock"])
    group.rng.load_state_dict(state["rng"])
    rows = {key: _row(row, group.env.spec.device) for key, row in state["carry"].items()}
    for key, row in rows.items():
        like = group.carry.get(key)  # None: a recurrent state that the policy has not made yet
        if row.shape[:2] != (1, group.B) or (
            like is not None and (row.shape, row.dtype) != (like.shape, like.dtype)
        ):
            raise BadCheckpoint(
                f"the row of {dotted(key)} has shape {tuple(row.shape)} and dtype {row.dtype}"
            )
    group.carry.clear()  # also of columns of this process's policy
    group.carry.update(rows)
    call = state["call"]
    group.discard_call()
    if call is not None and policy is not None:
        group.keep_call(FirstCall(policy, _outputs(call), call["version"]))
    group.take_resumed()
    group.due.load(state["pending"], state["seeds"], group.B)
    if group.agent_returns is not None:
        group.agent_returns.load_state_dict(state.get("agent_returns"))
    group.seeding.load_state_dict(state.get("seeding"))
    group.random_start.load(index(state["unreported"]), is_over=bool(state["started"]))
    if not any(reasons):
        keeping = capability(group.env, KeepsState)
        if keeping is not None:
            keeping.restore(state["adapter"])
        return {}
    # One object per environment, or one for all of them: then none of them is restored.
    # Where agents take turns, the open turns of all games are lost with one of them.
    per_env = len(reasons) == group.B and not group.env.spec.agents
    if group.env.spec.agents:
        group.clock.abandon(range(group.B))
    lost = [i for i, why in enumerate(reasons) if why] if per_env else list(range(group.B))
    group.reset(lost)
    group.mark_resumed(lost)
    return {
        int(group.env_ids[i]): str(reasons[i] if per_env else next(filter(None, reasons)))
        for i in lost
    }


def _call_state(call: FirstCall) -> dict[str, Any]:
    """Return the outputs of a policy call that was already made for the next row, as plain data."""
    outputs = call.outputs
    objects = {key: array.tolist() for key, array in outputs.objects.items()}
    tensors = {
        "action": outputs.action,
        "extras": outputs.extras,
        "state": outputs.state,
        "begun": outputs.begun,
    }
    return {name: {k: v.cpu() for k, v in part.items()} for name, part in tensors.items()} | {
        "objects": objects,
        "version": call.version,
    }


def _outputs(state: dict[str, Any]) -> Outputs:
    objects = {key: _leaf(values) for key, values in state["objects"].items()}
    begun = state.get("begun", {})  # earlier states have none
    return Outputs(state["action"], state["extras"], state["state"], objects, begun)


def _plain(row: Any) -> Any:
    return plain(row) if isinstance(row, np.ndarray) else row.cpu().clone()


def _row(row: Any, device: Any) -> Any:
    if isinstance(row, list):
        return cells_of(row)
    return row.copy() if isinstance(row, np.ndarray) else row.to(device)


# --- undelivered rollouts -------------------------------------------------------------------------


def to_plain(slot: Slot, results: Sequence[RolloutResult]) -> dict[str, Any]:
    """Copy a full slot and the results of its lanes into plain data."""
    layout = slot.layout
    return {
        "T": layout.T,
        "B": layout.B,
        "batch_shape": layout.batch_shape,
        "columns": _plain_columns(layout.columns),
        "lanes": [_lane(lane, result) for lane, result in zip(slot.lanes, results, strict=True)],
        "results": [_result(result) for result in results],
    }


def layout_of(saved: Mapping[str, Any]) -> Layout:
    """Return the layout of the saved slot."""
    columns = _columns_of(saved["columns"])
    return Layout(
        saved["T"], saved["B"], columns, len(saved["lanes"]), batch_shape=saved["batch_shape"]
    )


def write(saved: Mapping[str, Any], slot: Slot) -> None:
    """Write the saved lanes into a slot of the same layout, which is complete then."""
    for lane, columns in zip(slot.lanes, saved["lanes"], strict=True):
        for key, rows in columns.items():
            if key in lane.arrays:
                lane.arrays[key][...] = cells_of(rows) if isinstance(rows, list) else rows
            if lane.mirrored and key in lane.tensors:
                lane.tensors[key].copy_(as_tensor(rows))
        lane.complete(lane.T)
    slot.state = SlotState.FULL


def result_of(saved: Mapping[str, Any], number: int) -> RolloutResult:
    """Return a saved result as the result of request ``number``."""
    return RolloutResult(
        number,
        **{name: saved[name] for name in PARTS},
        episodes=None if saved["episodes"] is None else Episodes.from_state(saved["episodes"]),
        values=None if saved["values"] is None else _values_of(saved["values"]),
        finals=[
            Final(f["t"], f["envs"], {k: _leaf(v) for k, v in f["leaves"].items()})
            for f in saved["finals"]
        ],
    )


def _plain_columns(columns: Sequence[Column]) -> list[dict[str, Any]]:
    known = [{f.name: getattr(column, f.name) for f in fields(Column)} for column in columns]
    return [{**column, "dtype": column["dtype"].str} for column in known]


def _columns_of(saved: Sequence[Mapping[str, Any]]) -> tuple[Column, ...]:
    return tuple(Column(**{**column, "dtype": np.dtype(column["dtype"])}) for column in saved)


def _lane(lane: Lane, result: RolloutResult) -> dict[Any, Any]:
    columns = lane.data | result.objects
    return {column.key: _plain(columns[column.key]) for column in lane.layout.columns}


def _plain_values(values: BootstrapRows) -> dict[str, Any]:
    """Return the rows that need values of the policy, and the values if they are known."""
    return {
        "t": values.t.copy(),
        "env": values.env.copy(),
        "last": values.last.copy(),
        "rows": {key: _plain(rows) for key, rows in values.rows.items()},
        "columns": _plain_columns(values.columns),
        "values": None if values.values is None else values.values.copy(),
    }


def _values_of(saved: Mapping[str, Any]) -> BootstrapRows:
    return BootstrapRows(**{**saved, "columns": _columns_of(saved["columns"])})


def _result(result: RolloutResult) -> dict[str, Any]:
    finals = [
        {
            "t": f.t,
            "envs": [int(i) for i in f.envs],
            "leaves": {key: plain(leaf) for key, leaf in f.leaves.items()},
        }
        for f in result.finals
    ]
    return {
        **{name: getattr(result, name) for name in PARTS},
        "episodes": None if result.episodes is None else result.episodes.state_dict(),
        "finals": finals,
        "values": None if result.values is None else _plain_values(result.values),
    }


def plain(array: Array) -> Any:
    """Return a copy of an array; Python objects, ``[rows, B]`` or ``[B]``, as lists."""
    return array.tolist() if array.dtype == OBJECT else array.copy()


def cells_of(rows: list[list[Any]]) -> Array:
    """Return an object array ``[rows, B]``, also of cells that NumPy would convert to arrays."""
    cells = np.empty((len(rows), len(rows[0])), OBJECT)
    for t, row in enumerate(rows):
        for b, cell in enumerate(row):
            cells[t, b] = cell
    return cells


def _leaf(values: list[Any] | Array) -> Array:
    return cells_of([values]).reshape(-1) if isinstance(values, list) else values
