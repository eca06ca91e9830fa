"""The parts of a collector: groups of environments, and the policy as the loop calls it."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from muster.collectors.options import CollectorOptions
from muster.columns import RolloutOptions
from muster.envs.build import BuiltEnv, build_env
from muster.errors import BadOption
from muster.group import Group
from muster.keys import STEP_COUNT, TRUNCATED
from muster.policies.adapt import adapt, takes_tensordict
from muster.policies.heads import Head
from muster.protocols import EnvBatch, Policy
from muster.rng import GroupRng


def make_groups(
    create_env_fn: Any, options: CollectorOptions, policy_device: torch.device | None, made: ExitStack
) -> list[Group]:
    """One group for every entry of ``create_env_fn``; ``made`` closes them if anything fails later."""
    makers = list(create_env_fn) if isinstance(create_env_fn, (list, tuple)) else [create_env_fn]
    if not makers:
        raise BadOption("create_env_fn is an empty list: expected at least one environment")
    built: list[BuiltEnv] = []
    for maker, kwargs in zip(makers, _keywords(options.create_env_kwargs, len(makers)), strict=True):
        built.append(build_env(maker, options.num_envs, kwargs, options.devices["env_device"]))
        made.callback(built[-1].env.close)
        _check_env(built[-1].env, options)
    objects = [id(_innermost(env)) for b in built for env in b.env.objects()]
    if len(set(objects)) < len(objects):
        raise BadOption("create_env_fn has the same environment object twice; give functions that make one")
    total = sum(b.env.num_envs for b in built)
    surplus = options.frames_per_batch % total
    if surplus and options.trajs_per_batch:
        raise BadOption(
            f"frames_per_batch={options.frames_per_batch} cannot be shared equally by {total} environments, and the "
            f"episodes of trajs_per_batch would have holes where batches end. Use a multiple of {total}."
        )
    if surplus and options.extend_buffer:
        rows = options.rows_per_batch(total)
        warnings.warn(
            f"frames_per_batch={options.frames_per_batch} cannot be shared equally by {total} environments: batches "
            f"have {rows} time steps and {rows * total} cells, of which collector/valid marks "
            f"{options.frames_per_batch}. A multiple of {total} avoids this.",
            stacklevel=3,
        )
    common = {f.name: getattr(options, f.name) for f in dataclasses.fields(RolloutOptions) if hasattr(options, f.name)}
    masks = bool(surplus) or options.interruptor is not None or not options.reset_when_done
    rollout = RolloutOptions(**common, marks_valid=masks)
    groups: list[Group] = []
    first = 0
    for number, b in enumerate(built):
        ids = np.arange(first, first + b.env.num_envs)
        rng = GroupRng(options.seed, number, policy_device or b.env.device)
        groups.append(Group(b.env, batch_shape=b.batch_shape, env_ids=ids, total_envs=total, rng=rng, options=rollout))
        first += b.env.num_envs
    return groups


def build_policy(policy: Any, options: CollectorOptions, group: Group, device: torch.device | None) -> Policy:
    """The policy as the loop calls it; None is uniformly random."""
    takes = options.trust_policy
    if policy is not None and takes is None:
        takes = type(policy).__name__ == "CudaGraphModule" or takes_tensordict(policy)
    return adapt(
        _compiled(policy, options),
        group.env,
        batch_shape=group.batch_shape,
        device=device,
        exploration_type=options.exploration_type,
        executor=options.executor,
        takes_td=bool(takes),
    )


def _compiled(policy: Any, options: CollectorOptions) -> Any:
    wanted = [name for name in ("compile_policy", "cudagraph_policy") if getattr(options, name) not in (None, False)]
    if policy is None or not wanted:
        return policy
    if isinstance(policy, Head):
        raise BadOption(
            f"{wanted[0]} is for whole policies, and {policy.name} is a head: compile its network instead, as in "
            f"muster.policies.{policy.name}(torch.compile(net))"
        )
    compiled: Any = policy
    if "compile_policy" in wanted:
        compiled = torch.compile(compiled, **_dict(options.compile_policy))
    if "cudagraph_policy" in wanted:
        from tensordict.nn import CudaGraphModule

        compiled = CudaGraphModule(compiled, **_dict(options.cudagraph_policy))
    return compiled


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _check_env(env: EnvBatch, options: CollectorOptions) -> None:
    if options.set_truncated and TRUNCATED not in env.flags and not options.max_frames_per_traj:
        raise BadOption(
            f"set_truncated=True, but {env.name} has no 'truncated' flag. Add one (TorchRL: env.add_truncated_keys()), "
            f"or leave set_truncated out."
        )
    if options.max_frames_per_traj and STEP_COUNT in env.observation_specs:
        raise BadOption(
            f"max_frames_per_traj adds 'step_count', which {env.name} has already. Let the environment truncate "
            f"(TorchRL: StepCounter(max_steps)), or rename its key."
        )
    if options.compact_obs and env.writes_next:
        raise BadOption(f"compact_obs: {env.name} resets on the device, where last observations cannot be set aside")


def _innermost(env: Any) -> Any:
    """The environment inside all wrappers of Gymnasium's and Muster's.

    Without a look at its ``__dict__``: an object whose ``__dict__`` was asked for is slower ever after (CPython 3.11:
    15 % of a CartPole step).
    """
    wraps = any(kind.__module__.startswith(("gymnasium.", "muster.envs.")) for kind in type(env).__mro__)
    for name in ("env", "pool") if wraps else ():
        if (inner := getattr(env, name, None)) is not None and inner is not env:
            return _innermost(inner)
    return env


def _keywords(kwargs: Any, count: int) -> Sequence[Mapping[str, Any] | None]:
    if kwargs is None or isinstance(kwargs, Mapping):
        return [kwargs] * count
    if not isinstance(kwargs, (list, tuple)) or len(kwargs) != count:
        raise BadOption(
            f"create_env_kwargs: expected a dict, or a list of {count} dicts, one for each entry of create_env_fn"
        )
    return list(kwargs)
