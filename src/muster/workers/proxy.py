"""The proxy of a worker that runs in a process or thread of its own."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from muster.memory.slots import Slot
from muster.restore.registered import with_later_ids
from muster.rollout.progress import STOP, Phase
from muster.rollout.request import RolloutRequest
from muster.utils.interrupts import allowed, postponed
from muster.workers.config import WorkerConfig, WorkerPlace
from muster.workers.effects import add_answer, log_request, sent_through
from muster.workers.failures import Where
from muster.workers.lives import Proxy, WorkerState
from muster.workers.main import WorkerMain
from muster.workers.messages import BIRTH, Answer, RolloutResult, Tell, WorkerStatus
from muster.workers.pool import stats_of
from muster.workers.requests import Call, LayOut, Request
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


@dataclass
class WorkerProcess:
    """The process or thread of a worker, the channel to it, and its status page."""

    child: Child | WorkerThread
    channel: Any
    status_page: Any

    def fds(self) -> list[int]:
        """Return the descriptors that become readable on a message or at the end of the process."""
        return [fd for fd in (self.channel.fileno(), self.child.fileno()) if fd >= 0]

    def send(self, message: Any, fds: Sequence[int] = (), timeout: float = SEND_S) -> None:
        """Send a message; if the process has ended, the next wait detects that.

        Raises:
            TimeoutError: it has not read the message within ``timeout`` seconds.
        """
        with suppress(EOFError):
            self.channel.send(message, fds, timeout)

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
    """Implements ``Proxy`` for a process or thread."""

    absent = False

    def __init__(self, config: WorkerConfig, supervisor: Supervisor) -> None:
        super().__init__(config.index, config.groups, supervisor)
        # config of a successor, except ``generation`` and ``place``
        self.config = config
        self._supervisor = supervisor
        self.process: WorkerProcess  # the most recent one
        # error before any request, while it made its environments or groups
        self.failure: SentError | None = None
        # why a rollout was not written to its destination, and no later one is
        self.unwritten: Exception | None = None

    @property
    def awaited(self) -> bool:
        """Whether the process has something to do: a rollout, an answer, or making its
        environments.
        """
        return self.alive and (
            bool(self.under_way) or self._awaited is not None or self.infos is None
        )

    @property
    def phase(self) -> Phase:
        return phase_of(self.process.status_page.cells)

    # --- its process ------------------------------------------------------------------------------

    def start(self) -> None:
        """Start a process.

        A successor gets the present config and all requests that have no result yet.
        """
        self._owner.check()
        self._check_next(WorkerState.RUNNING)
        is_successor = self._state is WorkerState.DEAD
        config = self.config
        if is_successor:
            registered = config.registered and with_later_ids(config.registered)
            config = replace(config, generation=config.generation + 1, registered=registered)
            self.process.close()  # it is closed, unless an exception has come in between
        process = WorkerProcess(
            *self._supervisor.launch(f"muster-worker-{self.index}", not config.generation)
        )
        try:
            self._send_config(process, config)
            if is_successor and self.place is not None:
                self._note_successor(config.generation, self.place)
                for request in self.under_way.requests():
                    process.send(request)
        except BaseException:
            process.close()
            raise
        self.config = config
        self.process = process
        self.infos = self.failure = self.unwritten = self._answer = self._awaited = None
        for requested in self.under_way.outstanding.values():
            requested.entered = False
        self.starts += 1
        self.state = WorkerState.RUNNING

    def where(self) -> Where:
        counters = self._supervisor.counters
        ids = [int(i) for group in self.groups for i in counters[group].env_ids] if counters else []
        return Where(self.index, env_ids=tuple(ids), node=self._supervisor.config.node)

    def assign(self, place: WorkerPlace) -> None:
        """Send the worker its place among all workers, and wait until it has made its groups."""
        self.place = place
        self._ask(WorkerMain.configure, place)

    def pump(self) -> bool:
        """Process all received messages. Return False if the channel is closed."""
        try:
            while self.process.channel.poll():
                self._note(self.process.channel.receive()[0])
        except EOFError:
            return False
        return True

    def kill(self) -> None:
        """Kill the process without waiting. Its status page and its requests are kept."""
        self.process.child.kill()

    def forget_answers(self) -> None:
        """Drop the answers of a process that has hung: it is lost, even if it has gone on before it
        was killed.
        """
        self._answer = self.infos = self.failure = None

    def end(self) -> None:
        """End the process if it runs, add its steps to the counters, and release its resources."""
        if not self.alive:
            return
        try:
            self._supervisor.ends(self)
        finally:  # also after Ctrl-C
            self.abandon()

    def abandon(self) -> None:
        """Kill the process if it runs, and release its resources; nothing more is added to the
        counters.
        """
        if not self.alive:
            return
        self.state = WorkerState.DEAD if self._state is WorkerState.RUNNING else WorkerState.CLOSED
        self.process.close()
        if self._supervisor.responder is not None:
            self._supervisor.responder.lost(self.index, self.groups)

    # --- methods of Proxy -------------------------------------------------------------------------

    def stats(self, counters: Sequence[FrameCounters]) -> list[WorkerStats]:
        return [
            stats_of(
                self.index, self.groups, counters, status_of(self), self._supervisor.config.node
            )
        ]

    def submit(self, request: RolloutRequest, slot: Slot) -> None:
        request.offset, request.nbytes = slot.offset, slot.layout.nbytes
        self.under_way.add(request, slot)
        if self.alive:
            if self._supervisor.responder is not None:
                self._supervisor.responder.mailbox.expect(self.index, request.number)
            self.send(request)
        elif not self.reviving:
            self._supervisor.begin(self)

    def stop(self, number: int) -> None:
        if self.alive:
            self.process.status_page.cells[STOP] = number

    @postponed()
    def call(self, request: Request) -> list[Any]:
        asked = request
        self._wait_until_there()
        server = self._supervisor.server
        if server is not None:
            request = self._with_columns(server, request)
            request = sent_through(request, server.actor, self.groups)
        self.remember(request)
        result = self._ask(WorkerMain.call, request)
        if server is not None:
            add_answer(request, server.actor, self.groups, result)
        if self._supervisor.counters:
            log_request(asked, self._supervisor.notes, self.groups)
        return [result]

    def _ask_to_close(self) -> None:
        with suppress(TimeoutError):
            self.process.send(Tell(WorkerMain.close), timeout=1.0)
        if self.under_way:
            self.process.child.send_signal(signal.SIGTERM)  # in the middle of a rollout

    def _wait_for_close(self) -> None:
        close_s = self._supervisor.config.timeout("close")
        deadline = None if close_s is None else self._closing_since + close_s
        try:
            while self._answer is None:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                self._note(self.process.channel.receive(left)[0])
            self.process.child.join(1.0)
        except (EOFError, TimeoutError):
            pass
        finally:
            self.end()

    def send(self, message: Any) -> None:
        """Send a message; if the process has ended, the next wait detects that.

        One that does not read is lost here.
        """
        try:
            self.process.channel.send(message, (), SEND_S)
        except EOFError:
            pass
        except TimeoutError:
            self._supervisor.hangs(self, SEND_S)

    # --- parts ------------------------------------------------------------------------------------

    def _send_config(self, process: WorkerProcess, config: WorkerConfig) -> None:
        responder = self._supervisor.responder
        subscribe = self._supervisor.subscribe
        ticket = (
            None if subscribe is None or config.served_by is not None else subscribe(self.index)
        )
        fds = [*([] if config.in_thread else [process.status_page.fd]), self._supervisor.arena.fd]
        fds += (
            responder.mailbox.fds_for(self.index)
            if responder is not None
            else []
            if ticket is None
            else ticket.fds
        )
        try:
            with allowed():  # a process that does not read delays Ctrl-C otherwise
                process.send(replace(config, place=self.place, ticket=ticket), fds)
        finally:
            if ticket is not None:
                ticket.close()

    def _note_successor(self, generation: int, place: WorkerPlace) -> None:
        """Prepare the inference server and the crash notes for a successor, before it gets its
        first request.
        """
        if self._supervisor.server is not None:
            self._supervisor.server.actor.reseed(self.groups, place.seed, generation)
        self._supervisor.notes.forget(self.groups)
        self._supervisor.notes.seeded(
            self.groups, place.seed, static=place.static, generation=generation
        )

    def answered(self, answer: Answer) -> None:
        if answer.number == BIRTH:
            self.infos = answer.value
            self.failure = answer.failure
        super().answered(answer)

    def _note(self, message: RolloutResult | Answer) -> None:
        if isinstance(message, Answer):
            self.answered(message)
        else:
            self.under_way.finished(message)

    def _with_columns(self, server: InferenceServer, request: Request) -> Request:
        """Add the columns that the server's policy writes to a ``LayOut`` request; return other
        requests unchanged.
        """
        if not isinstance(request, LayOut):
            return request
        served = server.ask(
            "adopt", self._ask(WorkerMain.call, Call(Worker.observe)), request.policy == "policy"
        )
        return replace(request, served=served)


def status_of(handle: WorkerProxy) -> WorkerStatus:
    """Return the state of a worker for ``WorkerStats``."""
    if handle.state is WorkerState.NEW:
        return WorkerStatus(0, "working", "construct", handle.config.generation)
    state = (
        "dropped" if handle.state is WorkerState.DROPPED else "working" if handle.alive else "dead"
    )
    phase = handle.phase.name.lower() if handle.alive else state
    return WorkerStatus(handle.process.child.pid, state, phase, handle.config.generation)
