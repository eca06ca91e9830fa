"""What a worker and a node have in common for their worker pool: states, and how it goes on after a loss."""

from __future__ import annotations

import enum
import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from muster.errors import EnvError, WorkerHung
from muster.utils.forks import Owner
from muster.workers.messages import GroupInfo, RolloutResult
from muster.workers.under_way import UnderWay

if TYPE_CHECKING:
    from muster.memory.slots import Slot
    from muster.observing.stats import WorkerStats
    from muster.workers.config import PoolConfig
    from muster.workers.counters import FrameCounters
    from muster.workers.failures import Where
    from muster.workers.messages import RolloutRequest
    from muster.workers.requests import Request

BACK_OFF = (0.0, 0.1, 0.5, 2.0)  # seconds before a restart, by restarts without a batch
FRUITLESS = 3  # restarts without a batch are enough
SLOW_S = 5.0  # seconds after which it is logged what a construction waits for
SLOW_AGAIN_S = 30.0  # seconds after which the same is logged again
_log = logging.getLogger(__name__)


class WorkerState(enum.Enum):
    """The life of a worker or node; see the diagram in ARCHITECTURE.md."""

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
    """The worker that was asked has a successor, who has to be asked again."""


@dataclass
class Record:
    """What is remembered of one worker or node.

    Attributes:
        signs, since: of life, and since when (``time.monotonic``) they are these.
        restarts: times within the last minute.
        fruitless: restarts since its last batch.
        revive_at: when it will be started again; None: it will not.
    """

    signs: tuple[Any, ...] = ()
    since: float = 0.0
    restarts: deque[float] = field(default_factory=deque)
    fruitless: int = 0
    revive_at: float | None = None

    def may_restart(self, most: int | None) -> bool:
        """Within the budget, ``most`` per minute; one more is counted."""
        now = time.monotonic()
        while self.restarts and self.restarts[0] < now - 60:
            self.restarts.popleft()
        self.restarts.append(now)
        self.fruitless += 1
        return most is None or (len(self.restarts) <= most and self.fruitless <= FRUITLESS)

    def plan(self) -> None:
        """A restart; later, if others have not helped."""
        self.revive_at = time.monotonic() + BACK_OFF[min(self.fruitless, len(BACK_OFF)) - 1]


class Proxy(ABC):
    """A worker or node as its worker pool sees it: its state, what it was asked for, and its answers.

    Requests and calls are followed one after another, as they came.

    Attributes:
        index: number of the worker.
        groups: numbers of its groups.
        under_way: what was requested from it.
        infos: of the groups that it has made; None: it has made none yet.
        cause: why it is not there.
        starts: how often it was started.
        record: of its losses.
        late: it was called and has not come in time.
    """

    late = False

    def __init__(self, index: int, groups: Sequence[int], watcher: Watcher) -> None:
        self.index, self.groups, self._watcher = index, list(groups), watcher
        self.under_way = UnderWay()
        self.infos: list[GroupInfo] | None = None
        self.cause: Exception | None = None
        self.starts, self.record = 0, Record()
        self._state = WorkerState.NEW
        self._owner = Owner("collector", "workers")
        self._asked = 0  # number of the newest request
        self._awaited: int | None = None  # number of the answer that a caller waits for
        self._answer: Any = None  # that one

    @property
    def state(self) -> WorkerState:
        return self._state

    @state.setter
    def state(self, state: WorkerState) -> None:
        self._check_next(state)
        self._state = state

    def _check_next(self, state: WorkerState) -> None:
        assert state in _NEXT[self._state], f"{type(self).__name__} {self.index}: {self._state.name} -> {state.name}"

    @property
    def alive(self) -> bool:
        """It has a process or thread, or its node is called, as far as is known; in a fork of this process none has."""
        return self._state in _ALIVE and self._owner.is_here()

    @property
    def reviving(self) -> bool:
        """It will be started again by its supervisor."""
        return self._state is WorkerState.RESTARTING

    @property
    def outstanding(self) -> Collection[int]:
        """Numbers of requests whose result was not taken, oldest first."""
        return self.under_way.outstanding

    @property
    def untaken(self) -> Sequence[RolloutResult]:
        """Results that have come and were not taken."""
        return self.under_way.results

    def take(self) -> RolloutResult | None:
        """The next result that is there."""
        return self.under_way.take() if self.under_way.results else None

    @property
    @abstractmethod
    def absent(self) -> bool:
        """Its node is not there, and may never come, so that nothing is requested from it."""

    @abstractmethod
    def start(self) -> None:
        """Start it, or call it; also again."""

    @abstractmethod
    def end(self) -> None:
        """End it by force. May be called again."""

    @abstractmethod
    def kill(self) -> None:
        """Let its process end; from another thread."""

    @abstractmethod
    def prepared(self, policy: str) -> bool:
        """``layouts`` would say the same as before."""

    @abstractmethod
    def stats(self, counters: Sequence[FrameCounters]) -> list[WorkerStats]:
        """Of its workers."""

    @abstractmethod
    def submit(self, request: RolloutRequest, slot: Slot) -> None:
        """Let it follow a request. Does not wait."""

    @abstractmethod
    def stop(self, number: int) -> None:
        """Let requests up to this number end after their current step."""

    @abstractmethod
    def call(self, request: Request) -> list[Any]:
        """Wait for what its workers answer, each of them, or raise."""

    @abstractmethod
    def close(self, *, wait: bool = True) -> None:
        """End it, with its environments, by force if need be. Nothing can be asked of it any more. May be called again.

        Args:
            wait: False lets it begin to.

        Raises:
            Exception: what closing an environment raised; it is closed all the same.
        """

    def _wait_until_there(self) -> None:
        if not self.alive and not self.reviving:
            self.start()
        while self.reviving or self.absent:
            try:
                self._watcher.wait_for(self, lambda: self.alive and not self.absent)
            except Restarted:
                continue

    def _ask(self, send: Callable[[int], None]) -> Any:
        """The answer to what is sent under a number, of it or a successor."""
        while True:
            self._asked += 1
            self._awaited, self._answer = self._asked, None
            try:
                send(self._asked)
                self._watcher.wait_for(self, lambda: self._answer is not None)
            except Restarted:
                continue
            finally:
                answer, self._answer, self._awaited = self._answer, None, None
            if answer.failure is not None:
                raise answer.failure.error()
            return answer.value


class Watcher(ABC):
    """Watches over the workers or nodes of a worker pool.

    Args:
        config: ``on_failure``: "raise": the error reaches the user, and the worker is started again by the next batch.
            "restart": it is started again at once. "drop": the others go on without it.

    Attributes:
        handles: all workers, or nodes.
        counters: of the groups, once there is a pool.
        elastic: nodes may come late, and go: what a lost one had to do is for others.
    """

    def __init__(self, config: PoolConfig, *, elastic: bool = False) -> None:
        self.handles: Sequence[Any] = ()
        self.counters: Sequence[FrameCounters] = ()
        self.elastic, self.config = elastic, config
        self._lost: list[RolloutResult] = []
        self._slow = SlowConstruction(self.missing)

    @abstractmethod
    def wait(self, timeout: float | None, *, revives: bool = True) -> None:
        """Until some worker has reported, or is lost; takes in what has come. May return early.

        Args:
            revives: start again those whose time for it has come; returns at once if one is lost already.
        """

    @abstractmethod
    def missing(self) -> str:
        """What a construction waits for, for people; empty: nothing."""

    def take_lost(self) -> list[RolloutResult]:
        """Results in the place of workers that were lost since the last call."""
        lost, self._lost = self._lost, []
        return lost

    def wait_for(self, handle: Any, ready: Callable[[], bool]) -> None:
        """Until something is so.

        Raises:
            Restarted: it has a successor, who has to be asked again.
            Exception: what became of it instead.
        """
        asked = handle.starts
        while not ready():
            if not self.counters:
                self._slow.look()
            if was_alive := handle.alive:
                self.wait(None, revives=False)
            if handle.starts != asked:
                raise Restarted
            if not handle.alive and not ready():
                if handle.record.revive_at is None or (was_alive and handle.late):
                    self._raise_once(handle)
                while not handle.alive:
                    self.wait(None, revives=False)  # of others, until this one is due
                    self._revive_due()
                raise Restarted

    def _until_due(self, *seconds: float | None) -> float:
        """The least of these, and of the time until a worker is to be started again."""
        now = time.monotonic()
        due: list[float] = [
            handle.record.revive_at - now for handle in self.handles if handle.record.revive_at is not None
        ]
        return max(0.0, min([*due, *(s for s in seconds if s is not None)]))

    def _pass_on(self, handle: Any, error: Exception) -> None:
        """The requests of one that is lost, to a successor, to others or back."""
        if not self.counters:
            return  # it was never part of the worker pool
        record, lost = handle.record, self._lost
        for number in handle.groups if self.elastic else ():
            self.counters[number].late = True
        if self.config.on_failure == "restart" and (handle.late or record.may_restart(self.config.max_restarts)):
            record.plan()
            handle.state = WorkerState.RESTARTING
            if self.elastic:
                lost += [RolloutResult(o.number, o.group, lost=True) for o in handle.under_way.give_up()]
                lost.append(news(handle.groups[0]))
            return
        requests = handle.under_way.give_up()
        if self.config.on_failure == "drop":
            handle.state = WorkerState.DROPPED
            for number in handle.groups:
                self.counters[number].dropped = True
            why = f"a worker is dropped, and the others go on without it: {error}"
            lost.append(RolloutResult(0, handle.groups[0], lost=True, warnings=[why]))
            lost += [RolloutResult(request.number, request.group, dropped=True) for request in requests]
            return
        if not requests and (handle.absent or isinstance(error, WorkerHung)):  # it may have got on and done them all
            lost.append(news(handle.groups[0], error))
        lost += [
            RolloutResult(o.number, o.group, lost=True, error=None if i else error) for i, o in enumerate(requests)
        ]

    def _revive_due(self) -> None:
        for handle in self.handles:
            self._revive(handle)

    def _revive(self, handle: Any) -> None:
        """Start it again, if it is due."""
        record = handle.record
        if record.revive_at is not None and record.revive_at <= time.monotonic():
            record.revive_at = None
            record.signs = ()
            handle.state = WorkerState.DEAD
            handle.start()

    def _raise_once(self, handle: Any) -> None:
        """The cause of its end, which is then not raised again for its requests."""
        for result in self._lost:
            if result.error is handle.cause:
                result.error = None
        assert handle.cause is not None
        raise handle.cause


class SlowConstruction:
    """Logs what the construction of a collector waits for, once it takes long.

    Args:
        missing: that; empty: nothing.
    """

    def __init__(self, missing: Callable[[], str]) -> None:
        self._missing = missing
        self._begun = time.monotonic()
        self._look_at = self._begun + SLOW_S
        self._logged = ""
        self._again_at = 0.0

    def look(self) -> None:
        """Log it if it is time to: when something else is missing than before, or after a while."""
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + SLOW_S
        missing = self._missing()
        if missing and (missing != self._logged or now >= self._again_at):
            _log.warning("Waiting for %s (%.0f s so far).", missing, now - self._begun)
            self._logged = missing
            self._again_at = now + SLOW_AGAIN_S


def listed(noun: str, numbers: Sequence[int]) -> str:
    """As "worker 3" or "workers 3, 5", for people; not more than ten of them."""
    shown = ", ".join(map(str, numbers[:10])) + (", ..." if len(numbers) > 10 else "")
    return f"{noun} {shown}" if len(numbers) == 1 else f"{noun}s {shown}"


def news(group: int, error: Exception | None = None) -> RolloutResult:
    """About no request: who can be given any has changed, at the worker of a group."""
    return RolloutResult(0, group, lost=True, error=error)


def unlike(where: Where, expected: GroupInfo, got: GroupInfo) -> EnvError:
    """The error for environments of a node that came later, and are not as many as was taken for granted."""
    error = EnvError(
        f"{where} has come with {got.num_envs} environments in a batch of shape {got.batch_shape} ({got.name}), where "
        f"{expected.num_envs} in {expected.batch_shape} ({expected.name}) were expected: with min_nodes, all entries "
        f"of create_env_fn have to make equally many."
    )
    error.worker, error.phase = where.worker, "construct"
    return error
