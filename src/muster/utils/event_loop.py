"""Coroutines of environments and policies, run by the event loop of this process, in a thread of
its own.

The loop also runs while you train: connections of environments stay alive between batches.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster.errors import MusterError

if TYPE_CHECKING:
    import torch
else:
    from muster.utils import lazy_torch as torch

CANCEL_S = 1.0  # time for cancelled coroutines to clean up
BLOCKED_S = (
    1.0  # time after which an event loop that does not cancel its coroutines is blocked
)
LOOK_S = 0.1  # interval at which a thread that waits for coroutines calls ``CoroutineRunner.look``


def is_coroutine_function(function: Any) -> bool:
    """Return whether ``function`` is a function or method, or has the method ``__call__``, defined
    by ``async def``.
    """
    call = getattr(type(function), "__call__", None)  # noqa: B004 (its kind is the question)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


class CoroutineCall:
    """A call of a coroutine function.

    Args:
        function: function without arguments that returns the coroutine.

    Attributes:
        task: task of the event loop; None: not started.
        error: exception that the coroutine raised, or reason why it has no result.
        returned: the coroutine has returned in time.
    """

    __slots__ = ("_function", "_value", "error", "returned", "task")

    def __init__(self, function: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        self._function = function
        self._value: Any = None
        self.task: asyncio.Task[None] | None = None
        self.error: BaseException | None = None
        self.returned = False

    @property
    def is_running(self) -> bool:
        return self.task is not None and not self.task.done()

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the coroutine."""
        self.task = loop.create_task(self.run())

    def fail(self, error: BaseException) -> None:
        """Set the reason why there is no result."""
        self.error = error

    def result(self) -> Any:
        """Return what the coroutine has returned, or raise ``error``."""
        if self.error is not None:
            raise self.error
        return self._value

    async def run(self) -> None:
        # Keeps all exceptions: SystemExit and KeyboardInterrupt in a task would end the event loop.
        try:
            value = await self._function()
        except asyncio.CancelledError:
            self.error = self.error or RuntimeError("its coroutine was cancelled")
        except BaseException as error:  # noqa: BLE001 (raised by ``result``)
            self.error = self.error or error
        else:
            if self.error is None:
                self._value = value
                self.returned = True


class CoroutineRunner:
    """Runs coroutines for the thread of a worker, and waits for all of them, with a deadline.

    Attributes:
        timeouts: deadlines in seconds by phase. Without an entry, or if it is None, there is no
            deadline.
        look: called every 0.1 s of a wait; True: the worker was ended, and the coroutines are
            cancelled.
    """

    def __init__(self) -> None:
        self.timeouts: Mapping[str, float | None] = {}
        self.look: Callable[[], bool] = bool
        self._home: EventLoop | None = None  # keeps the loop running between calls

    def run(self, calls: Sequence[CoroutineCall], phase: str) -> None:
        """Run all calls concurrently, until each has a result or an error.

        A coroutine that exceeds the deadline of ``phase`` is cancelled, and its error is a
        ``TimeoutError``. Others are not cancelled because of an error. If this wait is interrupted
        (by Ctrl-C, or since the worker was ended), all are cancelled, and get ``CANCEL_S`` to clean
        up.

        Raises:
            MusterError: the worker was ended.
        """
        seconds = self.timeouts.get(phase)
        finished = threading.Event()
        drivers: list[asyncio.Task[None]] = []

        def begin() -> None:
            drivers.append(
                asyncio.get_running_loop().create_task(_finish(calls, seconds, phase))
            )
            drivers[0].add_done_callback(lambda _: finished.set())

        blocked_at = None
        if seconds is not None:
            blocked_at = time.monotonic() + seconds + CANCEL_S + BLOCKED_S
        home = self._home = _event_loop()
        try:
            while not home.call(begin):  # the user's code has stopped that loop
                home = self._home = _event_loop()
            while not finished.wait(LOOK_S):
                if self.look():
                    raise MusterError(
                        "This worker was ended while it waited for coroutines."
                    )
                if not home.thread.is_alive():
                    break
                if blocked_at is not None and time.monotonic() > blocked_at:
                    self._home = None
                    _note_blocked(home, calls)
                    return
        except BaseException:
            home.call(lambda: [driver.cancel() for driver in drivers])
            finished.wait(CANCEL_S + BLOCKED_S)
            raise
        for call in calls:
            if not call.returned and call.error is None:  # cancelled before it began
                call.fail(RuntimeError("its coroutine was cancelled"))

    def close(self) -> None:
        """Release the event loop, which stops if nothing else uses it."""
        self._home = None


class EventLoop:
    """An event loop that runs in a daemon thread for as long as anything refers to this object."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._door = _Door()
        self.thread = threading.Thread(
            target=_serve,
            args=(self.loop, self._door),
            name="muster-event-loop",
            daemon=True,
        )
        self.thread.start()
        self._end = weakref.finalize(
            self, _stop, self.loop, self._door, self.thread, os.getpid()
        )

    @property
    def is_open(self) -> bool:
        return self._door.is_open and self.thread.is_alive()

    def call(self, function: Callable[[], Any]) -> bool:
        """Let the loop call a function soon; False: the loop has been stopped, and calls nothing
        any more.
        """
        with self._door.lock:
            if self._door.is_open:
                self.loop.call_soon_threadsafe(function)
            return self._door.is_open

    def abandon(self) -> None:
        """End the thread when it is not blocked any more. Does not wait for that."""
        self._end.detach()
        self.call(self.loop.stop)


class _Door:
    """Whether an event loop takes new work.

    What it has taken before the door was closed, it begins and cancels.
    """

    def __init__(self) -> None:
        # the garbage collection of another loop may need it at any time
        self.lock = threading.RLock()
        self.is_open = True

    def close(self) -> None:
        with self.lock:
            self.is_open = False


_current: weakref.ref[EventLoop] | None = None
_making = threading.Lock()


def _event_loop() -> EventLoop:
    """Return the event loop of this process.

    There is one at a time, since objects of the user belong to a loop.
    """
    global _current
    with _making:
        home = None if _current is None else _current()
        if home is None or not home.is_open:
            home = EventLoop()
            _current = weakref.ref(home)
        return home


def _forget() -> None:
    global _current, _making
    _current = None
    _making = threading.Lock()


os.register_at_fork(
    after_in_child=_forget
)  # the thread of the loop is in the other process


async def _finish(
    calls: Sequence[CoroutineCall], seconds: float | None, phase: str
) -> None:
    # as in all threads that step environments
    if "torch" in sys.modules and torch.is_grad_enabled():
        torch.set_grad_enabled(False)
    loop = asyncio.get_running_loop()
    for call in calls:
        call.begin(loop)
    tasks = [call.task for call in calls if call.task is not None]
    try:
        await asyncio.wait(tasks, timeout=seconds)
        for call in calls:
            if call.is_running:
                call.fail(
                    TimeoutError(
                        f"it did not return within {seconds:g} s, its deadline, and was cancelled."
                        f" If it may take that long, pass timeouts={{{phase!r}: ...}} with more"
                        " seconds (None: no limit)"
                    )
                )
    finally:
        late = [task for task in tasks if not task.done()]
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=CANCEL_S)


def _note_blocked(home: EventLoop, calls: Sequence[CoroutineCall]) -> None:
    """Set the errors of calls whose event loop is blocked, and leave that loop to itself."""
    global _current
    with _making:
        if _current is not None and _current() is home:
            _current = None
    task = asyncio.current_task(home.loop)
    place = _user_line(home.thread)
    for call in calls:
        if call.returned or call.error is not None:
            continue
        if call.task is not None and call.task is task:
            message = (
                f"it blocks the event loop{place}: all coroutines of the process wait. Call a"
                " function that can be awaited instead, or run this one in a thread: await"
                " asyncio.to_thread(...)"
            )
        else:
            message = f"another coroutine of the process blocks the event loop{place}"
        call.fail(TimeoutError(message))
    home.abandon()


def _user_line(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    stack = traceback.extract_stack(frame) if frame is not None else []
    ours = [n for n, line in enumerate(stack) if Path(line.filename) == Path(__file__)]
    called = stack[ours[-1] + 1 :] if ours else []
    if not called:
        return ""
    line = called[0]
    return f" at {line.filename}:{line.lineno} in {line.name}"


def _serve(loop: asyncio.AbstractEventLoop, door: _Door) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        door.close()
        loop.run_until_complete(asyncio.sleep(0))  # calls what came in before
        tasks = asyncio.all_tasks(loop)  # started by the user's code
        if tasks:
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.wait(tasks, timeout=CANCEL_S))
        loop.run_until_complete(asyncio.wait_for(loop.shutdown_asyncgens(), CANCEL_S))
    except asyncio.TimeoutError:  # of an asynchronous generator
        pass
    finally:
        door.close()
        loop.close()


def _stop(
    loop: asyncio.AbstractEventLoop, door: _Door, thread: threading.Thread, pid: int
) -> None:
    if os.getpid() != pid or not thread.is_alive():
        return
    with door.lock:
        if door.is_open:  # else it is stopping, and a second time would disturb that
            loop.call_soon_threadsafe(loop.stop)
    if thread is not threading.current_thread():
        thread.join(2 * CANCEL_S)
