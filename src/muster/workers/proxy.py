"""A worker in a process or thread of its own, as its worker pool sees it."""

from __future__ import annotations

import enum
import itertools
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from muster.memory.shared import Arena
from muster.memory.slots import Slot
from muster.rollout.progress import Phase
from muster.utils.forks import Owner
from muster.utils.interrupts import postponed
from muster.weights.transport import Ticket
from muster.workers.config import WorkerConfig, WorkerPlace
from muster.workers.launch import Child
from muster.workers.messages import GroupInfo, Order, Report
from muster.workers.requests import (
    BIRTH,
    Answer,
    Ask,
    Close,
    Closed,
    Configure,
    Finished,
    LayOut,
    Message,
    Observe,
    Request,
    RolloutRequest,
)
from muster.workers.under_way import UnderWay, phase_of

if TYPE_CHECKING:
    from muster.workers.failures import Failure
    from muster.workers.inference import InferenceServer

SEND_S = 60.0  # for a message to a worker that does not read
STACK_S = 0.5  # for the stack of one that hangs
_DEAF = -1  # instead of the number of an answer: none counts any more


class WorkerState(enum.Enum):
    """The life of a worker; see the diagram in ARCHITECTURE.md."""

    NEW = "was never started"
    JOINING = "was started on a node that may never come: nobody waits for its environments, nothing is ordered"
    RUNNING = "has a process or thread"
    CLOSING = "the same, and was told to end"
    DEAD = "has none; the next batch starts it again"
    RESTARTING = "has none; the supervisor starts it again"
    AWAY = "is lost with its node; the next batch calls it again"
    REJOINING = "is lost with its node; the supervisor calls it again"
    DROPPED = "has none, and the others go on without it"
    CLOSED = "has none, for good"


_STATES = WorkerState
_NEXT: dict[WorkerState, tuple[WorkerState, ...]] = {
    _STATES.NEW: (_STATES.JOINING, _STATES.RUNNING),
    _STATES.JOINING: (_STATES.RUNNING, _STATES.AWAY),
    _STATES.RUNNING: (_STATES.DEAD, _STATES.CLOSING),
    _STATES.CLOSING: (_STATES.CLOSED,),
    _STATES.DEAD: (_STATES.RUNNING, _STATES.RESTARTING, _STATES.AWAY, _STATES.DROPPED),
    _STATES.RESTARTING: (_STATES.DEAD,),
    _STATES.AWAY: (_STATES.JOINING, _STATES.REJOINING, _STATES.DROPPED),
    _STATES.REJOINING: (_STATES.AWAY,),
    _STATES.DROPPED: (),
    _STATES.CLOSED: (),
}
_HAS_PROCESS = (_STATES.JOINING, _STATES.RUNNING, _STATES.CLOSING)
_AFTER_END = {
    _STATES.JOINING: _STATES.AWAY,
    _STATES.RUNNING: _STATES.DEAD,
    _STATES.CLOSING: _STATES.CLOSED,
}


class Restarted(Exception):
    """The worker that was asked has a successor, who has to be asked again."""


class Patience(Protocol):
    """Waits for workers in a worker pool's name; see ``supervision``."""

    def wait_for(self, handle: WorkerProxy, ready: Callable[[], bool]) -> None:
        """Until something is so.

        Raises:
            Restarted: see there.
            Exception: what became of the worker instead.
        """

    def told(self, handle: WorkerProxy, request: Request) -> None:
        """A worker has done what was asked of it."""

    def restarted(self, handle: WorkerProxy) -> None:
        """A worker has a successor."""

    def ends(self, handle: WorkerProxy) -> None:
        """A worker is to do nothing more: halt it, and enter its steps."""


@dataclass
class WorkerHost:
    """How a worker is started, and started again.

    Attributes:
        start: starts a process or thread called so; gives it, the parent's end of a channel to it, and its ledger.
            Told whether it may take time to make later starts quicker.
        ticket: makes a subscription to the weights; None: the worker does not take any, or gets them elsewhere.
        close_s: seconds for closing; None is for ever.
        server: acts for it; None: it acts by itself, or a server elsewhere does.
        remote: it is on a node, with memory of its own.
        elastic: that node may come later, or never.
        where: that node, for people.
    """

    start: Callable[[str, bool], tuple[Child, Any, Any]]
    arena: Arena
    ticket: Callable[[], Ticket] | None
    close_s: float | None
    server: InferenceServer | None = None
    remote: bool = False
    elastic: bool = False
    where: Callable[[], str] = str


@dataclass
class WorkerProcess:
    """A process or thread of a worker, with the channel to it and what it shows of itself."""

    child: Child
    channel: Any
    ledger: Any

    def fds(self) -> list[int]:
        """What becomes readable when there is something to do."""
        return [fd for fd in (self.channel.fileno(), self.child.fileno()) if fd >= 0]

    def stack(self) -> str:
        """Of a process that hangs."""
        self.ledger.stack()
        self.child.send_signal(signal.SIGUSR1)
        return str(self.ledger.stack(STACK_S))

    def close(self) -> None:
        """Kill it, and release descriptors."""
        self.child.kill()
        self.child.close()
        self.channel.close()
        self.ledger.close()


class WorkerProxy:
    """Implements ``Handle``.

    Attributes:
        config: that a successor will get, but for its ``generation``.
        process: the last one.
        under_way: what was ordered from it.
        infos: of the groups that the process has made; None: it has made none yet.
        failure: of something that the process did unasked: of making them, above all.
        cause: why it has no process.
    """

    def __init__(self, config: WorkerConfig, host: WorkerHost, patience: Patience) -> None:
        self.config, self.host, self._patience = config, host, patience
        self.index, self.groups = config.index, list(config.groups)
        self.under_way = UnderWay()
        self.process: WorkerProcess
        self.infos: list[GroupInfo] | None = None
        self.failure: Failure | None = None
        self.cause: Exception | None = None
        self._state = WorkerState.NEW
        self._owner = Owner("collector", "workers")
        self._numbers: Iterator[int] = itertools.count(BIRTH + 1)  # of requests
        self._awaited: int | None = None  # number of the answer that somebody waits for
        self._answer: Answer | None = None  # that one

    # --- its state --------------------------------------------------------------------------------

    @property
    def state(self) -> WorkerState:
        return self._state

    @state.setter
    def state(self, state: WorkerState) -> None:
        self._check_next(state)
        self._state = state

    def _check_next(self, state: WorkerState) -> None:
        assert state in _NEXT[self._state], f"worker {self.index}: {self._state.name} -> {state.name}"

    @property
    def alive(self) -> bool:
        """It has a process or thread, as far as is known; in a fork of this process nobody has."""
        return self._state in _HAS_PROCESS and self._owner.is_here()

    @property
    def reviving(self) -> bool:
        """It will be started again by whoever watches over it."""
        return self._state in (WorkerState.RESTARTING, WorkerState.REJOINING)

    @property
    def absent(self) -> bool:
        """Its node is not there, so that nothing is ordered from it."""
        if self._state is WorkerState.JOINING:
            return self.infos is None
        return self._state in (WorkerState.AWAY, WorkerState.REJOINING)

    @property
    def awaited(self) -> bool:
        """There is something that it should be doing."""
        return self.alive and (bool(self.under_way) or self._awaited is not None or self.infos is None)

    @property
    def phase(self) -> Phase:
        return phase_of(self.process.ledger.cells)

    # --- its process ------------------------------------------------------------------------------

    def start(self) -> None:
        """Start a process, which makes its environments. A successor's is told all that its predecessor was, and what
        that had not done; one that is absent, when it is there.
        """
        self._owner.check()
        is_successor = self._state is WorkerState.DEAD
        joins = self.host.elastic and not is_successor
        started = WorkerState.JOINING if joins else WorkerState.RUNNING
        self._check_next(started)
        if is_successor:
            self.config = replace(self.config, generation=self.config.generation + 1)
        self.infos = self.failure = self._answer = self._awaited = None
        self.under_way.entered.clear()
        name = f"muster-worker-{self.index}"
        self.process = WorkerProcess(*self.host.start(name, not self.config.generation))
        self.state = started
        if joins:
            self._send_config(replace(self.config, place=None))
            return
        self._send_config(self.config)
        if self.config.place is not None:
            if self.host.server is not None:
                self.host.server.actor.reseed(self.groups, self.config.place.seed, self.config.generation)
            self._begin()

    def assign(self, place: WorkerPlace) -> None:
        """Tell it its place among all workers. One that has just joined does not have to answer."""
        self.config = replace(self.config, place=place)
        if self._state is WorkerState.JOINING and not self.absent:
            self.state = WorkerState.RUNNING
            self._send(Ask(BIRTH, Configure(place)))
            self._begin()
        elif not self.absent:
            self._ask(Configure(place))

    def pump(self) -> bool:
        """Take in what has come; False if nothing more can come."""
        try:
            while self.process.channel.poll():
                self._note(self.process.channel.receive()[0])
        except EOFError:
            return False
        return True

    def kill(self, *, deaf: bool = False) -> None:
        """End its process by force; does not wait. What is known of it, and what it was at, stays.

        Args:
            deaf: its answers do not count any more.
        """
        if deaf:
            self._awaited, self._answer, self.infos, self.failure = _DEAF, None, None, None
        self.process.child.kill()

    def end(self) -> None:
        """Forget a process that has ended, or end it; its steps are entered."""
        if not self.alive:
            return
        try:
            self._patience.ends(self)
        finally:  # also after Ctrl-C
            self.state = _AFTER_END[self._state]
            self.process.close()
            if self.host.server is not None:
                self.host.server.lost(self.index)

    # --- Handle -----------------------------------------------------------------------------------

    @property
    def outstanding(self) -> dict[int, Order]:
        return self.under_way.outstanding

    @property
    def untaken(self) -> Sequence[Report]:
        return self.under_way.reports

    def prepared(self, policy: str) -> bool:
        columns = None if self.config.place is None else self.config.place.columns
        return columns is not None and columns.policy == policy

    def submit(self, order: Order, slot: Slot) -> None:
        self.under_way.add(order, slot)
        if self.alive:
            if self.host.server is not None:
                self.host.server.lines.expect(self.index, order.number)
            self._send(self._request(order))
        elif not self.reviving:
            self.start()

    def take(self) -> Report | None:
        return self.under_way.take() if self.under_way.reports else None

    def stop(self, number: int) -> None:
        if self.alive:
            self.process.ledger.stop(number)

    def withdraw(self) -> list[Order]:
        return []  # it has seen all of them

    @postponed()
    def call(self, request: Request) -> Any:
        asked = request
        if self.absent and request.waits:
            if self._remember(request):
                self._patience.told(self, request)
            return None
        if not self.alive and not self.reviving:
            self.start()
        while self.reviving or self.absent:
            with suppress(Restarted):
                self._patience.wait_for(self, lambda: self.alive and not self.absent)
        server = self.host.server
        if server is not None:
            request = self._with_columns(server, request).through(server.actor, self.groups)
        self._remember(request)
        result = self._ask(request)
        if server is not None:
            request.answered(server.actor, self.groups, result)
        self._patience.told(self, asked)
        return result

    def close(self, *, wait: bool = True) -> None:
        if self._state is WorkerState.RUNNING and self.alive:
            self.state = WorkerState.CLOSING
            with suppress(TimeoutError):
                self._send(Close(), timeout=1.0)
            if self.under_way:
                self.process.child.send_signal(signal.SIGTERM)  # in the middle of a rollout
        if wait:
            self._close()

    # --- parts ------------------------------------------------------------------------------------

    def _send_config(self, config: WorkerConfig) -> None:
        if self.host.remote:
            self._send(config)
            return
        server, ticket = self.host.server, None if self.host.ticket is None else self.host.ticket()
        fds = [*([] if config.in_thread else [self.process.ledger.fd]), self.host.arena.fd]
        fds += server.lines.fds_for(self.index) if server is not None else [] if ticket is None else ticket.fds
        try:
            self._send(replace(config, ticket=ticket), fds)
        finally:
            if ticket is not None:
                ticket.close()

    def _begin(self) -> None:
        """It has its place: what is left to do comes next."""
        if self.config.generation:
            self._patience.restarted(self)
        for order in self.under_way.orders():
            self._send(self._request(order))

    def _note(self, message: Finished | Answer | Closed) -> None:
        """Take in a message of the process."""
        match message:
            case Finished(report, unfinished=True):
                self.under_way.unfinished.append(report)
            case Finished(report):
                self.under_way.finished(report)
            case Answer() if self._awaited == _DEAF:
                pass
            case Answer(number) if number == self._awaited:
                self._answer = message
            case Answer(number, infos, failure) if number == BIRTH:
                self.failure = self.failure or failure
                self._is_born(infos)

    def _is_born(self, infos: list[GroupInfo] | None) -> None:
        self.infos = self.infos or infos
        if self._state is WorkerState.JOINING and self.config.place is None and infos is not None:
            self.state = WorkerState.RUNNING  # the worker pool is not complete, and it is one of the first

    def _remember(self, request: Request) -> bool:
        """For a successor; whether it is told anything else than before."""
        before = self.config.place
        if before is not None:
            self.config = replace(self.config, place=request.placed(before))
        return self.config.place is not before

    def _with_columns(self, server: InferenceServer, request: Request) -> Request:
        """A request for layouts with what the server writes, or would write."""
        if not isinstance(request, LayOut):
            return request
        columns = request.columns
        served = server.ask("adopt", self._ask(Observe()), columns.policy == "policy")
        return LayOut(replace(columns, served=served))

    def _ask(self, request: Request) -> Any:
        """The answer to a request, of the process or a successor."""
        while True:
            self._awaited, self._answer = next(self._numbers), None
            try:
                self._send(Ask(self._awaited, request))
                self._patience.wait_for(self, lambda: self._answer is not None)
            except Restarted:
                continue
            finally:
                answer, self._answer, self._awaited = self._answer, None, None
            assert answer is not None
            if answer.failure is not None:
                raise answer.failure.error()
            return answer.value

    def _request(self, order: Order) -> RolloutRequest:
        slot = self.under_way.slot_of(order.number)
        if self.host.remote:
            begin = order.lane * slot.layout.lane_bytes
            self.process.channel.expect(slot.block[begin : begin + slot.layout.lane_bytes])
        return RolloutRequest(order, slot.offset, slot.layout.nbytes)

    def _send(self, message: WorkerConfig | Message, fds: Sequence[int] = (), timeout: float | None = SEND_S) -> None:
        try:
            self.process.channel.send(message, fds, timeout)
        except EOFError:
            pass  # whoever waits for it will find it dead

    def _close(self) -> None:
        close_s = self.host.close_s if self._state is WorkerState.CLOSING else 0.0  # else nobody may ever answer
        deadline = None if close_s is None else time.monotonic() + close_s
        failure: Failure | None = None
        try:
            while self.alive:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                message, _ = self.process.channel.receive(left)
                if isinstance(message, Closed):
                    failure = message.failure
                    self.process.child.join(1.0)
                    break
                if isinstance(message, Finished):
                    self.under_way.finished(message.report)
        except (EOFError, TimeoutError):
            pass
        finally:
            self.end()
        if failure is not None:
            raise failure.error()
