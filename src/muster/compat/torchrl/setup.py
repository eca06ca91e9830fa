"""Conversion of the arguments of TorchRL's constructor to an environment, options and an engine."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import torch
from torchrl._utils import RL_WARNINGS
from torchrl.collectors.utils import _validate_traj_format
from torchrl.envs import EnvBase, StepCounter, TransformedEnv
from torchrl.envs.batched_envs import BatchedEnvBase
from torchrl.envs.utils import ExplorationType
from torchrl.modules import RandomPolicy
from torchrl.modules.utils.utils import _compute_missing_env_transforms

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
    signature, name, ignore_buffer = cls.__signature__, cls.__name__, cls._ignore_rb
    bound = signature.bind(*args, **kwargs)
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
    given.init_random_frames = max(0, int(given.init_random_frames or 0))
    if given.total_frames is None or given.total_frames < 0:
        given.total_frames = float("inf")
    given.exploration_type = given.exploration_type or ExplorationType.RANDOM
    given.compact_obs, given.split_trajs = bool(given.compact_obs), bool(given.split_trajs)
    _check_buffer(given, ignored=ignore_buffer)
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


def make_env(create_env_fn: Any, kwargs: Mapping[str, Any] | None) -> Any:
    """Return the environment: TorchRL's, or any that ``muster.Collector`` takes."""
    if isinstance(create_env_fn, Sequence) and not isinstance(create_env_fn, (str, bytes)):
        if len(create_env_fn) != 1:
            raise ValueError("backend='direct' requires exactly one environment constructor.")
        create_env_fn = create_env_fn[0]
    if not isinstance(create_env_fn, EnvBase):
        return create_env_fn(**(kwargs or {})) if callable(create_env_fn) else create_env_fn
    if kwargs:
        if not isinstance(create_env_fn, BatchedEnvBase):
            raise RuntimeError(
                f"kwargs were passed to Collector but they can't be set on environment of type {type(create_env_fn)}."
            )
        create_env_fn.update_kwargs(kwargs)
    return create_env_fn


def resolve_devices(given: SimpleNamespace) -> None:
    """Set missing devices to ``device``; ``storing_device`` then defaults to that of policy and environment."""
    for name in ("storing_device", "policy_device", "env_device"):
        value = getattr(given, name)
        setattr(given, name, _device(given.device if value is None else value))
    if given.storing_device is None and given.policy_device == given.env_device:
        given.storing_device = given.env_device


def add_transforms(env: Any, policy: Any, wanted: bool | None) -> Any:
    """Append transforms that the policy needs. With ``wanted=None``, only warn: Muster keeps recurrent states."""
    if wanted is False or not isinstance(env, EnvBase):
        return env
    missing = _compute_missing_env_transforms(env, policy)
    if wanted:
        for transform in missing:
            env = env.append_transform(transform)
    elif missing:
        names = ", ".join(type(transform).__name__ for transform in missing)
        warnings.warn(
            f"The env passed to Collector is missing transforms required by the policy ({names}). From torchrl v0.15 "
            "the collector will append them automatically. To enable that behavior now (and silence this warning), "
            "pass `auto_register_policy_transforms=True`. To opt out permanently, pass "
            "`auto_register_policy_transforms=False`.",
            FutureWarning,
            stacklevel=3,
        )
    return env


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


def warn_of_surplus(given: Any, num_envs: int) -> None:
    """Warn, as TorchRL does, if more frames are collected than requested."""
    per_batch, total, random = given.frames_per_batch, given.total_frames, given.init_random_frames
    messages = []
    if total != float("inf") and total % per_batch:
        messages.append(
            f"total_frames ({total}) is not exactly divisible by frames_per_batch ({per_batch}). This means "
            f"{per_batch - total % per_batch} additional frames will be collected."
        )
    if random % per_batch:
        messages.append(
            f"init_random_frames ({random}) is not exactly a multiple of frames_per_batch ({per_batch}),  this results "
            f"in more init_random_frames than requested ({-(-random // per_batch) * per_batch})."
        )
    if per_batch % num_envs:
        messages.append(
            f"frames_per_batch ({per_batch}) is not exactly divisible by the number of batched environments "
            f"({num_envs}),  this results in more frames_per_batch per iteration that requested "
            f"({-(-per_batch // num_envs) * num_envs})."
        )
    for message in messages if RL_WARNINGS else ():
        warnings.warn(
            f"{message} To silence this message, set the environment variable RL_WARNINGS to False.", stacklevel=5
        )


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


def _check_buffer(given: SimpleNamespace, *, ignored: bool) -> None:
    if given.replay_buffer is None or ignored:
        return
    for wrong, what in (
        (given.postproc is not None and not given.extend_buffer, "postproc must be None"),
        (given.split_trajs and not given.extend_buffer, "split_trajs must be None/False"),
        (given.return_same_td, "return_same_td must be False"),
    ):
        if wrong:
            raise TypeError(f"{what} when a replay buffer is passed, or extend_buffer must be set to True.")
    if given.use_buffers:
        raise TypeError("replay_buffer is exclusive with use_buffers.")


def _device(value: Any) -> torch.device | None:
    if value is None:
        return None
    device = torch.device(value)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
    return device
