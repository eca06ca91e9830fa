"""What a worker is asked for, and what it answers.

A request knows what it does in the worker (``run``, ``reach``), and in this process what it means for the worker's
successors (``placed``) and for the inference server.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from muster.sources.config import Columns, WorkerPlace
from muster.sources.messages import Order, Report
from muster.sources.pickling import dumps, loads

if TYPE_CHECKING:
    from muster.sources.actor import Actor
    from muster.sources.failures import Failure
    from muster.sources.main import WorkerMain


# --- to a worker -----------------------------------------------------------------------------------


class Message(Protocol):
    """Anything that is sent to a worker."""

    def reach(self, main: WorkerMain) -> None:
        """In the worker: do it."""


@dataclass(frozen=True)
class RolloutRequest:
    """Follow an order.

    Attributes:
        offset, nbytes: where in the arena its slot is.
    """

    order: Order
    offset: int
    nbytes: int

    def reach(self, main: WorkerMain) -> None:
        main.follow(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Without the names of fields, and with one class: this is half of what a rollout's messages cost."""
        return _rollout_request, (self.offset, self.nbytes, *vars(self.order).values())


def _rollout_request(offset: int, nbytes: int, *order: Any) -> RolloutRequest:
    return RolloutRequest(Order(*order), offset, nbytes)


@dataclass(frozen=True)
class Ask:
    """Answer a request.

    Attributes:
        number: of the answer.
    """

    number: int
    request: Request

    def reach(self, main: WorkerMain) -> None:
        main.answer(self.number, self.request)


@dataclass(frozen=True)
class Close:
    """Close the environments, and end."""

    def reach(self, main: WorkerMain) -> None:
        main.ending = True


# --- to be answered --------------------------------------------------------------------------------


class Request(ABC):
    """What a worker is asked, besides rollouts."""

    @abstractmethod
    def run(self, main: WorkerMain) -> Any:
        """In the worker: the answer."""

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
    """What a method of ``Worker`` returns."""

    method: str
    args: tuple[Any, ...]

    def run(self, main: WorkerMain) -> Any:
        return getattr(main.worker, self.method)(*self.args)


@dataclass(frozen=True)
class Configure(Request):
    """Take a place among all workers."""

    place: WorkerPlace

    def run(self, main: WorkerMain) -> Any:
        main.configure(self.place)


@dataclass(frozen=True)
class Observe(Request):
    """What a server needs to act for the first time: by group, observations and the state of random streams."""

    def run(self, main: WorkerMain) -> Any:
        return main.observe()


@dataclass(frozen=True)
class Weights(Request):
    """Of the policy, as it is."""

    def run(self, main: WorkerMain) -> Any:
        return main.weights()


@dataclass(frozen=True)
class LayOut(Request):
    """The layouts of the rollouts to come, by group of the worker."""

    columns: Columns

    def run(self, main: WorkerMain) -> Any:
        return main.lay_out(self.columns)

    def placed(self, place: WorkerPlace) -> WorkerPlace:
        return replace(place, columns=self.columns)


@dataclass(frozen=True)
class Seed(Request):
    """See ``Worker.seed``."""

    seed: int | None
    static: bool

    def run(self, main: WorkerMain) -> Any:
        main.seed(self.seed, self.static)

    def placed(self, place: WorkerPlace) -> WorkerPlace:
        return replace(place, seed=self.seed, static=self.static)

    def through(self, actor: Actor, groups: Sequence[int]) -> Request:
        actor.reseed(groups, self.seed)
        return self


@dataclass(frozen=True)
class EnableGrad(Request):
    """See ``Worker.enable_grad``."""

    on: bool

    def run(self, main: WorkerMain) -> Any:
        main.worker.enable_grad(self.on)

    def placed(self, place: WorkerPlace) -> WorkerPlace:
        return replace(place, grad=self.on)


@dataclass(frozen=True)
class Profile(Request):
    """See ``Worker.profile``. The number is the worker's own."""

    config: Any

    def run(self, main: WorkerMain) -> Any:
        config = loads(self.config, "on_trace_ready") if isinstance(self.config, bytes) else self.config
        main.worker.profile(config, main.config.index)


@dataclass(frozen=True)
class TakeState(Request):
    """See ``Worker.state``."""

    def run(self, main: WorkerMain) -> Any:
        return main.worker.state()

    def answered(self, actor: Actor, groups: Sequence[int], result: Any) -> None:
        actor.add_streams(groups, result)


@dataclass(frozen=True)
class LoadState(Request):
    """See ``Worker.load``."""

    states: Mapping[int, Mapping[str, Any]]
    cut: str | None
    trust: bool

    def run(self, main: WorkerMain) -> Any:
        failed = main.worker.load(self.states, self.cut, self.trust)
        main.forget_lanes()
        return failed

    def placed(self, place: WorkerPlace) -> WorkerPlace:
        return replace(place, columns=None)

    def through(self, actor: Actor, groups: Sequence[int]) -> Request:
        return replace(self, states=actor.load(self.states))


@dataclass(frozen=True)
class MarkResumed(Request):
    """See ``Worker.mark_resumed``."""

    def run(self, main: WorkerMain) -> Any:
        main.worker.mark_resumed()
        main.forget_lanes()

    def placed(self, place: WorkerPlace) -> WorkerPlace:
        return replace(place, columns=None)


def request_for(method: str, args: Sequence[Any], *, in_thread: bool) -> Request:
    """The request that a call of a ``Worker``'s method is for a worker elsewhere.

    Raises:
        BadOption: something in it cannot be pickled.
    """
    match method, args:
        case "layouts", (policy, T, version):
            return LayOut(Columns(policy, T, version))
        case "seed", (seed, static):
            return Seed(seed, static)
        case "enable_grad", (on,):
            return EnableGrad(bool(on))
        case "profile", (config, _):
            return Profile(config if in_thread or config is None else dumps(config, "on_trace_ready"))
        case "weights", ():
            return Weights()
        case "state", ():
            return TakeState()
        case "load", (states, cut, trust):
            return LoadState(states, cut, trust)
        case "mark_resumed", ():
            return MarkResumed()
    return Call(method, tuple(args))


# --- from a worker ---------------------------------------------------------------------------------

BIRTH = 0  # number of the answer that nobody asks for: the groups that a new worker has made


@dataclass(frozen=True)
class Answer:
    """What came of a request; a failure or a value."""

    number: int
    value: Any = None
    failure: Failure | None = None


@dataclass(frozen=True)
class Finished:
    """What came of an order.

    Attributes:
        unfinished: the worker was terminated from outside; the order is under way.
    """

    report: Report
    unfinished: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        """See ``RolloutRequest``."""
        return _finished, (self.unfinished, *vars(self.report).values())


def _finished(unfinished: bool, *report: Any) -> Finished:
    return Finished(Report(*report), unfinished)


@dataclass(frozen=True)
class Closed:
    """The environments are closed, and the worker ends."""

    failure: Failure | None
