"""Workers in threads of this process, for environments that mostly wait.

They get the same messages as processes.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING, Any

from muster.errors import MusterError
from muster.keys import Key
from muster.memory.slots import Lane
from muster.memory.specs import Column
from muster.protocols import Act, Outputs, Policy
from muster.rng import GroupRng, global_streams
from muster.rollout.progress import ALL_ORDERS, CELLS, STOP, Phase, Progress
from muster.utils.exits import EndingThread
from muster.workers.channel import WakeUp
from muster.workers.failures import thread_stack

if TYPE_CHECKING:
    import torch

LOOKED_AT = 8  # number of batches that ``GlobalStreams`` checks
LOOK_S = 0.1  # interval at which a thread that waits for its turn checks whether it was ended
ENDED = "This worker was ended while the policy was called, or while it waited for its turn."


class GlobalStreams:
    """Warns if environments in threads draw from the process's random generators, which all threads
    share.

    Their data are then not reproducible, and the user's random numbers change. A check takes some
    microseconds, so only the first few batches are checked, and only those that the main thread
    waits for: while a collector runs in the background the user may draw.
    """

    def __init__(self) -> None:
        self._left = LOOKED_AT

    def before(self) -> dict[str, Any] | None:
        """Return the states of the generators before a batch, while no thread has the turn; None:
        do not check.
        """
        if not self._left or threading.current_thread() is not threading.main_thread():
            return None
        self._left -= 1
        return global_streams()

    def check(self, before: dict[str, Any]) -> None:
        """Warn, once, if the states have changed during the batch."""
        if moved := [
            name for name, state in global_streams().items() if state != before.get(name, state)
        ]:
            self._left = 0
            warnings.warn(
                f"The global random generators of {', '.join(moved)} moved while threads collected."
                " An environment, a hook or another thread of this program draws from them."
                " Threads share them: the same seed does not give the same data, and your own"
                " random numbers change. Let environments draw from self.np_random, or use"
                " backend='processes'.",
                stacklevel=2,
            )


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

    def send(self, message: Any, fds: Sequence[int] = (), timeout: float | None = None) -> None:
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
        from muster.memory.shared import Arena
        from muster.rollout.context import run_beside_user
        from muster.workers.main import WorkerMain

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


# --- policies that draw from the process's generators ---------------------------------------------


class Turns:
    """Lets one thread at a time act, with the streams of its group as the global ones.

    ``revoke`` ends the turn of a thread that hangs: the user's streams are the global ones again,
    and other threads continue. If the thread continues later, the end of its revoked turn changes
    nothing.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._present: ExitStack | None = None  # closing it restores the user's streams
        self._thread: int | None = None  # whose turn it is

    @contextmanager
    def turn(self, rng: GroupRng, progress: Progress) -> Iterator[None]:
        """Wait for the turn of the calling thread, and hold it in this context.

        Raises:
            MusterError: the worker was ended while it waited, or its turn was revoked.
        """
        mine = ExitStack()
        with self._changed:
            if self._present is not None:
                self._wait(progress)
            mine.enter_context(rng.as_global())
            self._present, self._thread = mine, threading.get_ident()
        try:
            yield
        finally:
            with self._changed:
                revoked = self._present is not mine
                self._end(mine)
        if revoked:  # the outputs are not used any more
            raise MusterError(ENDED)

    def revoke(self, thread: int | None) -> None:
        """End the turn of a thread, if it has the turn. Called from another thread."""
        with self._changed:
            if self._present is not None and self._thread == thread:
                self._end(self._present)

    def _wait(self, progress: Progress) -> None:
        phase = progress.begin(Phase.WAIT)
        try:
            while self._present is not None:
                if progress.cells[STOP] >= ALL_ORDERS:
                    raise MusterError(ENDED)
                self._changed.wait(LOOK_S)
        finally:
            progress.begin(phase)

    def _end(self, turn: ExitStack) -> None:
        turn.close()
        if self._present is turn:
            self._present = None
            self._changed.notify()


class OneAtATime:
    """Implements ``Policy``: acts in the turn of its thread.

    Policies that draw only from the group's own generator need a turn for their first call only.
    """

    def __init__(self, policy: Policy, turns: Turns, progress: Progress) -> None:
        self.inner = policy
        self._turns = turns
        self._progress = progress
        self.name = policy.name
        self.draws_globally = False

    @property
    def path(self) -> str:
        return self.inner.path

    @property
    def coroutines(self) -> Any:
        return getattr(self.inner, "coroutines", None)

    def first(self, obs: Mapping[Key, torch.Tensor], rng: GroupRng) -> Outputs:
        with self._turns.turn(rng, self._progress):
            return self.inner.first(obs, rng)

    def start(self, lane: Lane, rng: GroupRng) -> Act:
        act = self.inner.start(lane, rng)
        if not self.inner.draws_globally:
            return act
        turn = self._turns.turn
        progress = self._progress

        def act_alone(t: int) -> None:
            with turn(rng, progress):
                act(t)

        return act_alone

    def columns(self) -> Sequence[Column]:
        return self.inner.columns()
