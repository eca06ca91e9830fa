"""The worker pool: all workers of a collector, and the frame counters of all groups."""

from __future__ import annotations

import itertools
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

import numpy as np

from muster.env_spec import EnvSpec
from muster.errors import MusterError, WorkerDied, WorkerNotStarted
from muster.memory.slots import Slot
from muster.observing.stats import InferenceStats, WorkerStats
from muster.rollout.request import RolloutRequest
from muster.utils.forks import Owner
from muster.workers.counters import FrameCounters
from muster.workers.effects import log_request, part_of, run_request
from muster.workers.lives import Proxy, Watcher
from muster.workers.messages import RolloutResult, WorkerStatus
from muster.workers.requests import Request
from muster.workers.under_way import UnderWay
from muster.workers.worker import Worker, phase_ended_by

if TYPE_CHECKING:
    from muster.restore.crash_notes import CrashNotes, LocalLog


class LocalWorker:
    """A worker in the caller's thread, with the methods of ``Proxy``.

    It executes requests synchronously.
    """

    alive = True
    reviving = False
    absent = False

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.index = worker.index
        self.groups = [group.number for group in worker.groups]
        self.under_way = UnderWay()

    def prepared(self, policy: str) -> bool:
        return self.worker.prepared(policy)

    def stats(self, counters: Sequence[FrameCounters]) -> list[WorkerStats]:
        return []

    def submit(self, request: RolloutRequest, slot: Slot) -> None:
        self.under_way.add(request, slot)
        self.under_way.finished(self.worker.run(request, slot.lanes[request.lane]))
        self.under_way.fresh.clear()  # there is no supervisor

    def stop(self, number: int) -> None:
        """Do nothing: ``submit`` returns when the rollout is complete."""

    def call(self, request: Request) -> list[Any]:
        try:
            return [run_request(self.worker, request)]
        except BaseException as error:
            phase_ended_by(error, self.worker.progress)
            raise

    def start(self) -> None:
        """Do nothing: the worker needs no process or thread."""

    def end(self) -> None:
        """Do nothing: the environments stay open for the user."""

    def kill(self) -> None:
        """Do nothing: the worker has no process of its own."""

    def close(self, *, wait: bool = True) -> None:
        if wait:
            self.worker.close()
        else:
            self.worker.profile(None)


Handle: TypeAlias = LocalWorker | Proxy


class Servers(Protocol):
    """The interface of central inference for the collector: one ``InferenceServer``, or the servers
    of all nodes.
    """

    def settle(self) -> None: ...
    def ask(self, method: str, *args: Any, group: int | None = None) -> Any: ...
    def stats(self) -> InferenceStats: ...


class WorkerPool:
    """The workers of a collector, and the frame counters of their groups.

    Args:
        handles: the workers, in the order of their first groups.
        infos: descriptions of the groups.
        first_env: global number of the first environment.
        watch: supervisor of the workers; None: the only worker runs in this thread.
        local: the only worker, if it runs in this thread: it is never waited for, lost or dropped.

    Attributes:
        owner: process that owns the workers. None: they run in this thread, and a fork has its own
            copies.
        counters: frame counters, by group number.
        server: inference server; None: the workers run the policy.
        hold: context manager. Requests submitted inside are simultaneous for a server, and one
            message for a node.
        numbers: numbers for new requests.
        elastic: workers may be absent (see ``Proxy``), at the start and later.
        engine: see ``CollectorStats``.
        notes: action logs of the groups; None: they are kept by nodes, or not at all.
        log: adds rollouts in this thread to them; None: there is none.
        waited: nanoseconds spent waiting for results.
    """

    def __init__(
        self,
        handles: Sequence[Handle],
        infos: Sequence[EnvSpec],
        watch: Watcher | None = None,
        *,
        first_env: int = 0,
        local: Worker | None = None,
    ) -> None:
        self.handles = list(handles)
        self._watch = watch
        self.local = local
        self.owner = None if watch is None else Owner("collector", "workers")
        firsts = itertools.accumulate((info.num_envs for info in infos), initial=first_env)
        counters = [
            FrameCounters(info, np.arange(b, b + info.num_envs))
            for info, b in zip(infos, firsts, strict=False)
        ]
        first = handles[0].groups[0]
        # On a node the first number need not be 0; the pool of a node is only indexed.
        self.counters = (
            cast("Sequence[FrameCounters]", dict(enumerate(counters, first))) if first else counters
        )
        self.num_envs = sum(info.num_envs for info in infos)
        self._of = {number: handle for handle in handles for number in handle.groups}
        self.numbers = itertools.count(1)
        self._results: deque[RolloutResult] = deque()  # of requests that no worker has any more
        # numbers of lost requests given by ``give`` that were not given again
        self._lost: set[int] = set()
        self._turn = 0
        self._warnings: dict[str, None] = {}  # distinct texts of all workers, as an ordered set
        self._warned = 0
        self.server: Servers | None = None
        self.hold: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.elastic = False
        self.engine = ""
        self.notes: CrashNotes | None = None
        self.log: LocalLog | None = None
        self.waited = 0

    def handle(self, group: int) -> Handle:
        return self._of[group]

    def give(self, request: RolloutRequest, slot: Slot) -> None:
        """Submit a request to the worker of its group; its result comes from ``ready_result``.

        The sender may not know the last results yet. A request after a lost one is lost too, until
        both are requested again, in order.
        """
        self._lost.discard(request.number)
        if self.counters[request.group].dropped:
            self._results.append(RolloutResult(request.number, request.group, dropped=True))
        elif request.after in self._lost:
            self._lost.add(request.number)
            self._results.append(RolloutResult(request.number, request.group, lost=True))
        else:
            self._of[request.group].submit(request, slot)

    def welcome(self) -> None:
        """Start absent workers whose absence was raised before, and process new arrivals and losses
        without waiting.
        """
        start_dead(self, absent=True)
        if self._watch is not None:
            self._watch.wait(0.0)
            self._results += self._watch.take_lost()

    def check_alive(self) -> None:
        """Raise if all workers have been dropped."""
        if self.local is None and all(counts.dropped for counts in self.counters):
            give_warnings(self)
            raise WorkerDied(
                "all workers have been dropped, so nothing can be collected any more. Each was"
                " warned about with its cause; on_failure='restart' starts workers again."
            )

    @property
    def has_bad_news(self) -> bool:
        """Whether an untaken result has an error: requests lost with it are resubmitted only after
        it was raised.
        """
        return any(result.error is not None for result in self._untaken())

    def _untaken(self) -> Iterator[RolloutResult]:
        yield from self._results
        for handle in self.handles:
            yield from handle.under_way.results
        if self._watch is not None:
            yield from self._watch.lost

    def _forget_failed_starts(self) -> None:
        """One failed start is raised: the next call tries all again, and raises what is still wrong
        then.
        """
        for result in self._untaken():
            if isinstance(result.error, WorkerNotStarted):
                result.error = None

    @property
    def outstanding(self) -> bool:
        """Whether there are requests whose results were not taken."""
        # Most results are taken in the order of the workers: begin with those that come next.
        later = self.handles[self._turn :]
        earlier = self.handles[: self._turn]
        if self._results or any(
            handle.under_way.outstanding for part in (later, earlier) for handle in part
        ):
            return True
        # of workers that could not be started
        return self._watch is not None and bool(self._watch.lost)

    @property
    def untaken(self) -> int:
        """The number of steps in untaken results of nodes that the counters already include."""
        results = (
            result
            for handle in self.handles
            for result in handle.under_way.results
            if result.entered
        )
        return sum(result.executed - sum(result.discarded.values()) for result in results)

    def next_result(self) -> RolloutResult:
        """Wait for the next result of any request.

        Workers with results at the same time are served round-robin.
        """
        while True:
            result = self._take()
            if result is not None:
                self.enter(result)
                if result.error is not None and isinstance(result.error, WorkerNotStarted):
                    self._forget_failed_starts()
                return result
            assert self._watch is not None, "nothing was requested"
            began = time.perf_counter_ns()
            try:
                self._watch.wait(None)
            finally:
                self.waited += time.perf_counter_ns() - began
            self._results += self._watch.take_lost()

    def ready_result(self) -> RolloutResult | None:
        """Return a result that has already arrived, or None."""
        if self._watch is not None:
            self._results += self._watch.take_lost()
        result = self._take()
        if result is not None:
            self.enter(result)
            if result.lost:
                self._lost.add(result.number)
        return result

    def enter(self, result: RolloutResult) -> None:
        """Add a result to the counters of its group, and its warnings to those of the pool."""
        self.counters[result.group].add(result)
        if result.warnings:
            self._warnings.update(dict.fromkeys(result.warnings))

    def stop(self) -> None:
        """End all requested rollouts after their current step."""
        for handle in self.handles:
            if outstanding := handle.under_way.outstanding:
                handle.stop(max(outstanding))

    def worker_stats(self) -> tuple[WorkerStats, ...]:
        """Return the statistics of all workers, except one in this thread."""
        return tuple(stats for handle in self.handles for stats in handle.stats(self.counters))

    def call(self, request: Request) -> list[Any]:
        """Return the answers of all workers that have a part in the request."""
        if self.log is not None:
            self.log.flush()
            assert self.notes is not None
            log_request(request, self.notes, self.handles[0].groups)
        parts = [(handle, part_of(request, handle.groups)) for handle in self.handles]
        return [
            answer
            for handle, part in parts
            if part is not None
            for answer in self.ask(handle, part)
        ]

    def ask(self, handle: Handle, request: Request) -> list[Any]:
        """Return the answers of a handle's workers; an empty list if they are dropped."""
        if self.is_dropped(handle):
            return []
        try:
            return handle.call(request)
        except MusterError:
            if self.is_dropped(handle):  # just now
                return []
            raise

    def close(self, *, close_env: bool = True) -> None:
        """Close all workers, even if one of them raises.

        Args:
            close_env: False: leave the environments of a worker in this thread open.
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
        except BaseException:  # Ctrl-C: end the other workers without waiting for them
            for other in self.handles:
                other.end()
            raise

    def _enter_last_reports(self) -> None:
        for handle in self.handles:
            while (result := handle.under_way.take()) is not None:
                self.counters[result.group].add(result)

    def is_dropped(self, handle: Handle) -> bool:
        """Return whether all groups of a handle are dropped."""
        return all(self.counters[number].dropped for number in handle.groups)

    def _take(self) -> RolloutResult | None:
        if self._results:
            return self._results.popleft()
        for step in range(len(self.handles)):
            turn = (self._turn + step) % len(self.handles)
            result = self.handles[turn].under_way.take()
            if result is not None:
                self._turn = turn + 1
                return result
        return None


def stats_of(
    index: int,
    groups: Sequence[int],
    counters: Sequence[FrameCounters],
    status: WorkerStatus,
    node: str,
) -> WorkerStats:
    """Return the statistics of a worker with these groups; ``counters`` are those of all groups."""
    own = [counters[number] for number in groups]
    every = sum(counts.delivered for counts in counters)
    frames = sum(a.delivered for a in own)
    busy = sum(a.timing.total for a in own) / 1e9
    return WorkerStats(
        index,
        status.pid,
        status.state,
        status.phase,
        tuple(int(i) for a in own for i in a.env_ids),
        frames,
        frames / every if every else 0.0,
        frames / busy if busy else 0.0,
        busy,
        status.restarts,
        max(a.lag for a in own),
        node,
    )


def give_warnings(pool: WorkerPool) -> None:
    """Issue the workers' warnings.

    Filters can turn them into exceptions, so call this where one loses no data.
    """
    if pool._warned == len(pool._warnings):
        return
    for text in list(pool._warnings)[pool._warned :]:
        pool._warned += 1
        warnings.warn(text, stacklevel=3)


def start_dead(pool: WorkerPool, *, absent: bool) -> None:
    """Start dead workers that no supervisor will restart: the absent ones if ``absent``, otherwise
    all others.

    Raises the reason if a worker that is not absent cannot be started.
    """
    for handle in pool.handles:
        if (
            handle.absent is not absent
            or handle.alive
            or handle.reviving
            or pool.is_dropped(handle)
        ):
            continue
        assert pool._watch is not None  # else the only worker is this thread, which is alive
        pool._watch.begin(handle)
        if not (absent or handle.alive or handle.reviving or pool.is_dropped(handle)):
            pool._watch.raise_once(handle)
