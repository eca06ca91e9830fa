"""Construction of a collector: the options of its workers, and the worker in this thread."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, cast

import torch

from muster.collectors.options import CollectorOptions, half_of_memory
from muster.errors import BadOption
from muster.policies.adapt import observed_dtype
from muster.restore.crash_report import EnvFactory
from muster.rng import GroupRng
from muster.rollout.group import Group
from muster.rollout.progress import Progress
from muster.utils.checked import base_part
from muster.utils.containers import is_several
from muster.workers.build import build_envs, build_policy, make_group, recorders_for
from muster.workers.local import LocalPool
from muster.workers.options import WorkerOptions, WorkerSetting
from muster.workers.pool import Pool
from muster.workers.schedule import Bundle
from muster.workers.sync import Sync
from muster.workers.worker import Worker

if TYPE_CHECKING:
    from muster.memory.slots import Memory


def make_groups(
    create_env_fn: Any,
    options: CollectorOptions,
    policy: Any,
    policy_device: torch.device | None,
    made: ExitStack,
) -> list[Group]:
    """Make a group for each entry of ``create_env_fn``; ``made`` closes them after an error."""
    factories = factories_of(create_env_fn)
    kwargs = keywords_of(options.create_env_kwargs, len(factories))
    setting = worker_setting(options, policy)
    built = build_envs(factories, kwargs, setting, made)
    total = sum(env.spec.num_envs for env in built)
    groups: list[Group] = []
    first = 0
    progress = Progress()
    for number, env in enumerate(built):
        rng = GroupRng(options.seed, number, policy_device or env.spec.device)
        group = make_group(
            env,
            number,
            first,
            total,
            setting.options,
            rng,
            shared=True,
            progress=progress,
        )
        groups.append(group)
        first += env.spec.num_envs
    return groups


def in_this_thread(
    options: CollectorOptions,
    groups: Sequence[Group],
    policy: Any,
    device: torch.device | None,
) -> tuple[Sync, Worker]:
    """Make a worker in this thread, and its schedule, which fills one slot at a time."""
    setting = worker_setting(options, policy)
    policies = {
        name: build_policy(p, setting, groups[0].env, device)
        for name, p in (("policy", policy), ("random", None))
    }
    total = sum(group.B for group in groups)
    worker = Worker(
        groups,
        policies,
        policy,
        device=device,
        index=options.worker_idx or 0,
        marks_valid=marks_valid(options, total),
        recorders=recorders_for(groups, setting.options),
    )
    infos = [group.env.spec for group in groups]
    pool = LocalPool(worker, infos)
    rows = options.rows_per_batch(pool.num_envs) if options.extend_buffer else 1
    memory = _memory(options, groups[0].env.spec.device)
    bundle = Bundle(
        range(len(groups)),
        limit_bytes=slot_limit(options, memory),
        memory=memory,
    )
    return Sync(pool, [bundle], [rows] * len(groups)), worker


def log_rollouts(
    pool: Pool, worker: Worker, create_env_fn: Any, options: CollectorOptions
) -> None:
    """Keep the actions of a worker in this thread, from which ``watch`` repeats episodes."""
    assert isinstance(pool, LocalPool)
    log = pool.log_rollouts(
        origins_of(create_env_fn, options), options.max_frames_per_traj
    )
    worker.log_rollouts(log.add)


def origins_of(
    create_env_fn: Any, options: CollectorOptions, owns: Sequence[CollectorOptions] = ()
) -> list[EnvFactory]:
    """Return the ``EnvFactory`` of each group; ``owns``: options of each, if these differ."""
    factories = factories_of(create_env_fn)
    kwargs = keywords_of(options.create_env_kwargs, len(factories))
    owns = owns or [options] * len(factories)
    return [
        EnvFactory(made, own.num_envs, given, own.devices.env)
        for made, given, own in zip(factories, kwargs, owns, strict=True)
    ]


def factories_of(create_env_fn: Any) -> list[Any]:
    """Return the factories of all groups, as a list."""
    factories = list(create_env_fn) if is_several(create_env_fn) else [create_env_fn]
    if not factories:
        raise BadOption(
            "create_env_fn is an empty list: expected at least one environment"
        )
    return factories


def worker_setting(options: CollectorOptions, policy: Any) -> WorkerSetting:
    """Return what a worker needs of the options; ``policy`` is the one that will act."""
    return WorkerSetting(
        options=base_part(WorkerOptions, options),
        env_device=options.devices.env,
        policy_device=options.devices.policy,
        obs_dtype=observed_dtype(options.obs_dtype, policy),
    )


def marks_valid(options: CollectorOptions, sharing: int) -> bool:
    """Return whether batches need ``collector/valid``.

    Warns if ``sharing`` environments cannot share them equally.
    """
    surplus = 0 if options.frames_of_workers else options.frames % sharing
    if surplus and options.joins_episodes:
        raise BadOption(
            f"frames_per_batch={options.frames_per_batch} cannot be shared equally by {sharing}"
            f" environments, and the episodes of {options.joins_episodes} would have holes where"
            f" batches end. Use a multiple of {sharing}."
        )
    if surplus and options.extend_buffer:
        rows = options.rows_per_batch(sharing)
        warnings.warn(
            f"frames_per_batch={options.frames_per_batch} cannot be shared equally by {sharing}"
            f" environments: batches have {rows} time steps and {rows * sharing} cells, of which"
            f" collector/valid marks {options.frames_per_batch}. A multiple of {sharing} avoids"
            " this.",
            stacklevel=4,
        )
    return (
        bool(surplus) or options.interruptor is not None or not options.reset_when_done
    )


def keywords_of(kwargs: Any, count: int) -> Sequence[Mapping[str, Any] | None]:
    """Return the keyword arguments for each of ``count`` factories."""
    if kwargs is None or isinstance(kwargs, Mapping):
        return [kwargs] * count
    if not is_several(kwargs) or len(kwargs) != count:
        raise BadOption(
            f"create_env_kwargs: expected a dict, or a list of {count} dicts, one for each entry of"
            " create_env_fn"
        )
    return list(kwargs)


def slot_limit(options: CollectorOptions, memory: Memory) -> int:
    """Return the largest size of all slots in bytes; by default a share of the memory they are in."""
    limit = cast(int, options.slot_memory_limit)
    is_default = limit == half_of_memory()
    if is_default and isinstance(memory, torch.device) and memory.type == "cuda":
        free, _ = torch.cuda.mem_get_info(memory)
        return free // 2
    return limit


def _memory(options: CollectorOptions, device: torch.device | None) -> Memory:
    """Return where to allocate slots."""
    storing = options.devices.storing
    if device is not None:
        return device
    return "pinned" if storing is not None and storing.type == "cuda" else "heap"
