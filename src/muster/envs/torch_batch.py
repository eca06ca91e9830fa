"""B environments that step together on tensors, as Isaac Lab, ManiSkill and other simulators on a
GPU do.

Required are ``num_envs``, ``device``, Gymnasium spaces (``single_observation_space``, or batched
ones), ``reset(seed=...) -> (obs, info)`` and ``step(action) -> (obs, reward, terminated, truncated,
info)`` on tensors. The host never waits for flags of the device: each operation runs for all
environments, and a mask selects results.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from muster.capabilities import (
    CastsValues,
    CompilesSteps,
    CountsSteps,
    DrawsActions,
    KeepsState,
    LimitsResets,
    ResetsWithOptions,
    WritesNext,
)
from muster.env_spec import EnvSpec
from muster.envs import checks
from muster.envs.checks import FIX, Casts
from muster.envs.masks import choose, like, where
from muster.envs.spaces import SpaceCodec, action_codec, action_masks, observation_codec
from muster.envs.vector import autoreset_mode
from muster.errors import BadEnvOutput, BadOption, UnsupportedEnv, UnsupportedSpace
from muster.keys import (
    IS_INIT,
    NEXT_OBS_VALID,
    REWARD,
    TERMINATED,
    TRUNCATED,
    Key,
    dotted,
    next_of,
)
from muster.memory.joint_rows import joint_rows
from muster.memory.slots import Lane, as_tensor, torch_dtype
from muster.memory.specs import ArraySpec, choices_of, is_joint_mask
from muster.protocols import EnvBatch, Step
from muster.rng import GroupRng

Leaves = list[torch.Tensor]
Draw = Callable[[torch.Generator], torch.Tensor]
# keys of the true last observations, newest convention first
FINAL = ("final_obs", "final_observation")
MANI_SKILL = "mani_skill"
ISAAC_LAB = ("isaaclab", "omni.isaac.lab")
DO_ONE = (
    "let reset() take mask= (bool [num_envs]) or options={'reset_mask': mask} with"
    " metadata['autoreset_mode'] set, or pass the innermost environment if a wrapper hides this"
)


def takes(obj: Any) -> bool:
    """Return whether ``obj`` is a batch of environments on tensors; it may be a ``gymnasium.Env``
    or ``VectorEnv``.
    """
    if isinstance(obj, type):
        return False
    for cls in type(obj).__mro__:
        # a TorchRL wrapper, which has all attributes of the wrapped environment
        if cls.__module__.startswith("torchrl."):
            return False
    base = getattr(obj, "unwrapped", obj)
    device = getattr(obj, "device", getattr(base, "device", None))
    if not isinstance(device, (torch.device, str)):
        return False
    number = getattr(obj, "num_envs", getattr(base, "num_envs", None))
    if not isinstance(number, int):
        return False
    batched = getattr(obj, "action_space", None)
    space = getattr(base, "single_action_space", batched)
    return isinstance(space, spaces.Space)


def adapt(envs: list[Any], device: torch.device | None) -> EnvBatch:
    """Return the env batch, with rows on ``device``; None: the environments' device."""
    return TorchEnvs(checks.the_only(envs), device)


class TorchEnvs(
    EnvBatch,
    CastsValues,
    CompilesSteps,
    CountsSteps,
    DrawsActions,
    KeepsState,
    LimitsResets,
    ResetsWithOptions,
    WritesNext,
):
    """Implements ``EnvBatch`` for a batch of environments on tensors; owns (and closes) it.

    Rows are on ``device``. ``single``: see ``EnvSpec``.

    ``SAME_STEP`` environments reset themselves, and return the true last observations as
    ``info["final_obs"]`` or ``info["final_observation"]``, batched; if they do not,
    ``collector/next_obs_valid`` is False. ``DISABLED`` environments are reset by mask at every
    step. Isaac Lab's ``cfg.compute_final_obs`` is set to True.
    """

    def __init__(
        self,
        env: Any,
        device: torch.device | None = None,
        *,
        single: bool = False,
    ) -> None:
        self.env = env
        base = getattr(env, "unwrapped", env)
        name = checks.env_name(env)
        B = int(getattr(env, "num_envs", getattr(base, "num_envs", 0)))
        on = getattr(env, "device", getattr(base, "device", "cpu"))
        self._on = torch.device(on)
        rows = self._on if device is None else device
        observation_space = _single_space(env, "observation_space", B)
        action_space = _single_space(env, "action_space", B)
        self.observations: SpaceCodec = observation_codec(observation_space)
        self.actions: SpaceCodec = action_codec(action_space)
        observed = self.observations.specs
        checks.check_arrays(name, observed, self.actions.specs)
        self.casts: Casts = Casts(name)
        self._expected: list[tuple[Key, tuple[int, ...], torch.dtype]] = []
        for key, spec in observed.items():
            dtype = torch_dtype(spec.dtype)
            self._expected.append((key, (B, *spec.shape), dtype))
        self._self_resetting = _mode(env, name) is AutoresetMode.SAME_STEP
        self._how = _partial_reset(env)
        exact = bool(getattr(base, "muster_exact", False))
        # Only with this convention can an environment ignore the mask without an error.
        by_option = self._how is not None and self._how.option == "reset_mask"
        self._mask_untried = by_option and not exact
        cfg = getattr(base, "cfg", None)
        gives_final = exact or _is_from(env, MANI_SKILL)
        if (
            _is_from(env, *ISAAC_LAB)
            and cfg is not None
            and hasattr(cfg, "compute_final_obs")
        ):
            cfg.compute_final_obs = True
            gives_final = True
        self.spec = EnvSpec(
            name,
            B,
            (B,),
            observed,
            self.actions.specs,
            action_masks=action_masks(observed, self.actions.specs),
            final_obs_certain=gives_final or not self._self_resetting,
            device=None if rows.type == "cpu" else rows,
            single=single,
        )
        self._stepping: Any = env  # has ``step``, which may be compiled
        self._limit: int | None = None
        # steps of current episodes
        self._count = torch.zeros(B, dtype=torch.int64, device=self._on)
        rows_on = self.spec.device or torch.device("cpu")
        action_specs = list(self.actions.specs.values())
        self._random = RandomActions(action_specs, B, rows_on)
        if not self._self_resetting:
            self._need_mask("it does not reset by itself (AutoresetMode.DISABLED)")

    def compile_step(self, options: Mapping[str, Any]) -> None:
        compiled = torch.compile(self.env.step, **options)
        self._stepping = SimpleNamespace(step=compiled)

    def limit_episodes(self, steps: int) -> None:
        try:
            self._need_mask("max_frames_per_traj ends episodes from outside")
        except UnsupportedEnv as error:
            raise BadOption(
                f"{error}; or leave max_frames_per_traj out and set the environment's own limit"
            ) from None
        self._limit = steps

    def sample(self, rng: GroupRng, shape: tuple[int, ...]) -> dict[Key, Any]:
        """Draw like ``SpaceCodec.sample``, on the device of the rows. Each row has a seed of its
        own, so the numbers do not depend on the division of steps into batches.
        """
        rows: list[list[torch.Tensor]] = [[] for _ in self.spec.action_specs]
        for _ in range(math.prod(shape[:-1])):
            seed = int(rng.stream(0).integers(2**63))
            leaves = self._random.drawn(seed)
            for steps, leaf in zip(rows, leaves, strict=True):
                steps.append(leaf)
        drawn: dict[Key, Any] = {}
        specs = self.spec.action_specs.items()
        for (key, spec), steps in zip(specs, rows, strict=True):
            if steps:
                leaf = torch.stack(steps)
            else:  # the only row has an action of the policy's first call
                dtype = torch_dtype(spec.dtype)
                leaf = torch.empty(0, dtype=dtype, device=self._random.device)
            leaf = leaf.reshape(*shape, *spec.shape)
            drawn[key] = leaf if self.spec.device else leaf.numpy()
        return drawn

    def reset(
        self,
        arrays: Mapping[Key, Any],
        row: int,
        which: Sequence[int],
        seeds: Sequence[int] | None,
    ) -> None:
        given = self.take_options()
        if seeds is not None:
            seed = checks.batch_seed(seeds)
            given |= checks.seed_argument(
                self.env,
                seed,
                self.spec.name,
                self.casts,
            )
        index = list(which)
        with torch.inference_mode(False), torch.no_grad():
            targets = [
                as_tensor(arrays[key][row]) for key in self.spec.observation_specs
            ]
            if len(index) == self.spec.num_envs:
                leaves = self._reset(given)
                needs_mask = self._limit is not None or not self._self_resetting
                if self._mask_untried and needs_mask:
                    leaves = self._try_mask(given, leaves)
                for target, leaf in zip(targets, leaves, strict=True):
                    target.copy_(leaf)
            else:
                B = self.spec.num_envs
                mask = torch.zeros(B, dtype=torch.bool, device="cpu")
                mask[index] = True
                mask = mask.to(self._on)
                leaves = self._reset_some(mask, given, index)
                if self._mask_untried:
                    self._check_mask_respected(targets, leaves, mask)
                for target, leaf in zip(targets, leaves, strict=True):
                    before = target.to(self._on)
                    target.copy_(where(mask, leaf, before))
            self._count[index] = 0

    def start(self, lane: Lane) -> Step:
        step = lane.cache.get(self)
        if step is None:
            step = lane.cache[self] = self._make_step(lane)
        return step

    def objects(self) -> Sequence[object]:
        return [self.env]

    def snapshot(self) -> dict[str, Any]:
        return {
            "steps": self._count.clone(),
            "mask_untried": self._mask_untried,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._mask_untried = state["mask_untried"]
        self._count.copy_(state["steps"])

    def close(self) -> None:
        getattr(self.env, "close", lambda: None)()

    # --- one step ---------------------------------------------------------------------------------

    def _make_step(self, lane: Lane) -> Step:
        keys = list(self.spec.observation_specs)
        checks.check_next_rows(self.spec.name, keys, lane)
        tensors = lane.tensors

        def rows_of(key: Key) -> Sequence[torch.Tensor]:
            return tensors[key].unbind(0)

        observations = [rows_of(key) for key in keys]
        after = [rows_of(next_of(key)) for key in keys]
        actions = [rows_of(key) for key in self.spec.action_specs]
        valid = None
        if NEXT_OBS_VALID in tensors:
            valid = rows_of(NEXT_OBS_VALID)
        begins = []  # rows that are written one row later
        states = []
        for column in lane.layout.columns:
            key = column.key
            if not column.carry or key in self.spec.observation_specs:
                continue
            if key == IS_INIT:
                begins.append((rows_of(key), 1))
            else:
                states.append(rows_of(key))
        columns = [
            *after,
            rows_of(REWARD),
            rows_of(next_of(TERMINATED)),
            rows_of(next_of(TRUNCATED)),
        ]
        written = [(rows, 0) for rows in columns]
        # the rows with the observations of environments that go on
        kept = after
        later = 0
        next_rows = []
        if self._self_resetting:
            # they have returned the observations of the next row
            kept = observations
            later = 1
            next_rows = [(rows, 1) for rows in observations]
        write = joint_rows([*written, *begins, *next_rows])
        on = self._on

        def step(t: int) -> None:
            with torch.inference_mode(False), torch.no_grad():
                action = [rows[t].to(on, copy=True) for rows in actions]
                obs, reward, ended, cut, info = self._step(action, t)
                done = ended | cut
                last = obs
                unknown = None
                if self._self_resetting:
                    last, unknown = self._last(obs, ended, done, info)
                if valid is not None:
                    if unknown is None:
                        valid[t].fill_(True)
                    else:
                        valid[t].copy_(~unknown)
                waiting = None if self._self_resetting else done
                if self._limit is not None:
                    self._count += 1
                    late = (self._count >= self._limit) & ~done
                    cut = cut | late
                    done = done | late
                    waiting = late if self._self_resetting else done
                    self._count.masked_fill_(done, 0)
                # before a reset, which may write into the tensors that ``step`` has returned
                values = [*last, reward, ended, cut]
                if begins:
                    values.append(done)
                if next_rows:
                    values += obs
                write(t, values)
                if waiting is not None:
                    first = self._reset_some(waiting, {})
                    leaves = zip(observations, kept, first, strict=True)
                    for rows, others, leaf in leaves:
                        going_on = others[t + later]
                        choose(waiting, leaf, going_on, rows[t + 1])
                for rows in states:  # recurrent states at the start of an episode
                    row = rows[t + 1]
                    began = like(done.to(row.device), row)
                    row.masked_fill_(began, 0)
            self.executed_in_row = 0

        return step

    def _step(
        self,
        action: Leaves,
        t: int,
    ) -> tuple[Leaves, torch.Tensor, torch.Tensor, torch.Tensor, Any]:
        built = self.actions.build(action)
        got = checks.call(self._stepping, "step", self.spec.name, built)
        self.executed_in_row = self.spec.num_envs
        who = f"{self.spec.name}.step"
        obs, reward, terminated, truncated, info = checks.step_values(got, who)
        leaves = self._leaves(obs, f"{who} (row {t} of the batch)")
        ended = self._column(terminated, "terminated")
        cut = self._column(truncated, "truncated")
        return leaves, self._column(reward, "reward"), ended, cut, info

    def _last(
        self,
        obs: Leaves,
        ended: torch.Tensor,
        done: torch.Tensor,
        info: Any,
    ) -> tuple[Leaves, torch.Tensor | None]:
        """Return the true last observations if ``done``, else ``obs``; and the mask of unknown ones:
        0 after a termination (``ended``), where no target needs them and ``value * ~terminated`` has
        to be finite; else NaN, so that nothing bootstraps from them unnoticed.
        """
        names = []
        if isinstance(info, Mapping):
            names = [name for name in FINAL if info.get(name) is not None]
        if not names:
            last = obs
            unknown = done
        else:
            name = names[0]
            final = self._leaves(info[name], f"{self.spec.name}: info[{name!r}]")
            last = []
            for end, leaf in zip(final, obs, strict=True):
                last.append(where(done, end, leaf))
            given = info.get(f"_{name}")
            if given is None:
                return last, None
            if not torch.is_tensor(given):
                given = torch.as_tensor(given, device=done.device)
            unknown = done & ~self._column(given, f"info['_{name}']")
        blanked = []
        for leaf in last:
            blank = leaf.masked_fill(like(unknown, leaf), 0)
            if leaf.is_floating_point():
                is_nan = like(unknown & ~ended, leaf)
                blank = blank.masked_fill(is_nan, float("nan"))
            blanked.append(blank)
        return blanked, unknown

    def _leaves(self, obs: Any, who: str) -> Leaves:
        """Return the leaves of the observation, ``[B, *shape]``, after a check of shapes and
        dtypes.
        """
        leaves = self.observations.flatten(obs, who)
        for expectation, leaf in zip(self._expected, leaves, strict=True):
            key, expected, dtype = expectation
            shaped = torch.is_tensor(leaf) and tuple(leaf.shape) == expected
            if not shaped or not self._fits(leaf.dtype, dtype, key):
                raise BadEnvOutput(
                    f"{who}: {dotted(key)} is {_describe(leaf)}, expected a tensor of shape"
                    f" {expected} and dtype {dtype}, as its space says. {FIX}"
                )
        return leaves

    def _fits(
        self,
        got: torch.dtype,
        dtype: torch.dtype,
        key: Key,
    ) -> bool:
        """Decide like ``Casts.problem``, without the values, which are on the device: accept any
        float for a float.
        """
        if got == dtype:
            return True
        cast = (
            got.is_floating_point and dtype.is_floating_point and not self.casts.refused
        )
        if cast:
            self.casts.note(
                f"{dotted(key)} has dtype {got}, but its space says {dtype}"
            )
        return cast

    def _column(self, value: Any, name: str) -> torch.Tensor:
        """Return a reward, or a flag as bool, ``[B]``."""
        flag = name != "reward"
        count = self.spec.num_envs
        shaped = torch.is_tensor(value) and value.numel() == count
        if not shaped or (flag and value.is_floating_point()):
            raise BadEnvOutput(
                f"{self.spec.name}.step: {name} is {_describe(value)}, expected a tensor of"
                f" {count} {'bools' if flag else 'numbers'}. {FIX}"
            )
        column: torch.Tensor = value.reshape(count)
        return column.bool() if flag else column

    # --- resets -----------------------------------------------------------------------------------

    def _reset(self, given: Mapping[str, Any]) -> Leaves:
        who = self.spec.name
        returned = checks.call(self.env, "reset", who, **given)
        obs, _ = checks.reset_pair(returned, who)
        return self._leaves(obs, f"{who}.reset")

    def _reset_some(
        self,
        mask: torch.Tensor,
        given: dict[str, Any],
        which: Sequence[int] = (),
    ) -> Leaves:
        """Reset the environments in ``mask``; ``which`` has their indices, for environments that
        need these.
        """
        how = self._how
        self.check_partial_reset()
        assert how is not None
        value: Any = mask
        if how.indices:
            value = torch.as_tensor(which, device=self._on)
        if how.option:
            others = given.get(how.keyword, {})
            value = {**others, how.option: value}
        given[how.keyword] = value
        return self._reset(given)

    def check_partial_reset(self) -> None:
        if self._how is None:
            raise UnsupportedEnv(
                f"{self.spec.name} cannot reset single environments: reset all of them, or {DO_ONE}"
            )

    def _need_mask(self, why: str) -> None:
        if self._how is None or self._how.indices:
            raise UnsupportedEnv(
                f"{self.spec.name}: {why}, so it must be reset by mask, without waiting for the"
                f" device: {DO_ONE}"
            )

    def _try_mask(self, given: dict[str, Any], obs: Leaves) -> Leaves:
        """Test that a reset of environment 0 after a step leaves the others unchanged; then reset
        all as requested.
        """
        self._mask_untried = False
        actions = [leaf.to(self._on) for leaf in self._random.drawn(0)]
        seen = dict(zip(self.spec.observation_specs, obs, strict=True))
        for place, (action, spec) in enumerate(self.spec.action_specs.items()):
            key = self.spec.action_masks.get(action)
            if key is None or not spec.is_discrete:
                continue
            shape = self.spec.observation_specs[key].shape
            leaf = actions[place]
            # a mask that does not fit, which policies refuse
            with suppress(ValueError):
                allowed = _first_allowed(spec, seen[key], shape)
                actions[place] = allowed.to(leaf).reshape(leaf.shape)
        before, *_ = self._step(actions, 0)
        before = [leaf.clone() for leaf in before]
        mask = torch.arange(self.spec.num_envs, device=self._on) == 0
        after = self._reset_some(mask, {})
        self._check_mask_respected(before, after, mask)
        self.executed_in_row = 0
        return self._reset(given)

    def _check_mask_respected(
        self,
        before: Leaves,
        after: Leaves,
        mask: torch.Tensor,
    ) -> None:
        for old, new in zip(before, after, strict=True):
            equal = old.to(self._on) == new.to(old.dtype)
            same = equal | (new != new)
            if not (same | like(mask, new)).all():
                raise UnsupportedEnv(
                    f"{self.spec.name} ignores options={{'reset_mask': mask}}: a reset of"
                    f" environments {mask.nonzero()[:8, 0].tolist()} also reset others; {DO_ONE}."
                )


def _mode(env: Any, name: str) -> AutoresetMode:
    declared = autoreset_mode(env)
    mani_skill = _is_from(env, MANI_SKILL) and getattr(env, "auto_reset", False)
    if declared is None and (mani_skill or _is_from(env, *ISAAC_LAB)):
        return AutoresetMode.SAME_STEP
    if declared is None or declared is AutoresetMode.NEXT_STEP:
        what = "resets at the next step" if declared else "does not say how it resets"
        raise UnsupportedEnv(
            f"{name} {what}: Muster takes batches on tensors with metadata['autoreset_mode']"
            " SAME_STEP (it returns the first observations of new episodes, and the last ones as"
            " info['final_obs']) or DISABLED (reset() takes a mask). ManiSkill: pass"
            " ManiSkillVectorEnv(env, auto_reset=True)."
        )
    return declared


@dataclass(frozen=True)
class _Partial:
    """How to pass environments to ``reset``: by keyword, or as an entry ``option`` of a dict passed
    by keyword.
    """

    keyword: str
    option: str | None = None
    indices: bool = False  # pass indices instead of a mask; the host must know them


def _partial_reset(env: Any) -> _Partial | None:
    parameters = inspect.signature(env.reset).parameters
    for name in ("mask", "reset_mask"):
        if name in parameters:
            return _Partial(name)
    if "env_ids" in parameters:
        return _Partial("env_ids", indices=True)
    if _is_from(env, MANI_SKILL):
        return _Partial("options", "env_idx", indices=True)
    if "options" in parameters and not _is_from(env, *ISAAC_LAB):
        return _Partial("options", "reset_mask")
    return None


def _is_from(obj: Any, *packages: str) -> bool:
    inner = getattr(obj, "unwrapped", obj)
    classes = (*type(obj).__mro__, *type(inner).__mro__)
    prefixes = tuple(f"{name}." for name in packages)
    return any(f"{cls.__module__}.".startswith(prefixes) for cls in classes)


def _describe(value: Any) -> str:
    if torch.is_tensor(value):
        return f"a tensor of shape {tuple(value.shape)} and dtype {value.dtype}"
    return type(value).__name__


# --- spaces ---------------------------------------------------------------------------------------


class RandomActions:
    """Random actions of B environments, drawn on a device.

    Args:
        specs: of the parts of an action.
        device: on which they are drawn.
    """

    def __init__(
        self,
        specs: Sequence[ArraySpec],
        B: int,
        device: torch.device,
    ) -> None:
        self.device = device
        self._generator = torch.Generator(device)
        self._draws = [_drawing(spec, B, device) for spec in specs]

    def drawn(self, seed: int) -> list[torch.Tensor]:
        """Return each part of the actions, ``[B, *shape]``."""
        self._generator.manual_seed(seed)
        return [draw(self._generator) for draw in self._draws]


def _drawing(spec: ArraySpec, B: int, on: torch.device) -> Draw:
    assert spec.low is not None
    assert spec.high is not None
    size = (B, *spec.shape)
    dtype = torch_dtype(spec.dtype)
    lows = np.array(spec.low, np.float64)
    highs = np.array(spec.high, np.float64)
    low = torch.as_tensor(lows, device=on)
    high = torch.as_tensor(highs, device=on)

    def uniform(generator: torch.Generator) -> torch.Tensor:
        return torch.rand(
            size,
            generator=generator,
            dtype=torch.float64,
            device=on,
        )

    def integers(generator: torch.Generator) -> torch.Tensor:
        steps = (uniform(generator) * (high - low + 1)).floor()
        return torch.minimum(low + steps, high).to(dtype)

    if spec.dtype.kind in "iub":
        return integers
    below = low.isfinite()
    above = high.isfinite()
    low0 = low.where(below, torch.zeros_like(low))
    high0 = high.where(above, torch.zeros_like(high))

    def floats(generator: torch.Generator) -> torch.Tensor:
        u = uniform(generator)
        normal = torch.randn(
            size,
            generator=generator,
            dtype=torch.float64,
            device=on,
        )
        tail = -torch.log1p(-u)
        one_sided = torch.where(below, low0 + tail, high0 - tail)
        both = low0 + u * (high0 - low0)
        unbounded = torch.where(below | above, one_sided, normal)
        return torch.where(below & above, both, unbounded).to(dtype)

    return floats


def _first_allowed(
    spec: ArraySpec,
    mask: torch.Tensor,
    shape: tuple[int, ...],
) -> torch.Tensor:
    """Return the first allowed choice of each variable, ``[B, variables]``; ``shape``: of the mask
    of an environment.

    Raises:
        ValueError: the mask does not fit the action.
    """
    nvec, low = choices_of(spec)
    legal = mask.reshape(len(mask), -1) != 0
    if is_joint_mask(nvec, shape):
        first_legal = legal.byte().argmax(1)
        chosen = list(torch.unravel_index(first_legal, nvec))
    else:
        parts = torch.split(legal, list(nvec), 1)
        chosen = [part.byte().argmax(1) for part in parts]
    choices = []
    for choice, first in zip(chosen, low, strict=True):
        choices.append(choice + first)
    return torch.stack(choices, 1)


def _single_space(env: Any, name: str, B: int) -> spaces.Space[Any]:
    """Return the space of one environment; wrappers have the space of the batch only."""
    base = getattr(env, "unwrapped", env)
    batched = getattr(env, name, None)
    single = f"single_{name}"
    if hasattr(env, single) or batched is getattr(base, name, None):
        space = getattr(env, single, getattr(base, single, None))
        if isinstance(space, spaces.Space):
            return space
    return _unbatched(batched, B)


def _unbatched(space: Any, B: int) -> spaces.Space[Any]:
    if isinstance(space, spaces.Dict):
        parts = {}
        for key, part in space.spaces.items():
            parts[key] = _unbatched(part, B)
        return spaces.Dict(parts)
    known = isinstance(space, (spaces.Box, spaces.MultiDiscrete))
    if not known or space.shape[:1] != (B,):
        raise UnsupportedSpace(
            f"{space} is not a space of {B} environments: give the environment"
            " single_observation_space and single_action_space"
        )
    if isinstance(space, spaces.Box):
        low = space.low[0]
        high = space.high[0]
        return spaces.Box(low, high, dtype=space.dtype.type)
    if space.nvec.ndim == 1:
        n = int(space.nvec[0])
        return spaces.Discrete(n, start=int(space.start[0]))
    return spaces.MultiDiscrete(space.nvec[0], start=space.start[0])
