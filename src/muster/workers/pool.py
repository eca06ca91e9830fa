"""The pool: all workers of a collector, and the frame counters of all groups."""

from __future__ import annotations

import itertools
import time
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from muster.env_spec import EnvSpec
from muster.errors import MusterError, WorkerDied, WorkerNotStarted
from muster.memory.slots import Slot
from muster.observing.stats import InferenceStats, WorkerStats
from muster.rollout.request import RolloutRequest
from muster.utils.forks import Owner
from muster.workers.counters import FrameCounters
from muster.workers.effects import part_of
from muster.workers.messages import RolloutResult, WorkerStatus
from muster.workers.requests import Request
from muster.workers.under_way import UnderWay

if TYPE_CHECKING:
    from muster.restore.crash_notes import CrashNotes, LocalLog
    from muster.workers.worker import Worker


class Handle(ABC):
    """The pool's end of a worker, or of a node with workers of its own.

    Attributes:
        index: number of the worker or node.
        groups: numbers of its groups.
        under_way: its requests whose results were not taken.
    """

    def __init__(self, index: int, groups: Sequence[int]) -> None:
        self.index = index
        self.groups = list(groups)
        self.under_way = UnderWay()

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether it runs, as far as is known."""

    @property
    @abstractmethod
    def reviving(self) -> bool:
        """Whether its pool will restart it."""

    @property
    @abstractmethod
    def absent(self) -> bool:
        """Whether its node has not joined or was lost. Nothing is requested from an absent node."""

    @abstractmethod
    def prepared(self, policy: str) -> bool:
        """Return whether the layouts are still valid for rollouts of this policy."""

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

    @abstractmethod
    def end(self) -> None:
        """Kill the worker or end the session. May be called again."""

    @abstractmethod
    def close(self, *, wait: bool = True) -> None:
        """Close the environments and end the worker, by force if necessary. May be called again.

        Without ``wait``, only start to close: many workers close at the same time, and share one
        deadline. Raises the error of an environment; the worker has ended nevertheless.
        """


class Servers(Protocol):
    """The interface of central inference for the collector: one ``InferenceServer``, or the servers
    of all nodes.
    """

    def settle(self) -> None: ...
    def ask(self, method: str, *args: Any, group: int | None = None) -> Any: ...
    def stats(self) -> InferenceStats: ...


class Pool(ABC):
    """All workers of a collector, and the frame counters of their groups, as schedules use them.

    1. A pool is made with handles of workers that do not run yet (see ``SupervisedPool``), or of
       the one that is the caller's thread (``LocalPool``).
    2. ``_open`` makes the counters: from here on, it can be used.
    3. ``handle(group).submit`` gives a request to the worker of a group. The pool has it until ``next_result``
       returns what came of it. Each request has one result, which never changes.
    4. ``call`` sends a request other than a rollout to all workers, and waits for their answers.
    5. ``close`` ends all workers.

    The counters include a result as soon as the pool has it; ``untaken`` of its steps are in
    results that the schedule has not taken.

    Attributes:
        handles: the workers, in the order of their first groups.
        counters: frame counters, by group number; empty before ``_open``.
        owner: process that owns the workers. None: they run in this thread, and a fork has its own
            copies.
        numbers: numbers for new requests.
        waited: nanoseconds spent waiting for results.
        unwarned: texts of warnings that were not given to the user, see ``give_warnings``.
        elastic: workers may be absent (see ``Handle``), at the start and later.
        changes_memory: slots may get other memory with their rollouts (``Slot.adopt``), so that no
            batch is made before.
        local: the only worker, if it runs in this thread: it is never waited for, lost or dropped.
        server: the inference server; None: the workers run the policy.
    """

    elastic = False
    changes_memory = False
    local: Worker | None = None
    server: Servers | None = None

    def __init__(self, owner: Owner | None) -> None:
        self.handles: Sequence[Any] = ()
        self.owner = owner
        self.counters: Sequence[FrameCounters] = ()
        self.numbers = itertools.count(1)
        self.waited = 0
        self._of: dict[int, Any] = {}  # handle of each group
        self._returned: deque[RolloutResult] = (
            deque()
        )  # of requests that no worker has any more
        self._turn = 0  # index of the handle whose results are taken next
        self.unwarned: list[str] = []
        self._warned: set[str] = set()  # all texts, which are given to the user once

    def _open(self, infos: Sequence[EnvSpec], first_env: int = 0) -> None:
        """Make the counters of groups with these descriptions.

        Args:
            first_env: global number of the first environment.
        """
        self._of = {
            number: handle for handle in self.handles for number in handle.groups
        }
        firsts = itertools.accumulate(
            (info.num_envs for info in infos), initial=first_env
        )
        counters = [
            FrameCounters(info, np.arange(first, first + info.num_envs))
            for info, first in zip(infos, firsts, strict=False)
        ]
        first_group = self.handles[0].groups[0]
        if first_group:
            # On a node the first number need not be 0; the pool of a node is only indexed.
            by_group = dict(enumerate(counters, first_group))
            self.counters = cast("Sequence[FrameCounters]", by_group)
        else:
            self.counters = counters

    @abstractmethod
    def wait(self, timeout: float | None) -> None:
        """Wait until a worker has sent a message or is lost, and process all messages.

        May return early; at once if there are results.
        """

    # --- what only some pools have ----------------------------------------------------------------

    @property
    def notes(self) -> CrashNotes | None:
        """Action logs of the groups; None: they are kept by nodes, or not at all."""
        return None

    @property
    def log(self) -> LocalLog | None:
        """Adds rollouts in this thread to the action logs; None: there is none."""
        return None

    @property
    def engine(self) -> str:
        """See ``CollectorStats``."""
        return ""

    def hold(self) -> AbstractContextManager[Any]:
        """Return a context. Requests submitted inside are simultaneous for a server, and one
        message for a node.
        """
        return nullcontext()

    def start_dead(self, *, absent: bool) -> None:  # noqa: B027 (a worker in this thread is alive)
        """Start dead workers that will not be restarted: the absent ones if ``absent``, otherwise
        all others.

        Raises the reason if a worker that is not absent cannot be started.
        """

    def welcome(self) -> None:
        """Start absent workers whose absence was raised before, and process new arrivals and losses
        without waiting.
        """
        self.start_dead(absent=True)
        self.wait(0.0)

    # --- rollouts ---------------------------------------------------------------------------------

    def handle(self, group: int) -> Any:
        """Return the handle of the worker or node that has a group."""
        return self._of[group]

    def next_result(self) -> RolloutResult:
        """Wait for the next result of any request.

        Workers with results at the same time are served round-robin.
        """
        while True:
            result = self._take()
            if result is not None:
                break
            began = time.perf_counter_ns()
            try:
                self.wait(None)
            finally:
                self.waited += time.perf_counter_ns() - began
        if result.warnings:
            self.warn_later(result)
        if isinstance(result.error, WorkerNotStarted):
            # One failed start is raised: the next call tries all again, and raises what is still
            # wrong then.
            self._forget_errors(lambda error: isinstance(error, WorkerNotStarted))
        return result

    def add_result(self, result: RolloutResult) -> None:
        """Add a result of no request, or of one that no worker has any more."""
        self._returned.append(result)

    def ready_result(self) -> RolloutResult | None:
        """Return a result that has already arrived, or None."""
        result = self._take()
        if result is not None and result.warnings:
            self.warn_later(result)
        return result

    def stop(self) -> None:
        """End all requested rollouts after their current step."""
        for handle in self.handles:
            outstanding = handle.under_way.outstanding
            if outstanding:
                handle.stop(max(outstanding))

    @property
    def outstanding(self) -> bool:
        """Whether there are requests whose results were not taken."""
        if self._returned:
            return True
        # Most results are taken in the order of the workers: begin with those that come next.
        later = self.handles[self._turn :]
        earlier = self.handles[: self._turn]
        return any(
            handle.under_way.outstanding for part in (later, earlier) for handle in part
        )

    @property
    def untaken(self) -> int:
        """The number of steps in results that were not taken or have not arrived yet; the counters
        already include them.
        """
        in_results: int = sum(
            result.executed - sum(result.discarded.values())
            for handle in self.handles
            for result in handle.under_way.results
        )
        return in_results + sum(counts.without_result for counts in self.counters)

    @property
    def has_bad_news(self) -> bool:
        """Whether an untaken result has an error: requests lost with it are resubmitted only after
        it was raised.
        """
        return any(result.error is not None for result in self._untaken())

    def _untaken(self) -> Iterator[RolloutResult]:
        yield from self._returned
        for handle in self.handles:
            yield from handle.under_way.results

    def _take(self) -> RolloutResult | None:
        if self._returned:
            return self._returned.popleft()
        for step in range(len(self.handles)):
            turn = (self._turn + step) % len(self.handles)
            result: RolloutResult | None = self.handles[turn].under_way.take()
            if result is not None:
                self._turn = turn + 1
                return result
        return None

    def _forget_errors(self, is_raised: Callable[[Exception], bool]) -> None:
        """Replace untaken results by ones without the error, if it ``is_raised`` already."""
        for place, result in enumerate(self._returned):
            if result.error is not None and is_raised(result.error):
                self._returned[place] = replace(result, error=None)
        for handle in self.handles:
            handle.under_way.forget_errors(is_raised)

    # --- warnings ---------------------------------------------------------------------------------

    def warn_later(self, result: RolloutResult) -> None:
        """Keep the warnings of a result for ``give_warnings``."""
        for text in result.warnings:
            if text not in self._warned:
                self._warned.add(text)
                self.unwarned.append(text)

    def give_warnings(self) -> None:
        """Issue the workers' warnings.

        Filters can turn them into exceptions, so call this where one loses no data.
        """
        while self.unwarned:
            warnings.warn(self.unwarned.pop(0), stacklevel=3)

    # --- workers ----------------------------------------------------------------------------------

    @property
    def num_envs(self) -> int:
        return sum(counts.info.num_envs for counts in self.counters)

    def check_alive(self) -> None:
        """Raise if all workers have been dropped."""
        if self.local is None and all(counts.dropped for counts in self.counters):
            self.give_warnings()
            raise WorkerDied(
                "all workers have been dropped, so nothing can be collected any more. Each was"
                " warned about with its cause; on_failure='restart' starts workers again."
            )

    def is_dropped(self, handle: Handle) -> bool:
        """Return whether all groups of a handle are dropped."""
        return all(self.counters[number].dropped for number in handle.groups)

    def worker_stats(self) -> tuple[WorkerStats, ...]:
        """Return the statistics of all workers, except one in this thread."""
        return tuple(
            stats for handle in self.handles for stats in handle.stats(self.counters)
        )

    def call(self, request: Request) -> list[Any]:
        """Return the answers of all workers that have a part in the request."""
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
            closing.callback(self._drop_results)
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

    def _drop_results(self) -> None:
        for handle in self.handles:
            while handle.under_way.take() is not None:
                pass


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
    frames = sum(counts.delivered for counts in own)
    busy_s = sum(counts.timing.total for counts in own) / 1e9
    return WorkerStats(
        index,
        status.pid,
        status.state,
        status.phase,
        tuple(int(i) for counts in own for i in counts.env_ids),
        frames,
        frames / every if every else 0.0,
        frames / busy_s if busy_s else 0.0,
        busy_s,
        status.restarts,
        max(counts.lag for counts in own),
        node,
    )
