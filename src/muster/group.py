"""A group: an env batch with its random streams, its time, and the rows it will act on next."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from muster.envs.checks import values_problem
from muster.errors import BadEnvOutput, BadPolicyOutput, MusterError, PolicyError
from muster.keys import FLAGS, NEXT_OBS_VALID, REWARD, STEP_COUNT, TRAJ_IDS, Key, dotted, next_of
from muster.memory.slots import Lane
from muster.memory.specs import Array, Column
from muster.protocols import EnvBatch, Outputs, Policy
from muster.rng import GroupRng, torch_threads
from muster.trajectories import Episodes, TrajectoryClock

Validate = Literal["off", "fast", "full"]
Result = TypeVar("Result")

TERMINATED, TRUNCATED, DONE = next_of(("terminated",)), next_of(("truncated",)), next_of(("done",))
IS_INIT: Key = ("is_init",)
NEVER = 1 << 62
CACHE_BYTES = 1 << 18  # next/observation is copied in pieces of this size, while they are still in the cache


@dataclass(frozen=True)
class RolloutOptions:
    """What a rollout does besides stepping; see ``CollectorOptions`` for the words."""

    max_frames_per_traj: int | None = None
    reset_at_each_iter: bool = False
    set_truncated: bool = False
    validate: Validate = "fast"
    num_threads: int | None = 1
    inference_mode: bool = True


@dataclass
class Timing:
    """Nanoseconds by what they went to; environment and policy are extrapolated from timed steps."""

    env: float = 0.0
    policy: float = 0.0
    copy: float = 0.0
    total: float = 0.0


class Group:
    """An env batch with its random streams, its time, and the rows it will act on next.

    Args:
        env: owned by the group.
        batched: whether B is a dimension for policy and user.
        env_ids: global numbers of its environments.
        total_envs: over all groups.
        rng: the group's own.
    """

    def __init__(
        self, env: EnvBatch, *, batched: bool, env_ids: Array, total_envs: int, rng: GroupRng, options: RolloutOptions
    ) -> None:
        self.env, self.batched, self.rng, self.options = env, batched, rng, options
        self.B = env.num_envs
        self.clock = TrajectoryClock(env_ids, total_envs)
        self.timing = Timing()
        self.executed = 0  # environment steps, whatever became of them
        self.discarded: Counter[str] = Counter()  # environment steps that no batch will show, by reason
        self.episodes: Episodes  # ended in the last rollout
        self.carry: dict[Key, Array] = {  # one row per carried column, [1, B, *shape]
            key: np.zeros((1, self.B, *spec.shape), spec.dtype) for key, spec in env.observation_specs.items()
        }
        self._obs_keys = list(env.observation_specs)
        row_bytes = sum(row.nbytes for row in self.carry.values())
        self._copy_every = max(1, CACHE_BYTES // max(row_bytes, 1))  # rows of next/observation at a time
        self._primed: tuple[Policy, Outputs] | None = None
        self._pending: list[int] = list(range(self.B))  # environments to reset before the next step
        self._seeds: dict[int, int] = {}
        self._deadline = np.full(self.B, NEVER, np.int64)  # row at which max_frames_per_traj is reached
        self._limit = options.max_frames_per_traj
        self._next: list[tuple[Array, Array]] = []  # of the lane: next/observation and observation, per leaf
        self._states: list[tuple[Array, bool]] = []  # of the lane: other carried columns, and their value at a reset
        self._copied = 0  # rows of next/observation that are complete

    def reset(self, which: Sequence[int] | None = None, seeds: Sequence[int] | None = None) -> None:
        """Let the environments ``which`` (default all) begin anew before the next step."""
        chosen = list(range(self.B)) if which is None else sorted(set(which))
        self._pending = sorted({*self._pending, *chosen})
        if seeds is not None:
            self._seeds.update(zip(chosen, seeds, strict=True))

    def prime(self, policy: Policy) -> None:
        """Make the policy's first real call, which shows its columns; ``rollout`` goes on from it."""
        if self._primed is not None and self._primed[0] is policy:
            return
        with self.rng.as_global(), torch.no_grad(), torch_threads(self.options.num_threads):
            self._reset_carry()
            obs = {k: self._as_policy_sees(self.carry[k][0]) for k in self._obs_keys}
            self._primed = policy, call_policy(policy, lambda: policy.first(obs, self.rng))

    def no_grad(self) -> AbstractContextManager[Any]:
        """What rollouts run in. The first call (``prime``) only has no gradients: a module may make things then that
        it keeps, such as lazy parameters, and what is made in inference mode cannot be trained.
        """
        return torch.inference_mode() if self.options.inference_mode else torch.no_grad()

    def columns(self, policy: Policy) -> tuple[Column, ...]:
        """What a lane for this group and policy stores; call ``prime`` before."""
        flag, step = np.dtype(bool), np.dtype(np.int64)
        columns = []
        for key, spec in self.env.observation_specs.items():
            columns.append(Column(key, spec.shape, spec.dtype, carry=True))
            columns.append(Column(next_of(key), spec.shape, spec.dtype))
        columns += [Column(key, spec.shape, spec.dtype) for key, spec in self.env.action_specs.items()]
        columns += [Column(key, (), flag, trailing=True) for f in FLAGS for key in (f, next_of(f))]
        columns += [Column(REWARD, (), np.dtype(np.float32), trailing=True), Column(TRAJ_IDS, (), step)]
        if self.options.max_frames_per_traj:
            columns += [Column(key, (), step, trailing=True) for key in (STEP_COUNT, next_of(STEP_COUNT))]
        if not self.env.final_obs_certain:
            columns.append(Column(NEXT_OBS_VALID, (), flag))
        return (*columns, *policy.columns())

    def close(self) -> None:
        self.env.close()

    def lose(self, lane: Lane, reason: str) -> None:
        """Count the rows of a lane that will not be delivered."""
        self.discarded[reason] += lane.done_steps * self.B
        lane.done_steps = 0

    # --- the beginning and the end of a rollout ---------------------------------------------------

    def enter(self, lane: Lane) -> None:
        """Make row ``lane.done_steps`` the one to act on."""
        begin = lane.done_steps
        if begin == 0:
            self._reset_carry()
            self._copied = 0
            for flag in FLAGS:
                lane.arrays[flag][...] = False
                lane.arrays[next_of(flag)][...] = False
            if NEXT_OBS_VALID in lane.arrays:
                lane.arrays[NEXT_OBS_VALID][...] = True
            for column in lane.layout.columns:
                if column.carry:
                    lane.arrays[column.key][:1] = self._carried(column)
            self._next = [(lane.arrays[next_of(key)], lane.arrays[key][1:]) for key in self._obs_keys]
            carried = [c.key for c in lane.layout.columns if c.carry and c.key not in self.env.observation_specs]
            self._states = [(lane.arrays[key], key == IS_INIT) for key in carried]
            if self._limit:
                self._deadline = self._limit - 1 - self.clock.steps
        elif self._pending:
            self._cut(lane, begin - 1)

    def take_primed(self, lane: Lane) -> bool:
        """Write what ``prime`` left for row 0, if anything."""
        if self._primed is None:
            return False
        _store_outputs(self._primed[1], lane)
        self._primed = None
        return True

    def after_step(self, lane: Lane, t: int, finished: Sequence[int] | None) -> int:
        """Whatever is due after row ``t`` besides the next step; returns the row at which to call again."""
        lane.done_steps = t + 1
        if self._limit and (late := np.flatnonzero(self._deadline <= t).tolist()):
            cut = late if finished is None else [i for i in late if i not in finished]
            lane.arrays[TRUNCATED][t, cut] = True
            finished = sorted({*cut, *(finished or ())})
        if finished is not None:
            self._copy_next(t + 1)  # before the reset overwrites the true last observations
            self._reset_rows(lane, t + 1, finished, None)
        elif t + 1 - self._copied >= self._copy_every:
            self._copy_next(t + 1)
        return self.next_call()

    def next_call(self) -> int:
        """The next row after which ``after_step`` is due even if no episode ends."""
        copy_at = self._copied + self._copy_every - 1
        return min(copy_at, int(self._deadline.min())) if self._limit else copy_at

    def leave(self, lane: Lane) -> None:
        """Complete all columns of a lane whose T rows have been stepped."""
        T, arrays = lane.T, lane.arrays
        self._copy_next(T)
        self._check_values(lane)
        terminated, truncated, done = arrays[TERMINATED], arrays[TRUNCATED], arrays[DONE]
        np.logical_or(terminated, truncated, out=done)
        self.clock.fill_ids(arrays[TRAJ_IDS], done)
        if STEP_COUNT in arrays:
            self.clock.fill_step_counts(arrays[STEP_COUNT], done)
            np.add(arrays[STEP_COUNT], 1, out=arrays[next_of(STEP_COUNT)])
        self.episodes = self.clock.advance(arrays[REWARD], terminated, truncated, done)
        if self.options.set_truncated:  # a mark for the learner; the episode goes on
            truncated[-1] |= ~done[-1]
            done[-1] = True
        for column in lane.layout.columns:
            if column.carry:
                self._carried(column)[0] = arrays[column.key][T]
        if self.options.reset_at_each_iter:
            self.reset()

    def fail(self, lane: Lane, t: int, reason: str, executed: int) -> None:
        """Row ``t`` did not come about and the environments cannot be trusted: begin anew from there."""
        lane.done_steps = max(lane.done_steps, t)
        self.discarded[reason] += executed
        self.executed += executed
        self.env.executed_in_row = 0
        self._unmark(lane)
        self.reset()

    # --- parts ------------------------------------------------------------------------------------

    def _reset_carry(self) -> None:
        """Do the resets that are due before a lane's first row."""
        if not self._pending:
            return
        self.clock.abandon(self._pending)
        for key, row in self.carry.items():
            if key not in self.env.observation_specs:
                row[0, self._pending] = key == IS_INIT
        self.env.reset(self.carry, 0, self._pending, self._seeds_of(self._pending))
        self._primed = None
        self._pending, self._seeds = [], {}

    def _cut(self, lane: Lane, t: int) -> None:
        """Resets that are due in the middle of a lane: end the episodes at row ``t``, begin new ones after it."""
        done = lane.arrays[TERMINATED][t] | lane.arrays[TRUNCATED][t]
        lane.arrays[TRUNCATED][t, [i for i in self._pending if not done[i]]] = True
        self._copy_next(t + 1)
        self._reset_rows(lane, t + 1, self._pending, self._seeds_of(self._pending))
        self._pending, self._seeds = [], {}

    def _reset_rows(self, lane: Lane, row: int, which: Sequence[int], seeds: Sequence[int] | None) -> None:
        started = time.perf_counter_ns()
        self.env.reset(lane.arrays, row, which, seeds)
        self.timing.env += time.perf_counter_ns() - started
        for array, value in self._states:
            array[row, which] = value
        if self._limit:
            self._deadline[which] = row - 1 + self._limit

    def _seeds_of(self, which: Sequence[int]) -> list[int] | None:
        return [self._seeds[i] for i in which] if self._seeds.keys() >= set(which) else None

    def _carried(self, column: Column) -> Array:
        if column.key not in self.carry:  # a recurrent state before its first use
            self.carry[column.key] = np.full((1, self.B, *column.shape), column.key == IS_INIT, column.dtype)
        return self.carry[column.key]

    def _copy_next(self, end: int) -> None:
        begin, self._copied = self._copied, end
        if begin < end:
            for after, before in self._next:
                after[begin:end] = before[begin:end]

    def _check_values(self, lane: Lane) -> None:
        """What is cheaper to check once per rollout than once per step."""
        mode = self.options.validate
        if mode == "off":
            return
        reward = lane.arrays[REWARD]
        if not np.isfinite(reward).all():
            t, b = (int(i) for i in np.argwhere(~np.isfinite(reward))[0])
            self._reject(lane, t, f"{self.env.name}[{b}].step (row {t} of the batch): reward is {reward[t, b]}")
        for key, spec in self.env.action_specs.items():
            if mode == "full" or spec.dtype.kind in "iu":
                if problem := values_problem(lane.arrays[key], spec):
                    (t, b, *_), what = problem
                    self._reject(lane, t, f"{dotted(key)} for env {b} (row {t} of the batch): {what}", policy=True)
            elif spec.dtype.kind == "f" and not np.isfinite(lane.arrays[key]).all():
                t, b = (int(i) for i in np.argwhere(~np.isfinite(lane.arrays[key]))[0][:2])
                self._reject(lane, t, f"{dotted(key)} for env {b} (row {t}) is not finite", policy=True)
        for key, spec in self.env.observation_specs.items() if mode == "full" else ():
            # A bad observation shows after the step that gave it, and again before the next one.
            found = [values_problem(array, spec) for array in (lane.arrays[next_of(key)], lane.arrays[key][:-1])]
            if any(found):
                (t, b, *_), what = min((f for f in found if f), key=lambda f: f[0][0])
                self._reject(lane, t, f"{self.env.name}[{b}] (row {t} of the batch): {dotted(key)} {what}")

    def _reject(self, lane: Lane, t: int, message: str, *, policy: bool = False) -> None:
        """Take back row ``t`` and all after it: their values are wrong."""
        reason = "bad_policy_output" if policy else "bad_env_output"
        self.discarded[reason] += (lane.T - t) * self.B
        lane.done_steps = t
        self._unmark(lane)
        self.reset()
        error = BadPolicyOutput if policy else BadEnvOutput
        raise error(f"{message}. The {t} rows before it are kept; the environments begin anew.")

    def _unmark(self, lane: Lane) -> None:
        """Take back what was written about rows that are not complete."""
        begin = lane.done_steps
        self._copied = min(self._copied, begin)
        for flag in (TERMINATED, TRUNCATED):
            lane.arrays[flag][begin:] = False
        if NEXT_OBS_VALID in lane.arrays:
            lane.arrays[NEXT_OBS_VALID][begin:] = True

    def _as_policy_sees(self, row: Array) -> torch.Tensor:
        """A carried row as the policy gets rows of a lane: ``[B, *shape]``, or ``[*shape]`` unbatched."""
        if row.dtype == object:
            return row  # type: ignore[return-value]
        tensor = torch.from_numpy(row)
        return tensor if self.batched else tensor[0]


def call_policy(policy: Policy, call: Callable[[], Result]) -> Result:
    """What ``call`` returns; what it raises as a ``PolicyError``."""
    try:
        return call()
    except MusterError:
        raise
    except Exception as error:
        raise policy_error(policy, error) from error


def policy_error(policy: Policy, error: Exception, t: int = 0) -> PolicyError:
    """The error that says which policy raised what, at which row."""
    return PolicyError(
        f"policy {policy.name} raised {type(error).__name__} at row {t} of the batch: {error}. No environment was "
        f"stepped since; the next call tries again from there."
    )


def _store_outputs(outputs: Outputs, lane: Lane) -> None:
    for key, value in (*outputs.action.items(), *outputs.extras.items()):
        row = lane.tensors[key][0]
        row.copy_(value.reshape(row.shape))
    for key, array in outputs.objects.items():
        lane.arrays[key][0] = array
    for key, value in outputs.state.items():
        row = lane.tensors[key][1]
        row.copy_(value.reshape(row.shape))
