"""Workers in threads of this process, for environments that mostly wait.

They get the same messages as processes.
"""

from __future__ import annotations

import os
import queue
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

from muster.memory.shared import Arena
from muster.rollout.context import run_beside_user
from muster.rollout.progress import ALL_ORDERS, CELLS, STOP, Progress
from muster.utils.exits import EndingThread
from muster.workers.channel import WakeUp
from muster.workers.failures import thread_stack
from muster.workers.main import WorkerMain


class WorkerThread:
    """A thread that replaces a worker process, its channel and its status page. Nothing is pickled.

    A thread cannot be killed: it runs on, and its writes no longer reach shared memory. The methods
    are those of ``Child``, ``Channel`` and ``StatusPage``. ``wake_up`` rings with every message of
    the thread, and at its end.
    """

    fd = -1

    def __init__(self, name: str, wake_up: WakeUp) -> None:
        self.pid, self._wake_up = os.getpid(), wake_up
        self.cells: Any = [0] * CELLS
        self.arrived: deque[Any] = deque()
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.closed = self._ended = False
        self._main: Any = None
        self._thread = EndingThread(self._run, name, self._end_with_program)
        self._thread.start()

    def fileno(self) -> int:
        return self._wake_up.fileno()

    def send(
        self, message: Any, fds: Sequence[int] = (), timeout: float | None = None
    ) -> None:
        if self.closed or self._ended:
            raise EOFError("The thread has ended.")
        copies: list[int] = []
        try:
            for fd in fds:
                copies.append(os.dup(fd))
        except OSError:  # too many open files
            for fd in copies:
                os.close(fd)
            raise
        self._requests.put((message, copies))

    def receive(self, timeout: float | None = None) -> tuple[Any, list[int]]:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.arrived:
            if self._ended:
                raise EOFError("The thread has ended.")
            left = None if deadline is None else deadline - time.monotonic()
            if not self._wake_up.wait(left):
                raise TimeoutError("The thread has not answered in time.")
        return self.arrived.popleft(), []

    def poll(self) -> bool:
        return bool(self.arrived) or self._ended

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._requests.put(None)

    def stack(self, within_s: float = 0.0) -> str:
        """Return the current stack of the thread; empty if ``within_s`` is 0."""
        ident = self._thread.ident if within_s else None
        return "" if ident is None else thread_stack(ident)

    def exit_code(self) -> int | None:
        return None if self._thread.is_alive() else 0

    def is_stopped(self) -> bool:
        return False

    def send_signal(self, number: int) -> None:
        """End all rollouts of the thread after their current step, for any signal."""
        self.cells[STOP] = ALL_ORDERS

    def kill(self) -> None:
        """Isolate the memory of a thread that still runs, and end its turn with the policy."""
        self.cells[STOP] = ALL_ORDERS
        if self._thread.is_alive() and (main := self._main) is not None:
            try:
                main.arena.isolate()
            except OSError:
                if main.arena.is_open:
                    raise  # else the thread has just ended, or the program is ending
            if (turns := main.config.policy_turns) is not None:
                turns.revoke(self._thread.ident)

    def _end_with_program(self) -> None:
        self.cells[STOP] = ALL_ORDERS
        self.close()

    def join(self, timeout: float) -> bool:
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        run_beside_user()
        end = _ThreadEnd(self, self._requests)
        try:
            config, (arena, *fds) = end.receive()
            with closing(Arena.attach(arena)) as memory:
                self._main = WorkerMain(end, config, Progress(self.cells), memory, fds)
                self._main.serve()
        except EOFError:  # the channel is closed
            pass
        finally:
            self._ended = True
            self._wake_up.ring(self)


class _ThreadEnd:
    """The thread's end of the channel."""

    def __init__(self, thread: WorkerThread, requests: queue.SimpleQueue[Any]) -> None:
        self._thread = thread
        self._requests = requests

    def send(self, message: Any) -> None:
        if self._thread.closed:
            raise EOFError("This thread is not listened to any more.")
        self._thread.arrived.append(message)
        self._thread._wake_up.ring(self._thread)

    @staticmethod
    def sealed(value: Any, what: str) -> Any:
        return value  # threads share objects

    def receive(self) -> tuple[Any, list[int]]:
        content: tuple[Any, list[int]] | None = self._requests.get()
        if content is None:
            raise EOFError("This thread gets no messages any more.")
        return content


def in_thread(wake_up: WakeUp) -> Callable[[str, bool], tuple[WorkerThread, ...]]:
    """Return a function that launches workers as threads, which ring ``wake_up`` with every
    message.
    """
    return lambda name, preload: (WorkerThread(name, wake_up),) * 3
