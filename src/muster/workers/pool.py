"""All workers of a collector, and the books: what was executed, delivered, discarded, and is on its way."""

from __future__ import annotations

import itertools
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from muster.errors import MusterError, WorkerDied
from muster.memory.slots import Slot
from muster.memory.specs import Array
from muster.observing.stats import InferenceStats, WorkerStats
from muster.rollout.progress import Timing
from muster.utils.forks import Owner
from muster.utils.interrupts import allowed
from muster.workers.messages import GroupInfo, Order, Report
from muster.workers.requests import Request
from muster.workers.worker import Worker, phase_ended_by

if TYPE_CHECKING:
    from muster.workers.proxy import WorkerProxy


class Handle(Protocol):
    """A worker as its worker pool sees it. Orders and calls are followed one after another, as they came.

    Attributes:
        index: number of the worker.
        groups: numbers of its groups.
        outstanding: orders that nobody has taken the report of, by number, oldest first.
        untaken: reports that have come and nobody has taken.
        alive: it has a process or thread.
        reviving: it has none, and will be started again by whoever watches over it.
        absent: its node is not there, so that nothing is ordered from it.
    """

    @property
    def index(self) -> int: ...
    @property
    def groups(self) -> Sequence[int]: ...
    @property
    def outstanding(self) -> dict[int, Order]: ...
    @property
    def untaken(self) -> Sequence[Report]: ...
    @property
    def alive(self) -> bool: ...
    @property
    def reviving(self) -> bool: ...
    @property
    def absent(self) -> bool: ...

    def start(self) -> None:
        """Start it again."""

    def end(self) -> None:
        """End it by force; not its environments in this thread. May be called again."""

    def kill(self) -> None:
        """Let its process end; from another thread."""

    def prepared(self, policy: str) -> bool:
        """``layouts`` would say the same as before."""

    def submit(self, order: Order, slot: Slot) -> None:
        """Let it follow an order. Does not wait."""

    def take(self) -> Report | None:
        """The next report that is there."""

    def stop(self, number: int) -> None:
        """Let orders up to this number end after their current step."""

    def withdraw(self) -> list[Order]:
        """Take back orders that it has not seen yet."""

    def call(self, request: Request) -> Any:
        """Wait for what it answers or raises."""

    def close(self, *, wait: bool = True) -> None:
        """End it, with its environments, by force if need be. Nothing can be asked of it any more. May be called again.

        Args:
            wait: False lets it begin to.

        Raises:
            Exception: what closing an environment raised; it is closed all the same.
        """


class LocalWorker:
    """A worker in the caller's own thread: what is ordered is done at once."""

    alive, reviving, absent = True, False, False
    untaken: Sequence[Report] = ()

    def __init__(self, worker: Worker) -> None:
        self.worker, self.index = worker, worker.index
        self.groups = [group.number for group in worker.groups]
        self.outstanding: dict[int, Order] = {}
        self._reports: deque[Report] = deque()

    def prepared(self, policy: str) -> bool:
        return self.worker.prepared(policy)

    def submit(self, order: Order, slot: Slot) -> None:
        self._reports.append(self.worker.run(order, slot.lanes[order.lane]))

    def take(self) -> Report | None:
        return self._reports.popleft() if self._reports else None

    def stop(self, number: int) -> None:
        """Nothing is under way while somebody else can act."""

    def withdraw(self) -> list[Order]:
        """Nothing waits to be seen."""
        return []

    def call(self, request: Request) -> Any:
        try:
            with allowed():
                return request.run(self.worker)
        except BaseException as error:
            phase_ended_by(error, self.worker.progress)
            raise

    def start(self) -> None:
        """It is always there."""

    def end(self) -> None:
        """Its environments are left to the user."""

    def kill(self) -> None:
        """There is no process of its own."""

    def close(self, *, wait: bool = True) -> None:
        if wait:
            self.worker.close()
        else:
            self.worker.profile(None)


@dataclass
class Account:
    """The books of one group, over all that ever ran it.

    Attributes:
        env_ids: global numbers of its environments.
        in_flight: steps of lanes that nobody has got yet.
        partial: those of them in the lane that is not complete.
        delivered: frames in batches.
        lag: see ``WorkerStats.policy_lag``.
        clock: episode numbers and steps as of the last report, ``[2, B]``; None: nothing was reported.
        dropped: nobody runs it any more.
        late: its node was not there all the time.
        unseen: steps at most that were executed and nobody could count, since their node is lost.
    """

    info: GroupInfo
    env_ids: Array
    executed: int = 0
    in_flight: int = 0
    partial: int = 0
    delivered: int = 0
    lag: int = 0
    discarded: Counter[str] = field(default_factory=Counter)
    timing: Timing = field(default_factory=Timing)
    clock: Array | None = None
    dropped: bool = False
    late: bool = False
    unseen: int = 0

    def add(self, report: Report) -> None:
        """Enter what came of an order, once."""
        if report.entered:
            return
        report.entered = True
        self.executed += report.executed
        kept = report.executed
        if report.discarded:
            self.discarded.update(report.discarded)
            kept -= sum(report.discarded.values())
        self.in_flight += kept
        self.partial = 0 if report.error is None and not report.lost else self.partial + kept
        timing, more = self.timing, report.timing
        timing.env += more.env
        timing.policy += more.policy
        timing.copy += more.copy
        timing.total += more.total

    def cut_short(self, steps: int) -> None:
        """The lane at work has so many steps in all, which nobody has reported."""
        more = max(0, steps - self.partial)
        self.executed += more
        self.in_flight += more
        self.partial += more

    def discard(self, reason: str, steps: int) -> None:
        """Steps on their way will never arrive."""
        if steps:
            self.discarded[reason] += steps
            self.in_flight -= steps

    def give_up(self, reason: str) -> None:
        """The lane that is not complete never will be."""
        self.discard(reason, self.partial)
        self.partial = 0


class Watch(Protocol):
    """Waits for workers elsewhere, and deals with those that fail."""

    def wait(self, timeout: float | None) -> None:
        """Until some worker has something to say, or is lost."""

    def take_lost(self) -> list[Report]:
        """Reports in the place of workers that were lost since the last call."""


class Servers(Protocol):
    """Inference, as the collector sees it: one ``InferenceServer``, or those of all nodes."""

    def held(self) -> AbstractContextManager[None]: ...
    def settle(self) -> None: ...
    def ask(self, method: str, *args: Any, group: int | None = None) -> Any: ...
    def stats(self) -> InferenceStats: ...


class WorkerPool:
    """Workers, by the groups that they run.

    Args:
        handles: of the workers, by their first group.
        infos: of the groups.
        watch: for workers that are not in this thread.
        local: the only worker, where it is in this thread: it needs no waiting for, and is never lost or dropped.

    Attributes:
        owner: the process whose workers they are; None: they are in this thread, and a fork has copies of them.
        server: acts for the workers; None: they do.
        numbers: of orders.
        elastic: workers may be absent (see ``Handle``) from the beginning, and again later.
        waited: nanoseconds, for reports.
    """

    def __init__(
        self,
        handles: Sequence[Handle],
        infos: Sequence[GroupInfo],
        watch: Watch | None = None,
        *,
        local: Worker | None = None,
    ) -> None:
        self.handles, self._watch, self.local = list(handles), watch, local
        self.owner = None if watch is None else Owner("collector", "workers")
        firsts = itertools.accumulate((info.num_envs for info in infos), initial=0)
        self.accounts = [
            Account(info, np.arange(first, first + info.num_envs)) for info, first in zip(infos, firsts, strict=False)
        ]
        self.num_envs = sum(info.num_envs for info in infos)
        self._of = {number: handle for handle in handles for number in handle.groups}
        self.numbers = itertools.count(1)
        self._reports: deque[Report] = deque()  # of lost workers
        self._turn = 0
        self._warnings: dict[str, None] = {}  # texts, each once, whichever worker noted it
        self._warned = 0
        self.server: Servers | None = None
        self.elastic = False
        self.waited = 0

    def handle(self, group: int) -> Handle:
        return self._of[group]

    def welcome(self) -> None:
        """Take in which workers have come meanwhile, and call again those whose absence has been raised."""
        start_dead(self, absent=True)
        if self._watch is not None:
            self._watch.wait(0.0)
            self._reports += self._watch.take_lost()

    def together(self) -> AbstractContextManager[None]:
        """Workers that are given work in this context begin at the same time, as a server sees it."""
        return nullcontext() if self.server is None else self.server.held()

    def check_alive(self) -> None:
        """Raise if all workers have been dropped."""
        if self.local is None and all(account.dropped for account in self.accounts):
            raise WorkerDied(
                "all workers have been dropped, so nothing can be collected any more. Each was warned about with its "
                "cause; on_failure='restart' starts workers again."
            )

    @property
    def has_bad_news(self) -> bool:
        """An error is among the reports that nobody has taken: what failed with it is not to be repeated before."""
        untaken = [*self._reports, *(report for handle in self.handles for report in handle.untaken)]
        return any(report.error is not None for report in untaken)

    @property
    def outstanding(self) -> int:
        """Orders without a report."""
        return sum(len(handle.outstanding) for handle in self.handles) + len(self._reports)

    def next_report(self) -> Report:
        """Wait for what comes of an order, whichever is first; workers that are ready at once take turns."""
        while True:
            report = self._reports.popleft() if self._reports else self._take()
            if report is not None:
                self.enter(report)
                return report
            assert self._watch is not None, "nothing was ordered"
            began = time.perf_counter_ns()
            try:
                self._watch.wait(None)
            finally:
                self.waited += time.perf_counter_ns() - began
            self._reports += self._watch.take_lost()

    def enter(self, report: Report) -> None:
        """Into the account of its group, and what is to be warned of."""
        self.accounts[report.group].add(report)
        if report.warnings:
            self._warnings.update(dict.fromkeys(report.warnings))

    def stop(self) -> None:
        """Let all rollouts that have been ordered end after their current step."""
        for handle in self.handles:
            if handle.outstanding:
                handle.stop(max(handle.outstanding))

    def withdraw(self) -> None:
        """Take back orders that no worker has seen yet."""
        for handle in self.handles:
            handle.withdraw()

    def worker_stats(self) -> tuple[WorkerStats, ...]:
        """Of workers that are not in this thread."""
        every = sum(account.delivered for account in self.accounts)
        return () if self._watch is None else tuple(self._stats_of(cast("WorkerProxy", h), every) for h in self.handles)

    def _stats_of(self, handle: WorkerProxy, every: int) -> WorkerStats:
        accounts = [self.accounts[number] for number in handle.groups]
        frames, busy = sum(a.delivered for a in accounts), sum(a.timing.total for a in accounts) / 1e9
        state = "working" if handle.alive else "dead"
        state = "dropped" if self._is_dropped(handle) else "joining" if handle.absent else state
        return WorkerStats(
            handle.index,
            handle.process.child.pid,
            state,
            handle.phase.name.lower() if handle.alive else "join" if handle.absent else state,
            tuple(int(i) for a in accounts for i in a.env_ids),
            frames,
            frames / every if every else 0.0,
            frames / busy if busy else 0.0,
            busy,
            handle.config.generation,
            max(a.lag for a in accounts),
            handle.host.where(),
        )

    def call(self, request: Request) -> list[Any]:
        """What every worker answers."""
        return [answer for handle in self.handles for answer in self.ask(handle, request)]

    def ask(self, handle: Handle, request: Request) -> list[Any]:
        """What a worker answers, as the only entry of a list; an empty list if it is dropped."""
        if self._is_dropped(handle):
            return []
        try:
            return [handle.call(request)]
        except MusterError:
            if self._is_dropped(handle):  # just now
                return []
            raise

    def call_for(self, groups: Mapping[int, Any], request: Callable[[dict[int, Any]], Request]) -> None:
        """Ask the workers of ``groups``, each about its part of the mapping."""
        for handle in self.handles:
            part = {number: groups[number] for number in handle.groups if number in groups}
            if part and not self._is_dropped(handle):
                self.ask(handle, request(part))

    def close(self, *, close_env: bool = True) -> None:
        """End all workers, whatever one of them raises.

        Args:
            close_env: False leaves environments open that are in this thread.
        """
        for handle in self.handles:
            handle.close(wait=False)
        with ExitStack() as closing:
            closing.callback(self._enter_last_reports)
            for handle in self.handles if close_env else ():
                closing.callback(self._close, handle)

    def _close(self, handle: Handle) -> None:
        try:
            handle.close()
        except Exception:
            raise
        except BaseException:  # Ctrl-C: whoever has waited long enough does not want to wait for the others
            for other in self.handles:
                other.end()
            raise

    def _enter_last_reports(self) -> None:
        for handle in self.handles:
            while (report := handle.take()) is not None:
                self.accounts[report.group].add(report)

    def _is_dropped(self, handle: Handle) -> bool:
        return self.accounts[handle.groups[0]].dropped

    def _take(self) -> Report | None:
        for step in range(len(self.handles)):
            turn = (self._turn + step) % len(self.handles)
            report = self.handles[turn].take()
            if report is not None:
                self._turn = turn + 1
                return report
        return None


def give_warnings(pool: WorkerPool) -> None:
    """Warn of what workers have noted. A warning may be an error, and the caller must lose nothing then."""
    if pool._warned == len(pool._warnings):
        return
    for text in list(pool._warnings)[pool._warned :]:
        pool._warned += 1
        warnings.warn(text, stacklevel=3)


def start_dead(pool: WorkerPool, *, absent: bool) -> None:
    """Start workers that are dead and that nobody else will start: those that are absent, or all others."""
    for handle in pool.handles:
        if handle.absent is absent and not (handle.alive or handle.reviving or pool._is_dropped(handle)):
            handle.start()
