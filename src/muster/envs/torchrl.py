"""TorchRL environments as an env batch: writes the data that TorchRL's collector would store into a
slot's rows.

A step calls ``env._step``, which environments and transforms implement, and does the other work of
``EnvBase.step`` itself. Resets are TorchRL's own: ``step_mdp`` and ``maybe_reset`` after the end of
an episode, ``reset`` otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torchrl.envs import ActionMask, Compose, EnvBase, GymEnv, Transform, TransformedEnv
from torchrl.envs.batched_envs import BatchedEnvBase

from muster.capabilities import (
    CountsSteps,
    DrawsActions,
    KeepsState,
    MayWait,
    RefersToParts,
    ResetsWithOptions,
    WritesNext,
)
from muster.env_spec import EnvSpec
from muster.envs.checks import check_distinct, close_envs
from muster.envs.spaces import action_masks
from muster.envs.torchrl_gym import PlainGym, fast_step, is_plain_gym, plain_parts
from muster.envs.torchrl_on_device import OneOnDevice
from muster.envs.torchrl_one import OneEnv
from muster.envs.torchrl_pool import is_pool
from muster.envs.torchrl_specs import Declared, declared, drawers, masked
from muster.errors import BadOption, UnsupportedEnv
from muster.keys import ACTION, Key
from muster.memory.cells import take
from muster.memory.slots import Lane
from muster.memory.specs import Array
from muster.protocols import EnvBatch, Step
from muster.rng import GroupRng
from muster.utils.private_names import require


def takes(obj: Any) -> bool:
    """Return whether ``obj`` is a TorchRL environment."""
    return isinstance(obj, EnvBase)


def adapt(envs: list[Any], device: torch.device | None) -> EnvBatch:
    """Return the env batch of one environment of any batch size, or several without; it owns and
    closes them.
    """
    require("torchrl", extra="torchrl")
    moved = [env if device is None else env.to(device) for env in envs]
    first = moved[0]
    is_there = first.device is not None and first.device.type != "cpu"
    if len(moved) == 1 and is_there and can_have_rows_there(first):
        return TorchRLOnDevice(first, first.device)
    return TorchRLEnvs(moved)


def can_have_rows_there(env: EnvBase) -> bool:
    """Return whether the rows of an environment can be on its device.

    They are on the host for single environments; for environments in processes or one after
    another, whose data come from the host; for those that reset themselves; where random actions
    depend on the state; and if a leaf is an object or has no fixed shape.
    """
    if not env.batch_size or env.__dict__.get("_torchrl_native_autoreset", False):
        return False
    if any(isinstance(part, BatchedEnvBase) for part in _chain(env)):
        return False
    specs = declared(env)
    leaves = (specs.observations, specs.actions, specs.steps, specs.rewards, specs.done)
    are_tensors = all(spec.is_tensor for part in leaves for spec in part.values())
    return are_tensors and not _is_stateful(env)


# observations that TorchRL's transforms add
COUNTERS = {"step_count", "is_init", "episode_reward", "traj_count"}


class TorchRLEnvs(
    EnvBatch, CountsSteps, DrawsActions, RefersToParts, ResetsWithOptions
):
    """One ``EnvBase`` of any batch size, or several without a batch size, stepped one after
    another.

    Seeds: ``set_seed(seed)`` is called before the reset of an environment without a batch size, and
    for each part of a ``SerialEnv`` or ``ParallelEnv`` that is reset as a whole. Any other batch
    has one generator, which gets the first seed. ``reset_options`` are passed to ``env.reset`` by
    keyword.

    An episode ends where TorchRL resets: if ``done`` at the root is set, or without such a flag, if
    any of the flags nearest to the root is set. Flags further below are carried like observations.
    """

    def __init__(self, envs: Sequence[EnvBase]) -> None:
        self.envs = list(envs)
        first = self.envs[0]
        name = _name_of(first)
        _check(self.envs, name)
        specs = declared(first)
        for i, env in enumerate(self.envs[1:], 1):
            if not declared(env).same_as(specs):
                raise UnsupportedEnv(
                    f"{name}: environments of one group need equal specs; those of env {i} differ"
                )
        self.declared = specs  # with what ``spec`` does not tell
        self._ones = _ones_of(self.envs, name)
        bookkeeping = frozenset(
            key for key in specs.observations if _is_bookkeeping(key, specs)
        )
        # masks of agents are those of the environment's action spec
        masks: dict[Key, Key] = {}
        if [*specs.actions] == [ACTION]:
            masks = action_masks(specs.observations, specs.actions)
        B = sum(one.count for one in self._ones)
        self.spec = EnvSpec(
            name,
            B,
            specs.lead or (B,),
            specs.observations,
            specs.actions,
            step_specs=specs.steps,
            rewards=frozenset(specs.steps),
            bookkeeping=bookkeeping,
            own_dtype=bookkeeping | specs.state,
            action_masks=masks,
            samples_allowed=_samples_allowed(first),
            flags=specs.flags,
            reward_key=specs.reward_key,
            reward_dtype=specs.reward_dtype,
            reward_ends=specs.reward_ends,
            final_obs_certain=not first.__dict__.get(
                "_torchrl_native_autoreset", False
            ),
            single=not specs.lead,
            seeds_episodes=not specs.lead,
        )
        self._draw = drawers(first.full_action_spec, len(specs.lead))
        self._chooses = (
            False  # in the next rollout, environments choose actions themselves
        )

    def sample(self, rng: GroupRng, shape: tuple[int, ...]) -> dict[Key, Array]:
        """Draw random actions like ``env.rand_action``.

        If that depends on the state (a mask, or the environment's own ``rand_action``), actions for
        more than one step are zeros, which the steps of the next rollout replace.
        """
        if _is_stateful(self.envs[0]):
            return self._sample_stateful(shape)
        if self._draw is not None:
            drawn = {}
            for i, (key, draw) in enumerate(self._draw.items()):
                actions = draw(rng.stream(i), shape)
                spec = self.spec.action_specs[key]
                form = spec.shape, spec.dtype
                if (actions.shape[len(shape) :], actions.dtype) != form:
                    # they are stored as a policy returns them
                    actions = actions.reshape((*shape, *spec.shape)).astype(spec.dtype)
                drawn[key] = actions
            return drawn
        rows = int(np.prod(shape, dtype=int)) // self.spec.num_envs
        out = self._no_actions((rows, self.spec.num_envs))
        with torch.random.fork_rng(devices=[]):
            for t in range(rows):
                for one in self._ones:
                    seed = int(rng.stream(0).integers(1 << 62))
                    torch.default_generator.manual_seed(seed)
                    self._put(out, t, one, one.env.full_action_spec.rand())
        return _with_lead(out, shape)

    def reset(
        self,
        arrays: Mapping[Key, Any],
        row: int,
        which: Sequence[int],
        seeds: Sequence[int] | None,
    ) -> None:
        options = self.take_options()
        for one in self._ones:
            columns = one.columns
            mine = [n for n, i in enumerate(which) if columns.start <= i < columns.stop]
            if mine:
                own = None if seeds is None else [seeds[n] for n in mine]
                one.reset(arrays, row, [which[n] for n in mine], own, options)

    def pass_options(self, options: dict[str, Any] | None) -> None:
        self.reset_options = (
            options  # TorchRL's ``reset(**kwargs)`` takes any, also a seed
        )

    def start(self, lane: Lane) -> Step:
        chooses = self._chooses
        self._chooses = False
        for one in self._ones:
            one.choosing = chooses
        step = lane.cache.get(self)
        if step is None:
            step = lane.cache[self] = self._make_step(lane)
        return step

    def objects(self) -> Sequence[object]:
        return self.envs

    def look_again(self) -> None:
        self._ones = _ones_of(self.envs, self.spec.name)

    def close(self) -> None:
        open_envs = [
            (i, env)
            for i, env in enumerate(self.envs)
            if not env.is_closed or is_pool(env)
        ]
        close_envs(open_envs, self.spec.name)

    def _make_step(self, lane: Lane) -> Step:
        ones = self._ones
        advances = [one.start(lane) for one in ones]

        def step(t: int) -> Sequence[int] | None:
            finished: list[int] | None = None
            n = 0
            try:
                for advance in advances:
                    ended = advance(t)
                    ones[n].executed = False  # counted by ``n`` from here on
                    n += 1
                    if ended is not None:
                        finished = ended if finished is None else finished + ended
            except BaseException:
                returned = [
                    one.count for i, one in enumerate(ones) if i < n or one.executed
                ]
                self.executed_in_row = sum(returned)
                raise
            return finished

        return step

    def _sample_stateful(self, shape: tuple[int, ...]) -> dict[Key, Array]:
        B = self.spec.num_envs
        rows = int(np.prod(shape, dtype=int)) // B
        out = self._no_actions((rows, B))
        if all(len(array) == 1 for array in out.values()):
            for one in self._ones:
                self._put(out, 0, one, one.rand_action())
        else:
            self._chooses = True
        return _with_lead(out, shape)

    def _no_actions(self, lead: tuple[int, ...]) -> dict[Key, Array]:
        actions = {}
        for key, spec in self.spec.action_specs.items():
            actions[key] = np.zeros((*lead, *spec.shape), spec.dtype)
        return actions

    def _put(
        self,
        out: dict[Key, Array],
        t: int,
        one: OneEnv,
        td: Any,
    ) -> None:
        for key, spec in self.spec.action_specs.items():
            row = out[key][t, one.columns]
            if spec.is_tensor:
                value = td.get(key).cpu().numpy()
                row[...] = value.reshape(row.shape)
            else:
                cells = take(td, key, one.specs.lead)
                row[...] = None if cells is None else cells.reshape(-1)


class TorchRLOnDevice(TorchRLEnvs, KeepsState, MayWait, WritesNext):
    """One ``EnvBase`` with a batch size, whose rows are on its device; see ``OneOnDevice``."""

    def __init__(self, env: EnvBase, device: torch.device) -> None:
        super().__init__([env])
        self._device = device
        self._one = OneOnDevice(env, self.declared, self.spec.name, device)
        self._ones = [self._one]
        self.store_as(replace(self.spec, device=device))

    @property
    def why_waiting(self) -> str:
        if self._one.by_mask:
            return ""
        return (
            f"the host looks after each step of {self.spec.name} whether an episode has ended,"
            " since its _reset with a mask waits for the device, or does more than to reset where"
            " the mask is"
        )

    def sample(self, rng: GroupRng, shape: tuple[int, ...]) -> dict[Key, Any]:
        drawn = {}
        for key, actions in super().sample(rng, shape).items():
            drawn[key] = torch.from_numpy(actions).to(self._device)
        return drawn

    def look_again(self) -> None:
        """Nothing: all is asked of the outermost environment, which is the same object."""

    def limit_episodes(self, steps: int) -> None:
        self._one.limit_episodes(steps)

    def snapshot(self) -> dict[str, Any]:
        return self._one.snapshot()

    def restore(self, state: dict[str, Any]) -> None:
        self._one.restore(state)


def _with_lead(actions: dict[Key, Array], shape: tuple[int, ...]) -> dict[Key, Array]:
    """Return actions, ``[rows, B, ...]``, with these first dimensions."""
    shaped = {}
    for key, array in actions.items():
        shaped[key] = array.reshape((*shape, *array.shape[2:]))
    return shaped


def _is_bookkeeping(key: Key, specs: Declared) -> bool:
    return key in specs.state_only or key in specs.done or key[-1] in COUNTERS


def _check(envs: Sequence[EnvBase], name: str) -> None:
    first = envs[0]
    check_distinct(envs, name)
    if len(envs) > 1 and first.batch_size:
        raise BadOption(
            f"num_envs={len(envs)} was given, but {name} is a batch of environments"
            " already: leave num_envs out, or pass a list of factories for several groups."
        )
    for env in _chain(first):
        parts = env.transform.modules() if isinstance(env, TransformedEnv) else [env]
        for part in parts:
            hook = getattr(type(part), "_post_step_mdp_hooks", None)
            usual = (None, Transform._post_step_mdp_hooks, Compose._post_step_mdp_hooks)
            if hook not in usual:
                raise UnsupportedEnv(
                    f"{name}: {type(part).__name__} changes observations between one step"
                    " and the next (_post_step_mdp_hooks), which a batch cannot show. Leave it"
                    " out, and compress what is stored."
                )


def _ones_of(envs: Sequence[EnvBase], name: str) -> list[OneEnv]:
    parts = plain_parts(envs[0]) or envs
    names = [name]
    if len(parts) > 1:
        names = [f"{name}[{i}]" for i in range(len(parts))]
    specs = declared(parts[0])
    plain = all(is_plain_gym(env, specs) for env in parts)
    ones: list[OneEnv] = []
    for i, (env, who) in enumerate(zip(parts, names, strict=True)):
        if plain:
            ones.append(PlainGym(env, specs, who, i))
        else:
            ones.append(OneEnv(env, specs, who, i, fast_step(env)))
    return ones


def _is_stateful(env: EnvBase) -> bool:
    """Return whether random actions depend on the state: a mask, or an own ``rand_action``."""
    usual = (EnvBase.rand_action, TransformedEnv.rand_action)
    own = any(type(part).rand_action not in usual for part in _chain(env))
    return own or masked(env.full_action_spec)


def _samples_allowed(env: EnvBase) -> bool:
    """Return whether random actions are TorchRL's, by masks or in another way of the environment."""
    if _is_stateful(env):
        return True
    return any(isinstance(part, ActionMask) for part in _transforms(env))


def _transforms(env: EnvBase) -> Iterator[Any]:
    for part in _chain(env):
        if isinstance(part, TransformedEnv):
            yield from part.transform.modules()


def _chain(env: Any) -> Iterator[Any]:
    """Yield the environment, and the environments inside of ``TransformedEnv``."""
    yield env
    while isinstance(env, TransformedEnv):
        env = env.base_env
        yield env


def _name_of(env: EnvBase) -> str:
    *_, base = _chain(env)
    if isinstance(base, GymEnv):
        return str(getattr(base, "env_name", None))
    return type(base).__name__
