"""Jobs that a thread does one after another, while the user does something else."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from muster.errors import BadOption, CollectorTimeout

Job = TypeVar("Job")
Result = TypeVar("Result")


class Background(Generic[Job, Result]):
    """Results, and what jobs raise, come back in order. The thread lives while there is something to do.

    Args:
        work: does a job, in the thread.
        name: of the thread.
    """

    def __init__(self, work: Callable[[Job], Result], name: str) -> None:
        self._work, self._name = work, name
        self._changed = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._results: deque[Result | BaseException] = deque()
        self._thread: threading.Thread | None = None
        self.stopping = False  # jobs should end soon

    @property
    def waiting(self) -> int:
        """Jobs that are not done; the first of them is being done."""
        return len(self._jobs)

    def add(self, job: Job) -> None:
        """Returns at once."""
        with self._changed:
            self._jobs.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def take(self) -> Result | None:
        """The oldest result that was not taken yet; None if there is none. Raises what the job raised."""
        with self._changed:
            if not self._results:
                return None
            result = self._results.popleft()
        if isinstance(result, BaseException):
            raise result
        return result

    def wait(self, timeout: float | None) -> Result:
        """``take``, when there is one.

        Raises:
            CollectorTimeout: not within so many seconds; the job goes on.
            BadOption: no job was given.
        """
        with self._changed:
            if not self._results and not self._jobs:
                raise BadOption("there is nothing to wait for: every result was taken, so trigger() another one")
            if not self._changed.wait_for(lambda: self._results, timeout):
                raise CollectorTimeout(f"the evaluation is not done after {timeout} s; it goes on: wait() again")
            result = self.take()
        assert result is not None
        return result

    def stop(self, timeout: float | None) -> bool:
        """Forget jobs and results; whether the thread has ended in time."""
        with self._changed:
            self.stopping = True
            thread = self._thread
        if thread is not None:
            thread.join(timeout)
        return thread is None or not thread.is_alive()

    def _run(self) -> None:
        while True:
            result: Result | BaseException
            try:
                result = self._work(self._jobs[0])
            except BaseException as error:  # noqa: BLE001 (handed to the user's thread)
                result = error
            with self._changed:
                self._results.append(result)
                self._jobs.popleft()
                if self.stopping:
                    self._jobs.clear()
                self._changed.notify_all()
                if not self._jobs:
                    self._thread = None
                    return
