"""The state of a group as plain data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from muster.group import Group
from muster.protocols import Outputs, Policy
from muster.resets import Due
from muster.sources.waiting import cells_of, plain

if TYPE_CHECKING:
    pass
else:
    pass


def take(group: Group, acting: str | None) -> dict[str, Any]:
    """All that a group carries from rollout to rollout, besides its environments."""
    return {
        "acting": acting,
        "clock": group.clock.state_dict(),
        "rng": group.rng.state_dict(),
        "call": None if group._primed is None else _call_state(*group._primed[1:]),
        "carry": {key: _plain(row) for key, row in group.carry.items()},
        "pending": list(group.pending),
        "seeds": dict(group.due.seeds),
        "started": group.started,
        "adapter": group.env.snapshot(),
    }


def load(group: Group, state: dict[str, Any], reasons: list[str | None], policy: Policy | None) -> dict[int, str]:
    """Go on from ``take``.

    Args:
        reasons: for every environment object, why it was not restored, or None.
        policy: that has acted last.

    Returns:
        the environments that begin anew, by global number, and why.
    """
    group.clock.load_state_dict(state["clock"])
    group.rng.load_state_dict(state["rng"])
    rows = {key: _row(row, group.env.device) for key, row in state["carry"].items()}
    group.carry.clear()  # also of what the policy here has carried
    group.carry.update(rows)
    call = state["call"]
    group._primed = None if call is None or policy is None else (policy, _call(call, group.B), call["version"])
    group.resumed = None if group.resumed is None else []
    group.due = Due(state["pending"], state["seeds"])
    group.started, group.unreported = state.get("started", True), 0
    if not any(reasons):
        group.env.restore(state["adapter"])
        return {}
    # One object per environment, or one for all of them: then none of them is restored.
    per_env = len(reasons) == group.B
    lost = [i for i, why in enumerate(reasons) if why] if per_env else list(range(group.B))
    group.reset(lost)
    group.resumed = lost
    return {int(group.clock.env_ids[i]): str(reasons[i] if per_env else next(filter(None, reasons))) for i in lost}


def _call_state(outputs: Outputs, version: int | str) -> dict[str, Any]:
    """A policy's call that has been made for the next row."""
    objects = {key: array.tolist() for key, array in outputs.objects.items()}
    tensors = {"action": outputs.action, "extras": outputs.extras, "state": outputs.state}
    return {name: {k: v.cpu() for k, v in part.items()} for name, part in tensors.items()} | {
        "objects": objects,
        "version": version,
    }


def _call(state: dict[str, Any], B: int) -> Outputs:
    objects = {key: np.empty(B, object) for key in state["objects"]}
    for key, array in objects.items():
        array[:] = state["objects"][key]
    return Outputs(state["action"], state["extras"], state["state"], objects)


def _plain(row: Any) -> Any:
    return plain(row) if isinstance(row, np.ndarray) else row.cpu().clone()


def _row(row: Any, device: Any) -> Any:
    if isinstance(row, list):
        return cells_of(row)
    return row.copy() if isinstance(row, np.ndarray) else row.to(device)
