"""A group: an env batch with its random streams, its clock, and the rows for the next step."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from muster.episodes.clock import MANY, AgentClock, TrajectoryClock
from muster.episodes.record import Episodes
from muster.episodes.rules import Rule
from muster.errors import BadEnvOutput, BadPolicyOutput
from muster.keys import AGENT, IS_INIT, POLICY_VERSION, STEP_COUNT, TRAJ_DONE, Key, next_of
from muster.memory.slots import Lane
from muster.memory.specs import Array
from muster.protocols import EnvBatch, Outputs, Policy
from muster.rng import GroupRng
from muster.rollout.acting import call_policy, env_error, keep, store_outputs
from muster.rollout.carry import Carry
from muster.rollout.columns import RolloutOptions
from muster.rollout.context import RolloutContext
from muster.rollout.lane_views import TERMINATED, TRUNCATED, LaneViews
from muster.rollout.marks import (
    NEVER,
    Final,
    NextObservations,
    cut_after_end,
    end_agents,
    mark_end,
    mark_valid,
)
from muster.rollout.progress import BEFORE, KNOWN, Phase, Progress, Timing
from muster.rollout.resets import Due, Waiting, check_resets, decorrelate
from muster.rollout.values import first_bad_value

if TYPE_CHECKING:
    import torch

    from muster.rollout.loop import StartedLane

STOP = -1  # returned instead of a row: the rollout ends here


class Group:
    """An env batch with its random streams, its clock, and the rows for the next step.

    Args:
        env: env batch, owned by the group.
        env_ids: global numbers of the group's environments.
        total_envs: number of environments over all groups.
        rng: random streams of the group.

    Attributes:
        version: version of the policy, for ``collector/policy_version``.
        closes_batch: the next rollout is the last one of a batch.
        frame_limit: number of valid steps in the current batch, over all groups; None: all steps.
        delivered, rows: number of valid steps, and number of rows, in the last rollout.
        spans: object with the method ``Timeline.add`` while a timeline is recorded; else None.
        in_background: returns whether this thread runs beside the user's thread.
        places: indices of the environments among those of the same batch, and their number; for
            ``frame_limit``.
        progress: state of the worker, read by the parent process; see ``muster.rollout.progress``.
        before_reset: called before each reset with the arguments of ``EnvBatch.reset``, except the
            arrays.
        lost_track: called with environments that have made steps outside of all rollouts.
        waiting: environments that ended in this rollout and are left out of it (no
            ``reset_when_done``, or ``rule``).
        rule: chooses the episodes to collect; the rollout ends with the last of them; None: all
            episodes.
        watch: called after every step with the lane and the row, which is complete.
        started, unreported: the first rollout has begun; number of random steps before it that are
            not counted yet.
        paused: the rollout that Ctrl-C has interrupted between two rows; set by the loop.
    """

    def __init__(
        self,
        env: EnvBatch,
        *,
        env_ids: Array,
        total_envs: int,
        rng: GroupRng,
        options: RolloutOptions,
    ) -> None:
        self.env = env
        self.rng = rng
        self.options = options
        self.B = env.spec.num_envs
        self.number = 0
        self.places = (env_ids, total_envs)
        self.progress = Progress()
        self.before_reset: Callable[[int, Sequence[int], Sequence[int] | None], None] | None = None
        self.lost_track: Callable[[Sequence[int]], None] = lambda which: None
        ids = env_ids, total_envs
        self._agents = AgentClock(*ids, env.spec.agents) if env.spec.agents else None
        self.clock = cast(TrajectoryClock, self._agents or TrajectoryClock(*ids))
        self._lost = False  # open turns of agents were discarded
        self.timing = Timing()
        self.spans: Any = None
        self.in_background: Callable[[], bool] = bool
        self.executed = 0  # all environment steps
        # environment steps that are in no batch, by reason
        self.discarded: Counter[str] = Counter()
        self.episodes: Episodes  # those that ended in the last rollout
        self.version: int | str = 0
        self.closes_batch = True
        self.frame_limit: int | None = None
        self.carry = Carry(env.spec)
        # environments whose next row is the first after a load; None: no load
        self.resumed: list[int] | None = None
        row_bytes, shown = (
            sum(row.nbytes for row in self.carry.values()),
            not (env.writes_next or options.compact_obs),
        )
        self.next_obs = NextObservations(
            list(env.spec.carried_specs), shown=shown, row_bytes=row_bytes
        )
        self._primed: tuple[Policy, Outputs, int | str] | None = None
        self.due = Due(range(self.B))
        # row at which max_frames_per_traj is reached
        self._deadline = np.full(self.B, NEVER, np.int64)
        self._limit = None if env.writes_next else options.max_frames_per_traj
        env.max_steps = options.max_frames_per_traj
        check_resets(env, options)
        self.waiting, self.rule = Waiting(env), cast("Rule | None", None)
        self.watch: Callable[[Lane, int], object] | None = None
        self.paused: StartedLane | None = None
        self.started = False
        self.delivered = 0
        self.rows = 0
        self.unreported = 0
        self._traj_done = () if options.traj_done_key is None else (TRAJ_DONE,)
        self._states: list[tuple[Any, bool]] = []  # ``LaneViews.states`` of the current lane
        self._contexts = RolloutContext(self), RolloutContext(self, first=True)

    @property
    def pending(self) -> list[int]:
        """The environments that are reset before the next step."""
        return [i for i in self.due.which if i not in self.waiting.absent]

    @property
    def finals(self) -> list[Final]:
        """With ``compact_obs``, the observations that are missing from the last rollout's rows."""
        return self.next_obs.finals

    def reset(self, which: Sequence[int] | None = None, seeds: Sequence[int] | None = None) -> None:
        """Schedule a reset of the environments ``which`` (default all) before the next step."""
        self.due.add(range(self.B) if which is None else sorted(set(which)), seeds)

    def prime(self, policy: Policy) -> Outputs:
        """Make the policy's first call, which determines its columns; ``rollout`` uses the outputs
        for row 0.

        Where environments act when they are ready, the outputs are not used.
        """
        if self.env.ready_envs is not None:
            return self.probe(policy)
        if self._primed is None or self._primed[0] is not policy:
            self._primed = policy, self._first(policy), self.version
        return self._primed[1]

    def probe(self, policy: Policy) -> Outputs:
        """Return the outputs of a first call as in ``prime``, without using them; restores the
        random streams.
        """
        self.begin()
        with self.rng.unmoved():
            return self._first(policy)

    def begin(self, *, early: bool = False) -> None:
        """Execute the scheduled resets now.

        Args:
            early: do nothing with ``reset_when_done``, and keep an error for the next rollout to
                raise.
        """
        if early and (self.options.reset_when_done or self.due.error is not None):
            return
        try:
            with self.context(first=True):
                self._begin(early=early)
        except Exception as error:
            if not early:
                raise
            self.due.error = error

    def observations(self) -> dict[Key, torch.Tensor]:
        """Return the observations for the policy's next call, ``[*batch_shape, *shape]`` per leaf."""
        return {key: self.carry.seen(key) for key in self.env.spec.observation_specs}

    def context(self, *, first: bool = False) -> RolloutContext:
        """Return the context for environments and policies; without inference mode for the
        ``first`` call.
        """
        return self._contexts[first]

    # --- the beginning and the end of a rollout ---------------------------------------------------

    def enter(self, lane: Lane) -> None:
        """Prepare the lane for a rollout from row ``lane.done_steps`` on."""
        views = self._views_of(lane)
        if (begin := lane.done_steps) == 0:
            self._enter_first(lane, views)
        elif self.pending:
            self._cut(lane, begin - 1)
        if self.progress.watched:
            leaves_out = not self.options.reset_when_done or self.rule is not None
            self.progress.count(waits=self.env.bypasses and leaves_out)
        if views.version is not None:
            views.version[begin:] = self.version

    def take_primed(self, lane: Lane) -> bool:
        """Write the outputs of ``prime`` into row 0, and return whether there were any."""
        if self._primed is None:
            return False
        store_outputs(self._primed[1], lane)
        if POLICY_VERSION in lane.arrays and POLICY_VERSION not in self._primed[1].extras:
            lane.arrays[POLICY_VERSION][0] = self._primed[2]
        self._primed = None
        return True

    def after_step(self, lane: Lane, t: int, finished: Sequence[int] | None) -> int:
        """Do all work due after row ``t`` except the next step; return the row of the next call, or
        STOP.
        """
        lane.done_steps = t + 1
        late: list[int] = []
        if self._limit and (late := np.flatnonzero(self._deadline <= t).tolist()):
            cut = late if finished is None else [i for i in late if i not in finished]
            lane.arrays[TRUNCATED][t, cut] = True
            finished = sorted({*cut, *(finished or ())})
        if finished is not None:
            self.next_obs.copy(t + 1)  # before the reset overwrites the true last observations
            if self.options.compact_obs:
                self.next_obs.keep(lane, t, finished, self.waiting.bypassed)
            lane.stopped = self._end(lane, t, finished, late)
        elif t >= self.next_obs.due or self.watch is not None:
            self.next_obs.copy(t + 1)
        if self.watch is not None:
            self.watch(lane, t)
        if self.options.interruptor is not None and not lane.stopped:
            lane.stopped = self.options.interruptor.collection_stopped()
        return STOP if lane.stopped else self.next_call(t + 1)

    def next_call(self, t: int) -> int:
        """Return the first row, from ``t`` on, after which ``after_step`` is due even if no episode
        ends.
        """
        if self.options.interruptor is not None or self.watch is not None:
            return t
        due = self.next_obs.due
        return min(due, int(self._deadline.min())) if self._limit else due

    def leave(self, lane: Lane) -> None:
        """Complete all columns of a lane after its last step."""
        n = lane.done_steps
        options = self.options
        waiting = self.waiting
        views = lane.cache[self]
        if self.progress.watched:
            cells = self.progress.cells
            cells[KNOWN] = waiting.made(0, n) + cells[BEFORE]
        self.next_obs.copy(n)
        if lane.mirrored:
            lane.pull((self.env.spec.reward_key, TERMINATED, TRUNCATED))
        reward, done, terminated, truncated, ids = (
            views.flags if n == lane.T else [rows[:n] for rows in views.flags]
        )
        # else it is False already
        if self.B >= MANY or 1 in terminated.tobytes() or 1 in truncated.tobytes():
            np.logical_or(terminated, truncated, out=done)
        late = None
        if not options.reset_when_done:
            late = cut_after_end(lane, done, self.env.spec.reward_key)
        elif not waiting.idle:
            late = waiting.late(n)
        if late is not None or n < lane.T or views.is_fine is None or not views.is_fine():
            self._check_values(lane, late)
        over = done if options.traj_done_key is None else lane.arrays[TRAJ_DONE][:n]
        if self._agents is not None:
            self._agents.sort(lane.arrays[AGENT][:n])
        self.clock.fill_ids(ids, over)
        if options.max_frames_per_traj:
            counts = lane.arrays[STEP_COUNT]
            self.clock.fill_step_counts(counts[:n], over)
            np.add(counts, 1, out=lane.arrays[next_of(STEP_COUNT)])
        self.episodes = self.clock.advance(reward, terminated, truncated, over)
        if self.env.spec.info_specs and len(self.episodes):
            self.episodes = replace(self.episodes, info=self.next_obs.infos(lane, over))
        if late is not None:
            self._begin_late(late, over)
        if options.compact_obs and n:
            self.next_obs.keep(lane, n - 1, np.flatnonzero(~done[-1]).tolist(), waiting.bypassed)
        # a mark for the learner; the episode continues
        if options.set_truncated and self.closes_batch and n:
            mark_end(lane, n - 1, self.env.spec, limited=bool(options.max_frames_per_traj))
        for key, rows, _, last in views.carried:
            self.carry.take(key, last if n == lane.T else rows[n : n + 1], waiting.absent)
        if self.rule is not None:
            self.rule, waiting.absent = None, ()
        if not waiting.idle and (going_on := waiting.resume(self.carry)):
            self.env.restart_agent(self.carry, 0, going_on)
            self.carry.begin_anew(going_on)
        self.rows = n
        self.delivered = n * self.B
        if late is not None or n < lane.T or self.frame_limit is not None:
            shared = None if self.frame_limit is None else (*self.places, self.frame_limit)
            marked = mark_valid(
                lane, n, late, repeat_flags=not options.reset_when_done, shared=shared
            )
            self.delivered, surplus = marked
            self.discarded["surplus"] += surplus
        elif views.valid is not None:
            views.valid[...] = True
        if lane.mirrored:  # the reward was copied from the device
            lane.push(
                key for key in views.mirrored if late is not None or key != self.env.spec.reward_key
            )
        if options.reset_at_each_iter and self.closes_batch:
            self.reset()

    def fail(self, lane: Lane, t: int, reason: str, executed: int) -> None:
        """Discard the ``executed`` steps of row ``t``, and reset all environments: their states are
        unknown.
        """
        lane.done_steps = max(lane.done_steps, t)
        self.discarded[reason] += executed
        self.executed += executed
        self.env.executed_in_row = 0
        self._unmark(lane)
        self._lose()

    # --- parts ------------------------------------------------------------------------------------

    def _first(self, policy: Policy) -> Outputs:
        """Make the policy's first call, on the rows for the next step."""
        self.begin()
        with self.context(first=True):
            obs = self.observations() | {
                key: self.carry.seen(key) for key in self.env.spec.action_masks.values()
            }
            if IS_INIT in self.carry:  # the episodes may have begun with an earlier policy
                obs[IS_INIT] = self.carry.seen(IS_INIT)
            if self.env.ready_envs is not None:
                obs = {key: value[self.env.ready_envs] for key, value in obs.items()}
            return keep(call_policy(policy, lambda: policy.first(obs, self.rng)))

    def _views_of(self, lane: Lane) -> LaneViews:
        views: LaneViews | None = lane.cache.get(self)
        if views is None:
            views = lane.cache[self] = LaneViews(self, lane)
        return views

    def _enter_first(self, lane: Lane, views: LaneViews) -> None:
        waiting = self.waiting
        let_go = []
        if self.rule is not None or self.due.which or self.due.begun:
            let_go = self._unwanted(range(self.B))
            held = self.due.leave_out(let_go)
            self._begin()
            self.due.done(held)  # environments that were reset early are stepped in this rollout
        if self.env.dropped:
            self.executed += self.env.dropped
            self.discarded["reset"] += self.env.dropped
            self.env.dropped = 0
        if not self.started:
            self.executed += self.unreported
            self.discarded["decorrelation"] += self.unreported
            self.progress.cells[BEFORE] = self.unreported
            self.started = True
            self.unreported = 0
        if let_go or waiting.absent or not waiting.idle:
            waiting.begin(let_go)
        lane.stopped = self.rule is not None and self.rule.complete
        self.next_obs.begin(views.next_rows)
        if self.progress.watched:
            self.progress.mark_unwritten(lane, self.env.spec.reward_key, 0)
        for fill, value in views.fills:
            fill(value)
        if views.resumed is not None:
            views.resumed[...] = False
            views.resumed[0, self.resumed or []] = True
            self.resumed = []
        for key, _, first, _ in views.carried:
            first[...] = self.carry[key]
        self._states = views.states
        for array, is_init in self._states:
            if is_init:
                array[1:] = False  # resets set it; the slot may hold values of an earlier rollout
        if self._limit:
            self._deadline = self._limit - 1 - self.clock.steps
            self._deadline[list(waiting.absent)] = NEVER

    def _begin_late(self, late: Array, over: Array) -> None:
        """Correct the clock of environments that ended and waited for others; reset them before the
        next batch.
        """
        self.clock.steps -= late.sum(axis=0)
        ended = [i for i, t in self.waiting.since.items() if over[t, i]]
        self.clock.steps[ended], self.clock.returns[ended] = 0, 0.0
        self.due.add(ended)
        if not self.env.bypasses:
            self.discarded["after_done"] += int(late.sum())

    def _end(self, lane: Lane, t: int, finished: Sequence[int], late: Sequence[int]) -> bool:
        """Reset, continue or leave out the environments ``finished`` at row ``t``; the limit ended
        those in ``late``.

        Returns: whether the rollout is over.
        """
        lost = self.env.lives_lost
        going_on = [i for i in finished if i in lost and i not in late] if lost else []
        over = [i for i in finished if i not in going_on] if going_on else finished
        if self.rule is not None:
            self.rule.ended(over)
        for key in self._traj_done:
            lane.arrays[key][t, over] = True
            lane.arrays[TRUNCATED][t, [i for i in late if i in lost]] = True
        stop = self.rule is not None and self.rule.complete
        if not self.options.reset_when_done:
            stop |= self.waiting.add(lane, t, finished, going_on)
            if stop or self.env.bypasses:
                self._deadline[finished] = NEVER
                return stop
        elif let_go := self._unwanted(over):
            stop |= self.waiting.add(lane, t, let_go)
            self._deadline[let_go] = NEVER
            over = [i for i in over if i not in let_go]
        self._reset_rows(lane, t + 1, over, None)
        if going_on:
            self.env.restart_agent(lane.data, t + 1, going_on)
            self._restart_states(t + 1, going_on)
        return stop

    def _unwanted(self, which: Sequence[int]) -> list[int]:
        """Return those of ``which`` that need no steps: all, after the last episode that the rule
        needs.
        """
        if self.rule is None:
            return []
        if self.rule.complete:
            return list(which)
        if not self.env.bypasses:
            return []
        return [i for i in which if not self.rule.awaits(i)]

    def _begin(self, *, early: bool = False) -> None:
        """Execute the resets that are due before a lane's first row."""
        if not (which := self.due.which):
            return
        if self.due.error is not None:
            self.progress.begin(Phase.RESET)  # the phase of the error
        undone = self.due.undone(again=bool(self.env.reset_options))
        if self._agents is None or self._lost:  # else the environments end the episodes of agents
            self.clock.abandon(which)
        self._lost = False
        self.carry.begin_anew(which)
        for part, seeds in self.due.parts(undone):
            self._reset_envs(self.carry, 0, part, seeds)
        self._primed = None
        self.due.done(early=early)
        if self.options.max_decorrelation_steps and not self.started:
            decorrelate(self, which)

    def _cut(self, lane: Lane, t: int) -> None:
        """Execute the resets that are due within a lane: end episodes at row ``t``, and start new
        ones after it.
        """
        done = lane.data[TERMINATED][t] | lane.data[TRUNCATED][t]
        waits = self.env.bypasses and not self.options.reset_when_done
        over = [i for i in self.pending if not (waits and i in self.waiting.since)]
        cut = [i for i in over if not done[i]]
        if self._agents is not None:
            cut = []
            if self._lost:
                end_agents(lane, t + 1, self._agents)
            self._lost = False
        lane.data[TRUNCATED][t, cut] = True
        for key in self._traj_done:
            lane.arrays[key][t, over] = True
        self.next_obs.copy(t + 1)
        if self.options.compact_obs:
            self.next_obs.keep(lane, t, cut, self.waiting.since)
        if waits:
            lane.stopped = self.waiting.add(lane, t, cut)
            self._deadline[cut] = NEVER
            return
        for part, seeds in self.due.parts(self.pending):
            self._reset_rows(lane, t + 1, part, seeds)
        self.due.done(self.due.leave_out(self.waiting.absent))

    def _lose(self) -> None:
        """Schedule a reset of all environments, whose states are unknown."""
        self.env.drop_open()
        self._lost = True
        self.reset()

    def _reset_rows(
        self, lane: Lane, row: int, which: Sequence[int], seeds: Sequence[int] | None
    ) -> None:
        started = time.perf_counter_ns()
        self._reset_envs(lane.data, row, which, seeds)
        self.timing.env += time.perf_counter_ns() - started
        self._restart_states(row, which)
        if self._limit:
            self._deadline[which] = row - 1 + self._limit

    def _restart_states(self, row: int, which: Sequence[int]) -> None:
        for array, value in self._states:
            array[row, which] = value

    def _reset_envs(
        self, data: Any, row: int, which: Sequence[int], seeds: Sequence[int] | None
    ) -> None:
        phase = self.progress.begin(Phase.RESET)
        if self.before_reset is not None:
            self.before_reset(row, which, seeds)
        try:
            self.env.reset(data, row, which, seeds)
        except Exception as error:
            if (raised := env_error(self.env.spec.name, "reset", error)) is error:
                raise
            raise raised from error
        self.progress.begin(phase)

    def _check_values(self, lane: Lane, late: Array | None) -> None:
        """Check values, which is cheaper once per rollout than once per step."""
        found = first_bad_value(lane, self.env.spec, self.options.validate, late)
        if found is None:
            return
        t, message, by_policy = found  # discard this row and all later ones
        self.discarded["bad_policy_output" if by_policy else "bad_env_output"] += self.waiting.made(
            t, lane.done_steps
        )
        lane.done_steps, lane.stopped = t, False
        self.progress.begin(Phase.POLICY if by_policy else Phase.STEP)
        self._unmark(lane)
        self._lose()
        error = BadPolicyOutput if by_policy else BadEnvOutput
        raise error(f"{message}. The {t} rows before it are kept; the environments are reset.")

    def _unmark(self, lane: Lane) -> None:
        """Undo the entries of incomplete rows."""
        begin = lane.done_steps
        self.next_obs.take_back(begin)
        self.waiting.take_back(lane)
        self.progress.mark_unwritten(lane, self.env.spec.reward_key, begin)
        for marks, value in self._views_of(lane).marks:
            marks[begin:] = value
