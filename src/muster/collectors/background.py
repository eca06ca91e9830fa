"""Collection in a background thread, into a replay buffer."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from muster.errors import CollectorTimeout, described
from muster.rollout.context import run_beside_user
from muster.utils.exits import GRACE_S, EndingThread
from muster.utils.forks import Owner

PATIENCE = 600.0  # timeout in seconds of a caller that waits for the end of a batch


class Background:
    """Calls ``step``, which collects a batch, in a thread until it returns False, raises, or
    ``stop`` is called.

    At the end of the program the thread ends after its current batch, or in the middle of a longer
    one; see ``muster.utils.exits``.

    Attributes:
        error: exception raised by ``step``, until it is raised in another thread.
        ended_by: type and message of that exception; empty if there was none.
    """

    def __init__(self, step: Callable[[], bool], name: str) -> None:
        self._step = step
        self._stopping = False
        self.owner = Owner("collector", "background thread")
        self._changed = threading.Condition()
        self._busy = False  # a batch is being collected
        self._pauses = 0  # number of ``paused`` contexts
        self.error: BaseException | None = None
        self.ended_by = ""
        self._thread = EndingThread(self._run, name, self._end_with_program)
        self._thread.start()

    def is_running(self) -> bool:
        return self._thread.is_alive()

    def here(self) -> bool:
        """Return whether this is called from the background thread."""
        return threading.current_thread() is self._thread

    def raise_error(self) -> None:
        """Raise the exception of ``step`` in this thread, if none has raised it yet."""
        error = self.error
        self.error = None
        if error is not None:
            raise error

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Wait until the current batch is complete; no batch is collected inside this context.

        May be nested.
        """
        if self.here():
            yield
            return
        with self._changed:
            self._pauses += 1
        try:
            with self._changed:
                idle = self._changed.wait_for(lambda: not self._busy, PATIENCE)
            if not idle:
                raise CollectorTimeout(
                    f"the thread {self._thread.name} has been in the middle of one batch for"
                    f" {PATIENCE:.0f} s: an environment or policy may hang"
                )
            yield
        finally:
            with self._changed:
                self._pauses -= 1
                self._changed.notify_all()

    def stop(self, timeout: float | None) -> None:
        """End the thread after the current batch.

        ``CollectorTimeout`` if this takes longer; it still ends then.
        """
        self._begin_to_stop()
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise CollectorTimeout(
                f"the thread {self._thread.name} is still in the middle of a batch after {timeout}"
                " s. An environment or policy may hang; call async_shutdown again with a longer"
                " timeout, or none to wait."
            )

    def _begin_to_stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def _end_with_program(self) -> None:
        """Wait for the current batch, for a moment: its workers and environments are ended after
        this.
        """
        self._begin_to_stop()
        self._thread.join(GRACE_S)

    def _run(self) -> None:
        run_beside_user()
        more = True
        try:
            while more and self._may_begin():
                more = self._step()
                self._rest()
        except BaseException as error:  # noqa: BLE001 (raised again in the user's thread)
            self.error, self.ended_by = error, described(error)
            self._warn()
        finally:
            self._rest()

    def _warn(self) -> None:
        """Warn a user who only reads the buffer, and so calls no method that would raise the error."""
        # ``stop`` raises it, or the program is exiting
        if self._stopping or not threading.main_thread().is_alive():
            return
        # filters may turn it into an exception; ``error`` is set in any case
        with suppress(Warning):
            warnings.warn(
                f"The background thread {self._thread.name} stopped collecting, because of"
                f" {self.ended_by}\nThe replay buffer gets no more data. The next call of a method"
                " of the collector raises this error; after that, start() goes on, and shutdown()"
                " ends.",
                RuntimeWarning,
                stacklevel=2,
            )

    def _may_begin(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: not self._pauses or self._stopping)
            self._busy = not self._stopping
            return self._busy

    def _rest(self) -> None:
        with self._changed:
            self._busy = False
            self._changed.notify_all()
