"""A group: an env batch with its random streams, its time, and the rows it will act on next."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from muster.acting import call_policy, keep, store_outputs
from muster.columns import RolloutOptions
from muster.errors import BadEnvOutput, BadPolicyOutput
from muster.keys import (
    FLAGS,
    IS_INIT,
    NEXT_OBS_VALID,
    POLICY_VERSION,
    RESUMED,
    STEP_COUNT,
    TRAJ_IDS,
    VALID,
    Key,
    next_of,
)
from muster.marks import Final, blank, cut_after_end
from muster.memory.slots import Lane, torch_dtype
from muster.memory.specs import Array, ArraySpec, Column
from muster.progress import Phase, Progress, Timing
from muster.protocols import EnvBatch, Outputs, Policy
from muster.rng import GroupRng, torch_threads
from muster.trajectories import Episodes, TrajectoryClock
from muster.values import first_bad_value

TERMINATED, TRUNCATED, DONE = next_of(("terminated",)), next_of(("truncated",)), next_of(("done",))
NEVER = 1 << 62
STOP = -1  # instead of a row: the rollout ends here
CACHE_BYTES = 1 << 18  # next/observation is copied in pieces of this size, while they are still in the cache


class Group:
    """An env batch with its random streams, its time, and the rows it will act on next.

    Args:
        env: owned by the group.
        batch_shape: B as policy and user see it.
        env_ids: global numbers of its environments.
        total_envs: over all groups.
        rng: the group's own.

    Attributes:
        version: of the policy, for ``collector/policy_version``.
        closes_batch: the next rollout is the last one of a batch.
        frame_limit: number of this batch's steps over all groups that are valid; None is all.
        delivered, rows: valid steps, and rows, of the last rollout.
        finals: with ``compact_obs``, what the last rollout's rows do not show.
        spans: somebody with ``Timeline.add``, while a timeline is running.
        in_background: says whether this thread runs beside the user's.
        number: among all groups.
        places: numbers of its environments within a batch, and how many there are; for ``frame_limit``.
        progress: cells that say what it is doing, for whoever watches from outside; see ``muster.progress``.
        before_reset: called with the arguments of ``EnvBatch.reset``, but for the arrays.
    """

    def __init__(
        self,
        env: EnvBatch,
        *,
        batch_shape: tuple[int, ...],
        env_ids: Array,
        total_envs: int,
        rng: GroupRng,
        options: RolloutOptions,
    ) -> None:
        self.env, self.batch_shape, self.rng, self.options = env, batch_shape, rng, options
        self.B = env.num_envs
        self.number = 0
        self.places: tuple[Array, int] = (env_ids, total_envs)
        self.progress = Progress()
        self.before_reset: Callable[[int, Sequence[int], Sequence[int] | None], None] | None = None
        self.clock = TrajectoryClock(env_ids, total_envs)
        self.timing = Timing()
        self.spans: Any = None
        self.in_background: Callable[[], bool] = lambda: False
        self.executed = 0  # environment steps, whatever became of them
        self.discarded: Counter[str] = Counter()  # environment steps that no batch will show, by reason
        self.episodes: Episodes  # ended in the last rollout
        self.finals: list[Final] = []
        self.delivered = self.rows = 0
        self.version: int | str = 0
        self.closes_batch = True
        self.frame_limit: int | None = None
        self.carry = {key: self._zeros(spec) for key, spec in env.observation_specs.items()}  # [1, B, *shape] each
        self.resumed: list[int] | None = None  # environments whose next row begins anew after a load; None: no load
        self._obs_keys = list(env.observation_specs)
        row_bytes = sum(row.nbytes for row in self.carry.values())
        shown = not (env.writes_next or options.compact_obs)
        self._copy_every = max(1, CACHE_BYTES // max(row_bytes, 1)) if shown else NEVER  # rows of next/observation
        self._primed: tuple[Policy, Outputs, int | str] | None = None
        self.pending = list(range(self.B))  # environments to reset before the next step
        self._seeds: dict[int, int] = {}
        self._deadline = np.full(self.B, NEVER, np.int64)  # row at which max_frames_per_traj is reached
        self._limit = None if env.writes_next else options.max_frames_per_traj
        env.max_steps = options.max_frames_per_traj
        self._ended: set[int] = set()  # without reset_when_done: environments that have ended in this rollout
        self._next: list[tuple[Any, Any]] = []  # of the lane: next/observation and observation, per leaf
        self._states: list[tuple[Any, bool]] = []  # of the lane: other carried columns, and their value at a reset
        self._copied = 0  # rows of next/observation that are complete

    def reset(self, which: Sequence[int] | None = None, seeds: Sequence[int] | None = None) -> None:
        """Let the environments ``which`` (default all) begin anew before the next step."""
        chosen = list(range(self.B)) if which is None else sorted(set(which))
        self.pending = sorted({*self.pending, *chosen})
        if seeds is not None:
            self._seeds.update(zip(chosen, seeds, strict=True))

    def prime(self, policy: Policy) -> None:
        """Make the policy's first real call, which shows its columns; ``rollout`` goes on from it."""
        if self._primed is not None and self._primed[0] is policy:
            return
        self.begin()
        with self.surroundings(first=True):
            obs = self.observations()
            self._primed = policy, keep(call_policy(policy, lambda: policy.first(obs, self.rng))), self.version

    def begin(self) -> None:
        """Do now the resets that would be done before the next step."""
        with self.surroundings(first=True):
            self._reset_carry()

    def observations(self) -> dict[Key, torch.Tensor]:
        """What the policy acts on next, ``[*batch_shape, *shape]`` per leaf."""
        return {key: self.state(key) for key in self._obs_keys}

    def state(self, key: Key) -> torch.Tensor:
        """What a carried column has for the next row."""
        return self._as_policy_sees(self.carry[key][0])

    @contextmanager
    def surroundings(self, *, first: bool = False) -> Iterator[None]:
        """What environments and policies run in: the group's generators as global ones, torch's threads, no gradients.

        The ``first`` call is not in inference mode: a module may make things then that it keeps, such as lazy
        parameters, and what is made in inference mode cannot be trained. Beside the user's own thread the generators
        and thread numbers of the process are left alone.
        """
        grad = torch.inference_mode() if self.options.inference_mode and not first else torch.no_grad()
        if self.in_background():
            with grad:
                yield
            return
        generators = self.rng.as_global() if self.options.own_rng else nullcontext()
        with generators, grad, torch_threads(self.options.num_threads):
            yield

    # --- the beginning and the end of a rollout ---------------------------------------------------

    def enter(self, lane: Lane) -> None:
        """Make row ``lane.done_steps`` the one to act on."""
        begin = lane.done_steps
        if begin == 0:
            self._enter_first(lane)
        elif self.pending:
            self._cut(lane, begin - 1)
        self.progress.count()
        if POLICY_VERSION in lane.arrays:
            lane.arrays[POLICY_VERSION][begin:] = self.version

    def take_primed(self, lane: Lane) -> bool:
        """Write what ``prime`` left for row 0, if anything."""
        if self._primed is None:
            return False
        store_outputs(self._primed[1], lane)
        if POLICY_VERSION in lane.arrays:
            lane.arrays[POLICY_VERSION][0] = self._primed[2]
        self._primed = None
        return True

    def after_step(self, lane: Lane, t: int, finished: Sequence[int] | None) -> int:
        """Whatever is due after row ``t`` besides the next step; returns the row at which to call again, or STOP."""
        lane.done_steps = t + 1
        if self._limit and (late := np.flatnonzero(self._deadline <= t).tolist()):
            cut = late if finished is None else [i for i in late if i not in finished]
            lane.arrays[TRUNCATED][t, cut] = True
            finished = sorted({*cut, *(finished or ())})
        if finished is not None:
            self._copy_next(t + 1)  # before the reset overwrites the true last observations
            if self.options.compact_obs:
                self._keep_final(lane, t, finished)
            if not self.options.reset_when_done:
                self._ended.update(finished)
                if len(self._ended) == self.B:
                    lane.stopped = True
                    return STOP
            self._reset_rows(lane, t + 1, finished, None)
        elif t + 1 - self._copied >= self._copy_every:
            self._copy_next(t + 1)
        if self.options.interruptor is not None and self.options.interruptor.collection_stopped():
            lane.stopped = True
            return STOP
        return self.next_call(t + 1)

    def next_call(self, t: int) -> int:
        """The next row, from ``t`` on, after which ``after_step`` is due even if no episode ends."""
        if self.options.interruptor is not None:
            return t
        copy_at = self._copied + self._copy_every - 1
        return min(copy_at, int(self._deadline.min())) if self._limit else copy_at

    def leave(self, lane: Lane) -> None:
        """Complete all columns of a lane whose rows have been stepped."""
        n, arrays, reward_key = lane.done_steps, lane.arrays, self.env.reward_key
        self.progress.steps_known(n * self.B)
        self._copy_next(n)
        lane.pull((reward_key, TERMINATED, TRUNCATED))
        self._check_values(lane)
        reward, terminated, truncated, done = (arrays[k][:n] for k in (reward_key, TERMINATED, TRUNCATED, DONE))
        np.logical_or(terminated, truncated, out=done)
        late = None if self.options.reset_when_done else cut_after_end(lane, done, reward_key)
        self.clock.fill_ids(arrays[TRAJ_IDS][:n], done)
        if self.options.max_frames_per_traj:
            self.clock.fill_step_counts(arrays[STEP_COUNT][:n], done)
            np.add(arrays[STEP_COUNT], 1, out=arrays[next_of(STEP_COUNT)])
        self.episodes = self.clock.advance(reward, terminated, truncated, done)
        if late is not None:  # whoever has ended begins anew with the next batch
            over = np.flatnonzero(done.any(axis=0)).tolist()
            self.clock.steps[over], self.clock.returns[over] = 0, 0.0
            self.reset(over)
        if self.options.compact_obs and n:
            self._keep_final(lane, n - 1, np.flatnonzero(~done[-1]).tolist())
        if self.options.set_truncated and self.closes_batch and n:  # a mark for the learner; the episode goes on
            truncated[-1] |= ~done[-1]
            done[-1] = True
        for column in lane.layout.columns:
            if column.carry:
                self._carried(column)[0] = lane.data[column.key][n]
        self._mark(lane, n, late)
        same = reward_key if late is None else None  # it came from there
        lane.push(column.key for column in lane.layout.tensor_columns if column.host and column.key != same)
        if self.options.reset_at_each_iter and self.closes_batch:
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

    def _enter_first(self, lane: Lane) -> None:
        self._reset_carry()
        self._copied, self.finals, self._ended = 0, [], set()
        data = lane.data
        self.progress.mark_unwritten(lane, self.env.reward_key, 0)
        for flag in FLAGS:
            for key in (flag, next_of(flag)):
                data[key][...] = lane.arrays[key][...] = False
        for mark in (NEXT_OBS_VALID, VALID):
            if mark in data:
                data[mark][...] = True
        if RESUMED in lane.arrays:
            lane.arrays[RESUMED][...] = False
            lane.arrays[RESUMED][0, self.resumed or []] = True
            self.resumed = []
        for column in lane.layout.columns:
            if column.carry:
                data[column.key][:1] = self._carried(column)
        shown = [] if self._copy_every == NEVER else self._obs_keys
        self._next = [(data[next_of(key)], data[key][1:]) for key in shown]
        carried = [c.key for c in lane.layout.columns if c.carry and c.key not in self.env.observation_specs]
        self._states = [(data[key], key == IS_INIT) for key in carried]
        for array, is_init in self._states:
            if is_init:
                array[1:] = False  # reset rows set it; the slot may have been used before
        if self._limit:
            self._deadline = self._limit - 1 - self.clock.steps

    def _mark(self, lane: Lane, n: int, late: Array | None) -> None:
        """Blank what is no transition, and count what is."""
        valid = np.ones((n, self.B), bool) if late is None else ~late
        if late is not None:
            self.discarded["after_done"] += int(late.sum())
        if late is not None or n < lane.T:
            blank(lane, valid, repeat_flags=late is not None)
        if self.frame_limit is not None:
            place = np.arange(n)[:, None] * self.places[1] + self.places[0]
            surplus = valid & (place >= self.frame_limit)
            self.discarded["surplus"] += int(surplus.sum())
            valid &= ~surplus
        self.rows, self.delivered = n, int(valid.sum())
        if VALID in lane.arrays:
            lane.arrays[VALID][:n] = valid

    def _keep_final(self, lane: Lane, t: int, envs: Sequence[int]) -> None:
        index = [i for i in envs if i not in self._ended]
        self.finals.append(Final(t, index, {key: lane.arrays[key][t + 1, index].copy() for key in self._obs_keys}))

    def _reset_carry(self) -> None:
        """Do the resets that are due before a lane's first row."""
        if not self.pending:
            return
        self.clock.abandon(self.pending)
        for key, row in self.carry.items():
            if key not in self.env.observation_specs:
                row[0, self.pending] = key == IS_INIT
        self._reset_envs(self.carry, 0, self.pending, self._seeds_of(self.pending))
        self._primed = None
        self.pending, self._seeds = [], {}

    def _cut(self, lane: Lane, t: int) -> None:
        """Resets that are due in the middle of a lane: end the episodes at row ``t``, begin new ones after it."""
        done = lane.data[TERMINATED][t] | lane.data[TRUNCATED][t]
        cut = [i for i in self.pending if not done[i]]
        lane.data[TRUNCATED][t, cut] = True
        self._copy_next(t + 1)
        if self.options.compact_obs:
            self._keep_final(lane, t, cut)
        self._reset_rows(lane, t + 1, self.pending, self._seeds_of(self.pending))
        self.pending, self._seeds = [], {}

    def _reset_rows(self, lane: Lane, row: int, which: Sequence[int], seeds: Sequence[int] | None) -> None:
        started = time.perf_counter_ns()
        self._reset_envs(lane.data, row, which, seeds)
        self.timing.env += time.perf_counter_ns() - started
        for array, value in self._states:
            array[row, which] = value
        if self._limit:
            self._deadline[which] = row - 1 + self._limit

    def _reset_envs(self, data: Any, row: int, which: Sequence[int], seeds: Sequence[int] | None) -> None:
        if self.before_reset is not None:
            self.before_reset(row, which, seeds)
        phase = self.progress.begin(Phase.RESET)
        self.env.reset(data, row, which, seeds)
        self.progress.begin(phase)

    def _seeds_of(self, which: Sequence[int]) -> list[int] | None:
        return [self._seeds[i] for i in which] if self._seeds.keys() >= set(which) else None

    def _carried(self, column: Column) -> Any:
        if column.key not in self.carry:  # a recurrent state before its first use
            self.carry[column.key] = self._zeros(ArraySpec(column.shape, column.dtype))
            self.carry[column.key][...] = column.key == IS_INIT
        return self.carry[column.key]

    def _copy_next(self, end: int) -> None:
        begin, self._copied = self._copied, end
        if begin < end:
            for after, before in self._next:
                after[begin:end] = before[begin:end]

    def _check_values(self, lane: Lane) -> None:
        """What is cheaper to check once per rollout than once per step."""
        found = first_bad_value(lane, self.env, self.options.validate)
        if found is None:
            return
        # Take back the row and all after it: their values are wrong.
        t, message, by_policy = found
        self.discarded["bad_policy_output" if by_policy else "bad_env_output"] += (lane.done_steps - t) * self.B
        lane.done_steps, lane.stopped = t, False
        self._unmark(lane)
        self.reset()
        error = BadPolicyOutput if by_policy else BadEnvOutput
        raise error(f"{message}. The {t} rows before it are kept; the environments begin anew.")

    def _unmark(self, lane: Lane) -> None:
        """Take back what was written about rows that are not complete."""
        begin = lane.done_steps
        self._copied = min(self._copied, begin)
        self.finals = [final for final in self.finals if final.t < begin]
        if self._ended:
            ended = lane.arrays[TERMINATED][:begin] | lane.arrays[TRUNCATED][:begin]
            self._ended = set(np.flatnonzero(ended.any(axis=0)).tolist())
        self.progress.mark_unwritten(lane, self.env.reward_key, begin)
        for flag in (TERMINATED, TRUNCATED):
            lane.data[flag][begin:] = False
        if NEXT_OBS_VALID in lane.data:
            lane.data[NEXT_OBS_VALID][begin:] = True

    def _zeros(self, spec: ArraySpec) -> Any:
        """One row for all environments, on the host or the device."""
        shape = (1, self.B, *spec.shape)
        if self.env.device is None or not spec.is_tensor:
            return np.zeros(shape, spec.dtype)
        with torch.inference_mode(False):  # rollouts run in it, but carried rows are written after them, too
            return torch.zeros(shape, dtype=torch_dtype(spec.dtype), device=self.env.device)

    def _as_policy_sees(self, row: Any) -> torch.Tensor:
        """A carried row as the policy gets rows of a lane: ``[*batch_shape, *shape]``."""
        if isinstance(row, np.ndarray) and row.dtype == object:
            return row  # type: ignore[return-value]
        tensor = torch.as_tensor(row)
        return tensor.reshape((*self.batch_shape, *tensor.shape[1:]))
