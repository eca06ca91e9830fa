"""The two ends of a weight sync scheme, in processes of one machine: how they meet, and hear of new weights.

::

    sender    listens on a socket in a folder that only its user may enter
    receiver  connects, and sends the number of its worker
    sender    sends the worker's ticket, with its descriptors; then a note whenever there is something new
    receiver  takes it, and sends its version back

The weights go through the transport that the ticket is for.
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
from muster.weights.transport import Publisher, Subscriber, Transport, chosen
from muster.workers.channel import Channel


class SendingEnd:
    """Publishes to receivers in other processes; may be used from any thread.

    Args:
        weights: the first.
        workers: numbers of receivers that may come: ``0 .. workers - 1``.
        transport: takes the weights.
        deadline_s: how long a receiver has to take weights that are waited for, and to send its number.

    Attributes:
        path: where receivers connect. They wait there until ``serve`` is called.
    """

    def __init__(self, weights: Weights, workers: int, transport: Transport, deadline_s: float) -> None:
        self._workers, self._deadline_s = workers, deadline_s
        self._publisher = transport.publisher(weights, workers)
        self._readers: dict[int, _Reader] = {}
        self._state = threading.Lock()
        self._is_serving = False
        folder = tempfile.mkdtemp(prefix="muster-weights-")  # mode 0700
        self.path = os.path.join(folder, "socket")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen(workers + 8)
        self._end = weakref.finalize(self, _end, os.getpid(), folder, self._listener, self._publisher, self._readers)

    def serve(self) -> None:
        """Let receivers in from now on."""
        if not self._is_serving:
            self._is_serving = True
            args = (self._listener, weakref.ref(self))
            threading.Thread(target=_serve, args=args, name="muster-weights", daemon=True).start()

    def publish(self, weights: Weights, version: int, workers: Collection[int] | None = None) -> None:
        """See ``Publisher.publish``.

        Raises:
            CollectorClosed: after ``close``.
        """
        with self._state:
            if not self._end.alive:
                raise CollectorClosed("this weight sync scheme was shut down: it sends nothing any more")
            self._publisher.publish(weights, version, workers)
            for reader in self._meant(workers).values():
                reader.note(version)

    def wait(self, workers: Collection[int] | None = None) -> None:
        """Wait until those of these receivers that are connected have taken what was published; one thread at a time.

        Raises:
            CollectorTimeout: they have not; the weights are there to be taken.
        """
        until = time.monotonic() + self._deadline_s
        with self._state:
            readers = self._meant(workers)
        if late := sorted(worker for worker, reader in readers.items() if not reader.wait(until)):
            raise CollectorTimeout(
                f"workers {late} have not taken their weights within {self._deadline_s} s: they get them with their "
                f"next receive(). A scheme with sync=False does not wait for that."
            )

    def admit(self, reader: _Reader) -> None:
        """Answer a receiver that has connected."""
        worker, _ = reader.channel.receive(self._deadline_s)  # a pickle, from a process of the same user
        with self._state:  # no note may come between the ticket and what it is for
            ticket = self._publisher.ticket(worker)
            try:
                reader.channel.send(ticket, ticket.fds)
            finally:
                ticket.close()
            if worker in self._readers:
                self._readers[worker].hang_up()
            self._readers[worker] = reader

    def close(self) -> None:
        """Receivers keep what they have; may be called again."""
        with self._state:
            self._end()

    def _meant(self, workers: Collection[int] | None) -> dict[int, _Reader]:
        return {worker: self._readers[worker] for worker in chosen(workers, self._workers) if worker in self._readers}


class _Reader:
    """A connected receiver, as its sender sees it."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket, self.channel = connected, Channel(connected)
        self._noted = self._taken = -1  # versions

    def note(self, version: int) -> None:
        """Say that there is something new."""
        self._noted = version
        try:
            self.channel.send(version, timeout=0.0)
        except TimeoutError:  # it has notes to read, and looks for what is newest when it does
            pass
        except (EOFError, OSError):  # it is gone
            self.hang_up()

    def wait(self, until: float) -> bool:
        """Wait until everything is taken; False: it was not in time. A receiver that is gone is not waited for."""
        while self._taken < self._noted:
            try:
                self._taken, _ = self.channel.receive(until - time.monotonic())
            except TimeoutError:
                return False
            except (EOFError, OSError):
                self.hang_up()
        return True

    def hang_up(self) -> None:
        """Both ends, and threads that wait, see that it is over."""
        _shut(self._socket)
        self._socket.close()
        self._taken = self._noted


class ReceivingEnd:
    """Takes weights; for one thread at a time.

    Args:
        path: of the sender.
        worker: which of its workers this is; a successor takes the place of its predecessor.
        deadline_s: how long to wait for the sender to serve.
        answers: the sender calls ``wait``.

    Attributes:
        alone: the sender is gone.

    Raises:
        BadOption: there is no such worker.
        CollectorClosed: the sender is gone.
        CollectorTimeout: it does not answer.
    """

    def __init__(self, path: str, worker: int, *, deadline_s: float, answers: bool) -> None:
        self._answers, self.alone = answers, False
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.connect(path)
            self._channel = Channel(self._socket)
            self._channel.send(worker)
            ticket, fds = self._channel.receive(deadline_s)
        except TimeoutError as error:
            self._socket.close()
            raise CollectorTimeout(
                f"no weights for worker {worker} came within {deadline_s} s: the sender has to call connect()"
            ) from error
        except (OSError, EOFError) as error:
            self._socket.close()
            raise CollectorClosed(f"no process sends weights to worker {worker} any more ({path})") from error
        try:
            if isinstance(ticket, str):
                self._socket.close()
                raise BadOption(ticket)
            self._subscriber: Subscriber = ticket.open(fds)
        finally:
            for fd in fds:
                os.close(fd)

    def hear(self, timeout: float | None) -> bool:
        """Wait for notes, for so many seconds; None is until the sender is gone. False: there are none."""
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
        """Tell the sender that this was taken."""
        if self._answers:
            with contextlib.suppress(EOFError, OSError):  # it is gone
                self._channel.send(version, timeout=0.0)

    def hang_up(self) -> None:
        """Wake a thread that is in ``hear``, for good; from any thread."""
        _shut(self._socket)

    def close(self) -> None:
        """When no thread uses it any more; may be called again."""
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
        except (BadOption, EOFError, OSError) as error:  # there is no such worker; or it is gone, or silent
            if isinstance(error, BadOption):
                reader.channel.send(str(error))
            reader.hang_up()
        del serving, reader


def _end(pid: int, folder: str, listener: socket.socket, publisher: Publisher, readers: dict[int, _Reader]) -> None:
    if os.getpid() == pid:  # else a fork, which leaves alone what is its parent's
        for reader in readers.values():
            reader.hang_up()
        _shut(listener)
        shutil.rmtree(folder, ignore_errors=True)
    listener.close()
    publisher.close()


def _shut(connected: socket.socket) -> None:
    """Wakes threads that wait, on both ends."""
    with contextlib.suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)
