"""Supervision of workers: receives their messages, detects exits and hangs, and handles losses."""

from __future__ import annotations

import select
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from muster.env_spec import EnvSpec
from muster.errors import BadEnvOutput, EnvError, MusterError, WorkerError, described
from muster.memory.shared import Arena
from muster.restore.crash_notes import CrashNotes, Replay
from muster.rollout.progress import Phase
from muster.utils.cpus import pinned
from muster.utils.interrupts import allowed
from muster.weights.transport import Ticket
from muster.workers import failures
from muster.workers.channel import WakeUp
from muster.workers.config import PoolConfig, WorkerPlace
from muster.workers.inference import InferenceServer
from muster.workers.launch import in_process
from muster.workers.lives import Watcher, listed
from muster.workers.messages import RolloutResult
from muster.workers.pool import WorkerPool
from muster.workers.proxy import WorkerProxy
from muster.workers.responder import Responder
from muster.workers.threads import in_thread
from muster.workers.under_way import AtWork

if TYPE_CHECKING:
    from muster.memory.slots import Slot

SAMPLED_EVERY = 0.2  # seconds
END_S = 5.0  # timeout for a killed process to exit


class Supervisor(Watcher):
    """Starts workers, makes a worker pool of them, and supervises their processes.

    ::

        supervisor = Supervisor(config, subscribe, made)
        supervisor.start()
        infos = supervisor.built()  # descriptions of the groups
        pool = supervisor.pool(infos, place)

    Args:
        subscribe: returns a ticket for the weights, by number of the worker; None: no weights yet.
        made: exit stack; its callbacks close everything that the supervisor makes.
        light: with an inference server, start worker processes that have not imported torch.
        responder: answers workers that wait, where there is no inference server.
        caller: node that owns the pool. While the pool waits for workers, and ``fileno()`` of the
            node is readable, its ``hear()`` handles its messages; an exception ends the wait.
            ``attends()`` is called in every wait.

    Attributes:
        launch: starts a process or thread with a name; returns it, the parent's end of its channel,
            and its status page. The second argument: whether to spend time on preloading modules
            for later starts.
        write: writes a rollout to its destination, if that is not its lane; its errors count as the
            worker's.
    """

    def __init__(
        self,
        config: PoolConfig,
        subscribe: Callable[[int], Ticket] | None,
        made: ExitStack,
        *,
        light: bool = True,
        caller: Any = None,
        responder: Responder | None = None,
    ) -> None:
        super().__init__(config)
        self.subscribe = subscribe
        self._caller = caller
        self.arena = Arena.create("muster-slots")  # memory of all lanes
        made.callback(self.arena.close)
        self.write: Callable[[RolloutResult, Slot], None] | None = None
        self._wake_up: WakeUp | None = None
        if config.in_threads:
            self._wake_up = WakeUp()
            made.callback(self._wake_up.close)
            self.launch: Callable[[str, bool], tuple[Any, ...]] = in_thread(self._wake_up)
        else:
            light = light and (config.server is not None or responder is not None)
            self.launch = in_process(config.supervision.start_method, light=light)
        # for all workers; None: the workers run the policy
        self.server: InferenceServer | None = None
        self.responder = responder  # None: workers ask no questions
        if config.server is not None:
            assert subscribe is not None, "weights come before the server"
            ticket = subscribe(config.workers[0].index)
            made.callback(ticket.close)  # if the server cannot be made
            self.server = InferenceServer(config, ticket)
            made.callback(self.server.close)
            self.responder = self.server
        self.notes: CrashNotes  # once there is a pool
        self._oom_kills = failures.oom_kills()
        self._look_at = 0.0
        self._listening: tuple[int, select.poll, dict[Any, WorkerProxy]] | None = None
        affinity = config.supervision.cpu_affinity
        numbers = [worker.index for worker in config.workers]
        cpus = [()] * len(numbers) if affinity is None else pinned(affinity, numbers)
        configs = [
            replace(
                worker,
                policy=config.policy,
                node=config.node,
                cpus=own,
                registered=config.registered,
            )
            for worker, own in zip(config.workers, cpus, strict=True)
        ]
        self.handles = [WorkerProxy(worker, self) for worker in configs]
        made.callback(self.end)

    def built(self) -> list[EnvSpec]:
        """Wait until all workers have made their environments, and describe the groups.

        Raises a worker's error.
        """
        infos: list[EnvSpec] = []
        for handle in self.handles:
            self.wait_for(handle, lambda: handle.infos is not None or handle.failure is not None)  # noqa: B023
            if handle.failure is not None:
                raise handle.failure.error()
            infos += handle.infos
        return infos

    def pool(self, infos: Sequence[EnvSpec], place: WorkerPlace) -> WorkerPool:
        """Make the worker pool, and send each worker its place."""
        groups = self.config.groups
        pool = WorkerPool(self.handles, infos, self, first_env=place.firsts[groups[0]])
        self.counters = pool.counters
        for number, begin in (place.episodes or {}).items():  # on a node that has rejoined
            pool.counters[number].clock = np.stack([begin, np.zeros_like(begin)])
        if self.server is not None:
            clients = {
                handle.index: (handle.groups[0], handle.under_way) for handle in self.handles
            }
            self.server.open(clients, dict(zip(groups, infos, strict=True)))
            pool.server, pool.hold = self.server, self.server.held
        config = self.config
        self.notes = CrashNotes(
            groups,
            config.origins,
            pool.counters,
            config.max_frames_per_traj,
            config.supervision.crash_dir,
        )
        pool.notes = self.notes
        for handle in self.handles:
            generation = handle.config.generation
            self.notes.seeded(handle.groups, place.seed, static=place.static, generation=generation)
            handle.assign(place.part(handle.groups))
        return pool

    def end(self) -> None:
        """Kill all workers that still run, and close the responder. None can be started any more."""
        self.is_closed = True
        for handle in self.handles:
            handle.end()
        if self.responder is not None:
            self.responder.close()

    def missing(self) -> str:
        absent = [handle.index for handle in self.handles if handle.infos is None]
        where = f" on node {self.config.node}" if self.config.node else ""
        of = f"{listed('worker', absent)} of {self.config.count}{where}"
        return f"{of} to construct environments" if absent else ""

    # --- waiting ----------------------------------------------------------------------------------

    def wait(self, timeout: float | None, *, revives: bool = True) -> None:
        """See ``Watcher``. Also detects hanging workers."""
        if revives:
            if self.lost:
                return
            self._revive_due()
        poller, of = self._listen()
        in_threads, due = self._wake_up, self._until_due(SAMPLED_EVERY, timeout)
        with allowed():
            ready = poller.poll(
                0 if in_threads is not None and in_threads.unattended else due * 1000
            )
        if in_threads is not None and ready:  # do not clear a wake-up rung after the poll
            in_threads.clear()
        if self._caller is not None:
            self._caller.attends()
            if ready:
                self._caller.hear()
        with (
            nullcontext([fd for fd, _ in ready]) if in_threads is None else in_threads.senders()
        ) as senders:
            # Others are the caller, and threads that were given up.
            for handle in dict.fromkeys(of[sender] for sender in senders if sender in of):
                if in_threads is not None and not handle.process.channel.poll():
                    continue  # its message was received already
                if not handle.pump() or handle.process.child.exit_code() is not None:
                    self._has_ended(handle)
                else:
                    self._take_note(handle)
        self._look_for_hangs()

    def _has_ended(self, handle: WorkerProxy) -> None:
        handle.process.child.join(1.0)
        handle.pump()  # messages sent before the exit
        self._take_note(handle)
        self._died(handle)

    def _listen(self) -> tuple[select.poll, dict[Any, WorkerProxy]]:
        """Return a poller for all workers that run, and the worker of each descriptor or thread."""
        if self._listening is None or self._listening[0] != self.changes:
            poller = select.poll()
            of: dict[Any, WorkerProxy] = {}
            for handle in self.handles:
                for fd in handle.process.fds() if handle.alive else ():
                    poller.register(fd, select.POLLIN)
                    of[fd if self._wake_up is None else handle.process.child] = handle
            if self._caller is not None:
                poller.register(self._caller.fileno(), select.POLLIN)
            self._listening = self.changes, poller, of
        return self._listening[1:]

    def _take_note(self, handle: WorkerProxy) -> None:
        """Process new results, and end the worker on an error that requires it."""
        error = self._take_note_of_reports(handle)
        if error is not None:
            self._lose(handle, error, "worker_died" if handle.unwritten is error else "env_error")

    def _take_note_of_reports(
        self, handle: WorkerProxy, *, ending: bool = False
    ) -> Exception | None:
        """Process new results; with ``ending``, errors are handled like the end of the worker.

        Returns the first error for which the worker has to be ended. Requests with such errors are
        under way again.
        """
        first = None
        fresh = handle.under_way.fresh
        while fresh:
            result = fresh[0]
            if result.clock is not None and not result.unfinished:
                self.counters[result.group].clock = result.clock
            if result.error is None and not result.lost and not self._is_written(handle, result):
                result.error = handle.unwritten
                first = first or handle.unwritten
                self.counters[result.group].add(result)
                self.counters[result.group].give_up("worker_died")
                handle.under_way.take_back(result)
            elif result.error is None and not result.lost:
                if self.server is not None:
                    self.server.complete(result)
                handle.record.fruitless = 0
                self.notes.reported(result, handle.under_way.outstanding[result.number].lane)
            elif result.error is not None or result.unfinished:
                is_ending = ending or result.unfinished
                if not is_ending:
                    self._explain(handle, result)
                raises = self.config.supervision.reaction == "raise" or not isinstance(
                    result.error, (EnvError, BadEnvOutput)
                )
                if is_ending or not raises:
                    first = first or (None if result.unfinished else result.error)
                    # in order: only the last one has a partial lane
                    for earlier in handle.under_way.results:
                        self.counters[earlier.group].add(earlier)
                    handle.under_way.take_back(result)
            del fresh[0]  # only now, in case that a signal handler has raised
        return first

    def _is_written(self, handle: WorkerProxy, result: RolloutResult) -> bool:
        """Write a rollout to its destination.

        False after an error, also for later rollouts: they follow a gap.
        """
        if self.write is not None and handle.unwritten is None:
            try:
                self.write(result, handle.under_way.outstanding[result.number].slot)
            except WorkerError as error:
                where = {
                    "worker": handle.index,
                    "pid": handle.process.child.pid,
                    "node": self.config.node,
                }
                handle.unwritten = failures.pack(error, phase="call", **where).error()
        return handle.unwritten is None

    def _explain(self, handle: WorkerProxy, result: RolloutResult) -> None:
        """Replace the ``SentError`` in a result by the exception, with a crash report if one can be
        made.
        """
        if isinstance(result.error, failures.SentError):
            result.error = result.error.error()
        error = result.error
        lane = handle.under_way.outstanding[result.number].lane
        _add_crash_report(error, partial(self.notes.failed, result, lane, error, error.env_index))
        if self.server is not None:
            self.server.complete(result)

    def _look_for_hangs(self) -> None:
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + SAMPLED_EVERY / 2
        self._begin_stranded()
        for handle in self.handles:
            record = handle.record
            if handle.under_way.fresh:  # a signal handler has raised before they were processed
                self._take_note(handle)
            if not handle.awaited or self._is_served(handle):
                record.signs = ()
                continue
            # no event while a child holds the descriptor
            if handle.process.child.exit_code() is not None:
                self._has_ended(handle)
                continue
            signs = handle.under_way.signs(handle.process.status_page.cells)
            # the thread at work has a deadline
            if signs != record.signs or handle.phase is Phase.WAIT:
                record.signs, record.since = signs, now
                continue
            phase = handle.phase.name.lower()
            deadline = self.config.timeout(phase)
            if deadline is not None and now - record.since > deadline:
                self._hung(handle, phase, now - record.since, deadline)

    def _is_served(self, handle: WorkerProxy) -> bool:
        """Return whether a worker waits for the responder; raises if that exceeds its deadline or
        has ended.
        """
        if (
            self.responder is None
            or not self.responder.waits(handle.index)
            or handle.process.child.exit_code() is not None
        ):
            return False
        self.responder.check()
        return True

    # --- losses -----------------------------------------------------------------------------------

    def _died(self, handle: WorkerProxy) -> None:
        if not handle.alive:
            return
        failure, phase, process = handle.failure, handle.phase.name.lower(), handle.process
        code = process.child.exit_code()
        at_work = None
        if failure is not None:
            error: MusterError = failure.error()
        else:
            error = failures.died(
                self._where(handle),
                phase=phase,
                exitcode=None if code is None or abs(code) > 255 else code,
                oom_kills=failures.oom_kills() - self._oom_kills,
                stack=process.status_page.stack(),
            )
            at_work = self._at_work(handle)
        self._lose(handle, error, "worker_died", at_work)

    def hangs(self, handle: WorkerProxy, seconds: float) -> None:
        """Handle a worker that has not read a message for so many seconds."""
        self._hung(handle, handle.phase.name.lower(), seconds, seconds)

    def _hung(self, handle: WorkerProxy, phase: str, seconds: float, deadline: float) -> None:
        where, at_work, stopped = (
            self._where(handle),
            self._at_work(handle),
            handle.process.child.is_stopped(),
        )
        stack = "" if stopped else handle.process.stack()
        known: dict[str, Any] = {"phase": phase, "seconds": seconds, "deadline": deadline}
        error: MusterError = failures.hung(where, stack=stack, stopped=stopped, **known)
        _halt(handle)  # it may continue at any time, even because of the signal for its stack
        handle.forget_answers()
        self._lose(handle, error, "worker_hung", at_work)

    def _at_work(self, handle: WorkerProxy) -> AtWork | None:
        return handle.under_way.at_work(handle.process.status_page.cells) if self.counters else None

    def _where(self, handle: WorkerProxy) -> failures.Where:
        config, at_work = handle.config, self._at_work(handle)
        known: dict[str, Any] = {"worker": handle.index, "pid": handle.process.child.pid}
        known |= {"generation": config.generation, "node": self.config.node}
        if at_work is None:
            ids = (
                [int(i) for group in handle.groups for i in self.counters[group].env_ids]
                if self.counters
                else []
            )
            return failures.Where(env_ids=tuple(ids), **known)
        assert handle.place is not None
        counts = self.counters[at_work.request.group]
        seed = handle.place.seed
        row = at_work.row if at_work.row >= 0 else None
        if at_work.index is None or not counts.info.replays_alone:
            return failures.Where(
                env_ids=tuple(counts.env_ids.tolist()), row=row, seed=seed, **known
            )
        env_id = int(counts.env_ids[at_work.index])
        seed = None if seed is None else seed + env_id * (not handle.place.static)
        return failures.Where(
            env_ids=(env_id,), env_index=at_work.index, row=row, seed=seed, **known
        )

    def _lose(
        self, handle: WorkerProxy, error: Exception, reason: str, at_work: AtWork | None = None
    ) -> None:
        """End a worker, and pass its requests on as ``on_failure`` says; ``at_work`` is for a crash
        report.
        """
        handle.cause = error
        crash_report = (
            None if at_work is None else self.notes.died(at_work, cast(MusterError, error))
        )
        if self.config.supervision.reaction != "restart":
            _add_crash_report(error, crash_report)
        try:
            handle.end()
        finally:  # also after Ctrl-C, or its requests would be lost
            handle.abandon()
            for number in handle.groups if self.counters else ():
                self.counters[number].give_up(reason)
            self._pass_on(handle, error)
        if self.config.supervision.reaction == "restart" and crash_report is not None:
            self._revive(handle)  # before the crash report is written, which can take long
            _add_crash_report(error, crash_report)

    def ends(self, handle: WorkerProxy) -> None:
        """Halt a worker, and add all its steps to the counters."""
        _halt(handle)
        if not self.counters:
            return  # it was never part of the worker pool
        self._take_note_of_reports(handle, ending=True)
        under_way = handle.under_way
        cells = handle.process.status_page.cells
        for result in under_way.results:
            self.counters[result.group].add(result)
        at_work = under_way.at_work(cells)
        if at_work is not None and not under_way.outstanding[at_work.request.number].entered:
            self.counters[at_work.request.group].cut_short(under_way.steps_seen(cells))


def _halt(handle: WorkerProxy) -> None:
    """Stop a worker, and process its messages until then.

    After this its status page does not change.
    """
    process = handle.process
    in_thread = handle.config.in_thread
    if in_thread:  # a thread runs on: its messages are ignored, then ``kill`` isolates its memory
        process.channel.close()
        handle.pump()
    handle.kill()
    if not in_thread:
        process.child.join(END_S)
        handle.pump()


def _add_crash_report(error: Exception, save: Callable[[], Replay] | None) -> None:
    """Write a crash report, and add its path and the command that replays it to the error."""
    if save is None or not isinstance(error, MusterError):
        return
    try:
        error.crash_report, error.replay_command = save()
    except Exception as problem:  # noqa: BLE001 (no descriptors or memory, most often; it must not hide the failure)
        with suppress(Warning):  # filters may turn it into an exception
            warnings.warn(f"No crash report was written: {described(problem)}", stacklevel=2)
        return
    if error.replay_command:
        error.args = (
            f"{error}\n\nTo see it happen again under a debugger: {error.replay_command}",
        )
