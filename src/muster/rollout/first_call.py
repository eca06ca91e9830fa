"""The beginning of a group's next rollout: resets that are due, random steps, and the first call of
a policy that did not act last.
"""

from __future__ import annotations

from muster.keys import IS_INIT
from muster.protocols import Outputs, Policy
from muster.rollout.acting import call_policy, keep
from muster.rollout.carry import FirstCall
from muster.rollout.group import Group
from muster.rollout.random_start import start_at_random


def begin_episodes(group: Group, *, early: bool = False) -> None:
    """Execute the scheduled resets now, and the random steps that follow before the first batch."""
    with group.contexts.without_inference:
        which = group.begin_episodes(early=early)
        if which and group.random_start.is_due:
            start_at_random(group, which)


def begin_early(group: Group) -> None:
    """Reset environments that wait for the next rollout; it raises the error, if there is one.

    Not with ``reset_when_done``: there, no environment waits.
    """
    if group.options.reset_when_done or group.due.error is not None:
        return
    try:
        begin_episodes(group, early=True)
    except Exception as error:  # noqa: BLE001 (raised by the next rollout)
        group.due.postpone(error)


def prime(group: Group, policy: Policy, version: int | str) -> Outputs:
    """Make the policy's first call, which determines its columns; the next rollout uses the outputs
    for row 0.

    Where environments act when they are ready, the outputs are not used.
    """
    if not group.can.starting.keeps_first_call:
        return probe(group, policy)
    call = group.carry.call_of(policy)
    if call is None:
        begin_episodes(group)
        call = FirstCall(policy, _call(group, policy), version)
        group.carry.keep_call(call)
    return call.outputs


def probe(group: Group, policy: Policy) -> Outputs:
    """Return the outputs of a first call as in ``prime``, without using them; restores the random
    streams.

    Of a rollout that is not complete, the resets that are due are not executed: its lane gets the
    observations. The call is made on the rows with which the rollout began.
    """
    if group.open is None:
        begin_episodes(group)
    with group.rng.unmoved():
        return _call(group, policy)


def _call(group: Group, policy: Policy) -> Outputs:
    """Make the policy's first call, on the rows for the next step."""
    with group.contexts.without_inference:
        obs = group.observations()
        obs |= {
            key: group.carry.seen(key) for key in group.env.spec.action_masks.values()
        }
        if IS_INIT in group.carry:  # the episodes may have begun with an earlier policy
            obs[IS_INIT] = group.carry.seen(IS_INIT)
        seen = group.can.starting.seen(obs)
        return keep(call_policy(policy, lambda: policy.first(seen, group.rng)))
