"""Conversion of the arguments of TorchRL's constructor to an environment, options and an engine."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import torch
from torchrl.collectors.utils import _validate_traj_format
from torchrl.envs import EnvBase, StepCounter, TransformedEnv
from torchrl.envs.utils import ExplorationType
from torchrl.modules import RandomPolicy

from muster.collectors.engine import Engine
from muster.collectors.options import CollectorOptions, Execution
from muster.collectors.setup import in_this_thread, make_groups
from muster.compat.torchrl.policies import as_torchrl_calls, needs_trial, take_actions_as_they_are
from muster.errors import BadOption
from muster.keys import Key
from muster.policies.tensordict_program import as_key
from muster.protocols import EnvBatch
from muster.weights.publish import PolicyWeights

KEPT = (  # arguments that are attributes of a TorchRL collector
    *("frames_per_batch", "total_frames", "device", "max_frames_per_traj", "init_random_frames", "reset_at_each_iter"),
    *("postproc", "split_trajs", "track_traj_ids", "exploration_type", "return_same_td", "reset_when_done"),
    *("interruptor", "set_truncated", "replay_buffer", "extend_buffer", "no_cuda_sync", "worker_idx"),
    *("trajs_per_batch", "trajs_per_write", "traj_format", "compact_obs"),
)


def parse(cls: Any, args: Any, kwargs: Any) -> SimpleNamespace:
    """Return the arguments with TorchRL's defaults, checked as TorchRL does, for a class like ``Collector``."""
    name = cls.__name__
    bound = cls.__signature__.bind(*args, **kwargs)
    bound.apply_defaults()
    given = SimpleNamespace(**bound.arguments)
    given.traj_pool = given.kwargs.pop("traj_pool", None)
    if given.kwargs:
        raise TypeError(f"Keys {list(given.kwargs)} are unknown to {name}.")
    _check_backend(given, name)
    if not given.reset_when_done:
        raise ValueError("reset_when_done is deprecated.")
    for option in ("frames_per_batch", "total_frames", "max_frames_per_traj", "init_random_frames"):
        value = getattr(given, option)
        if value is not None and (isinstance(value, bool) or value != int(value)):
            raise BadOption(f"{option}={value!r}: expected an integer")
    if given.frames_per_batch < 1:
        raise BadOption(f"frames_per_batch={given.frames_per_batch!r}: expected an integer of at least 1")
    given.traj_format = _validate_traj_format(
        given.traj_format, given.trajs_per_batch, has_replay_buffer=given.replay_buffer is not None
    )
    given.max_frames_per_traj = int(given.max_frames_per_traj or 0)
    given.exploration_type = given.exploration_type or ExplorationType.RANDOM
    given.compact_obs, given.split_trajs = bool(given.compact_obs), bool(given.split_trajs)
    if given.split_trajs:
        if not given.track_traj_ids:
            raise ValueError("split_trajs=True requires track_traj_ids=True.")
        warnings.warn(
            "split_trajs=True produces a (N_traj, T_max) zero-padded tensordict with a 'mask' key. For sequence "
            "training, whole trajectories (trajs_per_batch), or a replay buffer with a SliceSampler, need no padding.",
            stacklevel=3,
        )
    return given


def options_of(given: SimpleNamespace, env: Any, limit: int | None, *, per_step: bool) -> CollectorOptions:
    """Return Muster's options of the engine. The compat layer implements all other arguments.

    Args:
        limit: limit of steps from ``limit_steps``.
        per_step: add every time step to the replay buffer separately.
    """
    native = isinstance(env, EnvBase)
    named = isinstance(env, str)
    return CollectorOptions(
        env,
        frames_per_batch=-(-given.frames_per_batch // count_of(env)) * count_of(env),
        create_env_kwargs=given.create_env_kwargs if named else None,
        max_frames_per_traj=limit,
        interruptor=None if per_step else given.interruptor,
        trust_policy=True if native or given.trust_policy else None,
        compile_policy=given.compile_policy,
        cudagraph_policy=given.cudagraph_policy,
        compact_obs=given.compact_obs and not per_step,
        replay_buffer=given.replay_buffer if per_step else None,
        extend_buffer=not per_step,
        track_policy_version=given.track_policy_version,
        storing_device=given.storing_device,
        policy_device=given.policy_device,
        exploration_type=given.exploration_type,
        # As in TorchRL, values are not checked, and all draws use torch's global generator, seeded by the program.
        validate="off",
        obs_dtype="env",  # a network of another dtype fails in TorchRL, too
        # Environments and policies may keep their tensors.
        execution=Execution(inference_mode=False, own_rng=False),
        seed=None if native else int(torch.randint(1 << 31, ())),
        num_threads=None,
    )


def one_env(create_env_fn: Any) -> Any:
    """Return the only entry of a list; anything else unchanged."""
    if isinstance(create_env_fn, Sequence) and not isinstance(create_env_fn, (str, bytes)):
        if len(create_env_fn) != 1:
            raise ValueError("backend='direct' requires exactly one environment constructor.")
        return create_env_fn[0]
    return create_env_fn


def limit_steps(env: Any, policy: Any, limit: int) -> tuple[Any, int | None]:
    """Apply ``max_frames_per_traj`` with TorchRL's transform, unless Muster's own limit has the same results.

    Returns:
        the environment, and the limit for Muster to apply (None: no limit).
    """
    if limit <= 0 or not isinstance(env, EnvBase):
        return env, limit if limit > 0 else None
    if any("step_count" in as_key(key) for key in env.output_spec.keys(True, True)):
        raise ValueError(
            "A 'step_count' key is already present in the environment and the 'max_frames_per_traj' argument may "
            "conflict with a 'StepCounter' that has already been set. Possible solutions: Set max_frames_per_traj to "
            "0 or remove the StepCounter limit from the environment transforms."
        )
    reads = getattr(policy, "in_keys", None)
    unread = isinstance(policy, RandomPolicy) or (reads is not None and ("step_count",) not in map(as_key, reads))
    if unread and all(len(as_key(key)) == 1 for key in env.done_keys):
        return env, limit
    return TransformedEnv(env, StepCounter(max_steps=limit)), None


def count_of(env: Any) -> int:
    """Return the number of environments in ``env``; 1 if it is unknown before ``env`` is made."""
    return int(env.batch_size.numel()) if isinstance(env, EnvBase) else int(getattr(env, "num_envs", 1))


def make_engine(
    env: Any, policy: Any, device: Any, weights: PolicyWeights, options: CollectorOptions, *, buffers: bool
) -> Engine:
    """Return an engine for ``env`` after its first reset. ``buffers``: all batches have the full shape."""
    with ExitStack() as made:
        groups = make_groups(env, options, policy, device, made)
        for group in groups:
            group.begin()
        if isinstance(env, EnvBase):
            take_actions_as_they_are(groups[0], policy, device, needs_trial(policy, env, buffers))
            policy = as_torchrl_calls(policy, groups[0], options.devices["policy_device"])
        source, worker = in_this_thread(options, groups, policy, device)
        engine = Engine(options, source, weights, stacked=False, local=worker)
        made.pop_all()
    return engine


def classes_of(env: EnvBatch) -> dict[Key, Any]:
    """Return the tensorclasses that a TorchRL environment declares, by key."""
    nodes = getattr(getattr(env, "specs", None), "nodes", {})
    return {path: node.kind for path, node in nodes.items() if node.kind is not None}


def _check_backend(given: SimpleNamespace, name: str) -> None:
    """Raise unless the arguments select collection in this process."""
    selectors = (given.backend, given.num_collectors, given.sync, given.backend_options)
    if name != "Collector" and any(value is not None for value in selectors):
        raise TypeError(
            "backend, backend_options, num_collectors, and sync are only supported when constructing Collector "
            "directly."
        )
    if given.num_collectors not in (None, 1):
        raise ValueError("backend='direct' supports at most one collector.")
    if given.sync is not None:
        raise ValueError("sync is only valid for non-direct collectors.")
    if given.backend_options:
        raise ValueError("backend_options are only valid for non-direct collectors.")
