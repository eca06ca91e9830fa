"""The state of groups, and of complete, undelivered rollouts, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np

from muster.capabilities import KeepsState, capability
from muster.episodes.record import Episodes
from muster.errors import BadCheckpoint
from muster.keys import Key, dotted
from muster.memory.slots import Lane, Layout, Slot, SlotState, as_tensor
from muster.memory.specs import OBJECT, Array, Column
from muster.protocols import Outputs, Policy
from muster.rollout.bootstrap import BootstrapRows
from muster.rollout.carry import FirstCall
from muster.rollout.group import Group
from muster.rollout.marks import Final
from muster.workers.messages import RolloutResult

if TYPE_CHECKING:
    import torch

WAS_DROPPED = "Its worker had been dropped when the state was saved."
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
        "call": None
        if group.carry.first_call is None
        else _call_state(group.carry.first_call),
        "carry": {key: _plain(row) for key, row in group.carry.items()},
        "pending": list(group.pending),
        "seeds": dict(group.due.seeds),
        "agent_returns": None
        if group.agent_returns is None
        else group.agent_returns.state_dict(),
        "seeding": group.seeding.state_dict(),
        "started": group.random_start.is_over,
        "unreported": group.random_start.unreported,
        "adapter": {} if keeping is None else keeping.snapshot(),
    }


def of_dropped(clock: Array | None) -> dict[str, Any]:
    """Return the state of a group whose worker was dropped, like those of ``Worker.state``.

    Args:
        clock: see ``FrameCounters.clock``.
    """
    saved = None
    if clock is not None:
        episode, steps = clock
        saved = {"episode": episode.copy(), "steps": steps.copy()}
    return {"group": {"acting": None, "clock": saved}, "envs": None}


def begin_after_dropped(
    group: Group, clock: Mapping[str, Array] | None
) -> dict[int, str]:
    """Let a group begin where one was dropped, of which nothing but the ``clock`` was saved.

    Returns:
        all of its environments (global numbers), each with the reason why it begins a new episode.
    """
    group.carry.discard_call()
    group.clock.abandon(range(group.B))
    if clock is not None:
        group.clock.begin_at(clock["episode"] + (clock["steps"] > 0))
    group.reset()
    group.carry.mark_resumed(range(group.B))
    return dict.fromkeys(group.env_ids.tolist(), WAS_DROPPED)


def load(
    group: Group,
    state: dict[str, Any],
    reasons: list[str | None],
    policy: Policy | None,
) -> dict[int, str]:
    """Restore a state from ``take``, in which ``policy`` acted last.

    Args:
        reasons: for every environment object, the reason why it was not restored, or None.

    Returns:
        the environments that start new episodes (global numbers), each with the reason.
    """
    group.clock.load_state_dict(state["clock"])
    group.rng.load_state_dict(state["rng"])
    _load_carry(group, state["carry"])
    call = state["call"]
    group.carry.discard_call()
    if call is not None and policy is not None:
        group.carry.keep_call(FirstCall(policy, _outputs(call), call["version"]))
    group.carry.take_resumed()
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
    if group.env.spec.agents:
        group.clock.abandon(range(group.B))
    lost = _lost(group, reasons)
    group.reset(list(lost))
    group.carry.mark_resumed(list(lost))
    ids = group.env_ids
    return {int(ids[i]): why for i, why in lost.items()}


def _load_carry(group: Group, saved: Mapping[Key, Any]) -> None:
    rows = {}
    for key, plain_row in saved.items():
        row = _row(plain_row, group.env.spec.device)
        like = group.carry.get(
            key
        )  # None: a recurrent state that the policy has not made yet
        fits = row.shape[:2] == (1, group.B)
        if fits and like is not None:
            fits = row.shape == like.shape and row.dtype == like.dtype
        if not fits:
            raise BadCheckpoint(
                f"the row of {dotted(key)} has shape {tuple(row.shape)} and dtype {row.dtype}"
            )
        rows[key] = row
    group.carry.clear()  # also of columns of this process's policy
    group.carry.update(rows)


def _lost(group: Group, reasons: list[str | None]) -> dict[int, str]:
    """Return the environments of a group that are not restored, each with the reason."""
    # One object per environment, or one for all of them: then none of them is restored.
    # Where agents take turns, the open turns of all games are lost with one of them.
    per_env = len(reasons) == group.B and not group.env.spec.agents
    if per_env:
        return {i: why for i, why in enumerate(reasons) if why}
    first = next(why for why in reasons if why)
    return dict.fromkeys(range(group.B), first)


def _call_state(call: FirstCall) -> dict[str, Any]:
    """Return the outputs of a policy call that was already made for the next row, as plain data."""
    outputs = call.outputs
    return {
        "action": _on_cpu(outputs.action),
        "extras": _on_cpu(outputs.extras),
        "state": _on_cpu(outputs.state),
        "begun": _on_cpu(outputs.begun),
        "objects": {key: array.tolist() for key, array in outputs.objects.items()},
        "version": call.version,
    }


def _on_cpu(tensors: Mapping[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
    return {key: tensor.cpu() for key, tensor in tensors.items()}


def _outputs(state: dict[str, Any]) -> Outputs:
    objects = {key: _leaf(values) for key, values in state["objects"].items()}
    begun = state.get("begun", {})  # earlier states have none
    return Outputs(state["action"], state["extras"], state["state"], objects, begun)


def _plain(row: Any) -> Any:
    if isinstance(row, np.ndarray):
        return plain(row)
    return row.cpu().clone()


def _row(row: Any, device: Any) -> Any:
    if isinstance(row, list):
        return cells_of(row)
    if isinstance(row, np.ndarray):
        return row.copy()
    return row.to(device, copy=True)


# --- undelivered rollouts -------------------------------------------------------------------------


def to_plain(slot: Slot, results: Sequence[RolloutResult]) -> dict[str, Any]:
    """Copy a full slot and the results of its lanes into plain data."""
    layout = slot.layout
    pairs = zip(slot.lanes, results, strict=True)
    return {
        "T": layout.T,
        "B": layout.B,
        "batch_shape": layout.batch_shape,
        "columns": _plain_columns(layout.columns),
        "lanes": [_lane(lane, result) for lane, result in pairs],
        "results": [_result(result) for result in results],
    }


def layout_of(saved: Mapping[str, Any]) -> Layout:
    """Return the layout of the saved slot."""
    return Layout(
        saved["T"],
        saved["B"],
        _columns_of(saved["columns"]),
        len(saved["lanes"]),
        batch_shape=saved["batch_shape"],
    )


def write(saved: Mapping[str, Any], slot: Slot) -> None:
    """Write the saved lanes into a slot of the same layout, which is complete then."""
    for lane, columns in zip(slot.lanes, saved["lanes"], strict=True):
        for key, rows in columns.items():
            if key in lane.arrays:
                cells = cells_of(rows) if isinstance(rows, list) else rows
                lane.arrays[key][...] = cells
            if lane.mirrored and key in lane.tensors:
                lane.tensors[key].copy_(as_tensor(rows))
        lane.complete(lane.T)
    slot.state = SlotState.FULL


def result_of(saved: Mapping[str, Any], number: int) -> RolloutResult:
    """Return a saved result as the result of request ``number``."""
    parts = {name: saved[name] for name in PARTS}
    episodes = saved["episodes"]
    values = saved["values"]
    return RolloutResult(
        number,
        **parts,
        episodes=None if episodes is None else Episodes.from_state(episodes),
        values=None if values is None else _values_of(values),
        finals=[_final_of(final) for final in saved["finals"]],
        steps_before=saved.get("steps_before"),  # earlier states have none
    )


def _plain_columns(columns: Sequence[Column]) -> list[dict[str, Any]]:
    found = []
    for column in columns:
        known = {field.name: getattr(column, field.name) for field in fields(Column)}
        known["dtype"] = column.dtype.str
        found.append(known)
    return found


def _columns_of(saved: Sequence[Mapping[str, Any]]) -> tuple[Column, ...]:
    columns = []
    for known in saved:
        dtype = np.dtype(known["dtype"])
        columns.append(Column(**{**known, "dtype": dtype}))
    return tuple(columns)


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
    columns = _columns_of(saved["columns"])
    return BootstrapRows(**{**saved, "columns": columns})


def _plain_final(final: Final) -> dict[str, Any]:
    return {
        "t": final.t,
        "envs": [int(i) for i in final.envs],
        "leaves": {key: plain(leaf) for key, leaf in final.leaves.items()},
    }


def _final_of(saved: Mapping[str, Any]) -> Final:
    leaves = {key: _leaf(values) for key, values in saved["leaves"].items()}
    return Final(saved["t"], saved["envs"], leaves)


def _result(result: RolloutResult) -> dict[str, Any]:
    parts = {name: getattr(result, name) for name in PARTS}
    episodes = result.episodes
    values = result.values
    return {
        **parts,
        "episodes": None if episodes is None else episodes.state_dict(),
        "finals": [_plain_final(final) for final in result.finals],
        "values": None if values is None else _plain_values(values),
        "steps_before": result.steps_before,
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
    if isinstance(values, list):
        return cells_of([values]).reshape(-1)
    return values
