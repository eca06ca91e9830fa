"""The two ends of a weight sync scheme, in processes of one machine: connection, and notes about
new versions.

::

    sender    listens on a socket in a folder that only its user may enter
    receiver  connects, and sends the number of its worker
    sender    sends the worker's ticket, with its descriptors; then a note for each new version
    receiver  takes the weights, and sends their version back

The weights themselves go through shared memory.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
import threading
import time
import weakref
from collections.abc import Collection

from muster.errors import BadOption, CollectorClosed, CollectorTimeout
from muster.weights.names import Weights
from muster.weights.shared_memory import SharedMemory
from muster.weights.transport import Publisher, Subscriber, chosen
from muster.workers.channel import Channel


class SendingEnd:
    """Publishes weights to receivers in other processes. Can be used from any thread.

    Args:
        weights: first weights.
        workers: number of receivers, which are numbered from 0.
        deadline_s: timeout of ``wait``, and for a receiver to send its number, in seconds.

    Attributes:
        path: path of the socket. Receivers that connect wait until ``serve`` is called.
    """

    def __init__(self, weights: Weights, workers: int, deadline_s: float) -> None:
        self._workers = workers
        self._deadline_s = deadline_s
        self._publisher = SharedMemory().publisher(weights, workers)
        self._readers: dict[int, _Reader] = {}
        self._state = threading.Lock()
        self._is_serving = False
        folder = tempfile.mkdtemp(prefix="muster-weights-")  # mode 0700
        self.path = os.path.join(folder, "socket")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen(workers + 8)
        self._end = weakref.finalize(
            self,
            _end,
            os.getpid(),
            folder,
            self._listener,
            self._publisher,
            self._readers,
        )

    def serve(self) -> None:
        """Start to accept receivers."""
        if not self._is_serving:
            self._is_serving = True
            args = (self._listener, weakref.ref(self))
            threading.Thread(
                target=_serve, args=args, name="muster-weights", daemon=True
            ).start()

    def publish(
        self, weights: Weights, version: int, workers: Collection[int] | None = None
    ) -> None:
        """See ``Publisher.publish``.

        Raises:
            CollectorClosed: this end was closed.
        """
        with self._state:
            if not self._end.alive:
                raise CollectorClosed(
                    "this weight sync scheme was shut down: it sends nothing any more"
                )
            self._publisher.publish(weights, version, workers)
            for reader in self._meant(workers).values():
                reader.note(version)

    def wait(self, workers: Collection[int] | None = None) -> None:
        """Wait until the connected receivers among ``workers`` have taken the last version; one
        thread at a time.

        Raises:
            CollectorTimeout: a receiver has not taken it in time. The weights can still be taken.
        """
        until = time.monotonic() + self._deadline_s
        with self._state:
            readers = self._meant(workers)
        if late := sorted(
            worker for worker, reader in readers.items() if not reader.wait(until)
        ):
            raise CollectorTimeout(
                f"workers {late} have not taken their weights within {self._deadline_s} s: they get"
                " them with their next receive(). A scheme with sync=False does not wait for that."
            )

    def admit(self, reader: _Reader) -> None:
        """Send a connected receiver its ticket, and register it."""
        # a pickle, from a process of the same user
        worker, _ = reader.channel.receive(self._deadline_s)
        with (
            self._state
        ):  # no version may be published between the ticket and the registration
            ticket = self._publisher.ticket(worker)
            try:
                reader.channel.send(ticket, ticket.fds)
            finally:
                ticket.close()
            if worker in self._readers:
                self._readers[worker].hang_up()
            self._readers[worker] = reader

    def close(self) -> None:
        """Disconnect the receivers, which keep their weights. May be called again."""
        with self._state:
            self._end()

    def _meant(self, workers: Collection[int] | None) -> dict[int, _Reader]:
        return {
            worker: self._readers[worker]
            for worker in chosen(workers, self._workers)
            if worker in self._readers
        }


class _Reader:
    """The sender's connection to a receiver."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket, self.channel = connected, Channel(connected)
        self._noted = self._taken = -1  # versions

    def note(self, version: int) -> None:
        """Send a note about a new version."""
        self._noted = version
        try:
            self.channel.send(version, timeout=0.0)
        except (
            TimeoutError
        ):  # its unread notes suffice: it takes the newest weights after any note
            pass
        except (EOFError, OSError):  # it has disconnected
            self.hang_up()

    def wait(self, until: float) -> bool:
        """Wait until the last noted version is taken, or the receiver has disconnected.

        Return False on a timeout.
        """
        while self._taken < self._noted:
            try:
                self._taken, _ = self.channel.receive(until - time.monotonic())
            except TimeoutError:
                return False
            except (EOFError, OSError):
                self.hang_up()
        return True

    def hang_up(self) -> None:
        """Close the connection, and wake the threads that wait at either end."""
        _shut(self._socket)
        self._socket.close()
        self._taken = self._noted


class ReceivingEnd:
    """Takes weights from a sender. For one thread at a time.

    Args:
        path: path of the sender's socket.
        worker: number of this receiver. It replaces a connected receiver of the same number.
        deadline_s: timeout for the sender to call ``serve``, in seconds.
        answers: report taken versions, for a sender that calls ``wait``.

    Attributes:
        alone: the sender has disconnected.

    Raises:
        BadOption: the sender has no receiver with this number.
        CollectorClosed: the sender is closed, or its process has ended.
        CollectorTimeout: the sender does not answer.
    """

    def __init__(
        self, path: str, worker: int, *, deadline_s: float, answers: bool
    ) -> None:
        self._answers = answers
        self.alone = False
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.connect(path)
            self._channel = Channel(self._socket)
            self._channel.send(worker)
            ticket, fds = self._channel.receive(deadline_s)
        except TimeoutError as error:
            self._socket.close()
            raise CollectorTimeout(
                f"no weights for worker {worker} came within {deadline_s} s: the sender has to call"
                " connect()"
            ) from error
        except (OSError, EOFError) as error:
            self._socket.close()
            raise CollectorClosed(
                f"no process sends weights to worker {worker} any more ({path})"
            ) from error
        try:
            if isinstance(ticket, str):
                self._socket.close()
                raise BadOption(ticket)
            self._subscriber: Subscriber = ticket.open(fds)
        finally:
            for fd in fds:
                os.close(fd)

    def hear(self, timeout: float | None) -> bool:
        """Read all notes, after waiting ``timeout`` seconds for one (None: no limit).

        Return whether there were any.
        """
        heard = False
        try:
            while self._channel.poll(0.0 if heard else timeout):
                self._channel.receive()
                heard = True
        except (EOFError, OSError):
            self.alone = True
        return heard

    def take(self, into: Weights) -> int | str | None:
        """See ``Subscriber.take``."""
        return self._subscriber.take(into)

    def answer(self, version: int | str) -> None:
        """Report to the sender that this version was taken, if ``answers``."""
        if self._answers:
            with contextlib.suppress(EOFError, OSError):  # it has disconnected
                self._channel.send(version, timeout=0.0)

    def hang_up(self) -> None:
        """End the connection, which wakes a thread in ``hear``. May be called from any thread."""
        _shut(self._socket)

    def close(self) -> None:
        """Close this end; no thread may use it any more. May be called again."""
        self.hang_up()
        self._socket.close()
        self._subscriber.close()


def _serve(listener: socket.socket, sender: weakref.ref[SendingEnd]) -> None:
    while True:
        try:
            reader = _Reader(listener.accept()[0])
        except OSError:  # closed
            return
        serving = sender()
        if serving is None:
            return
        try:
            serving.admit(reader)
        except (
            BadOption,
            EOFError,
            OSError,
        ) as error:  # unknown number, disconnected, or a timeout
            if isinstance(error, BadOption):
                reader.channel.send(str(error))
            reader.hang_up()
        del serving, reader


def _end(
    pid: int,
    folder: str,
    listener: socket.socket,
    publisher: Publisher,
    readers: dict[int, _Reader],
) -> None:
    if os.getpid() == pid:  # else in a fork: the connections are its parent's
        for reader in readers.values():
            reader.hang_up()
        _shut(listener)
        shutil.rmtree(folder, ignore_errors=True)
    listener.close()
    publisher.close()


def _shut(connected: socket.socket) -> None:
    """Shut the connection down, which wakes the threads that wait at either end."""
    with contextlib.suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)
