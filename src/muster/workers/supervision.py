"""Waiting for worker processes: for what they say, for their deaths, and for what takes them too long."""

from __future__ import annotations

import select
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import numpy as np

from muster.errors import BadEnvOutput, EnvError, MusterError, WorkerHung
from muster.rollout.progress import Phase
from muster.utils.interrupts import allowed
from muster.workers import failures
from muster.workers.channel import WakeUp
from muster.workers.crash_notes import CrashNotes, Replay
from muster.workers.messages import GroupInfo, Order, Report
from muster.workers.pool import Account
from muster.workers.proxy import Restarted, WorkerProxy, WorkerState
from muster.workers.requests import Request
from muster.workers.restarts import Record, news, unlike

if TYPE_CHECKING:
    from muster.memory.slots import Lane
    from muster.workers.inference import InferenceServer

OnFailure = Literal["raise", "restart", "drop"]
AtWork: TypeAlias = "tuple[Order, Lane, int, int | None]"  # an order, its lane, and the row and environment got to

TIMEOUTS: dict[str, float | None] = {  # seconds
    "construct": 300.0,
    "reset": 60.0,
    "step": 60.0,
    "policy": 60.0,
    "weights": 60.0,
    "call": 300.0,
    "close": 5.0,
    "join": 600.0,
    "heartbeat": 15.0,
}
SAMPLED_EVERY = 0.2  # seconds
END_S = 5.0  # for a process to end that was killed


class Supervisor:
    """Watches over the processes of a worker pool.

    Args:
        on_failure: "raise": the error reaches the user, and the worker is started again by the next batch.
            "restart": it is started again at once. "drop": the others go on without it.
        timeouts: seconds by phase; what is missing is as in ``TIMEOUTS``, None is for ever.
        max_restarts: of one worker within a minute, before its error reaches the user.
        notes: from which failures can be repeated.

    Attributes:
        handles: all workers.
        accounts: of the groups.
        wake_up: of threads.
        server: acts for all workers; None: they act by themselves.
        elastic: nodes may come and go: what a lost one had to do is for others.
        restarts: of all workers, by index.
    """

    def __init__(
        self,
        *,
        on_failure: OnFailure,
        timeouts: Mapping[str, float | None],
        max_restarts: int | None,
        notes: CrashNotes,
    ) -> None:
        self.handles: Sequence[WorkerProxy] = ()
        self.wake_up: WakeUp | None = None
        self.server: InferenceServer | None = None
        self.elastic = False
        self._on_failure = on_failure
        self._timeouts = {**TIMEOUTS, **timeouts}
        self._max_restarts = max_restarts
        self._notes = notes
        self.accounts: Sequence[Account] = ()
        self._records: defaultdict[int, Record] = defaultdict(Record)
        self._oom_kills = failures.oom_kills()
        self._look_at = 0.0
        self._listening: tuple[list[int], select.poll, dict[int, list[WorkerProxy]]] | None = None
        self._lost: list[Report] = []

    @property
    def restarts(self) -> list[int]:
        return [handle.config.generation for handle in self.handles]

    def timeout(self, phase: str) -> float | None:
        """Seconds that a phase may take."""
        return self._timeouts.get(phase, self._timeouts["step"])

    def wait(self, timeout: float | None, *, revives: bool = True) -> None:
        """Until some worker has reported, or is lost. May return early.

        Takes in what has come, finds out who is lost, and looks for those that hang.

        Args:
            revives: start again workers whose time for it has come.
        """
        if revives:
            if self._lost:
                return
            self._revive_due()
        poller, of = self._listen()
        now = time.monotonic()
        due = [record.revive_at - now for record in self._records.values() if record.revive_at is not None]
        longest = min([SAMPLED_EVERY, *due, *([] if timeout is None else [timeout])])
        with allowed():
            ready = poller.poll(max(0.0, longest) * 1000)
        if self.wake_up is not None and ready:  # else it may have begun to ring just now, for what nobody looks at
            self.wake_up.clear()
        for handle in dict.fromkeys(handle for fd, _ in ready for handle in of[fd]):
            if not handle.pump() or handle.process.child.exit_code() is not None:
                self._has_ended(handle)
            else:
                self._take_note(handle)
        self._look_for_hangs()

    def take_lost(self) -> list[Report]:
        """Reports in the place of workers that were lost since the last call."""
        lost, self._lost = self._lost, []
        return lost

    def built(self, handle: WorkerProxy) -> list[GroupInfo]:
        """The groups that a worker has made, when it has; raises what became of it instead."""
        self.wait_for(handle, lambda: handle.infos is not None or handle.failure is not None)
        if handle.failure is not None:
            raise handle.failure.error()
        assert handle.infos is not None
        return handle.infos

    def wait_for_enough(self, lack: Callable[[list[WorkerProxy]], int]) -> None:
        """Until there are enough workers for a worker pool; raises what became of one of them instead.

        Args:
            lack: how many nodes are too few if these workers are not there; 0 or less: enough.
        """
        while lack([handle for handle in self.handles if handle.absent]) > 0:
            self.wait(None, revives=False)
            gone = [handle for handle in self.handles if not handle.alive]
            for handle in gone:
                if not handle.process.child.late or lack(gone) > 0:
                    self._raise_once(handle)

    def wait_for(self, handle: WorkerProxy, ready: Callable[[], bool]) -> None:
        """See ``Patience``."""
        asked = handle.config.generation
        while not ready():
            if was_alive := handle.alive:
                self.wait(None, revives=False)
            if handle.config.generation != asked:
                raise Restarted
            if not handle.alive and not ready():
                has_waited = was_alive and self.elastic and handle.process.child.late
                if self._records[handle.index].revive_at is None or has_waited:
                    self._raise_once(handle)
                while not handle.alive:
                    self.wait(None, revives=False)  # of others, until this one is due
                    self._revive_due()
                raise Restarted

    # --- looking ----------------------------------------------------------------------------------

    def _has_ended(self, handle: WorkerProxy) -> None:
        handle.process.child.join(1.0)
        handle.pump()  # what it said before
        self._take_note(handle)
        self._died(handle)
        lost = handle.process.child.lost
        for other in self.handles if lost else ():  # so are all of its node; they start again together
            if other.alive and other.process.child.lost:
                self._has_ended(other)

    def _listen(self) -> tuple[select.poll, dict[int, list[WorkerProxy]]]:
        """What to wait on, and whose it is; made anew when workers come or go."""
        present = [handle.config.generation if handle.alive else -1 for handle in self.handles]
        if self._listening is None or self._listening[0] != present:
            poller = select.poll()
            of: defaultdict[int, list[WorkerProxy]] = defaultdict(list)
            for handle in self.handles:
                for fd in handle.process.fds() if handle.alive else ():
                    of[fd].append(handle)
            for fd in of:
                poller.register(fd, select.POLLIN)
            self._listening = present, poller, of
        return self._listening[1:]

    def _take_note(self, handle: WorkerProxy) -> None:
        """Of reports that have come."""
        if self.elastic and handle.state is WorkerState.JOINING and handle.infos is not None:
            self._welcome(handle, handle.infos)
        error = self._take_note_of_reports(handle)
        if error is not None:
            self._lose(handle, error, "env_error")

    def _take_note_of_reports(self, handle: WorkerProxy, *, ending: bool = False) -> Exception | None:
        """Of those that have come.

        Args:
            ending: the worker was ended, so that errors are to be dealt with as its end is.

        Returns:
            the first error that the worker has to be ended for; the orders of such are under way again.
        """
        first = None
        fresh, handle.under_way.fresh = handle.under_way.fresh, []
        for report in fresh:
            if report.clock is not None:
                self.accounts[report.group].clock = report.clock
            if report.error is None and not report.lost:
                if self.server is not None:
                    self.server.complete(report)
                self._records[handle.index].fruitless = 0
                self._notes.reported(report, handle.under_way.lane_of(report.number))
            elif report.error is not None:
                if not ending:
                    self._explain(handle, report)
                if ending or (self._on_failure != "raise" and isinstance(report.error, (EnvError, BadEnvOutput))):
                    first = first or report.error
                    for earlier in handle.untaken:  # in this order, since only the last is of a partial lane
                        self.accounts[earlier.group].add(earlier)
                    handle.under_way.take_back(report)
        return first

    def _explain(self, handle: WorkerProxy, report: Report) -> None:
        """Put the error itself into a report, with the file that replays it if there is one."""
        failure: failures.Failure = report.error
        failure = replace(failure, where=replace(failure.where, node=handle.host.where()))
        lane, index = handle.under_way.lane_of(report.number), failure.where.env_index
        report.error = failure.error(*self._notes.failed(report, lane, failure.error(), index))
        if self.server is not None:
            self.server.complete(report)

    def _welcome(self, handle: WorkerProxy, infos: Sequence[GroupInfo]) -> None:
        """A worker that was absent has made its environments, which have to be as many as was taken for granted."""
        assert handle.config.place is not None
        for number, info in zip(handle.groups, infos, strict=True):
            account = self.accounts[number]
            if (info.num_envs, info.batch_shape) != (account.info.num_envs, account.info.batch_shape):
                handle.infos = None
                self._lose(handle, unlike(self._where(handle), account.info, info), "env_error")
                return
            account.info = info
            self._notes.joined(number, info)
        handle.assign(handle.config.place)
        self._lost.append(news(handle.groups[0]))

    def _look_for_hangs(self) -> None:
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + SAMPLED_EVERY / 2
        for handle in self.handles:
            record = self._records[handle.index]
            if not handle.awaited or self._is_served(handle):
                record.signs = ()
                continue
            if handle.process.child.exit_code() is not None:  # without a sign, where something it has started lives on
                self._has_ended(handle)
                continue
            as_of, signs = self._as_of(handle), handle.under_way.signs(handle.process.ledger.cells)
            if signs != record.signs or handle.phase is Phase.WAIT:  # for another one, whose deadline runs
                record.signs, record.since = signs, now
                continue
            phase = handle.phase.name.lower()
            deadline = self.timeout(phase)
            if deadline is not None and as_of - record.since > deadline:
                self._hung(handle, phase, as_of - record.since, deadline)

    def _as_of(self, handle: WorkerProxy) -> float:
        """When its signs were so (``time.monotonic``): what a node tells of its workers is a little old, or more."""
        told_at: float = handle.process.ledger.told_at if handle.host.remote else time.monotonic()
        return told_at

    def _is_served(self, handle: WorkerProxy) -> bool:
        """It waits for the server, whose affair it then is; raises what keeps that from acting."""
        if self.server is None or not self.server.waits(handle.index) or handle.process.child.exit_code() is not None:
            return False
        self.server.check()
        return True

    # --- who is lost ------------------------------------------------------------------------------

    def _died(self, handle: WorkerProxy) -> None:
        if not handle.alive:
            return
        failure, phase, process = handle.failure, handle.phase.name.lower(), handle.process
        code = process.child.exit_code()
        at_work = None
        if failure is not None:
            error: MusterError = failure.error()
        elif lost := process.child.lost:
            error = failures.node_lost(self._where(handle), phase=phase, why=lost)
        else:
            error = failures.died(
                self._where(handle),
                phase=phase,
                exitcode=None if code is None or abs(code) > 255 else code,
                oom_kills=process.ledger.oom_kills if handle.host.remote else failures.oom_kills() - self._oom_kills,
                stack=process.ledger.stack(),
            )
            at_work = self._at_work(handle)  # its lane is here; what is lost with its node left none
        self._lose(handle, error, "worker_died", at_work)

    def _hung(self, handle: WorkerProxy, phase: str, seconds: float, deadline: float) -> None:
        where, at_work, stopped = self._where(handle), self._at_work(handle), handle.process.child.is_stopped()
        stack = "" if stopped else handle.process.stack()
        known: dict[str, Any] = {"phase": phase, "seconds": seconds, "deadline": deadline}
        error: MusterError = failures.hung(where, stack=stack, stopped=stopped, **known)
        _halt(handle, deaf=True)  # it may get on again at any time, because of the signal for its stack, too
        # With a node its lane comes only if it ends by itself.
        self._lose(handle, error, "worker_hung", None if handle.host.remote else at_work)

    def _at_work(self, handle: WorkerProxy) -> AtWork | None:
        under_way, cells = handle.under_way, handle.process.ledger.cells
        order = under_way.at_work(cells) if self.accounts else None
        if order is None:
            return None
        lane = under_way.lane_of(order.number)
        return order, lane, *under_way.row_at_work(cells, lane.B)

    def _where(self, handle: WorkerProxy) -> failures.Where:
        under_way, config, cells = handle.under_way, handle.config, handle.process.ledger.cells
        order = under_way.at_work(cells) if self.accounts else None
        known: dict[str, Any] = {"worker": handle.index, "pid": handle.process.child.pid}
        known |= {"generation": config.generation, "node": handle.host.where()}
        if order is None:
            ids = [int(i) for group in handle.groups for i in self.accounts[group].env_ids] if self.accounts else []
            return failures.Where(env_ids=tuple(ids), **known)
        assert config.place is not None
        account, seed = self.accounts[order.group], config.place.seed
        at, index = under_way.row_at_work(cells, len(account.env_ids))
        row = at if at >= 0 else None
        if index is None or not account.info.replays_alone:
            return failures.Where(env_ids=tuple(account.env_ids.tolist()), row=row, seed=seed, **known)
        env_id = int(account.env_ids[index])
        seed = None if seed is None else seed + env_id * (not config.place.static)
        return failures.Where(env_ids=(env_id,), env_index=index, row=row, seed=seed, **known)

    def told(self, handle: WorkerProxy, request: Request) -> None:
        """See ``Patience``."""
        if self.accounts:
            request.noted(self._notes, handle.groups)

    def restarted(self, handle: WorkerProxy) -> None:
        """See ``Patience``."""
        config, place = handle.config, handle.config.place
        assert place is not None
        self._notes.restarted(handle.groups, place.seed, place.static, config.generation)

    def _lose(self, handle: WorkerProxy, error: Exception, reason: str, at_work: AtWork | None = None) -> None:
        """End a worker, and do with its orders what is to be done.

        Args:
            at_work: what it was at, if there is to be a file that replays the error.
        """
        handle.cause = error
        crash_report = None if at_work is None else self._notes.died(*at_work, cast(MusterError, error))
        if self._on_failure != "restart":
            _add_crash_report(error, crash_report)
        try:
            handle.end()
        finally:  # also after Ctrl-C, or its orders were nobody's
            for number in handle.groups if self.accounts else ():
                self.accounts[number].give_up(reason)
            self._pass_on(handle, error)
        if self._on_failure == "restart" and crash_report is not None:
            self._revive(handle)  # others wait for its successor, and nobody for the file
            _add_crash_report(error, crash_report)

    def ends(self, handle: WorkerProxy) -> None:
        """See ``Patience``. Steps are counted when no more can be made, and no report can come."""
        _halt(handle)
        if not self.accounts:
            return  # it was never part of the worker pool
        self._take_note_of_reports(handle, ending=True)
        under_way, cells = handle.under_way, handle.process.ledger.cells
        for report in [*under_way.reports, *under_way.unfinished]:  # in this order: only the last is of a partial lane
            self.accounts[report.group].add(report)
        under_way.unfinished.clear()
        steps, at_work = 0, under_way.at_work(cells)
        if at_work is not None and at_work.number not in under_way.entered:
            steps = under_way.steps_seen(cells)
            self.accounts[at_work.group].cut_short(steps)
        for order in under_way.orders() if handle.process.child.lost else ():
            lane = under_way.lane_of(order.number)
            self.accounts[order.group].unseen += lane.T * lane.B - (steps if order is at_work else 0)

    def _pass_on(self, handle: WorkerProxy, error: Exception) -> None:
        """Its orders, to a successor, to others or back."""
        record = self._records[handle.index]
        if not self.accounts:
            return  # it was never part of the worker pool
        self._prepare_successor(handle)
        child = handle.process.child
        away = self.elastic and bool(child.lost)
        if away:
            if handle.state is WorkerState.DEAD:
                handle.config = replace(handle.config, generation=handle.config.generation + 1)
                handle.state = WorkerState.AWAY
            for number in handle.groups:
                self.accounts[number].late = True
        if self._on_failure == "restart" and ((away and child.late) or record.may_restart(self._max_restarts)):
            record.plan()
            handle.state = WorkerState.REJOINING if handle.absent else WorkerState.RESTARTING
            if away:
                self._lost += [Report(o.number, o.group, lost=True) for o in handle.under_way.give_up()]
                self._lost.append(news(handle.groups[0]))
            return
        orders = handle.under_way.give_up()
        if self._on_failure == "drop":
            handle.state = WorkerState.DROPPED
            for number in handle.groups:
                self.accounts[number].dropped = True
            self._lost += [Report(order.number, order.group, dropped=True) for order in orders]
            self._lost += [news(handle.groups[0])] if self.elastic else []
            # Last, since a warning may be an error.
            warnings.warn(f"a worker is dropped, and the others go on without it: {error}", stacklevel=2)
            return
        if not orders and (handle.absent or isinstance(error, WorkerHung)):  # it may have got on and done them all
            self._lost.append(news(handle.groups[0], error))
        self._lost += [Report(o.number, o.group, lost=True, error=None if i else error) for i, o in enumerate(orders)]

    def _prepare_successor(self, handle: WorkerProxy) -> None:
        """Its environments begin episodes of new numbers."""
        episodes = []
        for number in handle.groups:
            account = self.accounts[number]
            none_yet = np.zeros((2, len(account.env_ids)), np.int64)
            episode, steps = none_yet if account.clock is None else account.clock
            episodes.append(episode + (steps > 0))
            account.clock = np.stack([episodes[-1], np.zeros_like(steps)])
        if handle.config.place is not None:
            handle.config = replace(handle.config, place=replace(handle.config.place, episodes=episodes))

    def _revive_due(self) -> None:
        for handle in self.handles:
            self._revive(handle)

    def _revive(self, handle: WorkerProxy) -> None:
        """Start a worker again, if it is due."""
        record = self._records[handle.index]
        if record.revive_at is not None and record.revive_at <= time.monotonic():
            record.revive_at = None
            record.signs = ()
            handle.state = WorkerState.AWAY if handle.absent else WorkerState.DEAD
            handle.start()

    def _raise_once(self, handle: WorkerProxy) -> None:
        """The cause of a worker's end, which is then not raised again for its orders."""
        for report in self._lost:
            if report.error is handle.cause:
                report.error = None
        assert handle.cause is not None
        raise handle.cause


def _halt(handle: WorkerProxy, *, deaf: bool = False) -> None:
    """Let a worker do nothing more, and take in what it has said until then: what its ledger says is final.

    Args:
        deaf: see ``WorkerProxy.kill``.
    """
    process, in_thread = handle.process, handle.config.in_thread
    if in_thread:  # it goes on: at first nobody listens to it, then nobody sees what it writes
        process.channel.close()
        handle.pump()
    handle.kill(deaf=deaf)
    if not in_thread:
        process.child.join(END_S)
        handle.pump()


def _add_crash_report(error: Exception, save: Callable[[], Replay] | None) -> None:
    """Write a crash report, and say in the error how it is replayed."""
    if save is not None and isinstance(error, MusterError):
        error.crash_report, command = save()
        if command:
            error.args = (f"{error}\n\nTo see it happen again under a debugger: {command}",)
