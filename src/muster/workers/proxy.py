"""The proxy of a worker that runs in a process or thread of its own."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from muster.memory.shared import Arena
from muster.memory.slots import Slot
from muster.observing.stats import WorkerStats
from muster.restore.pickling import opened
from muster.restore.registered import with_later_ids
from muster.rollout.progress import STOP, Phase
from muster.rollout.request import RolloutRequest
from muster.utils.interrupts import allowed, postponed
from muster.weights.transport import Ticket
from muster.workers.config import PoolConfig, WorkerConfig, WorkerPlace
from muster.workers.counters import FrameCounters
from muster.workers.effects import add_answer, log_request, sent_through
from muster.workers.failures import SentError, Where
from muster.workers.life import WorkerState
from muster.workers.main import WorkerMain
from muster.workers.messages import BIRTH, Answer, RolloutResult, Tell, WorkerStatus
from muster.workers.pool import stats_of
from muster.workers.requests import Call, LayOut, Request
from muster.workers.responder import Responder
from muster.workers.supervision import Proxy, SupervisedPool
from muster.workers.under_way import phase_of
from muster.workers.worker import Worker

if TYPE_CHECKING:
    from muster.workers.inference import InferenceServer
    from muster.workers.launch import Child
    from muster.workers.threads import WorkerThread

SEND_S = 60.0  # timeout of a message to a worker that does not read
STACK_S = 0.5  # timeout of the stack dump of a hanging worker
END_S = 5.0  # timeout for a killed process to exit


@dataclass
class WorkerProcess:
    """The process or thread of a worker, the channel to it, and its status page."""

    child: Child | WorkerThread
    channel: Any
    status_page: Any

    def fds(self) -> list[int]:
        """Return the descriptors that become readable on a message or at the end of the process."""
        return [fd for fd in (self.channel.fileno(), self.child.fileno()) if fd >= 0]

    def send(
        self, message: Any, fds: Sequence[int] = (), timeout: float = SEND_S
    ) -> None:
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


@dataclass(frozen=True)
class Shared:
    """What the workers of a pool share.

    Attributes:
        config: config of the pool.
        arena: memory of all lanes.
        launch: starts a process or thread with a name; returns it, the parent's end of its channel,
            and its status page. The second argument: whether to spend time on preloading modules
            for later starts.
        subscribe: returns a ticket for the weights, by number of the worker; None: no weights yet.
        server: inference server; None: the workers run the policy.
        responder: answers workers that wait, the server if there is one; None: they ask nothing.
    """

    config: PoolConfig
    arena: Arena
    launch: Callable[[str, bool], tuple[Any, ...]]
    subscribe: Callable[[int], Ticket] | None
    server: InferenceServer | None
    responder: Responder | None


class WorkerProxy(Proxy):
    """Implements ``Proxy`` for a process or thread.

    Attributes:
        config: config of a successor, except ``generation`` and ``place``.
        process: the most recent process.
        failure: error before any request, while it made its environments or groups.
        unusable: why a complete rollout was not received, and no later one is.
        deaf_s: seconds for which it has not read a message: it hangs; 0: it has read all.
    """

    absent = False

    def __init__(
        self, config: WorkerConfig, pool: SupervisedPool, shared: Shared
    ) -> None:
        super().__init__(config.index, config.groups, pool)
        self.config = config
        self.process: WorkerProcess
        self.failure: SentError | None = None
        self.unusable: Exception | None = None
        self.deaf_s = 0.0
        self._shared = shared

    @property
    def awaited(self) -> bool:
        """Whether the process has something to do: a rollout, an answer, or making its
        environments.
        """
        return self.alive and (
            bool(self.under_way) or self.question.is_open or self.infos is None
        )

    @property
    def phase(self) -> Phase:
        """The phase of its process; one that has not begun yet is in that of its first work."""
        return self._phase_in(self.process.status_page.cells)

    def look(self) -> tuple[Phase, Any]:
        """Return its phase and its signs of life, of the same moment.

        The process goes on meanwhile: signs of one phase and the deadline of the next would make a
        hang of a slow construction.
        """
        cells = list(self.process.status_page.cells)
        phase = self._phase_in(cells)
        return phase, (phase, self.under_way.signs(cells))

    def _phase_in(self, cells: Any) -> Phase:
        phase = phase_of(cells)
        if phase is Phase.IDLE and self.infos is None:
            return Phase.CONSTRUCT
        return phase

    @property
    def is_successor(self) -> bool:
        """Whether the next start is one of a successor."""
        return self.life.state is WorkerState.DEAD

    # --- its process ------------------------------------------------------------------------------

    def start(self) -> None:
        """Start a process.

        A successor gets the present config and all requests that have no result yet.
        """
        self._owner.check()
        self.life.check_next(WorkerState.RUNNING)
        config = self.config
        if self.is_successor:
            registered = config.registered and with_later_ids(config.registered)
            config = replace(
                config, generation=config.generation + 1, registered=registered
            )
            self.process.close()  # it is closed, unless an exception has come in between
        name = f"muster-worker-{self.index}"
        process = WorkerProcess(*self._shared.launch(name, not config.generation))
        try:
            self._send_config(process, config)
            if self.is_successor and self.place is not None:
                for request in self.under_way.requests():
                    process.send(request)
        except BaseException:
            process.close()
            raise
        self.config = config
        self.process = process
        self.infos = None
        self.failure = None
        self.unusable = None
        self.deaf_s = 0.0
        self.question.forget()
        self.under_way.begin_again()
        self.life.has_started(WorkerState.RUNNING)

    def where(self) -> Where:
        counters = self._pool.counters
        ids: list[int] = []
        if counters:
            for group in self.groups:
                ids += map(int, counters[group].env_ids)
        return Where(self.index, env_ids=tuple(ids), node=self.config.node)

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

    def halt(self) -> None:
        """Stop the process, and process its messages until then.

        After this its status page does not change.
        """
        if self.config.in_thread:
            # A thread runs on: its messages are ignored, then ``kill`` isolates its memory.
            self.process.channel.close()
            self.pump()
            self.kill()
        else:
            self.kill()
            self.process.child.join(END_S)
            self.pump()

    def give_up_hung(self) -> None:
        """Halt a process that has hung, and drop its answers: it is lost, even if it has gone on
        before it was killed.
        """
        self.halt()
        self.question.forget_answer()
        self.infos = None
        self.failure = None

    def cannot_use(self, error: Exception) -> None:
        """Note why a complete rollout cannot be received."""
        self.unusable = error

    def end(self) -> None:
        """End the process if it runs, add its steps to the counters, and release its resources."""
        if not self.alive:
            return
        try:
            self.halt()
            self._pool.count_last_steps(self)
        finally:  # also after Ctrl-C
            self.abandon()

    def abandon(self) -> None:
        """Kill the process if it runs, and release its resources; nothing more is added to the
        counters.
        """
        if not self.alive:
            return
        is_running = self.life.state is WorkerState.RUNNING
        self.life.become(WorkerState.DEAD if is_running else WorkerState.CLOSED)
        self.process.close()
        if self._shared.responder is not None:
            self._shared.responder.lost(self.index, self.groups)

    # --- methods of Handle ------------------------------------------------------------------------

    def stats(self, counters: Sequence[FrameCounters]) -> list[WorkerStats]:
        return [
            stats_of(
                self.index, self.groups, counters, status_of(self), self.config.node
            )
        ]

    def submit(self, request: RolloutRequest, slot: Slot) -> None:
        self.under_way.add(request, slot)
        if self.alive:
            if self._shared.responder is not None:
                self._shared.responder.mailbox.expect(self.index, request.number)
            self.send(request)
        elif not self.reviving:
            self._pool.begin(self)

    def stop(self, number: int) -> None:
        if self.alive:
            self.process.status_page.cells[STOP] = number

    @postponed()
    def call(self, request: Request) -> list[Any]:
        self._wait_until_there()
        sent = request
        server = self._shared.server
        if server is not None:
            sent = sent_through(
                self._with_columns(server, request), server.actor, self.groups
            )
        self.remember(sent)
        result = self._ask(WorkerMain.call, sent)
        if server is not None:
            add_answer(sent, server.actor, self.groups, result)
        if self._pool.notes is not None:
            log_request(request, self._pool.notes, self.groups)
        return [result]

    def _ask_to_close(self) -> None:
        with suppress(TimeoutError):
            self.process.send(Tell(WorkerMain.close), timeout=1.0)
        if self.under_way:
            self.process.child.send_signal(signal.SIGTERM)  # in the middle of a rollout

    def _wait_for_close(self) -> None:
        close_s = self._shared.config.timeout("close")
        deadline = None if close_s is None else self._closing_since + close_s
        try:
            while self.question.answer is None:
                left = (
                    None if deadline is None else max(0.0, deadline - time.monotonic())
                )
                self._note(self.process.channel.receive(left)[0])
            self.process.child.join(1.0)
        except (EOFError, TimeoutError):
            pass
        finally:
            self.end()

    def send(self, message: Any) -> None:
        """Send a message; if the process has ended, or does not read it, the next wait detects
        that.
        """
        try:
            self.process.channel.send(message, (), SEND_S)
        except EOFError:
            pass
        except TimeoutError:
            self.deaf_s = SEND_S

    # --- parts ------------------------------------------------------------------------------------

    def _send_config(self, process: WorkerProcess, config: WorkerConfig) -> None:
        responder = self._shared.responder
        subscribe = self._shared.subscribe
        ticket: Ticket | None = None
        if subscribe is not None and config.served_by is None:
            ticket = subscribe(self.index)
        fds: list[int] = []
        if not config.in_thread:
            fds.append(process.status_page.fd)
        fds.append(self._shared.arena.fd)
        if responder is not None:
            fds += responder.mailbox.fds_for(self.index)
        elif ticket is not None:
            fds += ticket.fds
        try:
            with allowed():  # a process that does not read delays Ctrl-C otherwise
                process.send(replace(config, place=self.place, ticket=ticket), fds)
        finally:
            if ticket is not None:
                ticket.close()

    def answered(self, answer: Answer) -> None:
        if answer.number == BIRTH:
            self.infos = opened(answer.value, "the description of the environments")
            self.failure = answer.failure
        super().answered(answer)

    def _note(self, message: RolloutResult | Answer) -> None:
        if isinstance(message, Answer):
            self.answered(message)
        else:
            self.under_way.report(message)

    def _with_columns(self, server: InferenceServer, request: Request) -> Request:
        """Add what the server's policy writes to a ``LayOut`` request; return other requests
        unchanged.
        """
        if not isinstance(request, LayOut):
            return request
        observed = self._ask(WorkerMain.call, Call(Worker.observe))
        served = server.ask("adopt", observed, request.policy == "policy")
        return replace(request, served=served)


def status_of(handle: WorkerProxy) -> WorkerStatus:
    """Return the state of a worker for ``WorkerStats``."""
    generation = handle.config.generation
    if handle.state is WorkerState.NEW:
        return WorkerStatus(0, "working", "construct", generation)
    state = "dead"
    if handle.state is WorkerState.DROPPED:
        state = "dropped"
    elif handle.alive:
        state = "working"
    phase = handle.phase.name.lower() if handle.alive else state
    return WorkerStatus(handle.process.child.pid, state, phase, generation)
