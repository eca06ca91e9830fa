"""The pool of workers in threads or processes of this machine."""

from __future__ import annotations

import select
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from muster.env_spec import EnvSpec
from muster.errors import BadEnvOutput, BadOption, MusterError, WorkerError, described
from muster.memory.shared import Arena
from muster.restore.crash_notes import CrashNotes, Replay
from muster.rng import seeds_of
from muster.rollout.progress import Phase
from muster.utils.cpus import pinned
from muster.utils.interrupts import allowed
from muster.weights.transport import Ticket
from muster.workers import failures
from muster.workers.channel import WakeUp
from muster.workers.config import PoolConfig, WorkerPlace
from muster.workers.fates import Fate
from muster.workers.inference import InferenceServer
from muster.workers.launch import in_process
from muster.workers.messages import RolloutResult, open_objects
from muster.workers.proxy import Shared, WorkerProxy
from muster.workers.responder import Responder
from muster.workers.slow_construction import listed
from muster.workers.supervision import SupervisedPool
from muster.workers.threads import in_thread
from muster.workers.under_way import AtWork

if TYPE_CHECKING:
    from muster.memory.slots import Slot

SAMPLED_EVERY = 0.2  # seconds
# A wait that takes so many seconds too long: this process was stopped, and maybe the whole machine,
# or a job with all its processes.
STOPPED_S = 1.0


@dataclass(frozen=True)
class _Loss:
    """Why a worker that reports has to be ended; ``fate`` is decided already."""

    error: Exception
    reason: str  # of its discarded steps
    fate: Fate


class WorkerPool(SupervisedPool):
    """The pool of workers in threads or processes of this machine; see ``SupervisedPool``.

    ::

        pool = WorkerPool(config, subscribe, made)
        pool.start()
        infos = pool.built()  # descriptions of the groups
        pool.open(infos, place)

    Args:
        subscribe: returns a ticket for the weights, by number of the worker; None: no weights yet.
        made: exit stack; its callbacks close everything that the pool makes.
        light: with an inference server, start worker processes that have not imported torch.
        caller: node that owns the pool. While the pool waits for workers, and ``fileno()`` of the
            node is readable, its ``hear()`` handles its messages; an exception ends the wait.
            ``attends()`` is called in every wait.
        responder: answers workers that wait, where there is no inference server.
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
        write: Callable[[RolloutResult, Slot], None] | None = None,
    ) -> None:
        super().__init__(config)
        self._caller = caller
        self._write = write
        self._notes: CrashNotes | None = None
        self.arena = Arena.create("muster-slots")  # memory of all lanes
        made.callback(self.arena.close)
        self._wake_up: WakeUp | None = None
        self.server: InferenceServer | None = None
        self._responder = responder  # None: workers ask no questions
        is_served = config.server is not None or responder is not None
        launch: Callable[[str, bool], tuple[Any, ...]]
        if config.in_threads:
            self._wake_up = WakeUp()
            made.callback(self._wake_up.close)
            launch = in_thread(self._wake_up)
        else:
            launch = in_process(
                config.supervision.start_method, light=light and is_served
            )
        if config.server is not None:
            assert subscribe is not None, "weights come before the server"
            ticket = subscribe(config.workers[0].index)
            made.callback(ticket.close)  # if the server cannot be made
            self.server = InferenceServer(config, ticket)
            made.callback(self.server.close)
            self._responder = self.server
        self._oom_kills = failures.oom_kills()
        self._look_at = 0.0  # time of the next look for hangs
        # number of changes for which the rest is valid; see ``_listen``
        self._listening: tuple[int, select.poll, dict[Any, WorkerProxy]] | None = None
        shared = Shared(
            config, self.arena, launch, subscribe, self.server, self._responder
        )
        self.handles = self._proxies(shared)
        made.callback(self.end)

    def _proxies(self, shared: Shared) -> list[WorkerProxy]:
        config = self.config
        numbers = [worker.index for worker in config.workers]
        cpus: Sequence[Sequence[int]] = [()] * len(numbers)
        affinity = config.supervision.cpu_affinity
        if affinity is not None:
            cpus = pinned(affinity, numbers)
        proxies = []
        for worker, own in zip(config.workers, cpus, strict=True):
            complete = replace(
                worker,
                policy=config.policy,
                node=config.node,
                cpus=own,
                registered=config.registered,
            )
            proxies.append(WorkerProxy(complete, self, shared))
        return proxies

    def built(self) -> list[EnvSpec]:
        infos: list[EnvSpec] = []
        for handle in self.handles:
            self.wait_for(
                handle,
                lambda: handle.infos is not None or handle.failure is not None,  # noqa: B023
            )
            if handle.failure is not None:
                raise handle.failure.error()
            infos += handle.infos
        return infos

    def open(self, infos: Sequence[EnvSpec], place: WorkerPlace) -> None:
        config = self.config
        groups = config.groups
        self._open(infos, first_env=place.firsts[groups[0]])
        for number, episodes in (
            place.episodes or {}
        ).items():  # on a node that has rejoined
            self.counters[number].begin_at(episodes)
        if self.server is not None:
            clients = {
                handle.index: (handle.groups[0], handle.under_way)
                for handle in self.handles
            }
            self.server.open(clients, dict(zip(groups, infos, strict=True)))
        notes = CrashNotes(
            groups,
            config.origins,
            self.counters,
            config.max_frames_per_traj,
            config.supervision.crash_dir,
            config.episode_seeds,
        )
        self._notes = notes
        for handle in self.handles:
            generation = handle.config.generation
            notes.seeded(
                handle.groups, place.seed, static=place.static, generation=generation
            )
            handle.assign(place.part(handle.groups))

    def end(self) -> None:
        """See ``SupervisedPool``. Closes the responder, too."""
        self.is_closed = True
        for handle in self.handles:
            handle.end()
        if self._responder is not None:
            self._responder.close()

    @property
    def notes(self) -> CrashNotes | None:
        return self._notes

    def hold(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.server is None else self.server.held()

    def missing(self) -> str:
        absent = [handle.index for handle in self.handles if handle.infos is None]
        if not absent:
            return ""
        where = f" on node {self.config.node}" if self.config.node else ""
        of = f"{listed('worker', absent)} of {self.config.count}{where}"
        return f"{of} to construct environments"

    def _start(self, handle: WorkerProxy) -> None:
        """Start a worker.

        Before a successor gets its first request, the inference server and the crash notes are
        prepared for it.
        """
        place = handle.place
        if handle.is_successor and place is not None and self._notes is not None:
            if handle.under_way.reports:  # Ctrl-C has come before they were processed
                self._process_reports(handle, ending=True)
            generation = handle.config.generation + 1
            if self.server is not None:
                self.server.actor.reseed(handle.groups, place.seed, generation)
            self._notes.forget(handle.groups)
            self._notes.seeded(
                handle.groups, place.seed, static=place.static, generation=generation
            )
        handle.start()

    # --- waiting ----------------------------------------------------------------------------------

    def wait(self, timeout: float | None, *, revives: bool = True) -> None:
        """See ``SupervisedPool``. Also detects hanging workers."""
        if revives:
            if self._returned:
                return
            self._revive_due()
        poller, of = self._listen()
        in_threads = self._wake_up
        due_s = self._until_due(SAMPLED_EVERY, timeout)
        if in_threads is not None and in_threads.unattended:
            due_s = 0.0
        begun = time.monotonic()
        with allowed():
            ready = poller.poll(due_s * 1000)
        late_s = time.monotonic() - begun - due_s
        if late_s > STOPPED_S:
            self._excuse(late_s)
        if (
            in_threads is not None and ready
        ):  # do not clear a wake-up rung after the poll
            in_threads.clear()
        if self._caller is not None:
            self._caller.attends()
            if ready:
                self._caller.hear()
        with (
            nullcontext([fd for fd, _ in ready])
            if in_threads is None
            else in_threads.senders()
        ) as senders:
            # Others are the caller, and threads that were given up.
            for handle in dict.fromkeys(
                of[sender] for sender in senders if sender in of
            ):
                if in_threads is not None and not handle.process.channel.poll():
                    continue  # its message was received already
                if not handle.pump() or handle.process.child.exit_code() is not None:
                    self._has_ended(handle)
                else:
                    self._take_reports(handle)
        self._look_for_hangs()

    def _has_ended(self, handle: WorkerProxy) -> None:
        handle.process.child.join(1.0)
        handle.pump()  # messages sent before the exit
        self._take_reports(handle)
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

    def _excuse(self, seconds: float) -> None:
        """Let no deadline run out because of a time in which this process was stopped."""
        for handle in self.handles:
            handle.life.excuse(seconds)
        if self._responder is not None:
            self._responder.excuse(seconds)

    def _look_for_hangs(self) -> None:
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + SAMPLED_EVERY / 2
        self._begin_stranded()
        for handle in self.handles:
            if handle.under_way.reports:  # Ctrl-C has come before they were processed
                self._take_reports(handle)
            if handle.alive and handle.deaf_s:
                self._hung(
                    handle, handle.phase.name.lower(), handle.deaf_s, handle.deaf_s
                )
                continue
            if not handle.awaited or self._is_served(handle):
                handle.life.forget_signs()
                continue
            # no event while a child holds the descriptor
            if handle.process.child.exit_code() is not None:
                self._has_ended(handle)
                continue
            phase, signs = handle.look()
            if phase is Phase.WAIT:  # the thread at work has a deadline
                handle.life.forget_signs()
                continue
            seconds = handle.life.silent_for(signs)
            name = phase.name.lower()
            deadline = self.config.timeout(name)
            if deadline is not None and seconds > deadline:
                self._hung(handle, name, seconds, deadline)

    def _is_served(self, handle: WorkerProxy) -> bool:
        """Return whether a worker waits for the responder; raises if that exceeds its deadline or
        has ended.
        """
        if (
            self._responder is None
            or not self._responder.waits(handle.index)
            or handle.process.child.exit_code() is not None
        ):
            return False
        self._responder.check()
        return True

    # --- reports ----------------------------------------------------------------------------------

    def _take_reports(self, handle: WorkerProxy) -> None:
        """Process the reports of a worker, and end the worker if an error requires it."""
        loss = self._process_reports(handle, ending=False)
        if loss is not None:
            self._lose(handle, loss.error, loss.reason, fate=loss.fate)

    def _process_reports(self, handle: WorkerProxy, *, ending: bool) -> _Loss | None:
        """Decide the fate of each report of a worker, in order.

        Args:
            ending: the worker ends for another reason. Its fate is that of failed rollouts.

        Returns:
            the first loss because of which the worker has to be ended.
        """
        first: _Loss | None = None
        reports = handle.under_way.reports
        while reports:
            # A report is removed last, in case that a signal handler raises.
            ends = ending or first is not None
            loss = self._process(handle, reports[0], ending=ends)
            first = first or loss
        return first

    def _process(
        self, handle: WorkerProxy, report: RolloutResult, *, ending: bool
    ) -> _Loss | None:
        """Decide the fate of a report: it is the result of its request, or the worker ends, and the
        request stays under way.
        """
        under_way = handle.under_way
        counts = self.counters[report.group]
        if report.clock is not None and not report.unfinished:
            counts.note_clock(report.clock)
        is_complete = report.error is None and not report.lost
        result = report  # what is counted is the report, and once
        if is_complete:
            result = self._received(handle, report)
            unusable = handle.unusable
            if unusable is not None:
                counts.add_lost(report, "worker_died")
                under_way.end(report)
                if ending:
                    return None
                fate = self._decide(handle, unusable, worker_ends=True)
                return _Loss(unusable, "worker_died", fate)
            handle.life.has_completed()
            self._log_actions(handle, result)
        counts.add(report)
        if report.unfinished or (ending and report.error is not None):
            under_way.end(report)
            return None
        if report.error is not None:
            result = self._explained(handle, report)
            fate = self._decide(handle, result.error, worker_ends=False)
            if fate is not Fate.RAISED:
                under_way.end(report)
                return _Loss(result.error, "env_error", fate)
        elif is_complete:
            result = self._served(result)
        under_way.complete(result)
        if self.server is not None:
            self.server.forget(report.number)
        return None

    def _served(self, report: RolloutResult) -> RolloutResult:
        """Return the report with what the inference server knows of its rollout."""
        return report if self.server is None else self.server.completed(report)

    def _log_actions(self, handle: WorkerProxy, report: RolloutResult) -> None:
        assert self._notes is not None
        self._notes.reported(report, handle.under_way.outstanding[report.number].lane)

    def _received(self, handle: WorkerProxy, report: RolloutResult) -> RolloutResult:
        """Return a complete rollout, with its objects, and written to its destination.

        If that is not possible, ``handle.unusable`` says why, and later rollouts are not received,
        either: they would follow a gap.
        """
        if handle.unusable is not None:
            return report
        try:
            result = open_objects(report)
            if self._write is not None:
                slot = handle.under_way.outstanding[report.number].slot
                self._write(result, slot)
        except BadOption as error:
            self._cannot_use(handle, BadEnvOutput(str(error)), "step")
        except WorkerError as error:
            self._cannot_use(handle, error, "call")
        else:
            return result
        return report

    def _cannot_use(self, handle: WorkerProxy, error: Exception, phase: str) -> None:
        pid = handle.process.child.pid
        where = {"worker": handle.index, "pid": pid, "node": self.config.node}
        handle.cannot_use(failures.pack(error, phase=phase, **where).error())

    def _explained(self, handle: WorkerProxy, report: RolloutResult) -> RolloutResult:
        """Return a failed report with the exception in the place of the ``SentError``, with a crash
        report if one can be made.
        """
        assert self._notes is not None
        error = report.error
        if isinstance(error, failures.SentError):
            error = error.error()
        lane = handle.under_way.outstanding[report.number].lane
        save = partial(self._notes.failed, report, lane, error, error.env_index)
        _add_crash_report(error, save)
        return self._served(replace(report, error=error))

    # --- losses -----------------------------------------------------------------------------------

    def _died(self, handle: WorkerProxy) -> None:
        if not handle.alive:
            return
        process = handle.process
        at_work = None
        error: MusterError
        if handle.failure is not None:
            error = handle.failure.error()
        else:
            code = process.child.exit_code()
            error = failures.died(
                self._where(handle),
                phase=handle.phase.name.lower(),
                exitcode=None if code is None or abs(code) > 255 else code,
                oom_kills=failures.oom_kills() - self._oom_kills,
                stack=process.status_page.stack(),
            )
            at_work = self._at_work(handle)
        self._lose(handle, error, "worker_died", at_work)

    def _hung(
        self, handle: WorkerProxy, phase: str, seconds: float, deadline: float
    ) -> None:
        where = self._where(handle)
        at_work = self._at_work(handle)
        is_stopped = handle.process.child.is_stopped()
        error = failures.hung(
            where,
            phase=phase,
            seconds=seconds,
            deadline=deadline,
            stack="" if is_stopped else handle.process.stack(),
            stopped=is_stopped,
        )
        # it may continue at any time, even because of the signal for its stack
        handle.give_up_hung()
        self._lose(handle, error, "worker_hung", at_work)

    def _at_work(self, handle: WorkerProxy) -> AtWork | None:
        return (
            handle.under_way.at_work(handle.process.status_page.cells)
            if self.counters
            else None
        )

    def _where(self, handle: WorkerProxy) -> failures.Where:
        """Return the place of an error of a worker that runs, or has run."""
        known = failures.Where(
            worker=handle.index,
            pid=handle.process.child.pid,
            generation=handle.config.generation,
            node=self.config.node,
        )
        at_work = self._at_work(handle)
        if at_work is None:
            return replace(known, env_ids=handle.where().env_ids)
        assert handle.place is not None
        counts = self.counters[at_work.request.group]
        seed = handle.place.seed
        known = replace(known, row=at_work.row if at_work.row >= 0 else None)
        if self.config.episode_seeds is not None:
            seed = None  # that of the episode is not known here
        if at_work.index is None or not counts.info.replays_alone:
            first = seed if isinstance(seed, int) else None
            return replace(known, env_ids=tuple(counts.env_ids.tolist()), seed=first)
        env_id = int(counts.env_ids[at_work.index])
        own = None
        if seed is not None:
            (own,) = seeds_of(seed, [0 if handle.place.static else env_id], 0)
        return replace(known, env_ids=(env_id,), env_index=at_work.index, seed=own)

    def _lose(
        self,
        handle: WorkerProxy,
        error: Exception,
        reason: str,
        at_work: AtWork | None = None,
        *,
        fate: Fate | None = None,
    ) -> None:
        """End a worker, and do with its requests what its fate says.

        Args:
            reason: of its discarded steps.
            at_work: rollout for a crash report; None: write none.
            fate: None: decide it.
        """
        handle.life.is_lost(error)
        crash_report: Callable[[], Replay] | None = None
        if at_work is not None:
            assert self._notes is not None
            crash_report = self._notes.died(at_work, cast(MusterError, error))
        if self.config.supervision.reaction != "restart":
            _add_crash_report(error, crash_report)
        try:
            handle.end()
        finally:  # also after Ctrl-C, or its requests would be lost
            handle.abandon()
            for number in handle.groups if self.counters else ():
                self.counters[number].give_up(reason)
            self._settle(handle, error, fate)
        if self.config.supervision.reaction == "restart" and crash_report is not None:
            self._revive(
                handle
            )  # before the crash report is written, which can take long
            _add_crash_report(error, crash_report)

    def count_last_steps(self, handle: WorkerProxy) -> None:
        if not self.counters:
            return  # it was never part of the pool
        self._process_reports(handle, ending=True)
        cells = handle.process.status_page.cells
        at_work = handle.under_way.at_work(cells)
        if at_work is None:
            return
        requested = handle.under_way.outstanding[at_work.request.number]
        if not requested.has_ended:  # else its report had its steps
            steps = handle.under_way.steps_seen(cells)
            self.counters[at_work.request.group].cut_short(steps)


def _add_crash_report(error: Exception, save: Callable[[], Replay] | None) -> None:
    """Write a crash report, and add its path and the command that replays it to the error."""
    if save is None or not isinstance(error, MusterError):
        return
    try:
        path, command = save()
    except Exception as problem:  # noqa: BLE001 (no descriptors or memory, most often; it must not hide the failure)
        with suppress(Warning):  # filters may turn it into an exception
            warnings.warn(
                f"No crash report was written: {described(problem)}", stacklevel=2
            )
        return
    vars(error).update(crash_report=path, replay_command=command)
    if command:
        text = f"{error}\n\nTo see it happen again under a debugger: {command}"
        error.args = (text,)
