"""Pools whose workers run elsewhere, in threads, processes or on nodes: starts, waits, losses."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from muster.env_spec import EnvSpec
from muster.errors import (
    BadOption,
    CollectorClosed,
    EnvError,
    ForkedProcess,
    MusterError,
)
from muster.restore.pickling import opened
from muster.utils.forks import Owner
from muster.workers.config import PoolConfig, WorkerPlace
from muster.workers.effects import place_after
from muster.workers.failures import Where, not_started
from muster.workers.fates import Fate, decide_fate
from muster.workers.life import ALIVE, Life, WorkerState
from muster.workers.messages import CLOSED, Answer, RolloutResult, Tell
from muster.workers.pool import Handle, Pool
from muster.workers.requests import Request
from muster.workers.slow_construction import SlowConstruction

# RuntimeError: "can't start new thread"
START_ERRORS = (OSError, MemoryError, MusterError, RuntimeError)


class NotAnswered(Exception):
    """An answer has not arrived in the time that the caller waits for it."""


class Question:
    """The message of a worker or node that a caller waits for: there is one at a time.

    Attributes:
        start: ``Life.starts`` when the message was sent that it answers.
        answer: the answer; None: it has not arrived.
    """

    def __init__(self) -> None:
        self.start = 0
        self.answer: Answer | None = None
        self._newest = 0  # number of the newest message
        self._awaited: int | None = None  # number of the awaited answer

    def ask(self, start: int) -> int:
        """Return the number of a new message, whose answer is awaited from now on."""
        self._newest += 1
        self.start = start
        self.wait_for(self._newest)
        return self._newest

    def wait_for(self, number: int) -> None:
        """Wait for the answer with this number."""
        self._awaited = number
        self.answer = None

    def answered(self, answer: Answer) -> None:
        """Store an answer, if it is awaited."""
        if answer.number == self._awaited:
            self.answer = answer

    def take(self) -> Answer | None:
        """Return the answer, if it has arrived, and wait for none any more."""
        answer = self.answer
        self.forget()
        return answer

    def forget(self) -> None:
        """Wait for no answer any more."""
        self.answer = None
        self._awaited = None

    def forget_answer(self) -> None:
        """Drop the answer: its sender is lost."""
        self.answer = None

    @property
    def is_open(self) -> bool:
        """Whether an answer is awaited."""
        return self._awaited is not None


class Proxy(Handle):
    """The handle of a worker or node that a ``SupervisedPool`` starts and restarts.

    Requests and calls are executed one after another, in the order in which they were submitted.

    Attributes:
        life: its state, its restarts and its signs of life.
        question: what a caller waits for.
        infos: descriptions of its groups; None: it has made none yet.
        place: place of its groups for a successor; None: not known yet.
    """

    late = False  # the node was called and did not join in time

    def __init__(self, index: int, groups: Sequence[int], pool: SupervisedPool) -> None:
        super().__init__(index, groups)
        self.life = Life(f"{type(self).__name__} {index}", pool.note_change)
        self.question = Question()
        self.infos: list[EnvSpec] | None = None
        self.place: WorkerPlace | None = None
        self._pool = pool
        self._owner = Owner("collector", "workers")
        self._closing_since = 0.0  # time at which it was asked to close

    @property
    def state(self) -> WorkerState:
        return self.life.state

    @property
    def starts(self) -> int:
        return self.life.starts

    @property
    def cause(self) -> Exception | None:
        return self.life.cause

    @property
    def alive(self) -> bool:
        """Whether it has a process, thread or session, as far as is known; always False in a fork
        of this process.
        """
        return self.life.state in ALIVE and self._owner.is_here()

    @property
    def reviving(self) -> bool:
        return self.life.state is WorkerState.RESTARTING

    @property
    def stranded(self) -> bool:
        """Whether it has requests and no process, and no restart is planned: an exception has come
        between these.
        """
        return self.life.state is WorkerState.DEAD and bool(self.under_way)

    @abstractmethod
    def start(self) -> None:
        """Start or restart the worker, or call the node. Called by ``SupervisedPool.begin`` only.

        If this raises, nothing has changed: all that it had acquired is released.
        """

    @abstractmethod
    def where(self) -> Where:
        """Return the worker that errors about a start name."""

    @abstractmethod
    def kill(self) -> None:
        """Kill the process without waiting. May be called from another thread."""

    # --- its place --------------------------------------------------------------------------------

    def prepared(self, policy: str) -> bool:
        columns = None if self.place is None else self.place.columns
        return columns is not None and columns.policy == policy

    def remember(self, request: Request) -> None:
        """Note the effect of a request on the place of a successor."""
        if self.place is not None:
            self.place = place_after(request, self.place)

    def begin_episodes_at(self, episodes: dict[int, Any]) -> None:
        """Note the numbers of the first episodes of a successor, by group."""
        if self.place is not None:
            self.place = replace(self.place, episodes=episodes)

    # --- calls ------------------------------------------------------------------------------------

    @abstractmethod
    def send(self, message: Tell) -> None:
        """Send a message. Does not wait."""

    def post(self, send: Callable[[int], None]) -> None:
        """Send a message with a new number. ``answer`` returns the answer."""
        number = self.question.ask(self.life.starts)
        self.life.forget_signs()
        try:
            send(number)
        except BaseException:
            self.question.forget()
            raise

    def answer(self, until: float | None = None) -> Answer | None:
        """Wait for the answer to the last message; None: that went to a predecessor.

        Args:
            until: raise ``NotAnswered`` at this time (``time.monotonic()``); the answer is still
                awaited.
        """

        def is_over() -> bool:
            return self.question.answer is not None or (
                until is not None and time.monotonic() >= until
            )

        try:
            is_there = self._pool.wait_for(self, is_over, self.question.start)
        except BaseException:
            self.question.forget()
            raise
        if is_there and self.question.answer is None:
            raise NotAnswered
        answer = self.question.take()
        return answer if is_there else None

    def _ask(self, method: Callable[..., Any], *args: Any) -> Any:
        """Have the worker or node call a method, and return the answer.

        A successor gets the message again.
        """
        while True:
            self.post(lambda number: self.send(Tell(method, args, number)))
            answer = self.answer()
            if answer is not None:
                return value_of(answer)

    def _wait_until_there(self) -> None:
        if not self.alive and not self.reviving:
            self._pool.begin_or_raise(self)
        while self.reviving or self.absent:
            self._pool.wait_for(self, lambda: self.alive and not self.absent)

    def answered(self, answer: Answer) -> None:
        """Store an answer, if it is awaited."""
        self.question.answered(answer)

    # --- the end ----------------------------------------------------------------------------------

    def close(self, *, wait: bool = True) -> None:
        if self.life.state is WorkerState.RUNNING and self.alive:
            self._closing_since = time.monotonic()
            self.life.become(WorkerState.CLOSING)
            self.question.wait_for(CLOSED)
            self._ask_to_close()
        if wait and self.alive:
            self._wait_for_close()
            answer = self.question.answer
            if answer is not None:
                value_of(answer)  # raises its failure

    @abstractmethod
    def _ask_to_close(self) -> None:
        """Tell the worker or node to close its environments. Does not wait."""

    @abstractmethod
    def _wait_for_close(self) -> None:
        """Wait for its answer until its deadline, and end it."""


class SupervisedPool(Pool):
    """A pool whose workers it starts, waits for and restarts.

    1. Made from a config: every worker is NEW (``Life``), and nothing runs.
    2. ``start``: all workers start, and make their environments in parallel. A failure is raised.
    3. ``built``: all have made their environments; returns descriptions of the groups.
    4. ``open``: the counters are made, and each worker gets its place among all. From here on, a
       worker that is lost, or that cannot be started, has a fate (``decide_fate``): a request
       belongs to a worker that runs, to one whose restart is planned, or it has a result. Waits
       rely on that.
    5. ``handle``, ``next_result``, ``call``: see ``Pool``. Every wait is one of ``wait``, which
       also detects losses and restarts workers.
    6. ``close``, or ``end``, which does not wait. Nothing is started any more.

    Args:
        config: its reaction to a failure: "raise": raise the error to the user; the next batch restarts
            the worker. "restart": restart the worker at once. "drop": continue without the worker.
    """

    def __init__(self, config: PoolConfig) -> None:
        super().__init__(Owner("collector", "workers"))
        self.config = config
        self.changes = 0  # number of changes of the states of workers or nodes
        self.is_closed = False  # nothing is started any more
        self._due: list[Any] = []  # proxies whose restart is planned
        self._construction = SlowConstruction(self.missing)

    @abstractmethod
    def wait(self, timeout: float | None, *, revives: bool = True) -> None:
        """See ``Pool``.

        With ``revives``, restart workers whose restart is due; return at once if there are results
        of requests of lost workers.
        """

    @abstractmethod
    def missing(self) -> str:
        """Return a description of what a construction waits for; empty if nothing is missing."""

    @abstractmethod
    def built(self) -> list[EnvSpec]:
        """Wait until the workers have made their environments, and describe the groups.

        Raises a worker's error.
        """

    @abstractmethod
    def open(self, infos: Sequence[EnvSpec], place: WorkerPlace) -> None:
        """Make the counters, and send each worker its place."""

    @abstractmethod
    def end(self) -> None:
        """End all workers that still run. None can be started any more."""

    def note_change(self) -> None:
        """Note that the state of a worker or node has changed."""
        self.changes += 1

    # --- starts -----------------------------------------------------------------------------------

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
            BadOption, WorkerNotStarted: the start has failed, and the pool is not open yet.
        """
        if self.is_closed:
            raise CollectorClosed("The workers of this collector were ended.")
        try:
            self._start(handle)
        except ForkedProcess:
            raise
        except START_ERRORS as error:
            if not self.counters and isinstance(error, BadOption):
                raise
            lost = not_started(handle.where(), error, again=bool(self.counters))
            if not self.counters:
                raise lost from error
            handle.life.could_not_start(lost)
            self._settle(handle, lost)
        else:
            handle.life.could_start()

    def _start(self, handle: Any) -> None:
        handle.start()

    def begin_or_raise(self, handle: Any) -> None:
        """Start a worker or node that has no process.

        Raises the reason if it is lost and not restarted.
        """
        self.begin(handle)
        if not (handle.alive or handle.reviving):
            self.raise_once(handle)

    def start_dead(self, *, absent: bool) -> None:
        for handle in self.handles:
            if handle.absent is not absent or _runs(handle) or self.is_dropped(handle):
                continue
            self.begin(handle)
            if not (absent or _runs(handle) or self.is_dropped(handle)):
                self.raise_once(handle)

    def _begin_stranded(self) -> None:
        """Start workers whose requests would otherwise be waited for without an end; see
        ``Proxy.stranded``.
        """
        for handle in self.handles:
            if handle.stranded and handle not in self._due:
                self.begin(handle)

    # --- waits ------------------------------------------------------------------------------------

    def wait_for(
        self, handle: Any, ready: Callable[[], bool], start: int | None = None
    ) -> bool:
        """Wait until ``ready()`` is true.

        Args:
            start: ``handle.starts`` when the request was sent; None: just now.

        Returns:
            True. False if the worker was restarted: its request has to be sent again.

        Raises:
            Exception: the worker was lost, with this cause.
        """
        start = handle.starts if start is None else start
        while not ready():
            if not self.counters:
                self._construction.look()
            was_alive = handle.alive
            if was_alive and handle.starts == start:
                self.wait(None, revives=False)
            if handle.starts != start:
                return False
            if handle.alive or ready():
                continue
            if was_alive and handle.late:
                self.raise_once(handle)
            while not handle.alive:
                if not handle.reviving:
                    self.raise_once(handle)
                # for messages of others, until its restart is due
                self.wait(None, revives=False)
                self._revive_due()
            return False
        return True

    def _until_due(self, *seconds: float | None) -> float:
        """Return the minimum of these timeouts and the time until the next planned restart, at
        least 0.
        """
        now = time.monotonic()
        bounds: list[float] = [handle.life.restart_at - now for handle in self._due]
        bounds += [timeout for timeout in seconds if timeout is not None]
        return max(0.0, min(bounds))

    def raise_once(self, handle: Any) -> None:
        """Raise the cause of a loss, and remove it from the results so that it is raised once."""
        cause = handle.cause
        assert cause is not None
        self._forget_errors(lambda error: error is cause)
        raise cause

    # --- losses -----------------------------------------------------------------------------------

    def count_last_steps(self, handle: Any) -> None:
        """Add the steps of a worker that was halted to the counters, also those that it has not
        reported.
        """

    def _decide(
        self, handle: Any, error: Exception | None, *, worker_ends: bool
    ) -> Fate:
        return decide_fate(
            error,
            self.config.supervision.reaction,
            worker_ends=worker_ends,
            is_elastic=self.elastic,
            may_restart=lambda: self._may_restart(handle),
        )

    def _may_restart(self, handle: Any) -> bool:
        """Return whether a lost worker or node may be restarted at once, and if so, count the
        restart.
        """
        config = self.config
        if handle.life.has_failed_for(config.timeout("construct")):
            return False
        restart = config.supervision.restart
        most = None if restart is None else restart.max_restarts
        return bool(handle.late) or handle.life.may_restart(most)

    def _settle(self, handle: Any, error: Exception, fate: Fate | None = None) -> None:
        """Do with a lost worker and its requests what its fate says; None: decide it."""
        if not self.counters:
            return  # the pool was never open
        handle.begin_episodes_at(
            {number: self.counters[number].next_episodes() for number in handle.groups}
        )
        if self.elastic:
            for number in handle.groups:
                self.counters[number].is_absent()
        if fate is None:
            fate = self._decide(handle, error, worker_ends=True)
        if fate is Fate.DROPPED:
            self._drop(handle, error)
        elif fate is Fate.RETURNED:
            self._return(handle, error)
        else:
            handle.life.plan_restart()
            self._due.append(handle)
            handle.life.become(WorkerState.RESTARTING)
            if fate is Fate.HANDED_OUT:
                self._return(handle, None)

    def _drop(self, handle: Any, error: Exception) -> None:
        requests = handle.under_way.give_up()
        handle.life.become(WorkerState.DROPPED)
        for number in handle.groups:
            self.counters[number].drop()
        why = f"a worker is dropped, and the others go on without it: {error}"
        self._returned.append(
            RolloutResult(0, handle.groups[0], lost=True, warnings=[why])
        )
        self._returned += [
            RolloutResult(request.number, request.group, dropped=True)
            for request in requests
        ]

    def _return(self, handle: Any, error: Exception | None) -> None:
        """Return the requests of a lost worker as lost. The first of the results has the error."""
        requests = handle.under_way.give_up()
        results = [
            RolloutResult(request.number, request.group, lost=True)
            for request in requests
        ]
        if error is None or not requests:
            # without requests, its environments are lost nevertheless
            results.append(news(handle.groups[0]))
        self._returned.append(replace(results[0], error=error))
        self._returned += results[1:]

    def _revive_due(self) -> None:
        for handle in list(self._due):
            self._revive(handle)

    def _revive(self, handle: Any) -> None:
        """Restart a worker whose restart is due."""
        restart_at = handle.life.restart_at
        if restart_at is None or restart_at > time.monotonic():
            return
        # In this order, so that an exception of a signal handler between two lines leaves the
        # worker due or stranded.
        if handle.reviving:
            handle.life.become(WorkerState.DEAD)
        self._due.remove(handle)
        handle.life.begin_restart()
        self.begin(handle)


def value_of(answer: Answer) -> Any:
    """Return the value of an answer, or raise its failure.

    Raises ``BadOption`` if the value cannot be unpickled here.
    """
    if answer.failure is not None:
        raise answer.failure.error()
    return opened(answer.value, "a result")


def news(group: int) -> RolloutResult:
    """Return a result for no request: the availability of a group's worker has changed."""
    return RolloutResult(0, group, lost=True)


def unlike(where: Where, expected: EnvSpec, got: EnvSpec) -> EnvError:
    """Return the error for a late node whose number of environments is not the expected one."""
    error = EnvError(
        f"{where} has come with {got.num_envs} environments in a batch of shape {got.batch_shape}"
        f" ({got.name}), where {expected.num_envs} in {expected.batch_shape} ({expected.name}) were"
        " expected: with min_nodes, all entries of create_env_fn have to make equally many."
    )
    vars(error).update(worker=where.worker, phase="construct")
    return error


def _runs(handle: Any) -> bool:
    """Return whether a worker runs, or will without being asked."""
    return bool(handle.alive or handle.reviving)
