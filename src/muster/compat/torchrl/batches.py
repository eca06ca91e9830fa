"""Conversion of Muster's batches to TorchRL's: columns, flags and omitted keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from muster.compat.torchrl.policies import AHEAD
from muster.keys import POLICY_VERSION, STEP_COUNT, TRAJ_IDS, TRUNCATED, Key, next_of
from muster.policies.tensordict_program import as_key

if TYPE_CHECKING:
    from tensordict import TensorDictBase


def tidy(
    batch: TensorDictBase,
    *,
    track_traj_ids: bool,
    limit: int | None,
    dropped: Sequence[Any],
) -> TensorDictBase:
    """Return a batch with TorchRL's columns.

    Args:
        track_traj_ids: keep the trajectory ids. All other columns below ``collector`` are removed.
        limit: ``max_frames_per_traj``. Like TorchRL, mark its last step as truncated even if the
            episode terminated.
        dropped: keys to omit.
    """
    version = batch.get(POLICY_VERSION, None)
    ids = batch.get(TRAJ_IDS)
    batch = batch.exclude("collector", *dropped)
    if track_traj_ids:
        batch.set(TRAJ_IDS, ids)
    if (ahead := batch.pop(AHEAD, None)) is not None:
        batch.get("next").update(ahead)
    if version is not None:
        batch.set("policy_version", version)
        batch.set(("next", "policy_version"), version.clone())
    if limit and next_of(STEP_COUNT) in batch.keys(True):
        batch.get(next_of(TRUNCATED)).logical_or_(
            batch.get(next_of(STEP_COUNT)) >= limit
        )
    return batch


def add_next_states(
    batch: TensorDictBase, last: Mapping[Key, torch.Tensor | None]
) -> None:
    """Add the policy's own states below ``next``: those of the following row, which are zero where
    episodes start.

    Args:
        last: states after the last row, by key; None: zeros.
    """
    dim = batch.ndim - 1
    for key, after in last.items():
        if (state := batch.get(key, None)) is not None:
            following = state.roll(-1, dim)
            following.select(dim, -1).copy_(
                torch.zeros((), device="cpu") if after is None else after
            )
            batch.set(next_of(key), following)


def restore_classes(batch: TensorDictBase, kinds: Mapping[Key, Any]) -> None:
    """Convert nested TensorDicts to the tensorclasses that the environment declares."""
    for key, kind in kinds.items():
        for path in (key, next_of(key)):
            if (node := batch.get(path, None)) is not None:
                batch.set(path, kind.from_tensordict(node))


def mark_end(batch: TensorDictBase, truncated: Sequence[Any]) -> TensorDictBase:
    """Implement ``set_truncated``: mark the last time step as truncated and done.

    The episode continues.

    TorchRL's own function fails for batches that are locked, which those on a device are.
    """
    for key in truncated:
        flag = batch.get(("next", *as_key(key)))
        flag[(slice(None),) * (batch.ndim - 1) + (-1,)] = True
        batch.get(("next", *as_key(key)[:-1], "done")).logical_or_(flag)
    return batch


def compact_keys(env: Any) -> list[Any]:
    """Return the keys that ``compact_obs`` omits: next observations, states, step counts and policy
    versions.
    """
    keys = [
        *getattr(env, "_observation_keys_step_mdp", ()),
        *getattr(env, "_state_keys_step_mdp", ()),
    ]
    return [("next", *as_key(key)) for key in keys] + [
        next_of(STEP_COUNT),
        ("next", "policy_version"),
    ]


def truncated_keys(env: Any, *, limited: bool) -> list[Any]:
    """Return the keys of the flags that ``set_truncated`` sets.

    Raises:
        RuntimeError: the environment has no such flags.
    """
    keys = [
        key
        for key in getattr(env, "done_keys", ["truncated"])
        if as_key(key)[-1] == "truncated"
    ]
    keys = keys or (["truncated"] if limited else [])
    if not keys:
        raise RuntimeError(
            "set_truncated was set to True but no truncated key could be found in the environment."
            " Make sure the truncated keys are properly set using `env.add_truncated_keys()` before"
            " passing the env to the collector."
        )
    return keys
