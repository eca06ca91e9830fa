"""A link that delivers only messages of a peer that knows the token, unchanged and in order.

::

    main -> node, node -> main   a magic word and a random number of 32 bytes, both at once
    main -> node, node -> main   HMAC(key, "proof", who); key = HMAC(token, "session", both numbers)
    afterwards                   HMAC(key, "message", who, sequence number, tag, length of the block, message), message

All HMACs are HMAC-SHA256. ``receive`` returns a message, which may be unpickled, only after its HMAC was compared. A
message of another session, of the other direction, out of order, or with a block of another tag or length is refused.

The contents of blocks are not authenticated, since that would cost more than sending them. They are numbers, and are
never unpickled. Nothing is encrypted. A process that can change packets between the machines can thus change
observations, rewards and weights: use a private network.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from collections.abc import Callable

from muster.cluster.link import Block, Link, LinkLost, Received
from muster.memory.specs import Array

MAGIC = b"muster-3"
NONCE_BYTES = 32
MAC_BYTES = 32
_PLACE = struct.Struct("<QQQ")  # sequence number, tag, length of the block
_MAIN, _NODE = b"main", b"node"


class WrongToken(LinkLost):
    """The other end does not know the token of this end."""


class AuthenticatedLink:
    """Implements ``Link``; made by ``authenticate``.

    Attributes:
        explain: returns a better error for a lost link; None: the connection's own error is raised.
    """

    def __init__(self, link: Link, key: bytes, own: bytes, other: bytes) -> None:
        self._link, self._key, self._own, self._other = link, key, own, other
        self._sent = self._received = 0
        self._closed = False
        self.explain: Callable[[LinkLost], LinkLost] | None = None

    def send(self, message: bytes, block: Block | None = None, tag: int = 0) -> None:
        size = 0 if block is None else block.array.size
        mac = self._mac(self._own, self._sent, tag, size, message)
        self._sent += 1
        try:
            self._link.send(mac + message, block, tag)
        except LinkLost as lost:
            raise self._explained(lost) from None

    def expect(self, tag: int, memory: Array) -> None:
        self._link.expect(tag, memory)

    def receive(self) -> Received:
        try:
            got = self._link.receive()
        except LinkLost as lost:
            raise self._explained(lost) from None
        mac, message = got.message[:MAC_BYTES], got.message[MAC_BYTES:]
        size = 0 if got.block is None else got.block.size
        expected = self._mac(self._other, self._received, got.tag, size, message)
        if not hmac.compare_digest(mac, expected):
            self._link.close()
            raise LinkLost(
                f"Message {self._received} of the {self._other.decode()} does not carry the signature of this session: "
                f"it was changed, repeated or made up on its way. The link is closed."
            )
        self._received += 1
        return Received(message, got.tag, got.block)

    def close(self) -> None:
        self._closed = True
        self._link.close()

    def _explained(self, lost: LinkLost) -> LinkLost:
        return lost if self._closed or self.explain is None else self.explain(lost)

    def _mac(self, who: bytes, number: int, tag: int, size: int, message: bytes) -> bytes:
        return _hmac(self._key, b"message", who, _PLACE.pack(number, tag, size), message)


def authenticate(link: Link, token: bytes, *, main: bool) -> AuthenticatedLink:
    """Prove to the other end that this end knows the token, and check its proof. Closes the link on failure.

    Args:
        link: a new link, without any message sent.
        token: the secret.
        main: whether this is the main process.

    Raises:
        WrongToken: the other end does not know the token.
        LinkLost: the other end has exited, or speaks another protocol.
    """
    own, other = (_MAIN, _NODE) if main else (_NODE, _MAIN)
    try:
        nonce = secrets.token_bytes(NONCE_BYTES)
        link.send(MAGIC + nonce)
        theirs = _handshake(link, other, len(MAGIC) + NONCE_BYTES)
        if not theirs.startswith(MAGIC):
            raise LinkLost(f"The {other.decode()} speaks another version of this protocol: {theirs[: len(MAGIC)]!r}.")
        nonces = (nonce, theirs[len(MAGIC) :]) if main else (theirs[len(MAGIC) :], nonce)
        key = _hmac(token, b"session", *nonces)
        link.send(_hmac(key, b"proof", own))
        if not hmac.compare_digest(_handshake(link, other, MAC_BYTES), _hmac(key, b"proof", other)):
            raise WrongToken(
                "The other end does not know the token of this main process."
                if main
                else "The main process has another token than this node: give both the same token."
            )
    except BaseException:
        link.close()
        raise
    return AuthenticatedLink(link, key, own, other)


def _handshake(link: Link, other: bytes, length: int) -> bytes:
    got = link.receive()
    if got.block is not None or len(got.message) != length:
        raise LinkLost(f"The {other.decode()} sent {len(got.message)} bytes where {length} were expected.")
    return got.message


def signature(token: bytes, text: bytes) -> str:
    """The HMAC of a text that other processes could change."""
    return _hmac(token, b"text", text).hex()


def _hmac(key: bytes, *parts: bytes) -> bytes:
    """The HMAC of parts: a constant first, then parts of fixed length, except the last."""
    mac = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        mac.update(part)
    return mac.digest()
