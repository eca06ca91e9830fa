"""What each request does: in the worker, and in the parent before and after it is sent.

The parent handles a request in this order:

1. ``part_of``: each worker gets the part of the request that concerns its groups.
2. ``sent_through``: the inference server, if there is one, executes its part.
3. ``place_after``: the place of a successor includes the effect of the request.
4. ``run_request`` in the worker, which answers.
5. ``add_answer``: the inference server adds its part to the answer.
6. ``log_request``: the action logs of the groups note resets and new states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from muster.capabilities import LimitsResets, capability, pass_options
from muster.memory.slots import Layout
from muster.workers.config import WorkerPlace
from muster.workers.requests import (
    Call,
    LayOut,
    LoadState,
    MarkResumed,
    Profile,
    Request,
    Reset,
    Seed,
    TakeState,
)
from muster.workers.worker import Worker

if TYPE_CHECKING:
    from muster.restore.crash_notes import CrashNotes
    from muster.workers.actor import Actor


# --- in the worker --------------------------------------------------------------------------------


def run_request(worker: Worker, request: Request) -> Any:
    """Execute a request in its worker, and return the answer."""
    for group in worker.groups:
        group.leave()
    return _IN_WORKER[type(request)](worker, request)


def _lay_out(worker: Worker, request: LayOut) -> dict[int, Layout]:
    numbers = [group.number for group in worker.groups]
    return dict(zip(numbers, worker.layouts(request), strict=True))


def _reset(worker: Worker, request: Reset) -> None:
    for number, chosen in request.which.items():
        group = worker.group(number)
        if not request.check:
            group.reset(chosen)
            pass_options(group.env, request.options)
        elif 0 < len(set(chosen)) < group.B:
            limiting = capability(group.env, LimitsResets)
            if limiting is not None:
                limiting.check_partial_reset()


def _mark_resumed(worker: Worker, request: MarkResumed) -> None:
    for group in worker.groups:
        group.carry.mark_resumed()


_IN_WORKER: dict[type[Request], Callable[[Worker, Any], Any]] = {
    Call: lambda worker, request: request.method(worker, *request.args),
    LayOut: _lay_out,
    Seed: lambda worker, request: worker.seed(request.seed, request.static),
    Reset: _reset,
    Profile: lambda worker, request: worker.profile(request.config),
    TakeState: lambda worker, request: worker.state(),
    LoadState: lambda worker, request: worker.load(
        request.states, request.cut, request.trust
    ),
    MarkResumed: _mark_resumed,
}


# --- in the parent --------------------------------------------------------------------------------


def part_of(request: Request, groups: Sequence[int]) -> Request | None:
    """Return the part of a request for a worker with these groups; None if it has no part in it."""
    match request:
        case Reset(which):
            own = {number: which[number] for number in groups if number in which}
            return replace(request, which=own) if own else None
        case LoadState(states):
            of_worker = {
                number: states[number] for number in groups if number in states
            }
            return replace(request, states=of_worker)
    return request


def sent_through(request: Request, actor: Actor, groups: Sequence[int]) -> Request:
    """Execute the inference server's part of a request, and return the worker's part."""
    match request:
        case Seed(seed):
            actor.reseed(groups, seed)
        case LoadState(states):
            return replace(request, states=actor.load(states))
    return request


def place_after(request: Request, place: WorkerPlace) -> WorkerPlace:
    """Return the place of a successor of a worker that has executed a request."""
    match request:
        case LayOut():
            return replace(place, columns=request)
        case Seed(seed, static):
            return replace(place, seed=seed, static=static)
        case LoadState():
            return replace(place, columns=None)
        case MarkResumed():
            return replace(place, columns=None, marks_resumed=True)
    return place


def add_answer(
    request: Request, actor: Actor, groups: Sequence[int], answer: Any
) -> None:
    """Add the inference server's part to a worker's answer."""
    if isinstance(request, TakeState):
        actor.add_streams(groups, answer)


def log_request(request: Request, notes: CrashNotes, groups: Sequence[int]) -> None:
    """Note the effect of a request on the episodes of a worker's groups."""
    match request:
        case LayOut():
            # a policy's first call needs observations
            notes.may_have_reset(groups)
        case Seed(seed, static):
            notes.seeded(groups, seed, static=static)
        case Reset(which, options, False):
            notes.reset(which, options)
        case LoadState():
            notes.forget(groups)
