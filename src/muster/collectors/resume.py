"""Exact resume: the state of a collector as plain data, and a report on what of it was restored."""

from __future__ import annotations

import copy
import os
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from muster import checkpoint
from muster.envs import snapshot
from muster.errors import BadCheckpoint, BadWeights
from muster.group import Group
from muster.keys import dotted
from muster.protocols import Outputs, Policy

if TYPE_CHECKING:
    from muster.collectors.collector import Collector

FORMAT = 1
STATE_FILE = "collector.safetensors"
CUT_SHORT = "The state was saved after an error, in the middle of a batch."


@dataclass(frozen=True)
class ResumeReport:
    """What ``load_state_dict`` restored.

    Attributes:
        restored: global numbers of the environments that go on exactly where they were.
        not_restored: of those that begin a new episode instead, with the reason.
        notes: what else is not as it was, a sentence each.
    """

    restored: tuple[int, ...]
    not_restored: dict[int, str]
    notes: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """Collecting goes on as if it had never stopped."""
        return not self.not_restored and not self.notes

    def __str__(self) -> str:
        lines = [f"{len(self.restored)} environments restored exactly, {len(self.not_restored)} begin new episodes"]
        lines += [f"  environment {i}: {why}" for i, why in self.not_restored.items()]
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


def state_of(collector: Collector) -> dict[str, Any]:
    """The state of a collector between two batches."""
    policy, engine = collector.policy, collector._engine
    acting = collector._weights.policy
    return {
        "format": FORMAT,
        "policy_state_dict": copy.deepcopy(dict(acting.state_dict())) if isinstance(acting, torch.nn.Module) else None,
        "policy_is_module": isinstance(policy, torch.nn.Module) or policy is None,
        "env_state_dict": [[snapshot.take(env) for env in group.env.objects()] for group in engine.groups],
        "groups": [_group_state(group) for group in engine.groups],
        "engine": engine.state_dict(),
        "in_flight": engine.source.in_flight,
        "policy_version": collector._weights.version,
        "outlet": engine.outlet.state_dict(),
        "options": _fingerprint(collector),
    }


def load(collector: Collector, state: Any, *, trust: bool) -> ResumeReport:
    """Put a state into a collector that was made in the same way."""
    if isinstance(state, (str, os.PathLike)):
        path = Path(state)
        state = checkpoint.load(path / STATE_FILE if path.is_dir() else path)
    _check(collector, state)
    engine = collector._engine
    notes = []
    engine.load_state_dict(state["engine"])
    if state["policy_state_dict"] is not None:
        collector._weights.policy.load_state_dict(state["policy_state_dict"])
    elif not state["policy_is_module"]:
        notes.append("the policy is no module: whatever it keeps is not restored")
    restored: list[int] = []
    failed: dict[int, str] = {}
    for group, saved, envs in zip(engine.groups, state["groups"], state["env_state_dict"], strict=True):
        cut = CUT_SHORT if state["in_flight"] else None
        objects = zip(group.env.objects(), envs, strict=True)
        reasons = [cut or snapshot.restore(env, taken, trust) for env, taken in objects]
        failed.update(_load_group(group, saved, reasons, engine.source.policy))
        restored += [int(i) for i in group.clock.env_ids if int(i) not in failed]
    engine.source.look_again()
    for group in engine.groups if failed else ():
        group.resumed = group.resumed or []  # all of them have the column then
    collector._weights.restore(state["policy_version"])
    engine.outlet.load_state_dict(state["outlet"])
    if engine.outlet.episodes is not None:
        engine.outlet.episodes.flush(failed)
    if state["in_flight"]:
        notes.append(f"{state['in_flight']} steps of a batch that an error had cut short are not restored")
        engine.groups[0].discarded["not_saved"] += state["in_flight"]
    return ResumeReport(tuple(restored), failed, tuple(notes))


class Autosave:
    """Writes a collector's state into a folder, not more often than every so many seconds."""

    def __init__(self, folder: str | os.PathLike[str] | None, every: float) -> None:
        self._folder = None if folder is None else Path(folder)
        self._every = every
        self._last = time.monotonic()

    def now_and_then(self, collector: Collector) -> None:
        """Called before a batch, when the user is done with the one before."""
        if self._folder is None or time.monotonic() - self._last < self._every:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        checkpoint.save(self._folder / STATE_FILE, state_of(collector))
        self._last = time.monotonic()


def _group_state(group: Group) -> dict[str, Any]:
    return {
        "clock": group.clock.state_dict(),
        "rng": group.rng.state_dict(),
        "call": None if group._primed is None else _call_state(*group._primed[1:]),
        "carry": {key: _plain(row) for key, row in group.carry.items()},
        "pending": list(group._pending),
        "seeds": dict(group._seeds),
        "executed": group.executed,
        "discarded": dict(group.discarded),
        "adapter": group.env.snapshot(),
    }


def _load_group(
    group: Group, state: dict[str, Any], reasons: list[str | None], policy: Policy | None
) -> dict[int, str]:
    """Returns the environments that begin anew, by global number, and why."""
    group.clock.load_state_dict(state["clock"])
    group.rng.load_state_dict(state["rng"])
    rows = {
        key: row.to(group.env.device) if torch.is_tensor(row) else row.copy() for key, row in state["carry"].items()
    }
    group.carry.clear()  # also of what the policy here has carried
    group.carry.update(rows)
    call = state["call"]
    group._primed = None if call is None or policy is None else (policy, _call(call, group.B), call["version"])
    group.resumed = None if group.resumed is None else []
    group._pending, group._seeds = list(state["pending"]), dict(state["seeds"])
    group.executed, group.discarded = state["executed"], Counter(state["discarded"])
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
    return row.cpu().clone() if torch.is_tensor(row) else row.copy()


def _fingerprint(collector: Collector) -> dict[str, Any]:
    """What has to be the same for a state to fit."""
    engine = collector._engine
    return {
        "environments": [group.B for group in engine.groups],
        "trajs_per_batch": engine.outlet.episodes is not None,
        "observations": [
            {dotted(key): str(spec) for key, spec in group.env.observation_specs.items()} for group in engine.groups
        ],
        "actions": [
            {dotted(key): str(spec) for key, spec in group.env.action_specs.items()} for group in engine.groups
        ],
    }


def _check(collector: Collector, state: Any) -> None:
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise BadCheckpoint(
            f"this is no state of a collector: expected what state_dict() returned or muster.save_state() wrote, "
            f"got {type(state).__name__}"
        )
    here = _fingerprint(collector)
    for name, value in here.items():
        if state["options"][name] != value:
            raise BadCheckpoint(
                f"the state was saved by a collector with {name} {state['options'][name]}, this one has {value}. "
                f"Make the collector in the same way. Nothing was changed."
            )
    _check_policy(collector._weights.policy, state["policy_state_dict"])


def _check_policy(policy: Any, weights: dict[str, Any] | None) -> None:
    """Raise before anything is changed: ``load_state_dict`` copies what fits before it complains of the rest."""
    if (weights is not None) != isinstance(policy, torch.nn.Module):
        has = ("no weights", "the weights of a policy")
        raise BadCheckpoint(
            f"the state has {has[weights is not None]}, and this collector's policy is {type(policy).__name__}. "
            f"Nothing was changed."
        )
    if weights is None:
        return
    own = policy.state_dict(keep_vars=True)
    if own.keys() != weights.keys():
        missing, unknown = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
        raise BadWeights(f"the state's weights do not fit: missing {missing}, unknown {unknown}. Nothing was changed.")
    for name, here in own.items():
        if torch.is_tensor(here) and not is_lazy(here) and here.shape != weights[name].shape:
            raise BadWeights(
                f"weight {name} has shape {tuple(weights[name].shape)} in the state, and {tuple(here.shape)} in the "
                f"policy. Nothing was changed."
            )
