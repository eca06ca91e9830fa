"""The proxy of a worker that runs in a process or thread of its own."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from muster.memory.slots import Slot
from muster.rollout.progress import Phase
from muster.utils.interrupts import postponed
from muster.workers.config import WorkerConfig, WorkerPlace
from muster.workers.lives import Proxy, WorkerState
from muster.workers.messages import RolloutRequest
from muster.workers.pool import stats_of
from muster.workers.requests import (
    BIRTH,
    Answer,
    Ask,
    Call,
    Close,
    Closed,
    Configure,
    FillLane,
    Finished,
    LayOut,
    Message,
    Request,
)
from muster.workers.under_way import phase_of
from muster.workers.worker import Worker

if TYPE_CHECKING:
    from muster.observing.stats import WorkerStats
    from muster.workers.counters import FrameCounters
    from muster.workers.failures import SentError
    from muster.workers.inference import InferenceServer
    from muster.workers.launch import Child
    from muster.workers.supervision import Supervisor
    from muster.workers.threads import WorkerThread

SEND_S = 60.0  # timeout of a message to a worker that does not read
STACK_S = 0.5  # timeout of the stack dump of a hanging worker
_DEAF = -1  # instead of the number of an answer: all answers are ignored


@dataclass
class WorkerProcess:
    """The process or thread of a worker, the channel to it, and its status page."""

    child: Child | WorkerThread
    channel: Any
    status_page: Any

    def fds(self) -> list[int]:
        """Return the descriptors that become readable on a message or at the end of the process."""
        return [fd for fd in (self.channel.fileno(), self.child.fileno()) if fd >= 0]

    def stack(self) -> str:
        """Return the stacks of a hanging process."""
        self.status_page.stack()
        self.child.send_signal(signal.SIGUSR1)
        return str(self.status_page.stack(STACK_S))

    def close(self) -> None:
        """Kill the process, and close its descriptors."""
        self.child.kill()
        self.child.close()
        self.channel.close()
        self.status_page.close()


class WorkerProxy(Proxy):
    """Implements ``Proxy`` for a process or thread.

    Attributes:
        config: config of a successor, except its ``generation``.
        process: the most recent process or thread.
        failure: error of the process before any request, while it made its environments or groups.
        unwritten: error that kept a rollout from being written to its destination. No later rollout is written either.
    """

    absent = False

    def __init__(self, config: WorkerConfig, supervisor: Supervisor) -> None:
        super().__init__(config.index, config.groups, supervisor)
        self.config, self._supervisor = config, supervisor
        self.process: WorkerProcess
        self.failure: SentError | None = None
        self.unwritten: Exception | None = None

    @property
    def awaited(self) -> bool:
        """Whether the process has something to do: a rollout, an answer, or making its environments."""
        return self.alive and (bool(self.under_way) or self._awaited is not None or self.infos is None)

    @property
    def phase(self) -> Phase:
        return phase_of(self.process.status_page.cells)

    # --- its process ------------------------------------------------------------------------------

    def start(self) -> None:
        """Start a process. A successor gets the present config and all requests that have no result yet."""
        self._owner.check()
        self._check_next(WorkerState.RUNNING)
        is_successor = self._state is WorkerState.DEAD
        if is_successor:
            self.config = replace(self.config, generation=self.config.generation + 1)
        self.infos = self.failure = self.unwritten = self._answer = self._awaited = None
        for requested in self.under_way.outstanding.values():
            requested.entered = False
        self.starts += 1
        name = f"muster-worker-{self.index}"
        self.process = WorkerProcess(*self._supervisor.launch(name, not self.config.generation))
        self.state = WorkerState.RUNNING
        self._send_config(self.config)
        if is_successor and self.config.place is not None:
            if self._supervisor.server is not None:
                self._supervisor.server.actor.reseed(self.groups, self.config.place.seed, self.config.generation)
            self._supervisor.restarted(self)
            for request in self.under_way.requests():
                self._send(self._request(request))

    def assign(self, place: WorkerPlace) -> None:
        """Send the worker its place among all workers, and wait until it has made its groups."""
        self.config = replace(self.config, place=place)
        self._ask(lambda number: self._send(Configure(number, place)))

    def pump(self) -> bool:
        """Process all received messages. Return False if the channel is closed."""
        try:
            while self.process.channel.poll():
                self._note(self.process.channel.receive()[0])
        except EOFError:
            return False
        return True

    def kill(self, *, deaf: bool = False) -> None:
        """Kill the process without waiting. Its status page and its requests are kept.

        Args:
            deaf: ignore its answers from now on.
        """
        if deaf:
            self._awaited, self._answer, self.infos, self.failure = _DEAF, None, None, None
        self.process.child.kill()

    def end(self) -> None:
        """End the process if it runs, add its steps to the counters, and release its resources."""
        if not self.alive:
            return
        try:
            self._supervisor.ends(self)
        finally:  # also after Ctrl-C
            self.state = WorkerState.DEAD if self._state is WorkerState.RUNNING else WorkerState.CLOSED
            self.process.close()
            if self._supervisor.server is not None:
                self._supervisor.server.lost(self.index, self.groups)

    # --- methods of Proxy -------------------------------------------------------------------------

    def prepared(self, policy: str) -> bool:
        return self.config.place is not None and self.config.place.prepared(policy)

    def stats(self, counters: Sequence[FrameCounters]) -> list[WorkerStats]:
        dropped = counters[self.groups[0]].dropped
        state = "dropped" if dropped else "working" if self.alive else "dead"
        phase = self.phase.name.lower() if self.alive else state
        return [
            stats_of(
                self.groups,
                counters,
                index=self.index,
                pid=self.process.child.pid,
                state=state,
                phase=phase,
                restarts=self.config.generation,
                node=self._supervisor.config.node,
            )
        ]

    def submit(self, request: RolloutRequest, slot: Slot) -> None:
        self.under_way.add(request, slot)
        if self.alive:
            if self._supervisor.server is not None:
                self._supervisor.server.mailbox.expect(self.index, request.number)
            self._send(self._request(request))
        elif not self.reviving:
            self.start()

    def stop(self, number: int) -> None:
        if self.alive:
            self.process.status_page.stop(number)

    @postponed()
    def call(self, request: Request) -> list[Any]:
        asked = request
        self._wait_until_there()
        server = self._supervisor.server
        if server is not None:
            request = self._with_columns(server, request).through(server.actor, self.groups)
        if self.config.place is not None:
            self.config = replace(self.config, place=request.placed(self.config.place))
        result = self._answer_to(request)
        if server is not None:
            request.answered(server.actor, self.groups, result)
        self._supervisor.told(self, asked)
        return [result]

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
        server, subscribe = self._supervisor.server, self._supervisor.subscribe
        ticket = None if subscribe is None or config.served_by is not None else subscribe(self.index)
        fds = [*([] if config.in_thread else [self.process.status_page.fd]), self._supervisor.arena.fd]
        fds += server.mailbox.fds_for(self.index) if server is not None else [] if ticket is None else ticket.fds
        try:
            self._send(replace(config, ticket=ticket), fds)
        finally:
            if ticket is not None:
                ticket.close()

    def _note(self, message: Finished | Answer | Closed) -> None:
        """Store a message of the process."""
        match message:
            case Finished(result, unfinished=True):
                self.under_way.unfinished.append(result)
            case Finished(result):
                self.under_way.finished(result)
            case Answer() if self._awaited == _DEAF:
                pass
            case Answer(number) if number == self._awaited:
                self._answer = message
            case Answer(number, infos, failure) if number == BIRTH:
                self.failure = self.failure or failure
                self.infos = self.infos or infos

    def _with_columns(self, server: InferenceServer, request: Request) -> Request:
        """Add the columns that the server's policy writes to a ``LayOut`` request; return other requests unchanged."""
        if not isinstance(request, LayOut):
            return request
        columns = request.columns
        served = server.ask("adopt", self._answer_to(Call(Worker.observe)), columns.policy == "policy")
        return LayOut(replace(columns, served=served))

    def _answer_to(self, request: Request) -> Any:
        return self._ask(lambda number: self._send(Ask(number, request)))

    def _request(self, request: RolloutRequest) -> FillLane:
        slot = self.under_way.outstanding[request.number].slot
        return FillLane(request, slot.offset, slot.layout.nbytes)

    def _send(self, message: WorkerConfig | Message, fds: Sequence[int] = (), timeout: float | None = SEND_S) -> None:
        try:
            self.process.channel.send(message, fds, timeout)
        except EOFError:
            pass  # the next wait detects the death

    def _close(self) -> None:
        closing = self._state is WorkerState.CLOSING  # in another state the process may never answer
        close_s = self._supervisor.config.timeout("close") if closing else 0.0
        deadline = None if close_s is None else time.monotonic() + close_s
        failure: SentError | None = None
        try:
            while self.alive:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                message, _ = self.process.channel.receive(left)
                if isinstance(message, Closed):
                    failure = message.failure
                    self.process.child.join(1.0)
                    break
                if isinstance(message, Finished):
                    self.under_way.finished(message.result)
        except (EOFError, TimeoutError):
            pass
        finally:
            self.end()
        if failure is not None:
            raise failure.error()
