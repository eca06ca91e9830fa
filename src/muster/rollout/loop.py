"""The loop: T steps of one group, written into one lane. Every collector runs it and no other."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

from muster.capabilities import HoldsSteps
from muster.errors import BadEnvOutput
from muster.memory.slots import Lane
from muster.protocols import Act, Policy
from muster.rollout.acting import env_error, is_own, policy_error
from muster.rollout.group import Group
from muster.rollout.progress import ACTING, PHASE, STEPPING, Phase
from muster.rollout.quiet_rows import quiet_rows
from muster.rollout.request import RolloutOutcome, RolloutRequest, Watch
from muster.rollout.resets import ResetListener
from muster.rollout.running import STOP, Prepared, Rollout
from muster.rollout.starting import no_act
from muster.rollout.tally import Tally
from muster.utils import interrupts

# positions of the loop
IN_POLICY = 0
IN_STEP = 1
AFTER_STEP = 2
BETWEEN_ROWS = 3
TIMED_EVERY = (
    16  # a power of two; only one of so many steps is timed, so timing is almost free
)


class RolloutRecorder(Protocol):
    """Makes whole rollouts by a recorded function instead of row by row; see ``muster.capture``."""

    def run(
        self, running: Rollout, prepared: Prepared, by_rows: Callable[[], None]
    ) -> None:
        """Fill the rest of the lane, or call ``by_rows``, which does."""


def rollout(
    group: Group,
    policy: Policy,
    request: RolloutRequest,
    lane: Lane,
    tally: Tally | None = None,
    *,
    listener: ResetListener | None = None,
    watch: Watch | None = None,
    recorder: RolloutRecorder | None = None,
) -> RolloutOutcome:
    """Fill ``lane`` with T steps of ``group``, from row ``lane.done_steps`` on; fewer if something
    stops it.

    On entry and on exit the group holds the rows for the next step, so rollouts of 3 and 4 steps
    contain the same data as one of 7. After an error, ``lane.done_steps`` rows are complete, and
    the next call with the same lane continues after them.

    Args:
        tally: counts what is executed and discarded, also if an error is raised.
        listener: is told of resets, beside the group's listeners.
        watch: called after every step with the lane and its row, which is complete.
        recorder: may make whole rollouts by a recorded function.

    Raises:
        EnvError, BadEnvOutput: the environments failed. The next call resets them.
        PolicyError, BadPolicyOutput: the policy failed. The next call repeats its call for the
            first incomplete row (if the check after the rollout found a bad value: after a reset of
            the environments).
        KeyboardInterrupt: Ctrl-C, most often between two rows: ``group.is_paused``, nothing is
            lost, and the next call continues with the next row. From within a row
            (``muster.utils.interrupts`` says when): the next call resets the environments.
    """
    began = time.perf_counter_ns()
    tally = Tally() if tally is None else tally
    cells = group.reports.progress.cells
    cells[PHASE] = Phase.STEP
    contexts = group.contexts
    with contexts.without_inference if request.grad else contexts.usual:
        running = group.open
        acted = False
        if lane.done_steps and isinstance(running, Rollout) and running.lane is lane:
            if request.open_rows:
                running.next_rows(request, tally)
            else:
                running.go_on(request, tally, listener, watch)
        else:
            if group.on_device is not None:
                group.check_earlier()
            running = Rollout(group, request, lane, tally, listener)
            group.opened(running)
            acted = running.begin(watch)
        # else no noise is drawn, as by a server of policies, which nothing asks
        if not lane.stopped:
            prepared = _prepare(running, policy, acted=acted)
            signals = interrupts.here()
            begin = lane.acts_from
            if begin > lane.done_steps:
                # row 0 has the action of the policy's first call
                _run(running, prepared, no_act, lane.done_steps, begin, signals)
            if not lane.stopped and begin < lane.acts_until:
                run = running, prepared, prepared.act, begin, lane.acts_until, signals
                if recorder is None:
                    _run(*run)
                else:
                    recorder.run(running, prepared, partial(_run, *run))
    completing = time.perf_counter_ns()
    outcome = running.settle() if request.open_rows else running.finish()
    cells[PHASE] = Phase.IDLE
    ended = time.perf_counter_ns()
    tally.add_rollout(ended - completing, ended - began)
    if tally.spans is not None:
        tally.spans.add("rollout", began, ended, group.track)
        tally.spans.add("copy", completing, ended, group.track)
    return outcome


class FurtherRows:
    """Makes further rows of a rollout that stays open, ``open_rows`` of its request per call.

    Rows are made as by ``rollout``. What cannot change while the rollout is open was looked up when
    it was opened, and quiet rows are settled by ``QuietRows``.

    Attributes:
        policy: acts in these rows.
        running: the rollout.
        lane: has the rows.
    """

    def __init__(self, running: Rollout, policy: Policy) -> None:
        group = running.group
        self.policy = policy
        self.running = running
        self._group = group
        self.lane = running.lane
        self._cells = group.reports.progress.cells
        self._context = group.contexts.usual
        self._rng = group.contexts.rng
        self._start = group.can.starting.start
        rows = running.request.open_rows
        self._quiet = quiet_rows(group, running.lane, running.views, rows)
        self._prepared: Prepared | None = None

    def is_for(self, policy: Policy) -> bool:
        """Return whether the rollout is still open, nothing has interrupted it, and this policy acts
        in it.
        """
        running = self.running
        return (
            self._group.open is running
            and running.paused is None
            and policy is self.policy
        )

    def __call__(self, request: RolloutRequest, tally: Tally) -> RolloutOutcome:
        """Make the next rows.

        Raises:
            BaseException: see ``rollout``.
        """
        began = time.perf_counter_ns()
        running = self.running
        lane = self.lane
        cells = self._cells
        quiet = self._quiet
        begin = lane.done_steps
        end = begin + request.open_rows
        cells[PHASE] = Phase.STEP
        with self._context:
            running.next_rows(request, tally)
            act, step = self._start(self.policy, lane, self._rng, cells)
            prepared = self._prepared
            if (
                prepared is None
                or prepared.act is not act
                or prepared.step is not step
                or prepared.version != request.version
            ):
                prepared = Prepared(self.policy, request.version, act, step)
                self._prepared = prepared
            _run(running, prepared, act, begin, end, interrupts.here())
        completing = time.perf_counter_ns()
        if quiet is not None and quiet.settle(begin, end):
            running.settled(end)
            outcome = quiet.outcome
        else:
            is_fine = quiet is not None and quiet.are_fine(begin, end)
            outcome = running.settle(is_fine=is_fine)
        cells[PHASE] = Phase.IDLE
        ended = time.perf_counter_ns()
        tally.add_rollout(ended - completing, ended - began)
        return outcome


def further_rows_of(group: Group, policy: Policy) -> FurtherRows | None:
    """Return what makes further rows of the open rollout of a group; None: there is none."""
    running = group.open
    if isinstance(running, Rollout) and running.stays_open and running.paused is None:
        return FurtherRows(running, policy)
    return None


def make_steps(
    group: Group, policy: Policy, request: RolloutRequest, lane: Lane, tally: Tally
) -> RolloutOutcome:
    """Make a ``rollout`` in the group's context, for a policy without a first call.

    Ctrl-C does not end it between two rows.
    """
    running = Rollout(group, request, lane, tally)
    group.opened(running)
    running.begin()
    if not lane.stopped:
        prepared = _prepare(running, policy, acted=False)
        _run(running, prepared, prepared.act, lane.acts_from, lane.T, interrupts.NEVER)
    return running.finish()


def end_early(group: Group) -> None:
    """Complete the columns of the rows before an error, and carry the row after them on; no request
    continues the rollout.
    """
    running = group.open
    if isinstance(running, Rollout):
        running.finish()


def _prepare(running: Rollout, policy: Policy, *, acted: bool) -> Prepared:
    """Return the functions that act and step in the lane.

    Sets the first row of ``act``, after row 0 if it has an action already (``acted``).
    """
    group = running.group
    lane = running.lane
    begin = lane.done_steps
    version = running.request.version
    if running.paused is not None:
        paused = running.unpause()
        if begin and paused.policy is policy and paused.version == version:
            lane.act_from(begin)
            return paused
    holding = group.can.holding
    if holding is not None and holding.late > 0 and not lane.stopped:
        _catch_up(running, policy, holding, acted)
        acted = False
    if lane.acts_from != begin + acted:
        lane.act_from(begin + acted)
    cells = running.reports.progress.cells
    act, step = group.can.starting.start(policy, lane, group.contexts.rng, cells)
    return Prepared(policy, version, act, step)


def _catch_up(
    running: Rollout, policy: Policy, holding: HoldsSteps, acted: bool
) -> None:
    """Make the steps after which rows can be complete, where agents take turns; see
    ``HoldsSteps.late``.

    The last row of the lane is used for these, so that a policy draws noise for one row, whatever
    the lane's length. If ``acted``, the first row has an action already.
    """
    group = running.group
    lane = running.lane
    first = lane.done_steps
    last = lane.T - 1
    step = group.env.start(lane)
    prepared = Prepared(policy, running.request.version, no_act, step)
    at = IN_POLICY
    try:
        while holding.late > 0:
            at = IN_POLICY
            row = first if acted else last
            if not acted:
                _repeat_row(running, first, last)
                lane.act_from(last)
                policy.start(lane, group.rng)(last)
            at = IN_STEP
            acted = False
            step(row)
            _repeat_row(running, row + 1, first)
    except BaseException as error:
        raised = _cut_short(running, prepared, first, at, error)
        if raised is error:
            raise
        raise raised from error


def _repeat_row(running: Rollout, source: int, row: int) -> None:
    """Make row ``source`` of the carried columns the next one to act on, in ``row``."""
    for key, rows, *_ in running.views.carried:
        rows[row] = rows[source]
        if row == 0:
            running.group.carry.take(key, rows[source : source + 1], ())


def _run(
    running: Rollout,
    prepared: Prepared,
    act: Act,
    begin: int,
    end: int,
    signals: interrupts.Signals,
) -> None:
    lane = running.lane
    step = prepared.step
    clock = time.perf_counter_ns
    call_at = running.next_call(begin)
    spans = running.tally.spans
    track = 0 if spans is None else running.group.track
    cells = running.reports.progress.cells
    in_env = 0
    in_policy = 0
    timed = 0
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
                call_at = running.after_step(t, finished)
                if call_at == STOP:
                    return
            if signals.noted:
                at = BETWEEN_ROWS
                lane.complete(t + 1)
                running.pause(prepared)
                signals.deliver()
                running.unpause()  # the user's handler has raised nothing
        lane.complete(end)
    except BaseException as error:
        if at == BETWEEN_ROWS:
            raise
        raised = _cut_short(running, prepared, t, at, error)
        try:
            if raised is error:
                raise
            raise raised from error
        finally:
            # it refers to this frame, and this to the lane: only the cycle collector would free the
            # slot
            del raised
    finally:
        rows = lane.done_steps - begin
        executed = rows * lane.B
        if not running.waiting.is_idle:
            executed = running.waiting.executed(begin, lane.done_steps)
        share = rows / timed if timed else 0.0  # of the timed rows
        running.tally.execute(executed, in_env * share, in_policy * share)


def _cut_short(
    running: Rollout, prepared: Prepared, t: int, at: int, error: BaseException
) -> BaseException:
    """Count the steps executed in row ``t`` before ``error``, and return the error to raise.

    The number of steps depends on the place of the error (``at``, and the phase of a reset), never
    on its type: an environment can raise a policy's error, and a policy an environment's error.
    """
    lane = running.lane
    policy = prepared.policy
    progress = running.reports.progress
    if at == IN_STEP and progress.cells[PHASE] == Phase.POLICY:
        at = IN_POLICY
    resetting = at == AFTER_STEP and progress.cells[PHASE] == Phase.RESET
    if at == IN_POLICY:
        progress.begin(Phase.POLICY)
    if not issubclass(type(error), Exception):  # Ctrl-C, sys.exit(): passed on as it is
        running.fail(t, "interrupted", _executed(running, t, at))
        return error
    if at == IN_POLICY:
        lane.complete(max(lane.done_steps, t))
        return error if is_own(policy, error) else policy_error(policy, error, t)
    if at == AFTER_STEP and lane.done_steps > t and not resetting:
        running.pause(prepared)  # raised by a hook of the user: the row is complete
        return error
    reason = "bad_env_output" if issubclass(type(error), BadEnvOutput) else "env_error"
    running.fail(t, reason, _executed(running, t, at))
    what = "reset" if resetting else "step"
    return env_error(
        running.group.env.spec.name, f"{what} (row {t} of the batch)", error
    )


def _executed(running: Rollout, t: int, at: int) -> int:
    """Return the number of environments stepped in row ``t``; 0 if the row is complete."""
    if at == IN_STEP:
        return running.group.can.take_executed()
    if at == AFTER_STEP and running.lane.done_steps <= t:
        return running.waiting.executed(t, t + 1)
    return 0
