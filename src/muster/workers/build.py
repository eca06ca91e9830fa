"""Construction of a worker's environments, groups and policies."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from threading import current_thread, main_thread
from typing import TYPE_CHECKING, Any

import numpy as np

from muster.capabilities import (
    AwaitsCoroutines,
    CastsValues,
    CompilesSteps,
    LimitsResets,
    TellsInfos,
    WritesNext,
    capability,
)
from muster.env_spec import EnvSpec
from muster.envs.build import build_env, is_environment
from muster.envs.infos import Seen, look_at, with_infos
from muster.envs.previous import with_previous
from muster.errors import BadOption, UnsupportedEnv
from muster.keys import ACTION_MASK, STEP_COUNT, TRUNCATED, dotted, next_of
from muster.memory.slots import Lane, Layout, Slot
from muster.memory.specs import ArraySpec
from muster.policies.random import random_policy
from muster.policies.sampling import check_masks
from muster.protocols import EnvBatch, Policy
from muster.restore.pickling import loads
from muster.rng import GroupRng
from muster.rollout.columns import lane_columns
from muster.rollout.group import Group
from muster.rollout.marks import nested_truncations
from muster.rollout.options import RolloutOptions
from muster.rollout.progress import Progress
from muster.utils.attributes import name_of
from muster.utils.devices import with_index
from muster.workers.config import WorkerConfig
from muster.workers.options import WorkerOptions, WorkerSetting

if TYPE_CHECKING:
    import torch

    from muster.capture.recording import GraphRecorder
else:
    from muster.utils import lazy_torch as torch


def made_policy(config: WorkerConfig, policy: bytes, setting: WorkerSetting) -> Any:
    """Unpickle the policy of a worker, or of the server of this and other workers; or unpickle its
    factory and call it. Set its mode.
    """
    made = loads(policy, "policy_factory" if config.is_factory else "policy")
    if config.is_factory:
        made = made[config.factory]()
    if made is not None and setting.options.execution.policy_mode == "eval":
        from muster.policies.modes import set_eval
        from muster.weights.names import acting_modules

        set_eval(acting_modules(made), besides=setting.users_modules)
    return made


def on_this_machine(setting: WorkerSetting) -> WorkerSetting:
    """Return the setting with the devices of this machine. Raises ``BadOption`` if it has none."""
    return replace(
        setting,
        policy_device=_device_here("policy_device", setting.policy_device),
        env_device=_device_here("env_device", setting.env_device),
    )


def _device_here(name: str, device: torch.device | None) -> torch.device | None:
    if device is None or device.type != "cuda":
        return device
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        raise BadOption(
            f"{name}={str(device)!r}: the machine of this worker has {count} CUDA devices"
        )
    return with_index(device)


def build_envs(
    factories: Sequence[Any],
    kwargs: Sequence[Mapping[str, Any] | None],
    setting: WorkerSetting,
    made: ExitStack,
) -> list[EnvBatch]:
    """Make an env batch for each factory, and register its ``close`` with ``made``."""
    options = setting.options
    built: list[EnvBatch] = []
    looks: dict[tuple[int, int], Callable[[], Seen]] = {}
    for factory, keywords in zip(factories, kwargs, strict=True):
        env = build_env(factory, options.num_envs, keywords, setting.env_device)
        _close_with(made, env)
        _check_env(env, options)
        if options.compile_env not in (None, False):
            compiling = capability(env, CompilesSteps)
            if compiling is None:
                raise BadOption(
                    f"compile_env is for environments that step together on tensors, and"
                    f" {env.spec.name} is stepped in host memory. Leave it out."
                )
            compiling.compile_step(_dict(options.compile_env))
        awaiting = capability(env, AwaitsCoroutines)
        if awaiting is not None:
            awaiting.coroutines.timeouts = setting.deadlines
        casting = capability(env, CastsValues)
        if casting is not None and options.validate == "full":
            casting.casts.refuse()
        if options.info is not False:
            source = id(factory), id(keywords)
            if source not in looks:
                looks[source] = cache(
                    partial(_infos_of, env, factory, keywords, setting)
                )
            env = with_infos(env, options.info, looks[source])
        if options.prev_action_reward:
            env = with_previous(env)
        if setting.obs_dtype is not None:
            env.store_as(env.spec.stored_as(setting.obs_dtype))
        built.append(env)
    objects = [id(_innermost(each)) for env in built for each in env.objects()]
    if len(set(objects)) < len(objects):
        raise BadOption(
            "create_env_fn has the same environment object twice; give functions that make one"
        )
    return built


def _close_with(made: ExitStack, env: EnvBatch) -> None:
    """Let ``made`` close an environment. An error that is on its way says more than one of closing."""

    def close(kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            env.close()
        except Exception:
            if error is None:
                raise

    made.push(close)


def _infos_of(
    built: EnvBatch,
    factory: Any,
    kwargs: Mapping[str, Any] | None,
    setting: WorkerSetting,
) -> Seen:
    """What infos look like: of a reset and a random step of an environment that is made for this
    and closed.

    An environment that exists already is only reset.
    """
    mine = {id(_innermost(each)) for each in built.objects()}
    seen: Seen = {}
    with ExitStack() as made:
        env = built
        steps = False
        if not is_environment(factory):
            probe = build_env(
                factory,
                None if setting.options.num_envs is None else 1,
                kwargs,
                setting.env_device,
            )
            if steps := mine.isdisjoint(
                id(_innermost(each)) for each in probe.objects()
            ):
                env = probe
                _close_with(made, env)
                telling = capability(env, TellsInfos)
                assert telling is not None  # else ``with_infos`` has raised
                telling.keep_infos()
        lane = _one_row(env)
        rng = GroupRng(0)
        # what belongs to the process is not for other threads to exchange
        if current_thread() is main_thread():
            made.enter_context(rng.as_global())
            # the environments that are kept warn of the same
            made.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
        every = range(env.spec.num_envs)
        env.reset(lane.arrays, 0, every, every if steps else None)
        look_at(env, seen)
        if steps:
            # the action must be allowed
            if (
                isinstance(seen.get(ACTION_MASK), ArraySpec)
                and not env.spec.action_masks
            ):
                env = with_infos(env, [ACTION_MASK], lambda: seen)
                lane = _one_row(env)
                env.reset(lane.arrays, 0, every, every)
            random_policy(env).start(lane, rng)(0)
            env.start(lane)(0)
            look_at(env, seen)
    return seen


def _one_row(env: EnvBatch) -> Lane:
    columns = lane_columns(env.spec, (), RolloutOptions())
    slot = Slot(Layout(1, env.spec.num_envs, columns))
    return slot.lanes[0]


def make_group(
    env: EnvBatch,
    number: int,
    first: int,
    total: int,
    options: RolloutOptions,
    rng: GroupRng,
    *,
    shared: bool,
    progress: Progress,
) -> Group:
    """Make a group of the environments ``first``, ``first + 1``, ... of ``total``."""
    return Group(
        env,
        env_ids=np.arange(first, first + env.spec.num_envs),
        total_envs=total,
        rng=rng,
        options=options,
        number=number,
        progress=progress,
        shares_batch=shared,
    )


def recorders_for(
    groups: Sequence[Group], options: WorkerOptions
) -> dict[int, GraphRecorder]:
    """Return what records the rollouts of groups, by their numbers.

    Raises:
        BadOption: ``capture=True``, and no rollout of these environments can be recorded.
    """
    if options.capture is False:
        return {}
    from muster.capture.graph import GRAPHS
    from muster.capture.recording import recorder_for

    recorders = {}
    for group in groups:
        between = {
            "on_step": group.options.on_step is not None,
            "interruptor": group.options.interruptor is not None,
            "cudagraph_policy": options.cudagraph_policy not in (None, False),
        }
        recorder = recorder_for(
            group.env,
            options.capture,
            group.reset,
            GRAPHS,
            next((name for name, is_given in between.items() if is_given), ""),
        )
        if group.on_device is not None:
            group.on_device.watch_resets(recorder.replacing)
        recorders[group.number] = recorder
    return recorders


def build_policy(
    policy: Any, setting: WorkerSetting, env: EnvBatch, device: torch.device | None
) -> Policy:
    """Adapt a policy to ``Policy`` for these environments; None is a uniformly random policy."""
    if policy is None:
        check_masks(env.spec)
        return random_policy(env)
    return fit_policy(policy, setting, env.spec, device)


def fit_policy(
    policy: Any, setting: WorkerSetting, spec: EnvSpec, device: torch.device | None
) -> Policy:
    """Adapt a policy to ``Policy`` for environments with this spec."""
    from muster.policies.adapt import adapt, takes_tensordict

    options = setting.options
    takes = options.trust_policy
    if takes is None:
        takes = type(policy).__name__ == "CudaGraphModule" or takes_tensordict(policy)
    return adapt(
        _compiled(policy, options),
        spec,
        device=device,
        exploration_type=options.exploration_type,
        executor=options.execution.executor,
        takes_td=bool(takes),
        timeouts=setting.deadlines,
    )


def _compiled(policy: Any, options: WorkerOptions) -> Any:
    from muster.policies.adapt import is_coroutine_policy
    from muster.policies.heads import Head

    compiles = options.compile_policy not in (None, False)
    records_graph = options.cudagraph_policy not in (None, False)
    if not (compiles or records_graph):
        return policy
    name = "compile_policy" if compiles else "cudagraph_policy"
    if is_coroutine_policy(policy):
        raise BadOption(
            f"{name} is for modules and functions, and {name_of(policy)} is a coroutine function."
        )
    if isinstance(policy, Head):
        raise BadOption(
            f"{name} is for whole policies, and {policy.name} is a head: compile its network"
            f" instead, as in muster.policies.{policy.name}(torch.compile(net))"
        )
    compiled: Any = policy
    if compiles:
        compiled = torch.compile(compiled, **_dict(options.compile_policy))
    if records_graph:
        from tensordict.nn import CudaGraphModule

        compiled = CudaGraphModule(compiled, **_dict(options.cudagraph_policy))
    return compiled


def _dict(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


def _check_env(env: EnvBatch, options: RolloutOptions) -> None:
    if (
        options.set_truncated
        and TRUNCATED not in env.spec.flags
        and not options.max_frames_per_traj
    ):
        nested = nested_truncations(env.spec.observation_specs)
        if nested and options.compact_obs:
            raise BadOption(
                f"set_truncated=True marks {dotted(next_of(nested[0]))}, which compact_obs=True"
                " leaves out: leave one of them out."
            )
        if not nested:
            raise BadOption(
                f"set_truncated=True, but {env.spec.name} has no 'truncated' flag. Add one"
                " (TorchRL: "
                "env.add_truncated_keys()), or leave set_truncated out."
            )
    others = {
        "reset_when_done=False": not options.reset_when_done,
        "max_decorrelation_steps": options.max_decorrelation_steps,
        "prev_action_reward": options.prev_action_reward,
    }
    refused = {"max_frames_per_traj": options.max_frames_per_traj, **others}
    name = next(filter(refused.get, refused), None)
    if env.spec.ready is not None and name is not None:
        raise BadOption(
            f"{name}: {env.spec.name} is asynchronous (batch_size={env.spec.ready} of"
            f" num_envs={env.spec.num_envs}): its environments reset themselves, and are at"
            " different"
            " steps. Remove the option (max_episode_steps of envpool.make_gymnasium limits"
            " episodes), or leave batch_size out"
        )
    refused = {
        "set_truncated": options.set_truncated,
        "compact_obs": options.compact_obs,
        **others,
    }
    name = next(filter(refused.get, refused), None)
    if env.spec.agents and name is not None:
        raise BadOption(
            f"{name}: the agents of {env.spec.name} take turns, which this option does not know."
            " Remove it"
        )
    if options.max_frames_per_traj and STEP_COUNT in env.spec.observation_specs:
        raise BadOption(
            f"max_frames_per_traj adds 'step_count', which {env.spec.name} has already. Let the"
            " environment truncate (TorchRL: StepCounter(max_steps)), or rename its key."
        )
    if options.compact_obs and capability(env, WritesNext) is not None:
        raise BadOption(
            f"compact_obs: {env.spec.name} resets on the device, where last observations cannot be"
            " set"
            " aside"
        )
    limiting = capability(env, LimitsResets)
    if not options.reset_when_done and limiting is not None:
        try:
            limiting.check_partial_reset()
        except UnsupportedEnv as error:
            raise BadOption(
                "reset_when_done=False resets those environments before the next batch that have"
                f" ended: {error}"
            ) from None


def _innermost(env: Any) -> Any:
    """Return the environment inside all wrappers of Gymnasium and of Muster.

    Does not access its ``__dict__``: reading it makes all later attribute accesses of the object
    slower (CPython 3.11: 15 % of a CartPole step).
    """
    wraps = any(
        kind.__module__.startswith(("gymnasium.", "muster.envs."))
        for kind in type(env).__mro__
    )
    for name in ("env", "pool") if wraps else ():
        if (inner := getattr(env, name, None)) is not None and inner is not env:
            return _innermost(inner)
    return env
