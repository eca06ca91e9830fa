"""What a worker is asked for, and what it answers.

A request knows what it does in the worker (``run``, ``reach``), and in this process what it means for the worker's
successors (``placed``), for crash reports (``noted``) and for the inference server.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from muster.errors import BadOption
from muster.restore.pickling import dumps, loads
from muster.utils.attributes import resolve
from muster.workers.config import Columns, WorkerPlace
from muster.workers.messages import RolloutRequest, RolloutResult

if TYPE_CHECKING:
    from muster.memory.slots import Layout
    from muster.workers.actor import Actor
    from muster.workers.crash_notes import CrashNotes
    from muster.workers.failures import SentError
    from muster.workers.main import WorkerMain
    from muster.workers.worker import Worker


# --- to a worker -----------------------------------------------------------------------------------


class Message(Protocol):
    """Anything that is sent to a worker."""

    def reach(self, main: WorkerMain) -> None:
        """In the worker: do it."""


@dataclass(frozen=True)
class FillLane:
    """Follow a request.

    Attributes:
        offset, nbytes: where in the arena its slot is.
    """

    request: RolloutRequest
    offset: int
    nbytes: int

    def reach(self, main: WorkerMain) -> None:
        main.follow(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Without the names of fields, and with one class: this is half of what a rollout's messages cost."""
        return _fill_lane, (self.offset, self.nbytes, *vars(self.request).values())


def _fill_lane(offset: int, nbytes: int, *request: Any) -> FillLane:
    return FillLane(RolloutRequest(*request), offset, nbytes)


@dataclass(frozen=True)
class Ask:
    """Answer a request.

    Attributes:
        number: of the answer.
    """

    number: int
    request: Request

    def reach(self, main: WorkerMain) -> None:
        main.answer(self.number, lambda: self.request.run(main.worker))


@dataclass(frozen=True)
class Configure:
    """Take a place among all workers.

    Attributes:
        number: of the answer.
    """

    number: int
    place: WorkerPlace

    def reach(self, main: WorkerMain) -> None:
        main.answer(self.number, lambda: main.configure(self.place))


@dataclass(frozen=True)
class Close:
    """Close the environments, and end."""

    def reach(self, main: WorkerMain) -> None:
        main.ending = True


# --- to be answered --------------------------------------------------------------------------------


class Request(ABC):
    """What a worker is asked, besides rollouts.

    Attributes:
        waits: workers that are absent need not hear it, or hear it when they come.
    """

    waits: ClassVar[bool] = False

    @abstractmethod
    def run(self, worker: Worker) -> Any:
        """In the worker: the answer."""

    def part(self, groups: Sequence[int]) -> Request | None:
        """What there is to do for a worker with these groups; None: nothing."""
        return self

    def noted(self, notes: CrashNotes, groups: Sequence[int]) -> None:  # noqa: B027 (most change no episodes)
        """In the parent, when it was done: what it means for the episodes of the worker's groups."""

    def placed(self, place: WorkerPlace) -> WorkerPlace:
        """In the parent, when it was done: what a successor is told."""
        return place

    def through(self, actor: Actor, groups: Sequence[int]) -> Request:
        """In the process of an inference server, before it is sent: what is left for the worker."""
        return self

    def answered(self, actor: Actor, groups: Sequence[int], result: Any) -> None:  # noqa: B027 (most add nothing)
        """There: what the server adds to the answer."""


@dataclass(frozen=True)
class Call(Request):
    """What a method of ``Worker``, or a function of one, returns."""

    method: Callable[..., Any]
    args: Sequence[Any] = ()

    def run(self, worker: Worker) -> Any:
        return self.method(worker, *self.args)


@dataclass(frozen=True)
class LayOut(Request):
    """The layouts of the rollouts to come, by group."""

    columns: Columns

    def run(self, worker: Worker) -> dict[int, Layout]:
        layouts = worker.layouts(self.columns)
        return {group.number: layout for group, layout in zip(worker.groups, layouts, strict=True)}

    def placed(self, place: WorkerPlace) -> WorkerPlace:
        return replace(place, columns=self.columns)


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
    """Reset environments, by group, before the next step.

    Attributes:
        check: only raise ``UnsupportedEnv`` where some of a group's environments cannot be reset without the others.
    """

    waits = True
    which: Mapping[int, Sequence[int]]
    options: dict[str, Any] | None = None
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
class EnableGrad(Request):
    """See ``Worker.enable_grad``."""

    on: bool

    def run(self, worker: Worker) -> Any:
        worker.enable_grad(self.on)

    def placed(self, place: WorkerPlace) -> WorkerPlace:
        return replace(place, grad=self.on)


@dataclass(frozen=True)
class Profile(Request):
    """See ``Worker.profile``. Pickling raises BadOption where the user's function cannot be."""

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
        return replace(self, states={number: self.states[number] for number in groups if number in self.states})

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
    """All groups say which episodes are new after a load, since one of them has such."""

    def run(self, worker: Worker) -> Any:
        for group in worker.groups:
            group.resumed = group.resumed or []

    def placed(self, place: WorkerPlace) -> WorkerPlace:
        return replace(place, columns=None)


@dataclass(frozen=True)
class Execute(Request):
    """Call what a path such as "env.unwrapped.set_gravity" names."""

    path: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    def run(self, worker: Worker) -> Any:
        found = resolve(worker, self.path)
        if not callable(found):
            raise BadOption(f"cascade_execute({self.path!r}): that is {type(found).__name__}, which cannot be called")
        return found(*self.args, **self.kwargs)


# --- from a worker ---------------------------------------------------------------------------------

BIRTH = 0  # number of the answer without a request: the groups that a new worker has made


@dataclass(frozen=True)
class Answer:
    """What came of a request; a failure or a value."""

    number: int
    value: Any = None
    failure: SentError | None = None


@dataclass(frozen=True)
class Finished:
    """What came of a request.

    Attributes:
        unfinished: the worker was terminated from outside; the request is under way.
    """

    result: RolloutResult
    unfinished: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        """See ``FillLane``."""
        return _finished, (self.unfinished, *vars(self.result).values())


def _finished(unfinished: bool, *result: Any) -> Finished:
    return Finished(RolloutResult(*result), unfinished)


@dataclass(frozen=True)
class Closed:
    """The environments are closed, and the worker ends."""

    failure: SentError | None
