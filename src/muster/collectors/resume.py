"""Exact resume: the state of a collector as plain data, and a report of what was restored."""

from __future__ import annotations

import copy
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from muster.collectors.engine import Engine
from muster.collectors.on_demand import OnDemand
from muster.collectors.options import Autosave
from muster.errors import BadCheckpoint, BadWeights, MusterError, described
from muster.restore import checkpoint
from muster.utils.interrupts import postponed
from muster.utils.whole_files import make_folder
from muster.weights.publish import PolicyWeights
from muster.workers import group_state
from muster.workers.pool import Pool
from muster.workers.requests import LoadState, MarkResumed, TakeState

FORMAT = 7
DROPPED_HERE = "Its worker is dropped in this collector: nothing runs it."
STATE_FILE = "collector.safetensors"
MALFORMED = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    AssertionError,
)
CUT_SHORT = "The state was saved after an error, in the middle of a batch."


@dataclass(frozen=True)
class ResumeReport:
    """The result of ``load_state_dict``.

    Attributes:
        restored: global numbers of the environments that continue exactly where they were.
        not_restored: reason for each other environment, by global number; these start new episodes.
        notes: other differences, a sentence each.
    """

    restored: tuple[int, ...]
    not_restored: dict[int, str]
    notes: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether collecting continues as if it had never stopped."""
        return not self.not_restored and not self.notes

    def __str__(self) -> str:
        lines = [
            f"{len(self.restored)} environments restored exactly, {len(self.not_restored)} begin"
            " new episodes"
        ]
        lines += [f"  environment {i}: {why}" for i, why in self.not_restored.items()]
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


@dataclass(frozen=True)
class CollectorParts:
    """The parts of a collector that have state.

    Attributes:
        kind: name of the collector's class.
        policy: policy that the collector was made with, or that acts in its process.
    """

    kind: str
    policy: Any
    engine: Engine
    weights: PolicyWeights
    on_demand: OnDemand


class Autosaver:
    """Writes a collector's state to a folder between batches, at an interval."""

    def __init__(self, saving: Autosave) -> None:
        self._saving = saving
        self._saved_at = time.monotonic()

    def save_if_due(self, parts: Callable[[], CollectorParts]) -> None:
        """Write the state, if the last time was an interval ago. Raises ``FileError``."""
        if time.monotonic() - self._saved_at < self._saving.every:
            return
        make_folder(self._saving.folder)
        checkpoint.save(Path(self._saving.folder) / STATE_FILE, state_of(parts()))
        self._saved_at = time.monotonic()


def state_of(parts: CollectorParts) -> dict[str, Any]:
    """Return the state of a collector between two batches."""
    policy = parts.policy
    engine = parts.engine
    source = engine.source_state()  # first: workers finish their rollouts here
    frames = sum(
        result["frames"]
        for rollout in source["rollouts"]
        for result in rollout["results"]
    )
    # Before the counters: both may join parts that could not be joined yet.
    pipeline = engine.pipeline.state_dict()
    on_demand, notes = parts.on_demand.state_dict()
    unsaved = parts.on_demand.unsaved
    acting = _acting(parts)
    states = _states_of_groups(engine.source.pool)
    for state, counts in zip(states, engine.source.pool.counters, strict=True):
        state["group"] |= {
            "executed": counts.executed,
            "discarded": dict(counts.discarded),
        }
    counters = engine.state_dict()
    counters["frames"] -= unsaved
    return {
        "format": FORMAT,
        "policy_state_dict": (
            copy.deepcopy(dict(acting.state_dict()))
            if isinstance(acting, torch.nn.Module)
            else None
        ),
        "policy_is_module": isinstance(policy, torch.nn.Module) or policy is None,
        "env_state_dict": [state["envs"] for state in states],
        "groups": [state["group"] for state in states],
        "engine": counters,
        "source": source,
        "in_flight": engine.source.in_flight
        - frames
        + unsaved
        + engine.next_batch.frames,
        "policy_version": parts.weights.version,
        "pipeline": pipeline,
        "on_demand": on_demand,
        "notes": notes,
        "options": _fingerprint(parts),
    }


def _states_of_groups(pool: Pool) -> list[dict[str, Any]]:
    """Return the state of every group; a dropped one has that of its counters."""
    of_living = {}
    for states in pool.call(TakeState()):
        for state in states:
            of_living[state.pop("number")] = state
    found = []
    for number, counts in enumerate(pool.counters):
        state = of_living.get(number)
        if state is None:
            state = group_state.of_dropped(counts.clock)
        found.append(state)
    return found


def load(
    parts: CollectorParts,
    state: Any,
    *,
    trust: bool,
    strict: bool = True,
    close: Callable[[], None],
) -> ResumeReport:
    """Load a state into a collector that was made in the same way.

    See ``BaseCollector.load_state_dict``. ``close`` is called if a part was loaded and the rest
    cannot be.
    """
    if isinstance(state, (str, os.PathLike)):
        path = Path(state)
        state = checkpoint.load(path / STATE_FILE if path.is_dir() else path)
    try:
        notes = _check(parts, state, strict)
    except MusterError:
        raise
    except MALFORMED as error:
        raise BadCheckpoint(
            f"the state is malformed ({described(error)}). Nothing was changed."
        ) from error
    try:
        with postponed():  # loaded or not, and not by half
            return _load(parts, state, trust, notes)
    except MALFORMED as error:
        # e.g. of an environment's reset
        if isinstance(error, MusterError) and not isinstance(error, BadCheckpoint):
            raise
        close()
        raise BadCheckpoint(
            f"the state is malformed ({described(error)}): something other than Muster has written"
            " it. A part was loaded, so this collector is shut down: make another."
        ) from error


def _load(
    parts: CollectorParts, state: Any, trust: bool, notes: list[str]
) -> ResumeReport:
    engine = parts.engine
    pool = parts.engine.source.pool
    notes = [*notes, *(str(note) for note in state["notes"])]
    engine.source.abandon("loaded")
    engine.load_state_dict(state["engine"])
    with parts.weights.in_mode():  # restoring a group may call the policy
        failed = _load_groups(engine, state, trust)
    # after the groups, whose loading may call the policy
    if state["policy_state_dict"] is not None:
        # ``_check`` has compared
        parts.weights.policy.load_state_dict(state["policy_state_dict"], strict=False)
    elif not state["policy_is_module"]:
        notes.append("the policy is not a module: what it keeps is not restored")
    restored = [
        int(i)
        for counts in pool.counters
        for i in counts.env_ids
        if int(i) not in failed
    ]
    if failed:
        pool.call(MarkResumed())
    parts.weights.restore(state["policy_version"])
    engine.source.load_state_dict(state["source"])
    engine.pipeline.load_state_dict(state["pipeline"], engine.place)
    parts.on_demand.load_state_dict(state["on_demand"])
    if engine.pipeline.episodes is not None:
        engine.pipeline.episodes.flush(failed)
    parts.on_demand.flush(list(failed))
    if state["in_flight"]:
        notes.append(
            f"{state['in_flight']} steps of a batch that an error had cut short are not restored"
        )
        pool.counters[0].discarded["not_saved"] += state["in_flight"]
    return ResumeReport(tuple(restored), failed, tuple(notes))


def _load_groups(engine: Engine, state: dict[str, Any], trust: bool) -> dict[int, str]:
    """Load the groups' state.

    Return the environments that start new episodes, by global number, with the reason.
    """
    pool = engine.source.pool
    groups = {
        number: {"group": group, "envs": envs}
        for number, (group, envs) in enumerate(
            zip(state["groups"], state["env_state_dict"], strict=True)
        )
    }
    failed: dict[int, str] = {}
    for of_worker in pool.call(
        LoadState(groups, CUT_SHORT if state["in_flight"] else None, trust)
    ):
        for of_group in of_worker:
            failed |= of_group
    for counts, group in zip(pool.counters, state["groups"], strict=True):
        discarded = {
            str(reason): index(steps) for reason, steps in group["discarded"].items()
        }
        clock = None
        if group["clock"] is not None:
            clock = np.stack([group["clock"]["episode"], group["clock"]["steps"]])
        counts.continue_from(index(group["executed"]), Counter(discarded), clock)
        if counts.dropped:
            failed |= dict.fromkeys(counts.env_ids.tolist(), DROPPED_HERE)
    engine.source.look_again()
    return failed


def _fingerprint(parts: CollectorParts) -> dict[str, Any]:
    """Return the properties in which a collector and a state must be equal."""
    engine = parts.engine
    infos = [counts.info for counts in engine.source.pool.counters]
    return {
        "environments": [info.num_envs for info in infos],
        "trajs_per_batch": engine.pipeline.episodes is not None,
        "observations": [info.observations for info in infos],
        "actions": [info.actions for info in infos],
    }


def _check(parts: CollectorParts, state: Any, strict: bool) -> list[str]:
    """Raise if the state does not fit, before anything is changed; return sentences on weights that
    differ.
    """
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise BadCheckpoint(
            "this is not a state of a collector: expected what state_dict() returned or"
            f" muster.save_state() wrote, got {type(state).__name__}"
        )
    here = _fingerprint(parts)
    for name, value in here.items():
        if state["options"][name] != value:
            raise BadCheckpoint(
                f"the state was saved by a collector with {name} {state['options'][name]}, this one"
                f" has {value}. Make the collector in the same way. Nothing was changed."
            )
    source = parts.engine.source
    if not source.can_load(state["source"]):
        raise BadCheckpoint(
            f"the state has {len(state['source']['rollouts'])} rollouts that were collected and not"
            f" delivered yet, and {parts.kind} cannot deliver them. Make the"
            " collector in the same way. Nothing was changed."
        )
    return _check_policy(_acting(parts), state["policy_state_dict"], strict)


def _acting(parts: CollectorParts) -> Any:
    """Return the object whose weights are in the state, if it is a module."""
    return (
        parts.weights.policy
        if isinstance(parts.policy, torch.nn.Module)
        else parts.policy
    )


def _check_policy(
    policy: Any, weights: dict[str, Any] | None, strict: bool
) -> list[str]:
    """Raise before any change: a module's ``load_state_dict`` copies matching weights before it
    raises for others.

    Returns:
        sentences on weights that only the state or only the policy has, if not ``strict``.
    """
    if (weights is not None) != isinstance(policy, torch.nn.Module):
        has = ("no weights", "the weights of a policy")
        raise BadCheckpoint(
            f"the state has {has[weights is not None]}, and this collector's policy is"
            f" {type(policy).__name__}. Nothing was changed."
        )
    if weights is None:
        return []
    own = policy.state_dict(keep_vars=True)
    missing = sorted(own.keys() - weights.keys())
    unknown = sorted(weights.keys() - own.keys())
    if strict and (missing or unknown):
        raise BadWeights(
            f"the state's weights do not fit: missing {missing}, unknown {unknown}. Nothing was"
            " changed. Pass strict=False to load those that both have."
        )
    for name, here in own.items():
        if name not in weights:
            continue
        if (
            torch.is_tensor(here)
            and not is_lazy(here)
            and here.shape != weights[name].shape
        ):
            raise BadWeights(
                f"weight {name} has shape {tuple(weights[name].shape)} in the state, and"
                f" {tuple(here.shape)} in the policy. Nothing was changed."
            )
    notes = []
    if missing:
        notes.append(
            f"weights {missing} of the policy are not in the state, and keep their values"
        )
    if unknown:
        notes.append(
            f"weights {unknown} of the state are not in the policy, and are ignored"
        )
    return notes
