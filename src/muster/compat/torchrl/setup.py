"""Conversion of the arguments of TorchRL's constructor to an environment, options and an engine."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torchrl.envs import EnvBase, StepCounter, TransformedEnv
from torchrl.modules import RandomPolicy

from muster.collectors.engine import Engine
from muster.collectors.options import CollectorOptions
from muster.collectors.setup import in_this_thread, make_groups
from muster.compat.torchrl.policies import (
    as_torchrl_calls,
    needs_trial,
    take_actions_as_they_are,
)
from muster.errors import BadOption
from muster.keys import Key
from muster.memory.replay import ReplayMemory
from muster.policies.tensordict_program import as_key
from muster.protocols import EnvBatch
from muster.rollout.first_call import begin_episodes
from muster.weights.publish import PolicyWeights

WRITE_MODE = "replay_write_mode"
# select another class than Collector
SELECTORS = ("backend", "backend_options", "num_collectors", "sync")


class Foreign:
    """Stands for an environment that is not TorchRL's in the constructor of TorchRL's collector."""

    _has_dynamic_specs = False

    def __init__(self, env: Any) -> None:
        self.env, self.batch_size = env, torch.Size([count_of(env)])


def signature_of(cls: type) -> inspect.Signature:
    """Return the signature of a class of TorchRL's, with ``replay_write_mode`` of TorchRL 0.15; where
    there is ``**kwargs``, it is one of these.
    """
    found = inspect.signature(cls.__init__)  # type: ignore[misc]
    parameters = list(found.parameters.values())
    takes_any = parameters[-1].kind is inspect.Parameter.VAR_KEYWORD
    if takes_any or WRITE_MODE in found.parameters:
        return found
    added = inspect.Parameter(WRITE_MODE, inspect.Parameter.KEYWORD_ONLY, default=None)
    return found.replace(parameters=[*parameters, added])


def written_as_asked(cls: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a class of TorchRL's with ``replay_write_mode`` in a form that the
    installed TorchRL knows: 0.14 writes whole trajectories if there is a ``trajs_per_batch``.

    Raises:
        BadOption: the mode does not exist, or contradicts other arguments.
    """
    options = dict(given)
    if WRITE_MODE in inspect.signature(cls.__init__).parameters:  # type: ignore[misc]
        return options
    mode = options.pop(WRITE_MODE, None)
    if mode is None:
        return options
    if mode not in ("rollout", "trajectory"):
        raise BadOption(
            f"replay_write_mode={mode!r}: expected 'rollout' or 'trajectory'"
        )
    if options.get("replay_buffer") is None:
        raise BadOption(
            f"replay_write_mode={mode!r} says what is written into replay_buffer, and none was"
            " given: pass replay_buffer="
        )
    if mode == "trajectory":
        # with a buffer the number only says that trajectories are written
        options["trajs_per_batch"] = options.get("trajs_per_batch") or 1
    elif options.get("trajs_per_batch") is not None:
        raise BadOption(
            "replay_write_mode='rollout' writes batches, and trajs_per_batch makes trajectories of"
            " them: give one of them"
        )
    return options


def check_numbers(given: Mapping[str, Any]) -> None:
    """Raise ``BadOption`` for numbers of frames that are no integers."""
    for option in (
        "frames_per_batch",
        "total_frames",
        "max_frames_per_traj",
        "init_random_frames",
    ):
        value = given.get(option)
        if value is None:
            continue
        try:
            is_integer = not isinstance(value, bool) and value == int(value)
        except (TypeError, ValueError, OverflowError):
            is_integer = False
        if not is_integer:
            raise BadOption(f"{option}={value!r}: expected an integer")
    frames = given.get("frames_per_batch", 1)
    if frames is None or frames < 1:
        raise BadOption(
            f"frames_per_batch={frames!r}: expected an integer of at least 1"
        )


def check_buffer(buffer: Any) -> None:
    """Raise ``BadOption`` for what is no replay buffer of TorchRL, nor like one."""
    if buffer is None:
        return
    if isinstance(buffer, ReplayMemory):
        raise BadOption(
            "replay_buffer is a muster.ReplayMemory, which muster.Collector writes into; pass a"
            " buffer of torchrl.data here, or use muster.Collector"
        )
    extend = getattr(buffer, "extend", None)
    if isinstance(buffer, type) or not callable(extend):
        raise BadOption(
            f"replay_buffer={buffer!r}: expected a replay buffer, such as"
            " torchrl.data.ReplayBuffer(storage=...)"
        )


def one_env(create_env_fn: Any) -> Any:
    """Return the only entry of a list; anything else unchanged."""
    if isinstance(create_env_fn, Sequence) and not isinstance(
        create_env_fn, (str, bytes)
    ):
        if len(create_env_fn) != 1:
            raise ValueError(
                "backend='direct' requires exactly one environment constructor."
            )
        return create_env_fn[0]
    return create_env_fn


def limit_steps(env: Any, policy: Any, limit: int) -> tuple[Any, int | None]:
    """Apply ``max_frames_per_traj`` with TorchRL's transform, unless Muster's own limit has the
    same results.

    Returns:
        the environment, and the limit for Muster to apply (None: no limit).
    """
    if limit <= 0 or not isinstance(env, EnvBase):
        return env, limit if limit > 0 else None
    if any("step_count" in as_key(key) for key in env.output_spec.keys(True, True)):
        raise ValueError(
            "A 'step_count' key is already present in the environment and the 'max_frames_per_traj'"
            " argument may conflict with a 'StepCounter' that has already been set. Possible"
            " solutions: Set max_frames_per_traj to 0 or remove the StepCounter limit from the"
            " environment transforms."
        )
    reads = getattr(policy, "in_keys", None)
    unread = isinstance(policy, RandomPolicy) or (
        reads is not None and ("step_count",) not in map(as_key, reads)
    )
    if unread and all(len(as_key(key)) == 1 for key in env.done_keys):
        return env, limit
    return TransformedEnv(env, StepCounter(max_steps=limit)), None


def count_of(env: Any) -> int:
    """Return the number of environments in ``env``; 1 if it is unknown before ``env`` is made."""
    return (
        int(env.batch_size.numel())
        if isinstance(env, EnvBase)
        else int(getattr(env, "num_envs", 1))
    )


def make_engine(
    env: Any,
    policy: Any,
    device: Any,
    weights: PolicyWeights,
    options: CollectorOptions,
    *,
    buffers: bool,
    faster: Callable[[Any], Any],
) -> Engine:
    """Return an engine for ``env`` after its first reset.

    Args:
        buffers: all batches have the full shape.
        faster: returns the policy that acts in TorchRL's environments in place of ``policy``.
    """
    with ExitStack() as made:
        groups = make_groups(env, options, policy, device, made)
        for group in groups:
            # TorchRL reads masks by its own means only, such as ActionMask
            group.env.store_as(replace(group.env.spec, action_masks={}))
            begin_episodes(group)
        if isinstance(env, EnvBase):
            acting = faster(policy)
            shown = needs_trial(policy, env, buffers)
            # A call that TorchRL does not make is no call of the warm-up.
            take_actions_as_they_are(
                groups[0], acting if shown else policy, device, shown
            )
            policy = as_torchrl_calls(acting, groups[0], options.devices.policy)
        source, worker = in_this_thread(options, groups, policy, device)
        engine = Engine(options, source, weights, stacked=False, local=worker)
        made.pop_all()
    return engine


def classes_of(env: EnvBatch) -> dict[Key, Any]:
    """Return the tensorclasses that a TorchRL environment declares, by key."""
    nodes = getattr(getattr(env, "declared", None), "nodes", {})
    return {path: node.kind for path, node in nodes.items() if node.kind is not None}
