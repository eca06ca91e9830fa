"""The requests to workers, other than for rollouts.

A request defines what it does in the worker (``run``), and its effects in this process: on the
place of the worker's successors (``placed``), on crash reports (``noted``) and on the inference
server (``through``, ``answered``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from muster.memory.specs import Column
from muster.restore.pickling import dumps, loads
from muster.workers.config import WorkerPlace

if TYPE_CHECKING:
    from muster.memory.slots import Layout
    from muster.restore.crash_notes import CrashNotes
    from muster.workers.actor import Actor
    from muster.workers.worker import Worker


class Request(ABC):
    """A request to a worker, other than for a rollout."""

    # not sent to absent workers. They get its effect with their ``WorkerPlace``
    waits: ClassVar[bool] = False

    @abstractmethod
    def run(self, worker: Worker) -> Any:
        """Execute the request in the worker, and return the answer."""

    def part(self, groups: Sequence[int]) -> Request | None:
        """Return the part of the request for a worker with these groups; None if it has no part in
        it.
        """
        return self

    def noted(self, notes: CrashNotes, groups: Sequence[int]) -> None:  # noqa: B027 (most change no episodes)
        """Note the effect on the episodes of the worker's groups; called in the parent, after the
        answer.
        """

    def placed(self, place: WorkerPlace) -> WorkerPlace:
        """Return the place of a successor; called in the parent, before the request is sent."""
        return place

    def through(self, actor: Actor, groups: Sequence[int]) -> Request:
        """Execute the inference server's part, and return the worker's; called in the parent,
        before ``run``.
        """
        return self

    def answered(self, actor: Actor, groups: Sequence[int], result: Any) -> None:  # noqa: B027 (most add nothing)
        """Add the inference server's part to the answer; called in the parent."""


@dataclass(frozen=True)
class Call(Request):
    """Call a method of ``Worker``, or a function with a worker as its first argument."""

    method: Callable[..., Any]
    args: Sequence[Any] = ()

    def run(self, worker: Worker) -> Any:
        return self.method(worker, *self.args)


@dataclass(frozen=True)
class LayOut(Request):
    """Prepare the next rollouts; the answer has their layouts by group."""

    policy: str  # "policy" or "random"
    T: Mapping[int, int]  # number of time steps, by group
    # of the weights; None: the worker sets it when it takes the weights
    version: int | str | None = None
    served: Sequence[Column] = ()  # columns that an inference server writes
    grad: bool = False  # the policy makes its first call with gradients enabled

    def run(self, worker: Worker) -> dict[int, Layout]:
        layouts = worker.layouts(self)
        return {group.number: layout for group, layout in zip(worker.groups, layouts, strict=True)}

    def placed(self, place: WorkerPlace) -> WorkerPlace:
        return replace(place, columns=self)


@dataclass(frozen=True)
class Seed(Request):
    """See ``Worker.seed``."""

    waits = True
    seed: int | None
    static: bool

    def run(self, worker: Worker) -> Any:
        worker.seed(self.seed, self.static)

    def placed(self, place: WorkerPlace) -> WorkerPlace:
        return replace(place, seed=self.seed, static=self.static)

    def through(self, actor: Actor, groups: Sequence[int]) -> Request:
        actor.reseed(groups, self.seed)
        return self

    def noted(self, notes: CrashNotes, groups: Sequence[int]) -> None:
        notes.seeded(groups, self.seed, static=self.static)


@dataclass(frozen=True)
class Reset(Request):
    """Reset environments, by group, before the next step."""

    waits = True
    which: Mapping[int, Sequence[int]]
    options: dict[str, Any] | None = None
    # do not reset; raise ``UnsupportedEnv`` if a group cannot reset only some environments
    check: bool = False

    def part(self, groups: Sequence[int]) -> Reset | None:
        which = {number: self.which[number] for number in groups if number in self.which}
        return replace(self, which=which) if which else None

    def run(self, worker: Worker) -> Any:
        for number, chosen in self.which.items():
            group = worker.group(number)
            if not self.check:
                group.reset(chosen)
                group.env.reset_options = self.options
            elif 0 < len(set(chosen)) < group.B:
                group.env.check_partial_reset()

    def noted(self, notes: CrashNotes, groups: Sequence[int]) -> None:
        if not self.check:
            notes.reset(self.which, self.options)


@dataclass(frozen=True)
class Profile(Request):
    """See ``Worker.profile``.

    Pickling raises ``BadOption`` if the user's function cannot be pickled.
    """

    waits = True
    config: Any

    def run(self, worker: Worker) -> Any:
        worker.profile(self.config)

    def __reduce__(self) -> tuple[Any, ...]:
        return _profile, (dumps(self.config, "on_trace_ready"),)


def _profile(config: bytes) -> Profile:
    return Profile(loads(config, "on_trace_ready"))


@dataclass(frozen=True)
class TakeState(Request):
    """See ``Worker.state``."""

    def run(self, worker: Worker) -> Any:
        return worker.state()

    def answered(self, actor: Actor, groups: Sequence[int], result: Any) -> None:
        actor.add_streams(groups, result)


@dataclass(frozen=True)
class LoadState(Request):
    """See ``Worker.load``."""

    states: Mapping[int, Mapping[str, Any]]
    cut: str | None
    trust: bool

    def part(self, groups: Sequence[int]) -> LoadState:
        return replace(
            self, states={number: self.states[number] for number in groups if number in self.states}
        )

    def run(self, worker: Worker) -> Any:
        return worker.load(self.states, self.cut, self.trust)

    def placed(self, place: WorkerPlace) -> WorkerPlace:
        return replace(place, columns=None)

    def through(self, actor: Actor, groups: Sequence[int]) -> Request:
        return replace(self, states=actor.load(self.states))

    def noted(self, notes: CrashNotes, groups: Sequence[int]) -> None:
        notes.forget(groups)


@dataclass(frozen=True)
class MarkResumed(Request):
    """Add the column of resumed episodes to all groups, because one of them has it after a load."""

    def run(self, worker: Worker) -> Any:
        for group in worker.groups:
            group.mark_resumed()

    def placed(self, place: WorkerPlace) -> WorkerPlace:
        return replace(place, columns=None, marks_resumed=True)
