"""The proxy of a node, in the worker pool of the main process.

The node is over many sessions the same one for the pool. In each session:

1. ``start``: the session begins, with the setup and the weights as its first messages; the state is
   JOINING. A node that is restarted gets its place and its open requests with them.
2. Its first message arrives: it has joined. With the descriptions of its groups it is RUNNING, once
   it has a place (``assign``). Of an elastic pool, ``join`` makes it RUNNING.
3. Requests are sent as ``LaneRun`` (``submit``, ``hold``, ``release``); ``pump`` handles messages,
   which carry counts since the session began: the differences are added to the counters here.
4. ``lose``: the session is lost. The steps that the node may have made and not reported are bounded
   (``unseen``), its workers get the next generation, and the pool decides about its requests.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from muster.cluster.lane_runs import LaneRuns
from muster.cluster.link import Block
from muster.cluster.messages import NodeSetup, Told
from muster.cluster.node_main import NodeMain
from muster.cluster.nodes import Nodes
from muster.cluster.session import BEAT_S, Session
from muster.errors import BadOption, VersionMismatch
from muster.memory.slots import Slot
from muster.observing.stats import WorkerStats
from muster.restore.crash_report import CrashDirectory
from muster.restore.registered import with_later_ids
from muster.rollout.request import RolloutRequest
from muster.utils.interrupts import postponed
from muster.workers.config import WorkerPlace
from muster.workers.counters import FrameCounters, NodeCounts
from muster.workers.failures import Where, node_lost
from muster.workers.life import WorkerState
from muster.workers.messages import (
    CLOSED,
    RolloutResult,
    Tell,
    WorkerStatus,
    open_objects,
)
from muster.workers.pool import stats_of
from muster.workers.requests import NOT_FOR_ABSENT, Request
from muster.workers.supervision import Proxy, SupervisedPool

CLOSE_S = 5.0  # seconds beyond the deadline of its workers


class NodeProxy(Proxy):
    """Implements ``Proxy`` for all workers of a node, which has a worker pool of its own.

    Args:
        setup: the first message of every session.
        policy: pickled, for all nodes.
        pool: of all nodes.
        nodes: makes its sessions.
        crash_directory: for crash reports of all nodes.
        apart: every rollout is sent back by itself, because a batch must not wait for other
            rollouts of the node.

    Attributes:
        setup: with the generations of the workers in the next session.
        error: why the node is lost.
        told: the state of the node at its last message.
    """

    def __init__(
        self,
        index: int,
        setup: NodeSetup,
        policy: Block,
        pool: SupervisedPool,
        nodes: Nodes,
        crash_directory: CrashDirectory,
        *,
        apart: bool,
    ) -> None:
        super().__init__(index, setup.config.groups, pool)
        self.setup = setup
        self._policy = policy
        self._nodes = nodes
        self._crash_directory = crash_directory
        comes_back = setup.buffer is None
        self._lane_runs = LaneRuns(
            self.groups,
            apart=apart,
            comes_back=comes_back,
            adopts=nodes.carrier.gives_memory,
        )
        self.error: Exception | None = None
        self.told = Told()
        self._host = ""  # where it has joined last
        self.session: Session
        self._is_there = False  # it has joined, in this session
        self._held: list[RolloutRequest] | None = None  # to be sent together
        self._server_knows: dict[
            str, Sequence[Any]
        ] = {}  # by method; sent again in later sessions

    # --- its state --------------------------------------------------------------------------------

    @property
    def absent(self) -> bool:
        """It has not joined, and the others do not wait for it."""
        return self._pool.elastic and self.life.state not in (
            WorkerState.RUNNING,
            WorkerState.CLOSING,
        )

    @property
    def late(self) -> bool:  # type: ignore[override]
        return self.absent and self.session.late

    @property
    def name(self) -> str:
        """Its number and host, for the user."""
        return f"{self.index} ({self._host})" if self._host else f"{self.index}"

    def stats(self, counters: Sequence[FrameCounters]) -> list[WorkerStats]:
        found = []
        for place, worker in enumerate(self.setup.config.workers):
            status = WorkerStatus(0, "working", "join", worker.generation)
            if self.told.workers:
                status = self.told.workers[place]
            if not self.alive:
                status = replace(status, state="dead", phase="dead")
            if self.absent:
                status = replace(status, state="joining", phase="join")
            if counters[worker.groups[0]].dropped:
                phase = status.phase if self.alive or self.absent else "dropped"
                status = replace(status, state="dropped", phase=phase)
            found.append(
                stats_of(worker.index, worker.groups, counters, status, self.name)
            )
        return found

    # --- its sessions -----------------------------------------------------------------------------

    def start(self) -> None:
        """Start a session.

        The node gets its place, and the requests that its predecessor had not completed.
        """
        self._owner.check()
        self.life.check_next(WorkerState.JOINING)
        self.session = self._nodes.session(self.index)
        self.infos = None
        self.error = None
        self._held = None
        self.question.forget_answer()
        self.told = Told()
        self.life.has_started(WorkerState.JOINING)
        try:
            self.session.post(
                Tell(NodeMain.set_up, (self.setup,)),
                self._policy,
                next(self._lane_runs.tags),
            )
            self._nodes.post_weights(self.index)
            self.session.post(Tell(NodeMain.start))
            if self.place is not None and not self._pool.elastic:
                self._take_place(self.place)
                self._held = self.under_way.requests()
                self.release()
        except BaseException:
            self.session.lose("it was given up while it was started")
            self.life.become(WorkerState.DEAD)
            raise

    def assign(self, place: WorkerPlace) -> None:
        """Send it its place. An absent node gets it when it joins, without an answer."""
        self.place = place
        if self.infos is not None:
            if self.life.state is WorkerState.JOINING:
                self.life.become(WorkerState.RUNNING)
            self._ask(NodeMain.assign, place)

    def refuse(self, error: Exception) -> None:
        """Do not use a node that has joined, because of this error."""
        self.error = error
        self.infos = None

    def join(self) -> None:
        """Use a node that has joined after the others began."""
        assert self.place is not None
        self.life.become(WorkerState.RUNNING)
        self._take_place(self.place)

    def _take_place(self, place: WorkerPlace) -> None:
        self.session.post(Tell(NodeMain.assign, (place,)))
        for method, args in self._server_knows.items():
            self.session.post(Tell(NodeMain.ask_server, (method, args)))

    def pump(self) -> None:
        """Take all messages from the inbox."""
        while self.alive and self.session.inbox:
            message, block, tag = self.session.inbox.popleft()
            if isinstance(message, Exception):
                what = f"{type(message).__name__}: {message}"
                self.session.lose(f"its message cannot be unpickled ({what})")
                return
            if block is not None:
                try:
                    self._lane_runs.has_arrived(tag, block)
                except ValueError as error:
                    self.session.lose(f"its rollout does not fit: {error}")
                    return
            try:
                results = [open_objects(result) for result in message.results]
            except BadOption as error:
                self.session.lose(str(error))
                return
            self._take_note(replace(message, results=results) if results else message)

    def lose(self, why: str) -> Exception:
        """Handle the end of the session: count the steps of its open requests.

        Returns the error.
        """
        self.session.lose(why)
        self._lane_runs.forget()
        error = self.error or self._lost()
        self.life.is_lost(error)
        is_closing = self.life.state is WorkerState.CLOSING
        self.life.become(WorkerState.CLOSED if is_closing else WorkerState.DEAD)
        requested = dict.fromkeys(self.groups, 0)
        for request in self.under_way.requests() if self._is_there else ():
            lane = self.under_way.outstanding[request.number].lane
            requested[request.group] += lane.T * lane.B
        for number, steps in requested.items() if self._pool.counters else ():
            self._pool.counters[number].lose_node(steps)
        if self._is_there and self.life.state is WorkerState.DEAD:
            self._prepare_successor()
        self._is_there = False
        return error

    def _lost(self) -> Exception:
        """The error for the lost session."""
        if self.session.mismatch:
            return VersionMismatch(self.session.lost)
        why = f"node {self.index}: {self.session.lost}"
        return node_lost(self.where(), phase=self.phase, why=why)

    @property
    def phase(self) -> str:
        """The phase of the worker with the oldest request; or "join" or "construct"."""
        if not self._is_there:
            return "join"
        return self._worker()[1].phase if self.told.workers else "construct"

    def _worker(self) -> tuple[int, Any]:
        """The worker with the oldest request, or the first worker: its place on the node, and its
        state.
        """
        requests = self.under_way.requests()
        group = requests[0].group if requests else self.groups[0]
        workers = self.setup.config.workers
        place = next(n for n, worker in enumerate(workers) if group in worker.groups)
        return place, self.told.workers[place] if self.told.workers else None

    def where(self) -> Where:
        """The worker that errors of the node name."""
        place, told = self._worker()
        worker = self.setup.config.workers[place]
        restarts = worker.generation if told is None else told.restarts
        return Where(
            worker.index,
            None if told is None else told.pid or None,
            restarts,
            node=self.name,
        )

    def _prepare_successor(self) -> None:
        """Give its workers the next generation."""
        config = self.setup.config
        restarts = [status.restarts for status in self.told.workers]
        if not restarts:
            restarts = [worker.generation for worker in config.workers]
        workers = [
            replace(worker, generation=number + 1)
            for worker, number in zip(config.workers, restarts, strict=True)
        ]
        registered = config.registered and with_later_ids(config.registered)
        self.setup = replace(
            self.setup, config=replace(config, workers=workers, registered=registered)
        )

    # --- Proxy -----------------------------------------------------------------------------------

    def submit(self, request: RolloutRequest, slot: Slot) -> None:
        self.under_way.add(request, slot)
        if self._held is not None:
            self._held.append(request)
        else:
            self._held = [request]
            self.release()

    def hold(self) -> None:
        """Send nothing until ``release``."""
        self._held = []

    def release(self) -> None:
        """Send all requests since ``hold`` as one message.

        Lanes will be received in their slots.
        """
        held, self._held = self._held, None
        if not held or self.reviving:
            return
        if not self.alive:
            self._pool.begin(self)  # sends all open requests
            return
        outstanding = self.under_way.outstanding
        runs, expects = self._lane_runs.of(
            [(request, outstanding[request.number].slot) for request in held]
        )
        self.session.post(Tell(NodeMain.follow, (runs,)), expects=expects)

    def stop(self, number: int) -> None:
        if self.alive:
            self.session.post(Tell(NodeMain.stop, (number,), urgent=True))

    @postponed()
    def call(self, request: Request) -> list[Any]:
        if self.absent and isinstance(request, NOT_FOR_ABSENT):
            self.remember(request)
            return []
        self._wait_until_there()
        self.remember(request)
        answers: list[Any] = self._ask(NodeMain.call, request)
        return answers

    def ask_server(self, method: str, args: Sequence[Any], *, keep: bool) -> Any:
        """The answer of the node's inference server.

        Args:
            keep: servers of later sessions are asked, too.
        """
        if keep:
            self._server_knows[method] = args
            if self.life.state is not WorkerState.RUNNING or self.session.lost:
                return None
        self._wait_until_there()
        return self._ask(NodeMain.ask_server, method, args)

    def kill(self) -> None:
        if self.alive:
            self.session.lose("it was killed")

    def end(self) -> None:
        if self.alive:
            self.lose("the collector was shut down")

    def _ask_to_close(self) -> None:
        """See ``Proxy``. ``Nodes`` ends the node itself."""
        self.session.post(Tell(NodeMain.close, number=CLOSED))

    def _wait_for_close(self) -> None:
        config = self.setup.config
        is_closing = self.life.state is WorkerState.CLOSING
        seconds = config.timeout("close")
        deadline = None if seconds is None else self._closing_since + seconds + CLOSE_S
        while is_closing and self.question.answer is None and not self.session.lost:
            left = (
                BEAT_S if deadline is None else min(BEAT_S, deadline - time.monotonic())
            )
            if left < 0:
                break
            self._nodes.wake_up.wait(left)
            self.pump()
        self.pump()
        if self.question.answer is None:
            self.lose("the collector was shut down")
        elif is_closing:
            self.life.become(WorkerState.CLOSED)

    def send(self, message: Tell) -> None:
        self.session.post(message)

    # --- messages of the node ---------------------------------------------------------------------

    def _take_note(self, told: Told) -> None:
        counters = self._pool.counters
        before = self.told.counts
        self.told = told
        self._host = told.host
        self._is_there = True
        if counters:
            for number, counts in told.counts.items():
                counters[number].add_counts(counts, before.get(number, NodeCounts()))
            for number in told.dropped:
                counters[number].drop()
        if told.infos is not None:
            self.infos = list(told.infos)
            if self.place is not None and not self._pool.elastic:
                self.life.become(WorkerState.RUNNING)
        if told.results:
            self._finished(told.results)
        if told.answer is not None:
            failure = told.answer.failure
            failure = None if failure is None else failure.here(self._crash_directory)
            self.answered(replace(told.answer, failure=failure))
        if told.failure is not None:
            self.error = told.failure.here(self._crash_directory).error()
            self.session.lose(str(self.error))

    def _finished(self, results: Sequence[RolloutResult]) -> None:
        """Rollouts are complete, with their lanes in their slots; or they have failed."""
        for sent in results:
            result = sent
            if result.error is not None:
                error = result.error.here(self._crash_directory).error()
                result = replace(result, error=error)
                self._pool.counters[result.group].failed()
            elif not (result.lost or result.dropped):
                self._pool.counters[result.group].arrived(result.frames)
            if result.number in self.under_way.outstanding:
                self.under_way.complete(result)
            else:
                self._pool.add_result(result)  # it belongs to no request
