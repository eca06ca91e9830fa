"""The messages between a policy server and its clients, programs in any language that ask for
actions.

A message is two unsigned 32-bit integers (little-endian), the sizes of its two parts; then a JSON
object (UTF-8) with a ``type``; then the values of an observation or action: the bytes of its leaves
one after another, in the order, shapes and dtypes that ``welcome`` lists, little-endian and in C
order. docs/serve.md has all messages.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from muster.envs.checks import check_arrays, values_problem
from muster.envs.spaces import SpaceCodec
from muster.keys import dotted
from muster.memory.specs import Array

PROTOCOL = 1
SIZES = struct.Struct("<II")
MOST_TEXT = 1 << 16  # bytes of a JSON object
DRAIN_S = 1.0  # time in which a client can read why it was refused
LARGEST_REWARD = float(np.finfo(np.float32).max)


class ClientLost(Exception):
    """A client broke the protocol, was too slow, or has closed its connection.

    Attributes:
        reason: "closed", "timeout", "bad_message", "bad_token", "bad_protocol", "bad_spaces" or
            "full".
    """

    def __init__(self, reason: str, text: str = "") -> None:
        super().__init__(text)
        self.reason = reason


class WireFormat:
    """The bytes of the values of a space.

    Args:
        check_bounds: refuse floats out of the bounds of the space. Integers are always checked.

    Attributes:
        description: the leaves as plain data: key, dtype and shape.
        nbytes: size of a value.

    Raises:
        UnsupportedSpace: a part of the space has no fixed shape.
    """

    def __init__(
        self, codec: SpaceCodec, name: str, *, check_bounds: bool = False
    ) -> None:
        check_arrays(name, codec.specs)
        self._codec = codec
        self.description = [
            {"key": dotted(key), "dtype": spec.dtype.name, "shape": list(spec.shape)}
            for key, spec in codec.specs.items()
        ]
        # name, spec, and its place among the bytes
        self._leaves: list[tuple[str, Any, int, int]] = []
        self.nbytes = 0
        for key, spec in codec.specs.items():
            begin, self.nbytes = (
                self.nbytes,
                self.nbytes + spec.dtype.itemsize * int(np.prod(spec.shape)),
            )
            keeps_bounds = check_bounds or spec.dtype.kind in "iu"
            checked = spec if keeps_bounds else replace(spec, low=None, high=None)
            self._leaves.append((dotted(key), checked, begin, self.nbytes))

    def encode(self, value: Any) -> bytes:
        leaves = [value] if self._codec.single else self._codec.flatten(value)
        told = zip(leaves, self._leaves, strict=True)
        return b"".join(
            np.asarray(leaf, spec.dtype.newbyteorder("<")).tobytes()
            for leaf, (_, spec, _, _) in told
        )

    def decode(self, values: bytes | bytearray) -> Any:
        """Return the value. Raises ``ClientLost`` if it is not in the space."""
        leaves = []
        for name, spec, begin, end in self._leaves:
            if spec.dtype.kind == "b":
                leaf: Array = np.frombuffer(values, np.uint8, end - begin, begin) != 0
            else:
                count = (end - begin) // spec.dtype.itemsize
                leaf = np.frombuffer(values, spec.dtype, count, begin)
                leaf = leaf if sys.byteorder == "little" else leaf.byteswap()
            leaf = leaf.reshape(spec.shape)
            if (problem := values_problem(leaf, spec)) is not None:
                raise ClientLost("bad_message", f"{name}: {problem[1]}")
            leaves.append(leaf)
        return leaves[0] if self._codec.single else self._codec.build(leaves)


class Connection:
    """A connection to a client. One thread sends and receives; any thread may ``close``."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket, self._received = sock, bytearray()
        self._sending = threading.Lock()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def receive(
        self, sizes: Mapping[str, int], within_s: float | None
    ) -> tuple[dict[str, Any], bytearray]:
        """Return the next message: its JSON object, and its values.

        Args:
            sizes: size of the values in bytes, by the types of messages that are expected.
            within_s: deadline of the whole message; None: no limit.

        Raises:
            ClientLost: there is no such message.
        """
        deadline = None if within_s is None else time.monotonic() + within_s
        size, nbytes = SIZES.unpack(self._take(SIZES.size, deadline))
        if size > MOST_TEXT or nbytes > max(sizes.values()):
            raise ClientLost(
                "bad_message",
                f"a message has {size} bytes of JSON and {nbytes} of values. Expected at most"
                f" {MOST_TEXT} and {max(sizes.values())}, both little-endian 32-bit integers",
            )
        text = self._take(size, deadline)
        try:
            about = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ClientLost(
                "bad_message", f"the text of a message is no JSON: {error}"
            ) from None
        kind = about.get("type") if isinstance(about, dict) else None
        if not isinstance(kind, str) or kind not in sizes:
            raise ClientLost(
                "bad_message",
                f"a message has the type {kind!r:.60}, expected {' or '.join(sizes)}",
            )
        if nbytes != sizes[kind]:
            raise ClientLost(
                "bad_message",
                f"{kind} has {nbytes} bytes of values, expected {sizes[kind]}",
            )
        return about, self._take(nbytes, deadline)

    def has_more(self) -> bool:
        """Return whether a part of a further message is there, or the end of the connection."""
        if self._received:
            return True
        poller = select.poll()
        try:
            poller.register(self._socket, select.POLLIN)
        except (OSError, ValueError):  # closed
            return False
        return bool(poller.poll(0))

    def send(
        self,
        about: Mapping[str, Any],
        values: bytes = b"",
        within_s: float | None = None,
    ) -> None:
        """Send a message. Raises ``ClientLost``."""
        text = json.dumps(about).encode()
        with self._sending:
            try:
                self._socket.settimeout(within_s)
                self._socket.sendall(SIZES.pack(len(text), len(values)) + text + values)
            except TimeoutError:
                raise ClientLost(
                    "timeout",
                    f"the client has not read a message within {within_s:g} s",
                ) from None
            except (OSError, ValueError) as error:
                raise ClientLost("closed", str(error)) from None

    def refuse(self, lost: ClientLost) -> None:
        """Send the reason, and close the connection. Waits a moment for the client to read it."""
        with suppress(ClientLost, OSError):
            if lost.reason != "closed":
                self.send(
                    {"type": "error", "error": lost.reason, "message": str(lost)},
                    within_s=DRAIN_S,
                )
                self._socket.shutdown(socket.SHUT_WR)
                # closed with unread bytes, the client's end would be reset
                deadline = time.monotonic() + DRAIN_S
                while (left := deadline - time.monotonic()) > 0:
                    self._socket.settimeout(left)
                    if not self._socket.recv(1 << 16):
                        break
        self._socket.close()

    def close(self, within_s: float = DRAIN_S) -> None:
        """Tell the client that the server closes, and end the connection.

        Wakes the thread that waits for it.
        """
        text = b'{"type": "close"}'
        with suppress(OSError):
            # held for longer if the client does not read
            if self._sending.acquire(timeout=max(0.0, within_s)):
                try:
                    self._socket.send(
                        SIZES.pack(len(text), 0) + text,
                        getattr(socket, "MSG_DONTWAIT", 0),
                    )
                finally:
                    self._sending.release()
            self._socket.shutdown(socket.SHUT_RDWR)

    def _take(self, count: int, deadline: float | None) -> bytearray:
        received = self._received
        while len(received) < count:
            left = None if deadline is None else deadline - time.monotonic()
            try:
                if left is not None and left <= 0:
                    raise TimeoutError
                self._socket.settimeout(left)
                piece = self._socket.recv(max(4096, count - len(received)))
            except TimeoutError:
                raise ClientLost(
                    "timeout", "no complete message arrived within the deadline"
                ) from None
            except (OSError, ValueError) as error:
                raise ClientLost("closed", str(error)) from None
            if not piece:
                raise ClientLost("closed")
            received += piece
        taken = received[:count]
        del received[:count]
        return taken
