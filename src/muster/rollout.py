"""The loop: T steps of one group, written into one lane. Every collector runs it and no other."""

from __future__ import annotations

import time

from muster.acting import call_policy, policy_error
from muster.errors import BadEnvOutput, EnvError, MusterError, UnsupportedEnv
from muster.group import STOP, Group
from muster.interrupts import allowed
from muster.memory.slots import Lane
from muster.progress import ACTING, STEPPING, Phase
from muster.protocols import Act, Policy, Step

TIMED_EVERY = 16  # a power of two; steps between two that are timed, so that timing costs next to nothing


def rollout(group: Group, policy: Policy, lane: Lane) -> None:
    """Fill ``lane`` with T steps of ``group``, from row ``lane.done_steps`` on; fewer if something stops it.

    On entry the group holds what to act on first; on exit what to act on next, so rollouts of 3 and 4
    steps give the same data as one of 7. After an error ``lane.done_steps`` rows are complete and the next
    call with the same lane goes on after them.

    Raises:
        EnvError, BadEnvOutput: the environments begin anew at the next call.
        PolicyError, BadPolicyOutput: nothing was stepped; the next call repeats the policy's call.
    """
    started = time.perf_counter_ns()
    group.progress.begin(Phase.STEP)
    with allowed(), group.surroundings():
        fill(group, policy, lane)
    completing = time.perf_counter_ns()
    group.leave(lane)
    group.progress.begin(Phase.IDLE)
    ended = time.perf_counter_ns()
    group.timing.copy += ended - completing
    group.timing.total += ended - started
    if group.spans is not None:
        track = int(group.clock.env_ids[0])
        group.spans.add("rollout", started, ended, track)
        group.spans.add("copy", completing, ended, track)


def fill(group: Group, policy: Policy, lane: Lane) -> None:
    """The steps of ``rollout``, within the group's surroundings; ``Group.leave`` completes them."""
    group.enter(lane)
    begin = lane.done_steps
    acted = begin == 0 and not lane.stopped and group.take_primed(lane)
    lane.acts_from = begin + acted
    act = call_policy(policy, lambda: policy.start(lane, group.rng))
    step = group.env.start(lane)
    if acted:
        _run(group, policy, _already_acted, step, lane, begin, begin + 1)
    if not lane.stopped:
        _run(group, policy, act, step, lane, lane.acts_from, lane.T)


def _run(group: Group, policy: Policy, act: Act, step: Step, lane: Lane, begin: int, end: int) -> None:
    clock = time.perf_counter_ns
    call_at = group.next_call(begin)
    spans, track = group.spans, int(group.clock.env_ids[0])
    cells = group.progress.cells
    in_env = in_policy = timed = 0
    t = begin
    try:
        for t in range(begin, end):
            cells[ACTING] = t
            if t & (TIMED_EVERY - 1):
                act(t)
                cells[STEPPING] = t
                finished = step(t)
            else:
                before = clock()
                act(t)
                between = clock()
                cells[STEPPING] = t
                finished = step(t)
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
        lane.done_steps = end
    except (EnvError, BadEnvOutput, UnsupportedEnv) as error:
        reset_failed = lane.done_steps > t
        reason = "bad_env_output" if isinstance(error, BadEnvOutput) else "env_error"
        group.fail(lane, t, reason, 0 if reset_failed else group.env.executed_in_row)
        raise
    except MusterError:
        lane.done_steps = max(lane.done_steps, t)
        raise
    except Exception as error:
        if lane.done_steps > t:  # the row is complete: it was the interruptor
            raise
        lane.done_steps = t
        raise policy_error(policy, error, t) from error
    except BaseException:  # Ctrl-C: who knows where
        group.fail(lane, t, "interrupted", group.env.executed_in_row)
        raise
    finally:
        steps = lane.done_steps - begin
        group.executed += group.waiting.made(begin, lane.done_steps)
        if timed:
            group.timing.env += in_env / timed * steps
            group.timing.policy += in_policy / timed * steps


def _already_acted(t: int) -> None:
    """Stands in for the policy at row 0, which ``prime`` has filled."""
