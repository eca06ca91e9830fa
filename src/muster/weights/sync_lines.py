"""How a receiver in another process of this machine finds its sender, and hears that there are new weights.

::

    sender    listens on a socket in a folder that nobody but its user may enter
    receiver  connects, and says which worker it is
    sender    sends the worker's ticket, descriptors along; then a byte whenever there is something new
    receiver  takes it, and sends its number back

The weights themselves go through the transport that the ticket is for.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import socket
import struct
import tempfile
import threading
import time
import weakref
from collections.abc import Collection
from typing import TYPE_CHECKING

from muster.errors import BadOption, CollectorClosed, CollectorTimeout
from muster.weights.transport import Publisher, Scheme, Subscriber, Ticket, chosen

if TYPE_CHECKING:
    from muster.weights.transport import Weights

_NUMBER = struct.Struct("<q")
_MOST_DESCRIPTORS = 8  # of a ticket
_BYTES = 4096  # notes or answers that are read at once; a multiple of the length of both


class Sender:
    """The sending end; may be used from any thread.

    Args:
        weights: the first.
        workers: numbers of receivers that may come: ``0 .. workers - 1``.
        deadline_s: how long ``wait`` waits, and how long a receiver has to say who it is.

    Attributes:
        path: where receivers connect. They wait there until ``serve`` is called.
    """

    def __init__(self, weights: Weights, workers: int, transport: Scheme, *, deadline_s: float) -> None:
        self._workers, self._deadline_s = workers, deadline_s
        self._publisher: Publisher = transport.publisher(weights, workers)
        self._lines: dict[int, _ReceiverLine] = {}
        self._state = threading.Lock()
        self._serving = False
        folder = tempfile.mkdtemp(prefix="muster-weights-")  # mode 0700
        self.path = os.path.join(folder, "socket")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen(workers + 8)
        self._end = weakref.finalize(self, _end, os.getpid(), folder, self._listener, self._publisher, self._lines)

    def serve(self) -> None:
        """Let receivers in from now on."""
        if not self._serving:
            self._serving = True
            serving = threading.Thread(
                target=_serve, args=(self._listener, weakref.ref(self)), name="muster-weights", daemon=True
            )
            serving.start()

    def publish(self, weights: Weights, version: int, workers: Collection[int] | None = None) -> None:
        """See ``Publisher.publish``.

        Raises:
            CollectorClosed: after ``close``.
        """
        with self._state:
            if not self._end.alive:
                raise CollectorClosed("this weight sync scheme was shut down: it sends nothing any more")
            self._publisher.publish(weights, version, workers)
            for line in self._meant(workers).values():
                line.note(version)

    def wait(self, workers: Collection[int] | None = None) -> None:
        """Wait until those of these receivers that are there have taken what was published; one thread at a time.

        Raises:
            CollectorTimeout: they have not; it is there to be taken.
        """
        until = time.monotonic() + self._deadline_s
        with self._state:
            lines = self._meant(workers)
        if late := sorted(worker for worker, line in lines.items() if not line.wait(until)):
            raise CollectorTimeout(
                f"workers {late} have not taken their weights within {self._deadline_s} s: they get them with their "
                f"next receive(). A scheme with sync=False does not wait for that."
            )

    def close(self) -> None:
        """Receivers keep what they have; may be called again."""
        with self._state:
            self._end()

    def admit(self, line: socket.socket) -> None:
        """Answer a receiver that has connected."""
        line.settimeout(self._deadline_s)
        (worker,) = _NUMBER.unpack(_exactly(line, _NUMBER.size))
        with self._state:  # no note may come between the parts of the answer
            try:
                ticket = self._publisher.ticket(worker)
            except BadOption as error:
                _send(line, str(error))
                line.close()
                return
            try:
                _send(line, ticket)
            finally:
                ticket.close()
            if worker in self._lines:
                self._lines[worker].close()
            self._lines[worker] = _ReceiverLine(line)

    def _meant(self, workers: Collection[int] | None) -> dict[int, _ReceiverLine]:
        return {worker: self._lines[worker] for worker in chosen(workers, self._workers) if worker in self._lines}


class _ReceiverLine:
    """A receiver that is there, as its sender sees it."""

    def __init__(self, line: socket.socket) -> None:
        self._socket, self._sent, self._taken = line, -1, -1  # numbers of publishes

    def note(self, number: int) -> None:
        """Say that there is something new."""
        self._sent = number
        self._socket.setblocking(False)
        try:
            self._socket.send(b"\0")
        except BlockingIOError:  # it has notes to read, and looks for what is newest when it does
            pass
        except OSError:  # it is gone
            self.close()

    def wait(self, until: float) -> bool:
        """Wait until everything is taken; False: it was not in time. Who is gone is not waited for."""
        while self._taken < self._sent:
            try:
                self._socket.settimeout(max(until - time.monotonic(), 0.001))
                answers = self._socket.recv(_BYTES)
            except TimeoutError:
                return False
            except OSError:
                answers = b""
            if answers:
                (self._taken,) = _NUMBER.unpack(answers[-_NUMBER.size :])
            else:
                self.close()
        return True

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes who waits, on both ends
        self._socket.close()
        self._taken = self._sent


class Receiver:
    """The receiving end, for one thread at a time.

    Args:
        path: of the sender.
        worker: which of its workers this is; a successor takes the place of who came before.
        deadline_s: how long to wait for the sender to serve.
        answers: the sender calls ``wait``.

    Raises:
        BadOption: there is no such worker.
        CollectorClosed: the sender is gone.
        CollectorTimeout: it does not answer.
    """

    def __init__(self, path: str, worker: int, *, deadline_s: float, answers: bool) -> None:
        self._answers, self.alone = answers, False
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._subscriber = self._subscribe(path, worker, deadline_s)
        except BaseException:
            self._socket.close()
            raise

    def hear(self, timeout: float | None) -> bool:
        """Wait for notes, for so many seconds; None is until the sender is gone. False: there are none."""
        self._socket.settimeout(timeout)
        try:
            heard = len(self._socket.recv(_BYTES))
        except (TimeoutError, BlockingIOError):
            return False
        except OSError:
            heard = 0
        self.alone = not heard
        return bool(heard)

    def take(self, into: Weights) -> int | str | None:
        """See ``Subscriber.take``."""
        return self._subscriber.take(into)

    def answer(self, version: int | str) -> None:
        """Tell the sender that this was taken."""
        if self._answers:
            with contextlib.suppress(OSError):  # it is gone
                self._socket.setblocking(False)
                self._socket.send(_NUMBER.pack(int(version)))

    def hang_up(self) -> None:
        """Wake whoever is in ``hear``, for good; from any thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """When nobody uses it any more; may be called again."""
        self.hang_up()
        self._socket.close()
        self._subscriber.close()

    def _subscribe(self, path: str, worker: int, deadline_s: float) -> Subscriber:
        self._socket.settimeout(deadline_s)
        try:
            self._socket.connect(path)
            self._socket.sendall(_NUMBER.pack(worker))
            answer, fds = _receive(self._socket)
        except TimeoutError as error:
            raise CollectorTimeout(
                f"no weights for worker {worker} came within {deadline_s} s: the sender has to call connect()"
            ) from error
        except (OSError, EOFError) as error:
            raise CollectorClosed(f"nobody sends weights to worker {worker} any more ({path})") from error
        try:
            if isinstance(answer, str):
                raise BadOption(answer)
            return answer.open(fds)
        finally:
            for fd in fds:
                os.close(fd)


def _serve(listener: socket.socket, sender: weakref.ref[Sender]) -> None:
    while True:
        try:
            line, _ = listener.accept()
        except OSError:  # closed
            return
        serving = sender()
        if serving is None:
            return
        try:
            serving.admit(line)
        except (OSError, EOFError):  # whoever that was is gone, or silent
            line.close()
        del serving, line


def _end(pid: int, folder: str, listener: socket.socket, publisher: Publisher, lines: dict[int, _ReceiverLine]) -> None:
    if os.getpid() == pid:  # else a fork of the sender, which leaves alone what is the sender's
        for line in lines.values():
            line.close()
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        shutil.rmtree(folder, ignore_errors=True)
    listener.close()
    publisher.close()


def _send(line: socket.socket, answer: Ticket | str) -> None:
    data = pickle.dumps(answer)
    socket.send_fds(line, [_NUMBER.pack(len(data))], [] if isinstance(answer, str) else answer.fds)
    line.sendall(data)


def _receive(line: socket.socket) -> tuple[Ticket | str, list[int]]:
    header, fds, _, _ = socket.recv_fds(line, _NUMBER.size, _MOST_DESCRIPTORS)
    try:
        header += _exactly(line, _NUMBER.size - len(header))
        answer: Ticket | str = pickle.loads(_exactly(line, *_NUMBER.unpack(header)))  # from the user's own folder
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return answer, fds


def _exactly(line: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        part = line.recv(nbytes - len(data))
        if not part:
            raise EOFError("the other end is gone")
        data += part
    return data
