"""The loop: T steps of one group, written into one lane. Every collector runs it and no other."""

from __future__ import annotations

import time
from functools import partial
from typing import NamedTuple, cast

from muster.errors import BadEnvOutput
from muster.memory.slots import Lane
from muster.protocols import Act, Policy, ReadyFirst, Step
from muster.rollout.acting import env_error, is_own, policy_error
from muster.rollout.group import STOP, Group
from muster.rollout.progress import ACTING, PHASE, STEPPING, Phase
from muster.utils import interrupts

IN_POLICY, IN_STEP, AFTER_STEP, BETWEEN_ROWS = range(4)  # positions of the loop
TIMED_EVERY = 16  # a power of two; only one of so many steps is timed, so timing is almost free


class StartedLane(NamedTuple):
    """The functions that act and step in a lane.

    ``Group.paused`` is one that Ctrl-C has interrupted between two rows.

    A policy draws noise for all rows when it starts in a lane. So the rest of a paused rollout is
    filled by the same ``act``, as long as the policy and its version are the same: no noise is
    drawn twice.
    """

    lane: Lane
    policy: Policy
    version: int | str
    act: Act
    step: Step

    def is_of(self, group: Group, policy: Policy, lane: Lane) -> bool:
        """Return whether a rollout of this policy in this lane continues here."""
        return self.lane is lane and self.policy is policy and self.version == group.version


def rollout(group: Group, policy: Policy, lane: Lane) -> None:
    """Fill ``lane`` with T steps of ``group``, from row ``lane.done_steps`` on; fewer if something
    stops it.

    On entry and on exit the group holds the rows for the next step, so rollouts of 3 and 4 steps
    contain the same data as one of 7. After an error, ``lane.done_steps`` rows are complete, and
    the next call with the same lane continues after them.

    Raises:
        EnvError, BadEnvOutput: the environments failed. The next call resets them.
        PolicyError, BadPolicyOutput: the policy failed. The next call repeats its call for the
            first incomplete row (if the check after the rollout found a bad value: after a reset of
            the environments).
        KeyboardInterrupt: Ctrl-C, most often between two rows: ``group.paused`` is set, nothing is
            lost, and the next call continues with the next row. From within a row
            (``muster.utils.interrupts`` says when): the next call resets the environments.
    """
    began = time.perf_counter_ns()
    cells = group.progress.cells
    cells[PHASE] = Phase.STEP
    with group.context():
        started, acted = _start(group, policy, lane)
        signals = interrupts.here()
        if acted:  # row 0 has the action of ``prime``
            _run(group, started, _no_act, lane.done_steps, lane.acts_from, signals)
        if not lane.stopped:
            _run(group, started, started.act, lane.acts_from, lane.T, signals)
    completing = time.perf_counter_ns()
    group.leave(lane)
    cells[PHASE] = Phase.IDLE
    ended = time.perf_counter_ns()
    group.timing.copy += ended - completing
    group.timing.total += ended - began
    if group.spans is not None:
        track = int(group.clock.env_ids[0])
        group.spans.add("rollout", began, ended, track)
        group.spans.add("copy", completing, ended, track)


def fill(group: Group, policy: Policy, lane: Lane) -> None:
    """Make the steps of ``rollout`` for a policy without a first call, in ``Group.context``, before
    ``Group.leave``.

    Ctrl-C does not end it between two rows.
    """
    started, _ = _start(group, policy, lane)
    if not lane.stopped:
        _run(group, started, started.act, lane.acts_from, lane.T, interrupts.NEVER)


def _start(group: Group, policy: Policy, lane: Lane) -> tuple[StartedLane, bool]:
    """Return the functions that act and step in this lane, and whether the first row's action is
    written already.
    """
    paused = group.paused
    group.paused = None
    group.enter(lane)
    begin = lane.done_steps
    if begin and paused is not None and paused.is_of(group, policy, lane):
        lane.acts_from = begin
        return paused, False
    acted = begin == 0 and not lane.stopped and group.take_primed(lane)
    if group.env.late > 0 and not lane.stopped:
        _catch_up(group, policy, lane, acted)
        acted = False
    lane.acts_from = begin + acted
    if group.env.ready_envs is not None:
        env, written = cast(ReadyFirst, group.env), [column.key for column in policy.columns()]
        step = env.start_ready(lane, partial(_acting_when_ready, group, policy), written)
        return StartedLane(lane, policy, group.version, _no_act, step), False
    cells = group.progress.cells
    phase, cells[PHASE] = cells[PHASE], Phase.POLICY
    try:
        act = policy.start(lane, group.rng)
    except Exception as error:
        if is_own(policy, error):
            raise
        raise policy_error(policy, error) from error
    cells[PHASE] = phase
    return StartedLane(lane, policy, group.version, act, group.env.start(lane)), acted


def _no_act(t: int) -> None:
    """Do nothing: the action is there, or the step acts."""


def _acting_when_ready(group: Group, policy: Policy, lane: Lane) -> Act:
    """Prepare a policy that acts within steps. In an error of the policy, the phase is POLICY."""
    cells = group.progress.cells
    phase, cells[PHASE] = cells[PHASE], Phase.POLICY
    act = policy.start(lane, group.rng)
    cells[PHASE] = phase

    def act_in_phase(t: int) -> None:
        cells[PHASE] = Phase.POLICY
        act(t)
        cells[PHASE] = phase

    return act_in_phase


def _catch_up(group: Group, policy: Policy, lane: Lane, acted: bool) -> None:
    """Make the steps after which rows can be complete, where agents take turns; see
    ``EnvBatch.late``.

    The last row of the lane is used for these, so that a policy draws noise for one row, whatever
    the lane's length. If ``acted``, the first row has an action already.
    """
    first, last, at, step = lane.done_steps, lane.T - 1, IN_POLICY, group.env.start(lane)
    try:
        while group.env.late > 0:
            at = IN_POLICY
            row = first if acted else last
            if not acted:
                _repeat_row(group, lane, first, last)
                lane.acts_from = last
                policy.start(lane, group.rng)(last)
            at = IN_STEP
            acted = False
            step(row)
            _repeat_row(group, lane, row + 1, first)
    except BaseException as error:
        raised = _cut_short(
            group, StartedLane(lane, policy, group.version, _no_act, step), first, at, error
        )
        if raised is error:
            raise
        raise raised from error


def _repeat_row(group: Group, lane: Lane, source: int, row: int) -> None:
    """Make row ``source`` of the carried columns the next one to act on, in ``row``."""
    for key, rows, *_ in lane.cache[group].carried:
        rows[row] = rows[source]
        if row == 0:
            group.carry.take(key, rows[source : source + 1], ())


def _run(
    group: Group, started: StartedLane, act: Act, begin: int, end: int, signals: interrupts.Signals
) -> None:
    lane = started.lane
    step = started.step
    clock = time.perf_counter_ns
    call_at = group.next_call(begin)
    spans = group.spans
    track = 0 if spans is None else int(group.clock.env_ids[0])
    cells = group.progress.cells
    in_env = in_policy = timed = 0
    t = begin
    at = IN_POLICY
    try:
        for t in range(begin, end):
            at = IN_POLICY
            cells[ACTING] = t
            if t & (TIMED_EVERY - 1):
                act(t)
                at = IN_STEP
                cells[STEPPING] = t
                finished = step(t)
                at = AFTER_STEP
            else:
                before = clock()
                act(t)
                between = clock()
                at = IN_STEP
                cells[STEPPING] = t
                finished = step(t)
                at = AFTER_STEP
                in_env += clock() - between
                in_policy += between - before
                timed += 1
                if spans is not None:
                    spans.add("policy", before, between, track)
                    spans.add("env", between, clock(), track)
            if finished is not None or t == call_at:
                call_at = group.after_step(lane, t, finished)
                if call_at == STOP:
                    return
            if signals.noted:
                at = BETWEEN_ROWS
                lane.done_steps = t + 1
                group.paused = started
                signals.deliver()
                group.paused = None  # the user's handler has raised nothing
        lane.done_steps = end
    except BaseException as error:
        if at == BETWEEN_ROWS:
            raise
        raised = _cut_short(group, started, t, at, error)
        try:
            if raised is error:
                raise
            raise raised from error
        finally:
            # it refers to this frame, and this to the lane: only the cycle collector would free the
            # slot
            del raised
    finally:
        steps = lane.done_steps - begin
        group.executed += (
            steps * group.B if group.waiting.idle else group.waiting.made(begin, lane.done_steps)
        )
        if timed:
            group.timing.env += in_env / timed * steps
            group.timing.policy += in_policy / timed * steps


def _cut_short(
    group: Group, started: StartedLane, t: int, at: int, error: BaseException
) -> BaseException:
    """Count the steps executed in row ``t`` before ``error``, and return the error to raise.

    The number of steps depends on the place of the error (``at``, and the phase of a reset), never
    on its type: an environment can raise a policy's error, and a policy an environment's error.
    """
    lane = started.lane
    policy = started.policy
    if at == IN_STEP and group.progress.cells[PHASE] == Phase.POLICY:
        at = IN_POLICY
    resetting = at == AFTER_STEP and group.progress.cells[PHASE] == Phase.RESET
    if at == IN_POLICY:
        group.progress.begin(Phase.POLICY)
    if not issubclass(type(error), Exception):  # Ctrl-C, sys.exit(): passed on as it is
        group.fail(lane, t, "interrupted", _executed(group, lane, t, at))
        return error
    if at == IN_POLICY:
        lane.done_steps = max(lane.done_steps, t)
        return error if is_own(policy, error) else policy_error(policy, error, t)
    if at == AFTER_STEP and lane.done_steps > t and not resetting:
        group.paused = started  # raised by a hook of the user: the row is complete
        return error
    reason = "bad_env_output" if issubclass(type(error), BadEnvOutput) else "env_error"
    group.fail(lane, t, reason, _executed(group, lane, t, at))
    return env_error(
        group.env.spec.name, f"{'reset' if resetting else 'step'} (row {t} of the batch)", error
    )


def _executed(group: Group, lane: Lane, t: int, at: int) -> int:
    """Return the number of environments stepped in row ``t``; 0 if the row is complete."""
    if at == IN_STEP:
        return group.env.executed_in_row
    return group.waiting.made(t, t + 1) if at == AFTER_STEP and lane.done_steps <= t else 0
