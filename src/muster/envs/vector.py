"""``gymnasium.vector.VectorEnv`` as an env batch: the same transitions in all three autoreset
modes.

Muster resets a finished environment itself, by a masked reset right after the step in which its
episode ended. With ``DISABLED`` the caller must do that. With ``NEXT_STEP`` it clears the pending
autoreset, so no row without a transition occurs. With ``SAME_STEP`` the environment has been reset
already, and returns the true last observation in ``info``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from muster.capabilities import (
    CastsValues,
    CountsSteps,
    DrawsActions,
    KeepsState,
    ResetsWithOptions,
    TellsInfos,
)
from muster.env_spec import EnvSpec
from muster.envs import checks
from muster.envs.cartpole_vector import has_masks, with_masks
from muster.envs.checks import FIX, Casts
from muster.envs.own_memory import with_own_memory
from muster.envs.spaces import SpaceCodec, action_codec, action_masks, observation_codec
from muster.envs.vector_wrappers import (
    check_masked_resets,
    forgets_statistics,
    unknown_resets,
)
from muster.errors import BadEnvOutput, BadOption, UnsupportedEnv, text_of
from muster.keys import NEXT_OBS_VALID, REWARD, Key, dotted, mask_of, next_of
from muster.memory.objects import copied_cells
from muster.memory.slots import Lane
from muster.memory.specs import Array, ArraySpec
from muster.protocols import ALL, EnvBatch, Step
from muster.rng import GroupRng

STATISTICS = (
    "episode",
    *mask_of(("episode",)),
)  # what Gymnasium's wrapper of batches adds
TERMINATED = next_of(("terminated",))
TRUNCATED = next_of(("truncated",))
FINAL = "final_obs"
(FINAL_MASK,) = mask_of((FINAL,))


class VectorEnvBatch(
    EnvBatch,
    CastsValues,
    CountsSteps,
    DrawsActions,
    KeepsState,
    ResetsWithOptions,
    TellsInfos,
):
    """Implements ``EnvBatch`` for a ``VectorEnv`` with a declared autoreset mode; owns (and closes)
    it.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        self.env = env = with_masks(env)
        B = env.num_envs
        name = checks.env_name(env)
        self.mode = _mode(env, name)
        base = env.unwrapped
        gymnasiums_own = isinstance(base, (SyncVectorEnv, AsyncVectorEnv))
        exact = gymnasiums_own or _is_ale(base) or has_masks(env)
        self._known = exact or bool(getattr(base, "muster_exact", False))
        if self.mode is AutoresetMode.SAME_STEP and isinstance(base, SyncVectorEnv):
            with_own_memory(base)
        self.observations: SpaceCodec = observation_codec(env.single_observation_space)
        self.actions: SpaceCodec = action_codec(env.single_action_space)
        self.spec = EnvSpec(
            name,
            B,
            (B,),
            self.observations.specs,
            self.actions.specs,
            action_masks=action_masks(self.observations.specs, self.actions.specs),
            final_obs_certain=self.mode is not AutoresetMode.SAME_STEP or self._known,
            seeds_episodes=isinstance(env.unwrapped, (SyncVectorEnv, AsyncVectorEnv)),
        )
        self._batched: list[ArraySpec] = []  # specs of the returned observations
        for spec in self.observations.specs.values():
            rows = (B, *spec.shape)
            self._batched.append(ArraySpec(rows, spec.dtype))
        self.casts: Casts = Casts(name)
        if self._is_reset_by_mask:
            check_masked_resets(env, name)
            for text in unknown_resets(env, name):
                self.casts.warn(text)
        # else ``_try_mask``
        self._masks = self._known or self.mode is AutoresetMode.SAME_STEP or B == 1
        # SAME_STEP: environments that have reset themselves and await ``reset``, and their first
        # observations: copies.
        self._fresh: tuple[list[int], list[Array]] = ([], [])
        self._keeps_infos = False
        self._reset_info: dict[str, Any] = {}
        self.new_infos: list[tuple[Any, Any]] = []
        self._infos_of: Callable[[Any], Any] = getattr(
            env, "muster_infos", lambda info: info
        )

    def sample(self, rng: GroupRng, shape: tuple[int, ...]) -> dict[Key, Array]:
        return self.actions.sample(rng, shape)

    def reset(
        self,
        arrays: Mapping[Key, Array],
        row: int,
        which: Sequence[int],
        seeds: Sequence[int] | None,
    ) -> None:
        targets = [arrays[key][row] for key in self.spec.observation_specs]
        fresh, first = self._fresh
        self._fresh = ([], [])
        now = seeds is not None or self.reset_options
        waiting = [] if now else sorted(set(which).intersection(fresh))
        if waiting:
            places = [fresh.index(i) for i in waiting]
            for target, leaf in zip(targets, first, strict=True):
                target[waiting] = leaf[places]
        rest = [i for i in which if i not in waiting]
        self.new_infos = []
        if not rest:
            return
        returned = self._masked_reset(rest, seeds)
        leaves = self._leaves(returned, f"{self.spec.name}.reset")
        if self._keeps_infos:
            self.new_infos = [(self._infos_of(self._reset_info), rest)]
        if not self._known and len(rest) < self.spec.num_envs:
            self._check_mask_respected(targets, leaves, rest)
        for target, leaf in zip(targets, leaves, strict=True):
            target[rest] = leaf[rest]

    def start(self, lane: Lane) -> Step:
        obs_arrays = [lane.arrays[key] for key in self.spec.observation_specs]
        actions: list[tuple[Array, Callable[[Any], Array]]] = []
        for key, spec in self.spec.action_specs.items():
            copier = np.ndarray.copy if spec.is_tensor else copied_cells
            actions.append((lane.arrays[key], copier))
        rewards = lane.arrays[REWARD]
        terminated = lane.arrays[TERMINATED]
        truncated = lane.arrays[TRUNCATED]
        known = lane.arrays.get(NEXT_OBS_VALID)

        def step(t: int) -> Sequence[int] | None:
            # the environment may keep it
            action = self.actions.build([copy(array[t]) for array, copy in actions])
            got = checks.call(self.env, "step", self.spec.name, action)
            self.executed_in_row = self.spec.num_envs
            obs, reward, ended, cut, info = checks.step_values(
                got, f"{self.spec.name}.step"
            )
            leaves = self._leaves(obs, f"{self.spec.name}.step (row {t} of the batch)")
            for array, leaf in zip(obs_arrays, leaves, strict=True):
                array[t + 1] = leaf
            rewards[t] = self._column(reward, "reward", checks.NUMBERS)
            terminated[t] = self._column(ended, "terminated", "b")
            truncated[t] = self._column(cut, "truncated", "b")
            finished: list[int] = np.flatnonzero(terminated[t] | truncated[t]).tolist()
            if self._keeps_infos:
                self._take_infos(info, finished)
            if finished and self.mode is AutoresetMode.SAME_STEP:
                self._fresh = finished, [leaf[finished] for leaf in leaves]
                rows = [array[t + 1] for array in obs_arrays]
                for i in finished:
                    is_known = self._take_final(i, info, rows)
                    if not is_known:
                        self._flag_unknown(i, known, t)
                        _blank(rows, i, is_terminated=bool(terminated[t, i]))
            self.executed_in_row = 0
            return finished or None

        return step

    def objects(self) -> Sequence[object]:
        return [self.env]

    @property
    def _is_reset_by_mask(self) -> bool:
        """Where an episode ends; to cut one, and for ``reset(index)``, it is in every mode."""
        return self.spec.num_envs > 1 and self.mode is not AutoresetMode.SAME_STEP

    def keep_infos(self) -> None:
        self._keeps_infos = True
        if self._is_reset_by_mask and forgets_statistics(self.env):
            self.casts.warn(
                f"{self.spec.name}: the infos 'episode' are wrong. Gymnasium's RecordEpisodeStatistics"
                " of batches forgets all episodes when Muster resets one environment: wrap the single"
                " environments, or build the batch with autoreset_mode=AutoresetMode.SAME_STEP."
                " collector.episodes has return and length of each episode"
            )

    def snapshot(self) -> dict[str, Any]:
        finished, leaves = self._fresh
        return {
            "finished": list(finished),
            "first": [leaf.copy() for leaf in leaves],
            "masks": self._masks,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._fresh = (state["finished"], state["first"])
        self._masks = state["masks"]

    def close(self) -> None:
        self.env.close()

    def _take_infos(self, info: Any, finished: list[int]) -> None:
        """Set ``new_infos``.

        SAME_STEP: for finished environments, ``final_info`` has the step's infos.
        """
        told = self._infos_of(info)
        self.new_infos = [(told, ALL)]
        if (
            finished
            and self.mode is AutoresetMode.SAME_STEP
            and isinstance(info, Mapping)
        ):
            final = info.get("final_info")
            final = {} if final is None else final
            # wrappers of the batch add the step's statistics outside of it
            if isinstance(final, Mapping):
                statistics = {name: info[name] for name in STATISTICS if name in info}
                final = {**statistics, **final}
                told = {
                    name: value
                    for name, value in told.items()
                    if name not in STATISTICS
                }
            self.new_infos = [(told, ALL), (final, finished)]

    def _take_final(
        self,
        i: int,
        info: Any,
        rows: list[Array],
    ) -> bool:
        """For SAME_STEP: write the true last observation into rows, and return whether it is known."""
        leaves = self._final_leaves(i, info)
        if leaves is None:
            return False
        specs = self.observations.specs.items()
        for (key, spec), row, leaf in zip(specs, rows, leaves, strict=True):
            who = f"{self.spec.name}[{i}]"
            what = f"final_obs {dotted(key)}"
            if spec.is_tensor:
                self.casts.check(leaf, spec, what, who)
                row[i] = leaf
            else:
                row[i] = checks.stored_copy(leaf, f"{who}: {what}")
        return True

    def _final_leaves(self, i: int, info: Any) -> list[Any] | None:
        """Return the leaves of the last observation of an environment; None: it is unknown.

        ``final_obs`` has an observation for each environment, as Gymnasium's, or is one observation
        of arrays for all, as those of a step; the mask ``_final_obs`` says for which it is there.
        """
        final = info.get(FINAL) if isinstance(info, Mapping) else None
        if final is None:
            return None
        there = info.get(FINAL_MASK)
        if (
            there is not None
            and not self._column(there, f"info['{FINAL_MASK}']", "b")[i]
        ):
            return None
        try:
            leaves = []
            if isinstance(final, Mapping):
                leaves = self.observations.flatten(final)
            elif isinstance(final, tuple):
                # or it has an observation for each environment
                with suppress(BadEnvOutput):
                    leaves = self.observations.flatten(final)
            if leaves and all(isinstance(leaf, np.ndarray) for leaf in leaves):
                return [leaf[i] for leaf in leaves]
            of_env = final[i]
        except (BadEnvOutput, TypeError, IndexError, KeyError) as error:
            raise BadEnvOutput(
                f"{self.spec.name}.step: info['final_obs'] is {checks.described_value(final)}; expected an"
                f" array or list of {self.spec.num_envs} observations (None where there is none), or"
                f" an observation as step returns it: {text_of(error)}. {FIX}"
            ) from error
        if of_env is None:
            return None
        return (
            [of_env] if self.observations.single else self.observations.flatten(of_env)
        )

    def _flag_unknown(
        self,
        i: int,
        known: Array | None,
        t: int,
    ) -> None:
        """Flag the last observation of an episode as unknown."""
        if known is None:
            raise BadEnvOutput(
                f"{self.spec.name}[{i}]: an episode ended in SAME_STEP mode without"
                f" info['final_obs']. {FIX}"
            )
        known[t, i] = False

    def _try_mask(self, seeds: Sequence[int] | None) -> None:
        """Test before the first batch, with environment 0, whether a class unknown to Muster
        respects masks.
        """
        who = f"{self.spec.name}.reset"
        first = self._reset(seed=self._seeds(seeds))
        before = [leaf.copy() for leaf in self._leaves(first, who)]
        after = self._leaves(self._masked_reset([0], None), who)
        self._check_mask_respected(before, after, [0])
        self._masks = True

    def _masked_reset(self, which: list[int], seeds: Sequence[int] | None) -> Any:
        given = self.take_options()
        unknown = given.keys() - {"options"}
        if unknown:
            raise BadOption(
                f"{self.spec.name}.reset takes options=, not {sorted(unknown)}"
            )
        if len(which) == self.spec.num_envs:
            if not self._masks:
                self._try_mask(seeds)
            return self._reset(seed=self._seeds(seeds), **given)
        if not self._is_reset_by_mask:  # else the constructor has checked
            check_masked_resets(self.env, self.spec.name)
        mask = np.zeros(self.spec.num_envs, bool)
        mask[which] = True
        seed_arg: Any = None
        if seeds is not None and _is_ale(self.env.unwrapped):
            seed_arg = np.asarray(list(seeds))
        elif seeds is not None:
            seed_arg = [None] * self.spec.num_envs
            for i, seed in zip(which, seeds, strict=True):
                seed_arg[i] = seed
        options = {**(given.get("options") or {}), "reset_mask": mask}
        return self._reset(seed=seed_arg, options=options)

    def _check_mask_respected(
        self,
        before: list[Array],
        after: list[Array],
        which: list[int],
    ) -> None:
        others = np.ones(self.spec.num_envs, bool)
        others[which] = False
        for old, new in zip(before, after, strict=True):
            if old.dtype != object and not _same(old[others], new[others]):
                raise UnsupportedEnv(
                    f"{self.spec.name} ({self.mode.name}) ignores options={{'reset_mask': mask}}: a"
                    f" reset of environments {which[:8]} also reset others. Muster needs masked"
                    " resets: let reset() respect reset_mask, or build it with"
                    " AutoresetMode.SAME_STEP and info['final_obs'], or stack single environments"
                    " (gymnasium.make_vec(..., vectorization_mode='sync'))."
                )

    def _seeds(self, seeds: Sequence[int] | None) -> Any:
        if seeds is None:
            return None
        if _is_ale(self.env.unwrapped):
            return np.asarray(list(seeds))
        return checks.batch_seed(seeds)

    def _reset(self, seed: Any, **given: Any) -> Any:
        who = self.spec.name
        given |= checks.seed_argument(self.env, seed, who, self.casts)
        got = checks.call(self.env, "reset", who, **given)
        obs, self._reset_info = checks.reset_pair(got, who)
        return obs

    def _leaves(self, obs: Any, who: str) -> list[Array]:
        """Return the leaves of a batched observation as checked arrays ``[B, *shape]``."""
        leaves = self.observations.flatten(obs, who)
        named = zip(self.spec.observation_specs, self._batched, strict=True)
        for n, (key, spec) in enumerate(named):
            if spec.is_tensor:
                self.casts.check(leaves[n], spec, dotted(key), who)
            else:
                leaves[n] = _object_row(
                    leaves[n], self.spec.num_envs, f"{who}: {dotted(key)}"
                )
        return leaves

    def _column(
        self,
        value: Any,
        name: str,
        kinds: str,
    ) -> Array:
        array = np.asarray(value)
        B = self.spec.num_envs
        number_in_array = kinds == checks.NUMBERS and array.shape == (B, 1)
        if number_in_array and not self.casts.refused:
            self.casts.note(
                f"rewards have shape {array.shape}, expected ({self.spec.num_envs},)"
            )
            array = array[:, 0]
        if array.shape != (self.spec.num_envs,) or array.dtype.kind not in kinds:
            raise BadEnvOutput(
                f"{self.spec.name}.step: {name} has shape {array.shape} and dtype {array.dtype},"
                f" expected ({self.spec.num_envs},) and {'bool' if kinds == 'b' else 'a number'}."
                f" {FIX}"
            )
        return array


def _mode(env: VectorEnv[Any, Any, Any], name: str) -> AutoresetMode:
    mode = autoreset_mode(env)
    if mode is None:
        raise UnsupportedEnv(
            f"{name} does not say how it resets: set metadata['autoreset_mode'] to a "
            "gymnasium.vector.AutoresetMode. Guessing would corrupt the ends of episodes."
        )
    base = env.unwrapped
    by_pipe = isinstance(base, AsyncVectorEnv) and not base.shared_memory
    if mode is AutoresetMode.NEXT_STEP and by_pipe:
        raise UnsupportedEnv(
            f"{name}: AsyncVectorEnv(shared_memory=False) forgets masked resets in"
            " NEXT_STEP mode. Use shared_memory=True or autoreset_mode=AutoresetMode.DISABLED."
        )
    lockstep = getattr(base, "batch_size", env.num_envs) == env.num_envs
    if mode is not AutoresetMode.SAME_STEP and not lockstep:
        raise UnsupportedEnv(
            f"{name}: batch_size < num_envs is not lockstep; use batch_size = num_envs"
        )
    return mode


def autoreset_mode(env: Any) -> AutoresetMode | None:
    """Return the autoreset mode that a batch of environments declares; None if it declares none.

    Shared ``metadata`` is ignored: some packages write into the dict of all classes that do not
    define their own.
    """
    metadata = getattr(env, "metadata", None) or {}
    shared = metadata is gymnasium.Env.metadata or metadata is VectorEnv.metadata
    declared = None if shared else metadata.get("autoreset_mode")
    if declared is None:
        declared = getattr(env, "autoreset_mode", None)
    if declared is None:
        inner = getattr(env, "unwrapped", env)
        declared = getattr(inner, "autoreset_mode", None)
    return None if declared is None else AutoresetMode(declared)


def _same(row: Array, new: Array) -> bool:
    """Return whether a stored row contains these observations."""
    return np.array_equal(row, new.astype(row.dtype, copy=False), equal_nan=True)


def _is_ale(env: Any) -> bool:
    return type(env).__module__.startswith("ale_py")


def _object_row(value: Any, B: int, what: str) -> Array:
    """Return copies of the objects of a batched leaf, ``[B]``."""
    row = np.empty(B, object)
    for i, item in enumerate(value):
        row[i] = checks.stored_copy(item, what)
    return row


def _blank(rows: Sequence[Array], i: int, *, is_terminated: bool) -> None:
    """Write an unknown last observation: 0 after a termination, where no target needs it and
    ``value * ~terminated`` has to be finite; else NaN, so that nothing bootstraps from it unnoticed.
    """
    for row in rows:
        row[i] = np.nan if row.dtype.kind == "f" and not is_terminated else 0
