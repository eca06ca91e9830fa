"""The engine "direct": a link over one TCP connection, which both ends have authenticated with a
token.

A message is sent as a header (its length, a tag, the length of its block), the message, and the
block. Blocks are sent from their own memory, and received in the memory given to ``expect``. Before
anything else::

    main -> node, node -> main   a magic word and a random number of 32 bytes, both at once
    main -> node, node -> main   HMAC(key, "proof", who); key = HMAC(token, "session", both numbers)
    afterwards                   HMAC(key, "message", who, sequence number, tag, length of the block, message), message

All HMACs are HMAC-SHA256. ``receive`` returns a message, which may be unpickled, only after its
HMAC was compared. A message of another session, of the other direction, out of order, or with a
block of another tag or length is refused.

The contents of blocks are not authenticated, since that would cost more than sending them. They are
numbers, and are never unpickled. Nothing is encrypted. A process that can change packets between
the machines can thus change observations, rewards and weights: use a private network.

What it guarantees: ``Link``. What it costs: one copy of a block, from the socket into the memory
given to ``expect``; a block for several nodes is sent once to each. What it trusts: processes that
know the token, and the network.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator

import numpy as np

from muster.cluster.link import SLOWEST, Block, Link, LinkLost, Received, WrongToken
from muster.memory.specs import Array

LONGEST = 1 << 16  # bytes of a message before authentication; blocks are refused
LONGEST_KNOWN = 1 << 40  # a peer that announces more speaks another protocol
PART = 64 << 20  # bytes
MAGIC = b"muster-4"
NONCE_BYTES = 32
MAC_BYTES = 32
_HEADER = struct.Struct("<QQQ")
_PLACE = struct.Struct("<QQQ")  # sequence number, tag, length of the block
_MAIN = b"main"
_NODE = b"node"


class SocketLink(Link):
    """One end, after both ends have proved that they know the token.

    One thread sends, another receives.

    Any thread may call ``expect`` and ``close``.

    Args:
        connection: a new connection, without any message sent. Closed by ``close``, or if this
            constructor fails.
        token: the secret.
        main: whether this is the main process.
        deadline_s: seconds without a message after which the link is lost.

    Attributes:
        deadline_s: while a node joins, later that of the session.

    Raises:
        WrongToken: the other end does not know the token.
        LinkLost: the other end has exited, or speaks another protocol.
    """

    def __init__(
        self, connection: socket.socket, token: bytes, *, main: bool, deadline_s: float
    ) -> None:
        self._socket = connection
        self.deadline_s = deadline_s
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # it is no TCP connection
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._own, self._other = (_MAIN, _NODE) if main else (_NODE, _MAIN)
        self._sent = self._received = 0  # numbers of messages
        self._longest = LONGEST
        self._expected: dict[int, Array] = {}
        self._lock = threading.Lock()  # held while memory is written
        self._users = 0  # threads that send or receive
        self._cause = ""  # why it is closed
        try:
            self._key = self._shake_hands(token)
        except BaseException:
            self.close()
            raise
        self._longest = LONGEST_KNOWN

    def send(self, message: bytes, block: Block | None = None, tag: int = 0) -> None:
        array = np.empty(0, np.uint8) if block is None else block.array
        mac = self._mac(self._own, self._sent, tag, array.size, message)
        self._sent += 1
        self._write(mac + message, array, tag)

    def expect(self, tag: int, memory: Array) -> None:
        with self._lock:
            if not self._cause:
                self._expected[tag] = memory

    @property
    def host(self) -> str:
        """The address of this end."""
        name = self._socket.getsockname()
        return str(name[0]) if isinstance(name, tuple) else "127.0.0.1"

    @property
    def is_used(self) -> bool:
        """Whether a thread sends or receives."""
        return self._users > 0

    def begin_session(self, deadline_s: float) -> None:
        """Begin the session: from now on, the link is lost after so many seconds of silence."""
        self.deadline_s = deadline_s

    @contextlib.contextmanager
    def set_up(self, deadline_s: float) -> Iterator[None]:
        """A context with another deadline, while both ends prepare a session."""
        before = self.deadline_s
        self.deadline_s = deadline_s
        try:
            yield
        finally:
            self.deadline_s = before

    def claim(self, tag: int, size: int) -> Array | None:
        """The memory that is expected for a block which arrives in another way; None: there is
        none.

        Raises:
            LinkLost: it has not so many bytes.
        """
        with self._lock:
            memory = self._expected.pop(tag, None)
        if memory is not None and memory.size != size:
            raise LinkLost(
                f"Block {tag} has {size} bytes where {memory.size} were expected."
            )
        return memory

    def derived(self, purpose: bytes) -> bytes:
        """32 bytes that only the two ends of this session can know."""
        return _hmac(self._key, b"derived", purpose)

    def receive(self) -> Received:
        got = self._read()
        mac = got.message[:MAC_BYTES]
        message = got.message[MAC_BYTES:]
        size = 0 if got.block is None else got.block.size
        if not hmac.compare_digest(
            mac, self._mac(self._other, self._received, got.tag, size, message)
        ):
            self.close()
            raise LinkLost(
                f"Message {self._received} of the {self._other.decode()} does not carry the"
                " signature of this session: it was changed, repeated or made up on its way. The"
                " link is closed."
            )
        self._received += 1
        return Received(message, got.tag, got.block)

    def close(self) -> None:
        self._close("The link was closed here.")

    # --- the token --------------------------------------------------------------------------------

    def _shake_hands(self, token: bytes) -> bytes:
        """Prove to the other end that this end knows the token, and check its proof; the key of the
        session.
        """
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._write(MAGIC + nonce)
        theirs = self._read_exactly(len(MAGIC) + NONCE_BYTES)
        if not theirs.startswith(MAGIC):
            raise LinkLost(
                f"The {self._other.decode()} speaks another version of this protocol:"
                f" {theirs[: len(MAGIC)]!r}."
            )
        nonces = nonce, theirs[len(MAGIC) :]
        key = _hmac(
            token, b"session", *(nonces if self._own == _MAIN else reversed(nonces))
        )
        self._write(_hmac(key, b"proof", self._own))
        if not hmac.compare_digest(
            self._read_exactly(MAC_BYTES), _hmac(key, b"proof", self._other)
        ):
            raise WrongToken(
                "The other end does not know the token of this main process."
                if self._own == _MAIN
                else "The main process has another token than this node: give both the same token."
            )
        return key

    def _read_exactly(self, length: int) -> bytes:
        got = self._read()
        if got.block is not None or len(got.message) != length:
            raise LinkLost(
                f"The {self._other.decode()} sent {len(got.message)} bytes where {length} were"
                " expected."
            )
        return got.message

    def _mac(
        self, who: bytes, number: int, tag: int, size: int, message: bytes
    ) -> bytes:
        return _hmac(
            self._key, b"message", who, _PLACE.pack(number, tag, size), message
        )

    # --- the connection ---------------------------------------------------------------------------

    def _write(self, message: bytes, array: Array | None = None, tag: int = 0) -> None:
        array = np.empty(0, np.uint8) if array is None else array
        parts = [
            memoryview(_HEADER.pack(len(message), tag, array.size) + message),
            array.data,
        ]
        deadline = time.monotonic() + self.allowed_s(len(message) + array.size)
        with self.used("read"):
            while parts := [part for part in parts if part.nbytes]:
                try:
                    sent = self._socket.sendmsg(parts)
                except BlockingIOError:
                    self._wait(select.POLLOUT, deadline)
                    continue
                for number, part in enumerate(parts):
                    parts[number] = part[sent:]
                    sent -= part.nbytes - parts[number].nbytes

    def _read(self) -> Received:
        with self.used("said anything"):
            header = np.empty(_HEADER.size, np.uint8)
            self._fill(header, time.monotonic() + self.deadline_s)
            length, tag, size = _HEADER.unpack_from(header.data)
            if max(length, size) > self._longest or (size and self._longest == LONGEST):
                raise LinkLost(
                    f"The other end announced a message of {length} and a block of {size} bytes."
                )
            deadline = time.monotonic() + self.allowed_s(length + size)
            message = self._filled(length, deadline).tobytes()
            if not tag:
                return Received(message)
            block = self.claim(tag, size)
            if block is None:
                block = self._filled(size, deadline)
            else:
                self._fill(block, deadline)
            return Received(message, tag, block)

    def _filled(self, size: int, deadline: float) -> Array:
        """Read into new memory, allocated part by part: the size that was announced is not
        authenticated.
        """
        parts = [np.empty(0, np.uint8)] * (size == 0)
        while size:
            parts.append(np.empty(min(size, PART), np.uint8))
            self._fill(parts[-1], deadline)
            size -= parts[-1].size
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _fill(self, memory: Array, deadline: float) -> None:
        rest = memory.data
        while rest.nbytes:
            with self._lock:  # not after `close` has returned
                if self._cause:
                    raise LinkLost(self._cause)
                try:
                    count = self._socket.recv_into(rest)
                except BlockingIOError:
                    count = -1
            if count == 0:
                raise LinkLost("The other end has closed the link, or is gone.")
            if count < 0:
                self._wait(
                    select.POLLIN, min(deadline, time.monotonic() + self.deadline_s)
                )
            else:
                rest = rest[count:]

    def _wait(self, event: int, deadline: float) -> None:
        """Wait until the socket is ready, or the link is closed."""
        poller = select.poll()
        poller.register(self._socket, event)
        if not poller.poll(1000 * max(0.0, deadline - time.monotonic())):
            raise TimeoutError

    def allowed_s(self, nbytes: int) -> float:
        """Seconds that so many bytes may take."""
        return self.deadline_s + nbytes / SLOWEST

    def _close(self, cause: str) -> None:
        with self._lock:
            if self._cause:
                return
            self._cause = cause
            self._expected.clear()
            # wakes the waiting threads; the last one closes the socket
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            if not self._users:
                self._socket.close()

    @contextlib.contextmanager
    def used(self, late: str) -> Iterator[None]:
        """A context for a thread that sends or receives.

        Errors close the link, and are raised as ``LinkLost``.

        Args:
            late: what the other end has not done in time, if it is a TimeoutError.
        """
        with self._lock:
            if self._cause:
                raise LinkLost(self._cause)
            self._users += 1
        try:
            yield
        except TimeoutError:
            self._close(f"The other end has not {late} for {self.deadline_s:g} s.")
        except LinkLost as error:
            self._close(str(error))
        except OSError as error:
            gone = isinstance(error, ConnectionError)
            self._close(
                "The other end is gone."
                if gone
                else f"The connection is lost: {error.strerror or error}."
            )
        finally:
            with self._lock:
                self._users -= 1
                if self._cause and not self._users:
                    self._socket.close()
                cause = self._cause
        if cause:
            raise LinkLost(cause)


def signature(token: bytes, text: bytes) -> str:
    """The HMAC of a text that other processes could change."""
    return _hmac(token, b"text", text).hex()


def _hmac(key: bytes, *parts: bytes) -> bytes:
    """The HMAC of parts: a constant first, then parts of fixed length, except the last."""
    mac = hmac.new(key, digestmod="sha256")
    for part in parts:
        mac.update(part)
    return mac.digest()
