"""The proxies of workers and of nodes: their states, their requests, and restarts after a loss."""

from __future__ import annotations

import enum
import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from muster.env_spec import EnvSpec
from muster.errors import BadOption, CollectorClosed, EnvError, ForkedProcess, MusterError
from muster.utils.forks import Owner
from muster.workers.effects import place_after
from muster.workers.failures import not_started
from muster.workers.messages import CLOSED, Answer, RolloutResult, Tell
from muster.workers.under_way import UnderWay

if TYPE_CHECKING:
    from muster.memory.slots import Slot
    from muster.observing.stats import WorkerStats
    from muster.rollout.request import RolloutRequest
    from muster.workers.config import PoolConfig, WorkerPlace
    from muster.workers.counters import FrameCounters
    from muster.workers.failures import Where
    from muster.workers.requests import Request

# seconds before a restart, by number of restarts since the last complete rollout
BACK_OFF = (0.0, 0.1, 0.5, 2.0)
FRUITLESS = 3  # maximum of restarts since the last complete rollout
# RuntimeError: "can't start new thread"
START_ERRORS = (OSError, MemoryError, MusterError, RuntimeError)
SLOW_S = 5.0  # seconds after which a construction logs what it waits for
SLOW_AGAIN_S = 30.0  # seconds after which it logs the same again
_log = logging.getLogger(__name__)


class WorkerState(enum.Enum):
    """The state of a worker or node; see the diagram in ARCHITECTURE.md."""

    NEW = "was never started"
    JOINING = "was called: a node that has not made its environments"
    RUNNING = "has a process or thread"
    CLOSING = "the same, and was told to end"
    DEAD = "has none; the next batch starts it again"
    RESTARTING = "has none; its supervisor starts it again"
    DROPPED = "has none, and the others go on without it"
    CLOSED = "has none, for good"


_STATES = WorkerState
_NEXT: dict[WorkerState, tuple[WorkerState, ...]] = {
    _STATES.NEW: (_STATES.JOINING, _STATES.RUNNING),
    _STATES.JOINING: (_STATES.RUNNING, _STATES.DEAD),
    _STATES.RUNNING: (_STATES.DEAD, _STATES.CLOSING),
    _STATES.CLOSING: (_STATES.CLOSED,),
    _STATES.DEAD: (_STATES.JOINING, _STATES.RUNNING, _STATES.RESTARTING, _STATES.DROPPED),
    _STATES.RESTARTING: (_STATES.DEAD,),
    _STATES.DROPPED: (),
    _STATES.CLOSED: (),
}
_ALIVE = (_STATES.JOINING, _STATES.RUNNING, _STATES.CLOSING)


class Restarted(Exception):
    """The worker was restarted: send the request to its successor."""


@dataclass
class Record:
    """The signs of life and the restarts of one worker or node."""

    signs: tuple[Any, ...] = ()  # the last ones
    since: float = 0.0  # time (``time.monotonic``) of their last change
    # times of the restarts within the last minute
    restarts: deque[float] = field(default_factory=deque)
    fruitless: int = 0  # number of restarts since the last complete rollout
    revive_at: float | None = None  # time of the next restart; None: none is planned
    # time of the first of the last starts that failed; None: the last did not
    not_started_since: float | None = None

    def may_restart(self, most: int | None) -> bool:
        """Return whether the budget of ``most`` per minute allows one more restart, and if so,
        count it.
        """
        now = time.monotonic()
        while self.restarts and self.restarts[0] < now - 60:
            self.restarts.popleft()
        if most is not None and (len(self.restarts) >= most or self.fruitless >= FRUITLESS):
            return False
        self.restarts.append(now)
        self.fruitless += 1
        return True

    def has_failed_for(self, seconds: float | None) -> bool:
        """Return whether every start in the last ``seconds`` (None: for ever) has failed, and there
        was one.
        """
        since = self.not_started_since
        return since is not None and seconds is not None and time.monotonic() - since > seconds


class Proxy(ABC):
    """The worker pool's end of a worker or node: its state, its requests, and their results.

    Requests and calls are executed one after another, in the order in which they were submitted.
    """

    late = False  # the node was called and did not join in time

    def __init__(self, index: int, groups: Sequence[int], watcher: Watcher) -> None:
        self.index = index
        self.groups = list(groups)
        self._watcher = watcher
        self.under_way = UnderWay()
        # descriptions of its groups; None: it has made none yet
        self.infos: list[EnvSpec] | None = None
        self.cause: Exception | None = None  # error with which it was lost
        self.starts, self.record = 0, Record()
        # place of its groups for a successor; None: not known yet
        self.place: WorkerPlace | None = None
        self._state = WorkerState.NEW
        self._owner = Owner("collector", "workers")
        self._asked = 0  # number of the newest request
        self._awaited: int | None = None  # number of the answer that a caller waits for
        self._answer: Answer | None = None  # the answer with this number
        self._posted_to = 0  # ``starts`` when the newest request was sent
        self._closing_since = 0.0  # time at which it was asked to close

    @property
    def state(self) -> WorkerState:
        return self._state

    @state.setter
    def state(self, state: WorkerState) -> None:
        self._check_next(state)
        self._state = state
        self._watcher.changes += 1

    def _check_next(self, state: WorkerState) -> None:
        assert state in _NEXT[self._state], (
            f"{type(self).__name__} {self.index}: {self._state.name} -> {state.name}"
        )

    @property
    def alive(self) -> bool:
        """Whether it has a process, thread or session, as far as is known; always False in a fork
        of this process.
        """
        return self._state in _ALIVE and self._owner.is_here()

    @property
    def reviving(self) -> bool:
        """Whether its supervisor will restart it."""
        return self._state is WorkerState.RESTARTING

    @property
    def stranded(self) -> bool:
        """Whether it has requests and no process, and no restart is planned: an exception has come
        between these.
        """
        return self._state is WorkerState.DEAD and bool(self.under_way)

    @property
    @abstractmethod
    def absent(self) -> bool:
        """Whether its node has not joined or was lost. Nothing is requested from an absent node."""

    @abstractmethod
    def start(self) -> None:
        """Start or restart the worker, or call the node. Called by ``Watcher.begin`` only.

        If this raises, nothing has changed: all that it had acquired is released.
        """

    @abstractmethod
    def where(self) -> Where:
        """Return the worker that errors about a start name."""

    @abstractmethod
    def end(self) -> None:
        """Kill the worker or end the session. May be called again."""

    @abstractmethod
    def kill(self) -> None:
        """Kill the process without waiting. May be called from another thread."""

    def prepared(self, policy: str) -> bool:
        """Return whether the layouts are still valid for rollouts of this policy."""
        columns = None if self.place is None else self.place.columns
        return columns is not None and columns.policy == policy

    def remember(self, request: Request) -> None:
        """Note the effect of a request on the place of a successor."""
        if self.place is not None:
            self.place = place_after(request, self.place)

    @abstractmethod
    def stats(self, counters: Sequence[FrameCounters]) -> list[WorkerStats]:
        """Return the statistics of its workers."""

    @abstractmethod
    def submit(self, request: RolloutRequest, slot: Slot) -> None:
        """Submit a rollout request. Does not wait."""

    @abstractmethod
    def stop(self, number: int) -> None:
        """End the rollouts of requests up to this number after their current step."""

    @abstractmethod
    def call(self, request: Request) -> list[Any]:
        """Send a request to each of its workers, and return their answers.

        Raises the error of a worker.
        """

    def close(self, *, wait: bool = True) -> None:
        """Close the environments and end the worker, by force if necessary. May be called again.

        Without ``wait``, only start to close: many workers close at the same time, and share one
        deadline. Raises the error of an environment; the worker has ended nevertheless.
        """
        if self._state is WorkerState.RUNNING and self.alive:
            self._closing_since = time.monotonic()
            self.state = WorkerState.CLOSING
            self._awaited = CLOSED
            self._answer = None
            self._ask_to_close()
        if wait and self.alive:
            self._wait_for_close()
            if self._answer is not None and self._answer.failure is not None:
                raise self._answer.failure.error()

    @abstractmethod
    def _ask_to_close(self) -> None:
        """Tell the worker or node to close its environments. Does not wait."""

    @abstractmethod
    def _wait_for_close(self) -> None:
        """Wait for its answer until its deadline, and end it."""

    def _wait_until_there(self) -> None:
        if not self.alive and not self.reviving:
            self._watcher.begin_or_raise(self)
        while self.reviving or self.absent:
            try:
                self._watcher.wait_for(self, lambda: self.alive and not self.absent)
            except Restarted:
                continue

    def answered(self, answer: Answer) -> None:
        """Store an answer, if it is awaited."""
        if answer.number == self._awaited:
            self._answer = answer

    @abstractmethod
    def send(self, message: Tell) -> None:
        """Send a message. Does not wait."""

    def _ask(self, method: Callable[..., Any], *args: Any) -> Any:
        """Have the worker or node call a method, and return the answer.

        A successor gets the message again.
        """
        while True:
            self.post(lambda number: self.send(Tell(method, args, number)))
            try:
                return self.answer()
            except Restarted:
                continue

    def post(self, send: Callable[[int], None]) -> None:
        """Send a message with a new number. ``answer`` returns the answer."""
        self._asked += 1
        self._awaited = self._asked
        self._answer = None
        self._posted_to = self.starts
        self.record.signs = ()
        try:
            send(self._asked)
        except BaseException:
            self._awaited = None
            raise

    def is_answered(self, until: float) -> bool:
        """Wait for the answer to the last message until this time (``time.monotonic()``).

        Return whether it is there.

        Raises ``Restarted`` if the message went to a predecessor.
        """

        def ready() -> bool:
            return self._answer is not None or time.monotonic() >= until

        self._watcher.wait_for(self, ready, self._posted_to)
        return self._answer is not None

    def answer(self) -> Any:
        """Wait for the answer to the last message.

        Raises ``Restarted`` if it went to a predecessor.
        """
        try:
            self._watcher.wait_for(self, lambda: self._answer is not None, self._posted_to)
        finally:
            answer, self._answer, self._awaited = self._answer, None, None
        assert answer is not None
        if answer.failure is not None:
            raise answer.failure.error()
        return answer.value


class Watcher(ABC):
    """Supervises the workers or nodes of a worker pool, from their start to their end.

    A start that fails is a loss like any other: ``_pass_on`` decides what becomes of the worker and
    its requests. So a request belongs to a worker that runs, to one whose restart is planned, or it
    has a result. Waits rely on that.

    Args:
        config: its ``on_failure``: "raise": raise the error to the user; the next batch restarts
            the worker. "restart": restart the worker at once. "drop": continue without the worker.
        elastic: nodes may join late and leave: requests of a lost node are returned as lost, for
            other nodes.
    """

    changes = 0  # number of changes of the states of workers or nodes
    is_closed = False  # nothing is started any more

    def __init__(self, config: PoolConfig, *, elastic: bool = False) -> None:
        self.handles: Sequence[Any] = ()  # proxies of all workers, or of all nodes
        self.counters: Sequence[FrameCounters] = ()  # of the groups; empty before there is a pool
        self.elastic = elastic
        self.config = config
        # results of requests of lost workers, until ``take_lost``
        self.lost: list[RolloutResult] = []
        self._due: list[Any] = []  # proxies whose restart is planned
        self._begun = time.monotonic()
        self._missed = ""  # what was logged last as missing
        self._next_log = self._begun + SLOW_S
        self._same_log = 0.0  # time at which the same is logged again

    @abstractmethod
    def wait(self, timeout: float | None, *, revives: bool = True) -> None:
        """Wait until a worker has sent a message or is lost, and process all messages.

        May return early.

        With ``revives``, restart workers whose restart is due; return at once if losses were not
        taken yet.
        """

    @abstractmethod
    def missing(self) -> str:
        """Return a description of what a construction waits for; empty if nothing is missing."""

    def start(self) -> None:
        """Start the workers, or sessions with all nodes. They make their environments in parallel.

        Raises:
            BadOption: there are too few descriptors, or the start method is impossible.
            WorkerNotStarted: the system does not allow it for another reason.
        """
        for handle in self.handles:
            self.begin(handle)

    def begin(self, handle: Any) -> None:
        """Start a worker or node that has no process.

        If that fails, the worker is lost once more, with this reason.

        Raises:
            CollectorClosed: after ``end``.
            BadOption, WorkerNotStarted: the start has failed, and there is no pool yet.
        """
        if self.is_closed:
            raise CollectorClosed("The workers of this collector were ended.")
        try:
            handle.start()
        except ForkedProcess:
            raise
        except START_ERRORS as error:
            if not self.counters and isinstance(error, BadOption):
                raise
            lost = not_started(handle.where(), error, again=bool(self.counters))
            if not self.counters:
                raise lost from error
            record = handle.record
            record.not_started_since = record.not_started_since or time.monotonic()
            handle.cause = lost
            self._pass_on(handle, lost)
        else:
            handle.record.not_started_since = None

    def begin_or_raise(self, handle: Any) -> None:
        """Start a worker or node that has no process.

        Raises the reason if it is lost and not restarted.
        """
        self.begin(handle)
        if not (handle.alive or handle.reviving):
            self.raise_once(handle)

    def _begin_stranded(self) -> None:
        """Start workers whose requests would otherwise be waited for without an end; see
        ``Proxy.stranded``.
        """
        for handle in self.handles:
            if handle.stranded and handle not in self._due:
                self.begin(handle)

    def take_lost(self) -> list[RolloutResult]:
        """Return the results made for requests of lost workers since the last call."""
        lost, self.lost = self.lost, []
        return lost

    def wait_for(self, handle: Any, ready: Callable[[], bool], asked: int | None = None) -> None:
        """Wait until ``ready()`` is true.

        Args:
            asked: ``handle.starts`` when the request was sent; None: just now.

        Raises:
            Restarted: the worker was restarted; its request has to be sent again.
            Exception: the worker was lost, with this cause.
        """
        asked = handle.starts if asked is None else asked
        while not ready():
            if not self.counters:
                self._log_slow_construction()
            if (was_alive := handle.alive) and handle.starts == asked:
                self.wait(None, revives=False)
            if handle.starts != asked:
                raise Restarted
            if not handle.alive and not ready():
                if was_alive and handle.late:
                    self.raise_once(handle)
                while not handle.alive:
                    if not handle.reviving:
                        self.raise_once(handle)
                    # for messages of others, until its restart is due
                    self.wait(None, revives=False)
                    self._revive_due()
                raise Restarted

    def _log_slow_construction(self) -> None:
        """Log what is missing after ``SLOW_S``, again when it changes, and again after
        ``SLOW_AGAIN_S``.
        """
        now = time.monotonic()
        if now < self._next_log:
            return
        self._next_log = now + SLOW_S
        missing = self.missing()
        if missing and (missing != self._missed or now >= self._same_log):
            _log.warning("Waiting for %s (%.0f s so far).", missing, now - self._begun)
            self._missed = missing
            self._same_log = now + SLOW_AGAIN_S

    def _until_due(self, *seconds: float | None) -> float:
        """Return the minimum of these timeouts and the time until the next planned restart, at
        least 0.
        """
        now = time.monotonic()
        due: list[float] = [handle.record.revive_at - now for handle in self._due]
        return max(0.0, min([*due, *(s for s in seconds if s is not None)]))

    def _pass_on(self, handle: Any, error: Exception) -> None:
        """Keep the requests of a lost worker for a successor, or return them as lost or dropped
        results.
        """
        if not self.counters:
            return  # it was never part of the worker pool
        record = handle.record
        lost = self.lost
        episodes = {number: self.counters[number].next_episodes() for number in handle.groups}
        if handle.place is not None:
            handle.place = replace(handle.place, episodes=episodes)
        for number in handle.groups if self.elastic else ():
            self.counters[number].late = True
        if self._may_restart(handle):
            record.revive_at = time.monotonic() + BACK_OFF[min(record.fruitless, len(BACK_OFF)) - 1]
            self._due.append(handle)
            handle.state = WorkerState.RESTARTING
            if self.elastic:
                lost += [
                    RolloutResult(o.number, o.group, lost=True) for o in handle.under_way.give_up()
                ]
                lost.append(news(handle.groups[0]))
            return
        requests = handle.under_way.give_up()
        if self.config.supervision.reaction == "drop":
            handle.state = WorkerState.DROPPED
            for number in handle.groups:
                self.counters[number].dropped = True
            why = f"a worker is dropped, and the others go on without it: {error}"
            lost.append(RolloutResult(0, handle.groups[0], lost=True, warnings=[why]))
            lost += [
                RolloutResult(request.number, request.group, dropped=True) for request in requests
            ]
            return
        # it has done them all, or was idle: its environments are lost nevertheless
        if not requests:
            lost.append(news(handle.groups[0], error))
        lost += [
            RolloutResult(o.number, o.group, lost=True, error=None if i else error)
            for i, o in enumerate(requests)
        ]

    def _may_restart(self, handle: Any) -> bool:
        """Return whether a lost worker or node is restarted at once, and if so, count the restart."""
        config = self.config
        record = handle.record
        if config.supervision.reaction != "restart" or record.has_failed_for(
            config.timeout("construct")
        ):
            return False
        restart = config.supervision.restart
        most = None if restart is None else restart.max_restarts
        return bool(handle.late) or record.may_restart(most)

    def _revive_due(self) -> None:
        for handle in list(self._due):
            self._revive(handle)

    def _revive(self, handle: Any) -> None:
        """Restart a worker whose restart is due."""
        record = handle.record
        if record.revive_at is None or record.revive_at > time.monotonic():
            return
        # In this order, so that an exception of a signal handler between two lines leaves the
        # worker due or stranded.
        if handle.reviving:
            handle.state = WorkerState.DEAD
        self._due.remove(handle)
        record.revive_at = None
        record.signs = ()
        self.begin(handle)

    def raise_once(self, handle: Any) -> None:
        """Raise the cause of a loss, and remove it from the results so that it is raised once."""
        for result in self.lost:
            if result.error is handle.cause:
                result.error = None
        assert handle.cause is not None
        raise handle.cause


def listed(noun: str, numbers: Sequence[int]) -> str:
    """Return "worker 3" or "workers 3, 5", with at most ten numbers."""
    shown = ", ".join(map(str, numbers[:10])) + (", ..." if len(numbers) > 10 else "")
    return f"{noun} {shown}" if len(numbers) == 1 else f"{noun}s {shown}"


def news(group: int, error: Exception | None = None) -> RolloutResult:
    """Return a result for no request: the availability of a group's worker has changed."""
    return RolloutResult(0, group, lost=True, error=error)


def unlike(where: Where, expected: EnvSpec, got: EnvSpec) -> EnvError:
    """Return the error for a late node whose number of environments is not the expected one."""
    error = EnvError(
        f"{where} has come with {got.num_envs} environments in a batch of shape {got.batch_shape}"
        f" ({got.name}), where {expected.num_envs} in {expected.batch_shape} ({expected.name}) were"
        " expected: with min_nodes, all entries of create_env_fn have to make equally many."
    )
    error.worker, error.phase = where.worker, "construct"
    return error
