"""Channels: messages and descriptors between two processes, over an unnamed socket pair; wake-ups;
status pages.

A message is a header (length, number of descriptors) and a pickle. Only processes of one collector
have an end of a channel, so that messages are as trusted as this process.

Both directions stay consistent when a signal handler raises at any point (Ctrl-C in a notebook,
after which collecting continues). For this, system calls append their results to a deque from
within C (``extend(map(...))``): between a call and the assignment of its result, the result could
be lost.
"""

from __future__ import annotations

import array
import contextlib
import errno
import faulthandler
import mmap
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from muster.memory.shared import Arena
from muster.restore.pickling import Sealed, packed, unpickle
from muster.rollout.progress import CELLS

_HEADER = struct.Struct("=QQ")
_SIZE = 1 << 16  # bytes per read
_ITEM = array.array("i").itemsize
# 253 is the most that Linux passes with one message
_SPACE = getattr(socket, "CMSG_SPACE", int)(253 * _ITEM)
# Plain integers: enums cost a microsecond.
_NOSIGNAL = int(getattr(socket, "MSG_NOSIGNAL", 0))
_DONTWAIT = int(getattr(socket, "MSG_DONTWAIT", 0))
_CLOEXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))
_TRUNCATED = int(socket.MSG_CTRUNC)
GIVE_PLAIN = "Return arrays, numbers or text instead."
_NOTHING = memoryview(b"")
_ONE = (1).to_bytes(8, sys.byteorder)


class Channel:
    """One end of a channel. At any time one thread may send and one may receive.

    Messages that arrive together are read together: after waiting for ``fileno()``, receive until
    ``poll()`` is false. When either end is closed, ``send`` raises EOFError, and so does
    ``receive`` after all messages sent before. A channel owns its socket.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._arrived: deque[Any] = deque()  # results of recvmsg
        self._data = bytearray()
        self._fds: list[int] = []
        self._sent: deque[int] = deque()  # results of sendmsg
        self._rest = _NOTHING  # unsent bytes of the current message
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(sock, select.POLLIN)
        self._writable.register(sock, select.POLLOUT)

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Make both ends of a channel; programs that this process starts do not inherit them."""
        a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(a), cls(b)

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(
        self, message: Any, fds: Sequence[int] = (), timeout: float | None = None
    ) -> None:
        """Send an object, and duplicates of descriptors (at most 253).

        Raises:
            BadOption: it cannot be pickled. Nothing was sent.
            TimeoutError: the other end has not read within ``timeout`` seconds. An unsent message
                is withdrawn. Of a partly sent message the rest is sent before the next one.
            EOFError: the other end is closed.
        """
        payload = packed(message, "a message")
        deadline = None if timeout is None else time.monotonic() + timeout
        ancillary = (
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
            if fds
            else []
        )
        if self._rest or self._sent:
            self._flush(deadline)
        frame = memoryview(_HEADER.pack(len(payload), len(fds)) + payload)
        self._rest = frame
        try:
            self._push(ancillary, deadline)  # descriptors go with the first part
        finally:
            if not self._sent:
                self._rest = (
                    _NOTHING  # no call here, after which another handler could raise
                )
        self._flush(deadline)

    @staticmethod
    def sealed(value: Any, what: str) -> Any:
        """Return a value that the user's code has made, as messages to the parent contain it.

        Raises ``BadOption``, in which it is called ``what``, if it cannot be pickled.
        """
        return Sealed(packed(value, what, GIVE_PLAIN))

    def receive(self, timeout: float | None = None) -> tuple[Any, list[int]]:
        """Return the next message and its descriptors, which the caller owns and no program
        inherits.

        Raises:
            TimeoutError: no message is complete after ``timeout`` seconds; it can still be received
                later.
            EOFError: the other end is closed, possibly in the middle of a message.
        """
        self._fill(None if timeout is None else time.monotonic() + timeout)
        length, count = _HEADER.unpack_from(self._data)
        end = _HEADER.size + length
        fds = self._fds[:count]
        payload = bytes(self._data[_HEADER.size : end])
        message: list[Any] = []
        try:
            message.extend(map(unpickle, (payload,)))
        except Exception:
            # A signal handler may have raised, during the call or after it: then the message is
            # kept for the next call. One that cannot be read, again, is dropped.
            if not message and not _can_be_read(payload):
                del self._data[:end]
                del self._fds[:count]
                for fd in fds:
                    os.close(fd)
            raise
        del self._data[:end]
        del self._fds[:count]
        return message[0], fds

    def poll(self, timeout: float | None = 0.0) -> bool:
        """Return whether ``receive`` would return or raise EOFError at once, after waiting up to
        ``timeout``.
        """
        try:
            self._fill(None if timeout is None else time.monotonic() + timeout)
        except TimeoutError:
            return False
        except EOFError:
            pass
        return True

    def close(self) -> None:
        """Close this end, and received descriptors that were not returned. May be called again."""
        self._sock.close()
        while self._fds:
            os.close(self._fds.pop())

    def _flush(self, deadline: float | None) -> None:
        while True:
            # No signal handler can run between these two lines: handlers run after calls, and at
            # jumps backwards.
            self._rest = self._rest[sum(self._sent) :]
            self._sent.clear()
            if not self._rest:
                return
            self._push([], deadline)

    def _push(self, ancillary: list[Any], deadline: float | None) -> None:
        flags = _NOSIGNAL if deadline is None else _NOSIGNAL | _DONTWAIT
        while True:
            self._check_open()
            try:
                self._sent.extend(
                    map(self._sock.sendmsg, ((self._rest,),), (ancillary,), (flags,))
                )
                return
            except BlockingIOError:
                self._wait(self._writable, deadline, "read")
            except (BrokenPipeError, ConnectionResetError):
                raise EOFError("The other end of the channel is closed.") from None

    def _fill(self, deadline: float | None) -> None:
        """Read until a message is complete."""
        self._absorb()
        while (
            len(self._data) < _HEADER.size
            or len(self._data) < _HEADER.size + _HEADER.unpack_from(self._data)[0]
        ):
            self._check_open()
            if deadline is not None:
                self._wait(self._readable, deadline, "sent a message")
            try:
                self._arrived.extend(
                    map(self._sock.recvmsg, (_SIZE,), (_SPACE,), (_CLOEXEC,))
                )
            except (
                ConnectionResetError
            ):  # closed with unread messages; all its messages have arrived
                raise EOFError("The other end of the channel is closed.") from None
            self._absorb()

    def _absorb(self) -> None:
        if not self._arrived:
            return
        data, ancillary, flags, _ = self._arrived[0]
        fds = [
            fd
            for _, _, raw in ancillary
            for fd in array.array("i", raw[: len(raw) // _ITEM * _ITEM])
        ]
        for fd in () if _CLOEXEC else fds:
            os.set_inheritable(fd, False)
        # As in _flush, no signal handler can run between these lines.
        self._data += data
        self._fds += fds
        self._arrived.clear()
        if flags & _TRUNCATED:  # descriptors of an unknown message are missing
            self.close()
            raise OSError(
                errno.EMFILE,
                "descriptors that another process sent are lost: too many open files",
            )
        if not data:
            raise EOFError("The other end of the channel is closed.")

    def _check_open(self) -> None:
        if self._sock.fileno() < 0:  # the system may reuse its number for another file
            raise EOFError("This end of the channel is closed.")

    def _wait(self, poller: select.poll, deadline: float | None, what: str) -> None:
        left = (
            None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
        )
        if not poller.poll(left):
            raise TimeoutError(f"The other end of the channel has not {what} in time.")


class WakeUp:
    """Wakes a thread that waits for it, from another thread or process. Repeated rings are one.
    Uses one descriptor, or two on systems without eventfd.

    Threads of the same process can say who rings: then only these senders are looked at, however
    many there are.
    """

    def __init__(self, *fds: int) -> None:
        if not fds:
            fds = (
                (os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC),)
                if hasattr(os, "eventfd")
                else os.pipe()
            )
        # for ``WakeUp(*fds)`` in another process; owned by this object
        self.fds = fds
        self._read = fds[0]
        self._closing = threading.Lock()
        self._senders: dict[Any, None] = {}  # as an ordered set
        self._close = weakref.finalize(
            self, _close_all, fds
        )  # a thread may never reach this
        self._close.atexit = False
        for fd in fds:
            os.set_blocking(fd, False)
        self._poller = select.poll()
        self._poller.register(self._read, select.POLLIN)

    def fileno(self) -> int:
        """Return a descriptor that is readable while it rings."""
        return self._read

    def ring(self, sender: Any = None) -> None:
        """Ring, in the name of a sender (hashable) of this process, for ``senders``."""
        with (
            self._closing,
            contextlib.suppress(BlockingIOError),
        ):  # it is ringing already
            if sender is not None:
                self._senders[sender] = None
            if self.fds:  # after ``close`` the number may be that of another file
                os.write(self.fds[-1], _ONE)

    @property
    def unattended(self) -> bool:
        """Whether ``senders`` would return some, even if it does not ring any more."""
        return bool(self._senders)

    @contextlib.contextmanager
    def senders(self) -> Iterator[list[Any]]:
        """A context with the senders that have rung since the last one.

        After an error in it they ring again.
        """
        with self._closing:
            senders, self._senders = list(self._senders), {}
        try:
            yield senders
        except BaseException:
            for sender in senders:
                self.ring(sender)
            raise

    def wait(self, seconds: float | None) -> bool:
        """Wait until it rings, at most ``seconds``; return whether it rang, and clear it."""
        rings = bool(
            self._poller.poll(None if seconds is None else max(0.0, seconds) * 1000)
        )
        if rings:
            self.clear()
        return rings

    def clear(self) -> None:
        """Stop ringing. Call this before checking for the events that it announces."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._read, 1 << 16)  # empties a pipe

    def close(self) -> None:
        """Close the descriptors. May be called again."""
        with self._closing:
            self._close()
            self.fds = ()


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


class StatusPage:
    """The status page of a worker, which its parent can read at any time, also when the worker
    hangs or is dead.

    A page of counters that the worker stores into, then text: the stacks that ``faulthandler``
    writes, which works without the GIL and during a crash.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._read = mmap.PAGESIZE  # end of the text that ``stack`` has read
        # Integers, stored and loaded as a whole. They outlive the status page.
        self.cells = memoryview(arena.view(0, CELLS * 8)).cast("q")  # type: ignore[arg-type]

    @classmethod
    def create(cls) -> StatusPage:
        """Make the parent's side; it uses one descriptor."""
        import fcntl

        arena = Arena.create("muster-status-page")
        arena.allocate(mmap.PAGESIZE)
        # Stacks follow the page, in every process that writes.
        fcntl.fcntl(
            arena.fd, fcntl.F_SETFL, os.O_APPEND | fcntl.fcntl(arena.fd, fcntl.F_GETFL)
        )
        return cls(arena)

    @classmethod
    def attach(cls, fd: int) -> StatusPage:
        """Make the worker's side; ``fd`` was received from the parent, and is owned by this object."""
        return cls(Arena.attach(fd))

    @property
    def fd(self) -> int:
        return self._arena.fd

    def arm(self) -> None:
        """In a worker process: write the stacks of all threads on SIGUSR1 and on a crash of the
        interpreter.
        """
        faulthandler.register(signal.SIGUSR1, file=self.fd, all_threads=True)
        faulthandler.enable(file=self.fd, all_threads=True)

    def disarm(self) -> None:
        """In a fork of a worker process: detach it, so that it writes neither stacks nor counters
        to this page.
        """
        faulthandler.unregister(signal.SIGUSR1)
        faulthandler.disable()
        self._arena.isolate()

    def stack(self, within_s: float = 0.0) -> str:
        """In the parent: return the text since the last call; waits up to ``within_s`` for complete
        text.
        """
        deadline = time.monotonic() + within_s
        size = os.fstat(self.fd).st_size
        while time.monotonic() < deadline:
            time.sleep(0.01)  # noqa: TID251 (there is no event for the growth of a file)
            before, size = size, os.fstat(self.fd).st_size
            if size == before > self._read:
                break
        text = os.pread(self.fd, size - self._read, self._read)
        self._read += len(text)
        return text.decode(errors="replace")

    def close(self) -> None:
        """Close the descriptor; idempotent. ``cells`` stay readable."""
        self._arena.close()


def _can_be_read(payload: bytes) -> bool:
    try:
        unpickle(payload)
    except Exception:  # noqa: BLE001 (of the classes of the message)
        return False
    return True
