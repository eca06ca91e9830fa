"""A rollout of one group into one lane: all that it does beside acting and stepping."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from muster.episodes.agent_returns import with_returns
from muster.episodes.clock import MANY, AgentClock, TrajectoryClock
from muster.episodes.record import Episodes
from muster.errors import BadEnvOutput, BadPolicyOutput
from muster.keys import AGENT, STEP_COUNT, TRAJ_DONE, next_of
from muster.memory.slots import Lane
from muster.memory.specs import Array
from muster.protocols import Act, Policy, Step
from muster.rollout.acting import store_outputs
from muster.rollout.carry import FirstCall
from muster.rollout.ends import (
    RESET_NOW,
    ChosenByRule,
    Ends,
    StepLimit,
    WaitForBatch,
    Waiting,
    unneeded_by,
)
from muster.rollout.group import Group, Reports
from muster.rollout.hooks import NO_HOOKS, RowHooks, rendering, watching
from muster.rollout.lane_views import TERMINATED, TRUNCATED, LaneViews, views_of
from muster.rollout.marks import NextObservations, end_agents, mark_end, mark_valid
from muster.rollout.on_device import (
    Completion,
    DeviceRows,
    OnDevice,
    device_rows,
    needs_of_request,
)
from muster.rollout.progress import BEFORE, KNOWN, Phase, Progress
from muster.rollout.request import RolloutOutcome, RolloutRequest, Watch
from muster.rollout.resets import ResetListener
from muster.rollout.tally import Tally
from muster.rollout.values import first_bad_value, first_unsent

STOP = -1  # returned instead of a row: the rollout ends here


class Prepared(NamedTuple):
    """The functions that act and step in the lane of a rollout."""

    policy: Policy
    version: int | str | None
    act: Act
    step: Step


class Rollout:
    """A rollout of one group into one lane.

    Its life:

    1. It is made for a request, which is never changed: what happens at the ends of episodes
       (``ends``), who watches its steps.
    2. ``begin`` executes the resets that are due, and writes the carried rows into row 0.
    3. The loop (``muster.rollout.loop``) acts and steps, and calls ``after_step`` where
       ``next_call`` says, and where an episode ends.
    4. An error makes rows incomplete (``fail``), or leaves it paused between two rows (``pause``).
       The next request for the same lane lets it ``go_on`` with the first incomplete row.
    5. ``finish`` completes all columns, carries the last rows on, and returns the outcome.

    If the request says that it stays open (``open_rows``), ``settle`` does afterwards what follows
    from its rows, the next request makes the ``next_rows``, and ``leave`` ends it.

    Args:
        tally: of the present request; ``go_on`` replaces it.
        listener: is told of resets, beside the group's listeners.

    Attributes:
        views: see ``LaneViews``.
        absent: environments that make no step in it.
        waiting: environments that make no more steps.
        paused: how it goes on after its last row as if nothing had happened; None: it does not, or
            is not interrupted. A policy draws noise for all rows when it starts in a lane. So the
            rest is filled by the same ``act``, if policy and version are the same.
    """

    def __init__(
        self,
        group: Group,
        request: RolloutRequest,
        lane: Lane,
        tally: Tally,
        listener: ResetListener | None = None,
    ) -> None:
        self.group = group
        self.request = request
        self.lane = lane
        self.tally = tally
        views: LaneViews | None = lane.cache.get(group)
        if views is None:
            views = lane.cache[group] = views_of(
                lane, group.env, group.carry, group.options
            )
        self.views = views
        self.next_obs = NextObservations(
            views.observed, views.next_rows, views.copied_every
        )
        self.paused: Prepared | None = None
        self._settled = 0  # number of rows that ``settle`` has completed
        self.reports = group.reports
        if request.is_random_start or listener is not None:
            self.reports = _reports_of(group, request, listener)
        self.absent = request.absent
        # its rows are completed on the device, and the host does not wait for them
        self._there: DeviceRows | None = None
        self.waiting: Waiting
        self.ends: Ends
        self._limit: StepLimit | None = None
        self._hooks = NO_HOOKS

    # --- the beginning ----------------------------------------------------------------------------

    def begin(self, watch: Watch | None = None) -> bool:
        """Prepare the lane for the first row, and return whether it has an action already.

        Args:
            watch: called after every step with the lane and its row, which is complete.
        """
        group = self.group
        lane = self.lane
        request = self.request
        views = self.views
        if lane.done_steps or lane.stopped:
            lane.restart()
        if request.rule is not None or group.due.which or group.due.begun:
            try:
                self._begin_episodes()
            except BaseException:
                group.closed()  # it has not begun: the rows to go on from are not in the lane yet
                raise
        self.waiting = Waiting(group.env, group.can.bypass, self.absent)
        if group.options.max_frames_per_traj is not None and not group.can.write_next:
            limit = group.options.max_frames_per_traj
            self._limit = StepLimit(limit, group.clock.steps, self.absent)
        self.ends = RESET_NOW
        if request.rule is not None or not group.options.reset_when_done:
            self.ends = self._choose_ends()
        if (
            group.options.on_step is not None
            or group.options.interruptor is not None
            or request.pause is not None
            or watch is not None
        ):
            self._hooks = self._choose_hooks(watch)
        if group.can.holding is not None or not group.random_start.is_over:
            self._count_before()
        if request.rule is not None and request.rule.complete:
            lane.stop()
        if self.reports.progress.watched:
            self.reports.progress.mark_unwritten(lane, group.env.spec.reward_key, 0)
        for fill, value in views.fills:
            fill(value)
        if group.on_device is not None:
            self._there = self._rows_there(group.on_device)
        if self._there is None:
            version = views.version
            resumed = views.resumed
            for fill, value in views.host_fills:
                fill(value)
        else:
            version = views.version_there
            resumed = views.resumed_there
        if resumed is not None:
            resumed[...] = False
            which = group.carry.take_resumed()
            if which:
                resumed[0, which] = True
        for key, _, first, _ in views.carried:
            first[...] = group.carry[key]
        for array, is_init in views.states:
            if is_init:
                array[1:] = (
                    False  # resets set it; the slot may hold values of an earlier rollout
                )
        call = None
        if group.carry.first_call is not None and not lane.stopped:
            call = group.carry.take_call()
        if self.reports.progress.watched:
            self.reports.progress.count(waits=self.ends.leaves_out)
        if version is not None:
            self._stamp(version, 0, call)
        if views.seed is not None:
            views.seed[...] = group.seeding.current
        if call is not None:
            store_outputs(
                call.outputs, lane
            )  # also the version, if the policy tells it itself
        if request.open_rows:
            lane.act_until(request.open_rows)
        return call is not None

    def go_on(
        self,
        request: RolloutRequest,
        tally: Tally,
        listener: ResetListener | None,
        watch: Watch | None,
    ) -> None:
        """Continue for another request: end episodes at the last row where resets are due.

        The rule is that of the first request, which counts its episodes.
        """
        self.request = request
        self.tally = tally
        self.reports = _reports_of(self.group, request, listener)
        self._hooks = self._choose_hooks(watch)
        if self.group.pending:
            self._cut(self.lane.done_steps - 1)
        if self.reports.progress.watched:
            self.reports.progress.count(waits=self.ends.leaves_out)
        version = (
            self.views.version if self._there is None else self.views.version_there
        )
        if version is not None:
            self._stamp(version, self.lane.done_steps, None)

    def next_rows(self, request: RolloutRequest, tally: Tally) -> None:
        """Make the next rows for another request. Rows that an interruption between two rows has
        left are part of them; after an error there are no others.
        """
        self.request = request
        self.tally = tally
        lane = self.lane
        begin = self._settled
        end = begin + request.open_rows
        if lane.done_steps > begin and not self.is_paused:
            end = lane.done_steps
            if self.group.pending:
                self._end_due(end - 1)
        if self.views.version is not None:
            self.views.version[begin:end] = request.version
        lane.act_between(lane.done_steps, end)

    @property
    def completion(self) -> Completion | None:
        """What completes its rows on the device; None: they are completed on the host."""
        on_device = self.group.on_device
        if on_device is None or self._there is None:
            return None
        return Completion(on_device, self._there)

    def _rows_there(self, on_device: OnDevice) -> DeviceRows | None:
        """Return the rows of the lane if it is completed on the device; None if the host needs
        them.
        """
        on_device.begin()
        if on_device.needs or needs_of_request(self.request, self._hooks.own):
            return None
        if not self.lane.mirrored:  # in shared memory
            return None
        rows: DeviceRows | None = self.lane.cache.get(DeviceRows)
        if rows is None:
            rows = self.lane.cache[DeviceRows] = device_rows(
                self.lane, self.group.env.spec
            )
        return rows

    def _begin_episodes(self) -> None:
        """Execute the resets that are due, except those of environments that make no steps because
        the rule does not need them.
        """
        group = self.group
        unneeded: list[int] = []
        if self.request.rule is not None:
            unneeded = unneeded_by(self.request.rule, range(group.B), group.can.bypass)
            self.absent = unneeded
        held = group.due.leave_out(unneeded)
        group.begin_episodes(reports=self.reports)
        group.due.done(
            held
        )  # environments that were reset early are stepped in this rollout

    def _choose_ends(self) -> Ends:
        group = self.group
        ends: Ends = RESET_NOW
        if not group.options.reset_when_done and not self.request.is_random_start:
            ends = WaitForBatch(
                self.waiting, group.can.bypass, self._limit, group.env.spec.reward_key
            )
        if self.request.rule is None:
            return ends
        return ChosenByRule(
            self.request.rule, ends, self.waiting, group.can.bypass, self._limit
        )

    def _choose_hooks(self, own: Watch | None) -> RowHooks:
        group = self.group
        options = group.options
        watches: list[Watch] = []
        if options.on_step is not None and not self.request.is_random_start:
            env_ids = group.env_ids
            repeats = group.env.spec.repeats
            watches.append(
                watching(options.on_step, env_ids, self.waiting, repeats, self.next_obs)
            )
        if self.request.pause is not None:
            watches.append(rendering(group.env, self.request.pause))
        if own is not None:
            watches.append(own)
        stopped: Callable[[], bool] | None = None
        if options.interruptor is not None and not self.request.is_random_start:
            stopped = options.interruptor.collection_stopped
        return RowHooks(watches, own, stopped)

    def _count_before(self) -> None:
        """Count the steps that were made before the first row."""
        holding = self.group.can.holding
        dropped = 0 if holding is None else holding.take_dropped()
        if dropped:
            self.tally.execute(dropped)
            self.tally.discard("reset", dropped)
        if self.request.is_random_start or self.group.random_start.is_over:
            return
        steps = self.group.random_start.end()
        self.tally.execute(steps)
        self.tally.discard("decorrelation", steps)
        self.reports.progress.cells[BEFORE] = steps

    def _stamp(self, version: Array, begin: int, call: FirstCall | None) -> None:
        """Write the version of the policy into the rows of ``version`` from ``begin`` on; that of
        ``call`` into row 0.
        """
        version[begin:] = self.request.version
        if call is not None:
            version[0] = call.version

    # --- rows -------------------------------------------------------------------------------------

    @property
    def is_paused(self) -> bool:
        """Whether it goes on after its last row as if nothing had happened."""
        return self.paused is not None

    def pause(self, prepared: Prepared) -> None:
        """Note an interruption after a complete row."""
        self.paused = prepared

    def unpause(self) -> Prepared:
        """Return how it goes on; it is not paused any more."""
        paused = self.paused
        assert paused is not None
        self.paused = None
        return paused

    def next_call(self, t: int) -> int:
        """Return the first row, from ``t`` on, after which ``after_step`` is due even if no episode
        ends.
        """
        if self._hooks.are_any:
            return t
        if self._limit is None:
            return self.next_obs.due
        return min(self.next_obs.due, self._limit.next)

    def after_step(self, t: int, finished: Sequence[int] | None) -> int:
        """Do all work due after row ``t`` except the next step; return the row of the next call, or
        STOP.
        """
        lane = self.lane
        lane.complete(t + 1)
        late: list[int] = []
        if self._limit is not None:
            late = self._limit.reached(t)
            if late:
                cut = (
                    late if finished is None else [i for i in late if i not in finished]
                )
                lane.arrays[TRUNCATED][t, cut] = True
                finished = sorted({*cut, *(finished or ())})
        if finished is not None:
            self.next_obs.copy(
                t + 1
            )  # before the reset overwrites the true last observations
            if self.group.options.compact_obs:
                self.next_obs.keep(lane, t, finished, self.waiting.all)
            self._end_episodes(t, finished, late)
        elif t >= self.next_obs.due or self._hooks.watches:
            self.next_obs.copy(t + 1)
        if self._hooks.are_any:
            self._hooks.call(lane, t)
        return STOP if lane.stopped else self.next_call(t + 1)

    def _end_episodes(
        self, t: int, finished: Sequence[int], late: Sequence[int]
    ) -> None:
        """End the episodes of ``finished`` at row ``t``; those of ``late`` reached the limit."""
        lane = self.lane
        lost = self.group.can.lives_lost
        over = finished
        going_on: Sequence[int] = ()
        if lost:
            going_on = [i for i in finished if i in lost and i not in late]
            over = [i for i in finished if i not in going_on]
        if self.group.options.traj_done_key is not None:
            lane.arrays[TRAJ_DONE][t, over] = True
            lane.arrays[TRUNCATED][t, [i for i in late if i in lost]] = True
        decision = self.ends.decide(lane, t, over, going_on)
        if decision.is_over:
            lane.stop()
        if decision.reset:
            self._reset_rows(t + 1, decision.reset, None)
        if decision.restart:
            self.group.can.restart_agent(lane.data, t + 1, decision.restart)
            self._restart_states(t + 1, decision.restart)

    def _cut(self, t: int) -> None:
        """Execute the resets that are due within the lane: end episodes at row ``t``, and start new
        ones after it.
        """
        group = self.group
        if not self._end_due(t):
            return  # they are reset before the next batch
        for part, seeds in group.due.parts(group.pending):
            self._reset_rows(t + 1, part, seeds)
        group.due.done(group.due.leave_out(self.absent))

    def _end_due(self, t: int) -> bool:
        """End the episodes of environments whose reset is due at row ``t``, and return whether they
        are reset after it.
        """
        lane = self.lane
        group = self.group
        done = lane.data[TERMINATED][t] | lane.data[TRUNCATED][t]
        over = group.pending
        if self.ends.waits:
            over = [i for i in over if i not in self.waiting.since]
        cut = [i for i in over if not done[i]]
        agents = group.agent_clock
        if agents is not None:
            cut = []
            if group.due.is_lost:
                end_agents(lane, t + 1, agents)
            group.due.recover()
        lane.data[TRUNCATED][t, cut] = True
        if group.options.traj_done_key is not None:
            lane.arrays[TRAJ_DONE][t, over] = True
        self.next_obs.copy(t + 1)
        if group.options.compact_obs:
            self.next_obs.keep(lane, t, cut, self.waiting.since)
        if self.ends.repeats_flags:
            all_wait = self.waiting.add(lane, t, cut)
            if all_wait:
                lane.stop()
            if all_wait or self.ends.waits:
                if self._limit is not None:
                    self._limit.let_go(cut)
                return False
        return True

    def _reset_rows(
        self, row: int, which: Sequence[int], seeds: Sequence[int] | None
    ) -> None:
        seeding = self.group.seeding
        if seeding.is_chosen:
            seeds = seeding.seeds_of(which, seeds, self._ended_before(row))
        took_ns = self.group.reset_envs(self.lane.data, row, which, seeds, self.reports)
        self.tally.add_reset(took_ns)
        if self.views.seed is not None:
            self.views.seed[row:, which] = seeding.current[which]
        self._restart_states(row, which)
        if self._limit is not None:
            self._limit.restart(which, row)

    def _ended_before(self, row: int) -> Array:
        """Return the number of episodes of each environment that have ended in the lane, ``[B]``."""
        arrays = self.lane.arrays
        if self.group.options.traj_done_key is not None:
            return np.asarray(arrays[TRAJ_DONE][:row].sum(axis=0))
        return np.asarray(
            (arrays[TERMINATED][:row] | arrays[TRUNCATED][:row]).sum(axis=0)
        )

    def _restart_states(self, row: int, which: Sequence[int]) -> None:
        for array, value in self.views.states:
            array[row, which] = value

    # --- errors -----------------------------------------------------------------------------------

    def fail(self, t: int, reason: str, executed: int) -> None:
        """Discard the ``executed`` steps of row ``t``, and reset all environments: their states are
        unknown.
        """
        self.lane.complete(max(self.lane.done_steps, t))
        self.tally.discard(reason, executed)
        self.tally.execute(executed)
        self._unmark()
        self.group.lose()

    def _check_values(self, without: Array | None, begin: int = 0) -> None:
        """Check the values of rows from ``begin`` on, which is cheaper once per rollout than once
        per step.
        """
        lane = self.lane
        group = self.group
        spec = group.env.spec
        found = first_bad_value(lane, spec, group.options.validate, without, begin)
        if self.request.seal is not None:
            kept = first_unsent(
                lane, self.next_obs.finals, spec, self.request.seal, begin
            )
            if kept is not None and (found is None or kept[0] < found[0]):
                found = kept
        if found is None:
            return
        t, message, by_policy = found
        first = begin + t  # discard this row and all later ones
        reason = "bad_policy_output" if by_policy else "bad_env_output"
        self.tally.discard(reason, self.waiting.executed(first, lane.done_steps))
        lane.take_back(first)
        self.reports.progress.begin(Phase.POLICY if by_policy else Phase.STEP)
        self._unmark()
        group.lose()
        kind = BadPolicyOutput if by_policy else BadEnvOutput
        raise kind(message).end_with(
            f"The {t} rows before it are kept; the environments are reset."
        )

    def _unmark(self) -> None:
        """Undo the entries of incomplete rows."""
        begin = self.lane.done_steps
        self.next_obs.take_back(begin)
        self.waiting.take_back(begin)
        self.reports.progress.mark_unwritten(
            self.lane, self.group.env.spec.reward_key, begin
        )
        for marks, value in self.views.marks:
            marks[begin:] = value

    # --- the end ----------------------------------------------------------------------------------

    def settle(self, *, is_fine: bool = False) -> RolloutOutcome:
        """Complete the columns of the rows that were made since the last call; the rollout stays open.

        Args:
            is_fine: their values are known to be fine.
        """
        lane = self.lane
        t = self._settled
        n = lane.done_steps
        flags = [rows[t:n] for rows in self.views.flags]
        _, done, terminated, truncated, _ = flags
        np.logical_or(terminated, truncated, out=done)
        if not is_fine:
            self._check_values(None, t)
        over = done
        if self.group.options.traj_done_key is not None:
            over = lane.arrays[TRAJ_DONE][t:n]
        episodes, steps = self._advance_clock(self.group.clock, t, flags, over)
        self._settled = n
        return RolloutOutcome(
            (n - t) * lane.B,
            n - t,
            episodes,
            self.next_obs.take_finals(),
            steps_before=None if t else steps,
        )

    def settled(self, n: int) -> None:
        """Note that the columns of the first ``n`` rows are complete; see ``QuietRows``."""
        self._settled = n

    def _advance_clock(
        self,
        clock: TrajectoryClock | AgentClock,
        begin: int,
        flags: Sequence[Array],
        over: Array,
    ) -> tuple[Episodes, Array | None]:
        """Write the ids and step counts of the complete rows from ``begin`` on.

        Args:
            flags: the columns of ``LaneViews.flags`` in these rows.
            over: where episodes end, ``[n, B]``.

        Returns:
            the episodes that ended in them, and the number of steps in each trajectory before them;
            None: agents take turns.
        """
        lane = self.lane
        group = self.group
        reward, _, terminated, truncated, ids = flags
        steps = clock.fill_ids(ids, over)
        if group.options.max_frames_per_traj:
            rows = slice(begin, lane.done_steps)
            counts = lane.arrays[STEP_COUNT][rows]
            clock.fill_step_counts(counts, over)
            np.add(counts, 1, out=lane.arrays[next_of(STEP_COUNT)][rows])
        episodes = clock.advance(reward, terminated, truncated, over)
        if group.env.spec.info_specs and len(episodes):
            episodes = replace(episodes, info=self.next_obs.infos(lane, over, begin))
        return episodes, steps

    @property
    def stays_open(self) -> bool:
        """Whether it waits for a request for its next rows."""
        return self.request.open_rows > 0

    @property
    def has_unsettled(self) -> bool:
        """Whether rows are complete that ``settle`` has not completed."""
        return self.lane.done_steps > self._settled

    def leave(self) -> None:
        """End a rollout that stays open: carry its last rows on."""
        n = self.lane.done_steps
        for key, rows, _, _ in self.views.carried:
            self.group.carry.take(key, rows[n : n + 1], self.absent)
        self.group.closed()

    def finish(self) -> RolloutOutcome:
        """Complete all columns of the lane after its last step."""
        lane = self.lane
        group = self.group
        options = group.options
        views = self.views
        n = lane.done_steps
        if self.reports.progress.watched:
            cells = self.reports.progress.cells
            cells[KNOWN] = self.waiting.executed(0, n) + cells[BEFORE]
        self.next_obs.copy(n)
        if self._there is not None:
            is_whole = n == lane.T and self.waiting.is_idle
            if is_whole and not needs_of_request(self.request, self._hooks.own):
                return self._finish_there(self._there)
            lane.pull(views.mirrored)
        elif lane.mirrored:
            lane.pull((group.env.spec.reward_key, TERMINATED, TRUNCATED))
        flags = views.flags if n == lane.T else [rows[:n] for rows in views.flags]
        _, done, terminated, truncated, _ = flags
        # else it is False already
        if lane.B >= MANY or 1 in terminated.tobytes() or 1 in truncated.tobytes():
            np.logical_or(terminated, truncated, out=done)
        without = None
        if self.ends.repeats_flags or not self.waiting.is_idle:
            without = self.ends.without_transition(lane, done, self.waiting)
        if (
            without is not None
            or n < lane.T
            or self.request.seal is not None
            or views.is_fine is None
            or not views.is_fine()
        ):
            self._check_values(without)
        over = done if options.traj_done_key is None else lane.arrays[TRAJ_DONE][:n]
        clock = group.clock
        if isinstance(clock, AgentClock):
            clock.sort(lane.arrays[AGENT][:n])
        episodes, steps = self._advance_clock(clock, 0, flags, over)
        if group.agent_returns is not None:
            returns = group.agent_returns.advance(lane.arrays, over)
            if returns:
                episodes = with_returns(episodes, returns)
        if without is not None:
            self._take_back_steps(without, over)
        if options.compact_obs and n:
            going_on = np.flatnonzero(~done[-1]).tolist()
            self.next_obs.keep(lane, n - 1, going_on, self.waiting.all)
        closes = self.request.closes and not self.request.is_random_start
        # a mark for the learner; the episode continues
        if options.set_truncated and closes and n:
            mark_end(
                lane, n - 1, group.env.spec, limited=bool(options.max_frames_per_traj)
            )
        for key, rows, _, last in views.carried:
            row = last if n == lane.T else rows[n : n + 1]
            group.carry.take(key, row, self.absent)
        if not self.waiting.is_idle:
            self._carry_on_lives()
        frames = n * lane.B
        if without is not None or n < lane.T or self.request.limit is not None:
            frames = self._mark_valid(n, without)
        elif views.valid is not None:
            views.valid[...] = True
        if lane.mirrored:  # the reward was copied from the device
            keys = views.mirrored
            if without is None:
                keys = [key for key in keys if key != group.env.spec.reward_key]
            lane.push(keys)
        group.closed()
        if options.reset_at_each_iter and closes:
            group.reset()
        return RolloutOutcome(
            frames,
            n,
            episodes,
            self.next_obs.finals,
            left_out=not self.waiting.is_idle,
            steps_before=steps,
        )

    def _finish_there(self, rows: DeviceRows) -> RolloutOutcome:
        """Complete all columns on the device."""
        group = self.group
        lane = self.lane
        on_device = group.on_device
        assert on_device is not None
        on_device.look()
        steps = on_device.complete(rows)
        for key, _, _, last in self.views.carried:
            group.carry.take(key, last, ())
        closes = self.request.closes
        if group.options.set_truncated and closes:
            limited = bool(group.options.max_frames_per_traj)
            mark_end(lane, lane.T - 1, group.env.spec, limited=limited, there=True)
        lane.completed_there()
        group.closed()
        if group.options.reset_at_each_iter and closes:
            group.reset()
        return RolloutOutcome(
            lane.T * lane.B,
            lane.T,
            on_device.send(rows),
            steps_before=steps,
        )

    def _carry_on_lives(self) -> None:
        """Let environments that only lost a life continue from their last observation."""
        group = self.group
        going_on = self.waiting.resume(group.carry)
        if going_on:
            group.can.restart_agent(group.carry, 0, going_on)
            group.carry.begin_anew(going_on)

    def _take_back_steps(self, without: Array, over: Array) -> None:
        """Correct the clock of environments that ended and waited for others; reset them before the
        next batch.
        """
        clock = self.group.clock
        assert isinstance(clock, TrajectoryClock)  # agents that take turns do not wait
        ended = [i for i, t in self.waiting.since.items() if over[t, i]]
        if self.group.can.write_next and self.ends.repeats_flags:
            ended = np.flatnonzero(
                over.any(axis=0)
            ).tolist()  # no step has told of them
        clock.take_back(without.sum(axis=0), ended)
        self.group.due.add(ended)
        if not self.group.can.bypass.is_possible:
            self.tally.discard("after_done", int(without.sum()))

    def _mark_valid(self, n: int, without: Array | None) -> int:
        """Mark the cells with a transition, and return the number of valid ones."""
        limit = self.request.limit
        shared = (
            None if limit is None else (*places_of(self.group, self.request), limit)
        )
        frames, surplus = mark_valid(
            self.lane, n, without, repeat_flags=self.ends.repeats_flags, shared=shared
        )
        self.tally.discard("surplus", surplus)
        return frames


def places_of(group: Group, request: RolloutRequest) -> tuple[Array, int]:
    """Return the indices of the environments among those of the same batch, ``[B]``, and the number
    of the latter.
    """
    if request.sharing is None:
        return group.sharing
    first, sharing = request.sharing
    return np.arange(first, first + group.B), sharing


def _reports_of(
    group: Group, request: RolloutRequest, listener: ResetListener | None
) -> Reports:
    if request.is_random_start:
        return Reports(Progress(), [])
    if listener is None:
        return group.reports
    return Reports(group.progress, [*group.reports.listeners, listener])
