"""The pool of a collector whose only worker runs in the caller's thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from muster.env_spec import EnvSpec
from muster.memory.slots import Slot
from muster.observing.stats import WorkerStats
from muster.restore.crash_notes import CrashNotes, LocalLog
from muster.rollout.request import RolloutRequest
from muster.workers.counters import FrameCounters
from muster.workers.effects import log_request, run_request
from muster.workers.pool import Handle, Pool
from muster.workers.requests import Request
from muster.workers.worker import Worker, phase_ended_by

if TYPE_CHECKING:
    from muster.restore.crash_report import EnvFactory


class LocalWorker(Handle):
    """The worker in the caller's thread. It executes requests synchronously."""

    alive = True
    reviving = False
    absent = False

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker.index, [group.number for group in worker.groups])
        self.worker = worker

    def prepared(self, policy: str) -> bool:
        return self.worker.prepared(policy)

    def stats(self, counters: Sequence[FrameCounters]) -> list[WorkerStats]:
        return []

    def submit(self, request: RolloutRequest, slot: Slot) -> None:
        """Not used: the schedule of this pool calls the worker itself."""
        raise NotImplementedError

    def stop(self, number: int) -> None:
        """Do nothing: no rollout is under way between two calls."""

    def call(self, request: Request) -> list[Any]:
        try:
            return [run_request(self.worker, request)]
        except BaseException as error:
            phase_ended_by(error, self.worker.progress)
            raise

    def end(self) -> None:
        """Do nothing: the environments stay open for the user."""

    def close(self, *, wait: bool = True) -> None:
        if wait:
            self.worker.close()
        else:
            self.worker.profile(None)


class LocalPool(Pool):
    """A worker in the caller's thread; see ``Pool``. Nothing is waited for, lost or dropped."""

    def __init__(self, worker: Worker, infos: Sequence[EnvSpec]) -> None:
        super().__init__(None)
        self.handles = [LocalWorker(worker)]
        self.local: Worker = worker
        self._notes: CrashNotes | None = None
        self._log: LocalLog | None = None
        self._open(infos)

    @property
    def notes(self) -> CrashNotes | None:
        return self._notes

    @property
    def log(self) -> LocalLog | None:
        return self._log

    def wait(self, timeout: float | None) -> None:
        """Not used: a rollout has a result when it returns."""
        raise NotImplementedError

    def log_rollouts(
        self, origins: Sequence[EnvFactory], max_frames_per_traj: int | None
    ) -> LocalLog:
        """Keep the actions of the groups, which had no reset yet.

        Returns the log, to which the worker's rollouts have to be added.
        """
        groups = self.local.groups
        self._notes = CrashNotes(
            range(len(groups)), origins, self.counters, max_frames_per_traj
        )
        self._log = LocalLog(self._notes, groups)
        return self._log

    def call(self, request: Request) -> list[Any]:
        if self._log is not None and self._notes is not None:
            self._log.flush()
            log_request(request, self._notes, self.handles[0].groups)
        return super().call(request)
