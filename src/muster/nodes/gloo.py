"""Links over torch.distributed: one process group of two ranks per node and session, beside the user's own groups.

Rank 0 is the main process. A message, with
its block if that is small, is one frame, for which a receive is always posted. A larger block is written right into the
memory that was expected to take it. The receive for it is posted when the frame has said how long it is, since gloo
aborts the process if more comes than fits. A session that is lost is a group whose connections are closed, through
which nothing can come any more.

Whatever a wait of gloo's fails with, its timeout included, closes all connections of the group. ``close`` makes use of
that: gloo has nothing else that wakes up the threads that wait. But it wakes up only those whose operation has not
begun. Therefore nobody waits for something long: after it, the sender sends one byte, for which the receiver waits, and
the receiver then sends one, for which the sender does. When these have come, what was before them has, since it all
goes through one TCP connection.

::

    sender     frame, rest of a long message, large block, done
    receiver                                                     ack
"""

from __future__ import annotations

import ctypes
import re
import struct
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed

from muster.memory.specs import Array
from muster.nodes.interfaces import listening_at
from muster.nodes.link import Block, Link, LinkLost, Received, allowed_s
from muster.nodes.seal import HANDSHAKE
from muster.private_names import usable

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

FRAME_BYTES = 1 << 16  # at most; a shorter one is sent as it is, and fits
LONGEST = 1 << 40  # bytes; whoever announces more speaks something else
_HEADER = struct.Struct("<QQQ")  # length of the message, tag, length of the block
_ROOM = FRAME_BYTES - _HEADER.size
_FRAMES, _RESTS, _BLOCKS, _DONE, _ACKS, _NEVER = range(1, 7)  # gloo's tags
_NOTHING = np.empty(0, np.uint8)
_c10d: Any = torch.distributed  # whose types do not say that it has groups
_Store: Any = getattr(_c10d, "Store", object)


class _Transfer:
    """Something that is on its way; keeps its memory for as long as it lasts."""

    def __init__(self, work: Any, memory: Array) -> None:
        self._work, self._memory = work, memory

    def finish(self, within_s: float) -> None:
        """Wait for its end; raises RuntimeError."""
        self._work.wait(timedelta(seconds=within_s))


class GlooLink:
    """One end of a session.

    Args:
        group: of two ranks.
        rank: of this end.
        deadline_s: seconds for which nothing may come.
        store: in which ``group`` was made; closed with the link.
    """

    def __init__(self, group: Any, rank: int, deadline_s: float, store: LinkStore) -> None:
        self._group, self._peer, self._deadline_s, self._store = group, 1 - rank, deadline_s, store
        self._short = HANDSHAKE  # what comes from an unknown process must fit into a frame
        self._expected: dict[int, Array] = {}
        self._outgoing, self._incoming = np.zeros(FRAME_BYTES, np.uint8), np.zeros(FRAME_BYTES, np.uint8)
        self._lock = threading.Lock()
        self._closed = False
        self._cause: str | None = None  # of the first failure, which makes the others
        self._next: _Transfer | None = None
        self._ack: _Transfer | None = None
        self._await_frame()

    def send(self, message: bytes, block: Block | None = None, tag: int = 0) -> None:
        array = _NOTHING if block is None else block.array
        _HEADER.pack_into(self._outgoing.data, 0, len(message), tag, array.size)
        first, rest = message[:_ROOM], message[_ROOM:]
        end = _HEADER.size + len(first)
        self._outgoing[_HEADER.size : end] = np.frombuffer(first, np.uint8)
        if is_inside := _fits(len(message), array.size):
            self._outgoing[end : (end := end + array.size)] = array
        try:
            ack = None if is_inside else self._post_receive(np.empty(1, np.uint8), _ACKS)
            self._post_send(self._outgoing[:end], _FRAMES).finish(self._deadline_s)
            if ack is not None:
                sent: list[_Transfer] = []
                if rest:
                    sent.append(self._post_send(np.frombuffer(bytearray(rest), np.uint8), _RESTS))
                if block is not None and array.size:
                    work = _open(self._group).send([block.form("torch", as_tensor)], self._peer, _BLOCKS)
                    sent.append(_Transfer(work, block.array))
                sent.append(self._post_send(np.zeros(1, np.uint8), _DONE))
                self._finish(ack, sent, len(rest) + array.size)
        except (RuntimeError, TimeoutError) as error:
            raise self._lost(error, f"The other end has not read for {self._deadline_s:g} s.") from None

    def expect(self, tag: int, memory: Array) -> None:
        """As in ``Link``; does nothing once the link is closed."""
        with self._lock:
            if not self._closed:
                self._expected[tag] = memory

    def receive(self) -> Received:
        try:
            _open(self._next).finish(self._deadline_s)
            length, tag, size = _HEADER.unpack_from(self._incoming.data)
            if max(length, size) > LONGEST or (self._short and not _fits(length, size)):
                raise RuntimeError(f"the other end announced a message of {length} and a block of {size} bytes")
            self._short = max(0, self._short - 1)
            end = _HEADER.size + min(length, _ROOM)
            message = self._incoming[_HEADER.size : end].tobytes()
            block = self._place(tag, size) if tag else None
            if (is_inside := _fits(length, size)) and block is not None:
                self._fill(block, self._incoming[end : end + size])
            self._await_frame()
            if not is_inside:
                message += self._receive_long(length - len(message), block)
        except (RuntimeError, TimeoutError) as error:
            raise self._lost(error, f"Nothing has come from the other end for {self._deadline_s:g} s.") from None
        return Received(message, tag, block)

    def _receive_long(self, length: int, block: Array | None) -> bytes:
        """The rest of a message; and the block, into its place."""
        rest = np.empty(length, np.uint8)
        coming: list[_Transfer] = []
        if length:
            coming.append(self._post_receive(rest, _RESTS))
        if block is not None and block.size:
            coming.append(self._post_receive(block, _BLOCKS))
        done = self._post_receive(np.empty(1, np.uint8), _DONE)  # after the others, or it would come before them
        self._finish(done, coming, length + (0 if block is None else block.size))
        # Not waited for: it may stand behind a block that is being sent. The next one is sent after it has come.
        self._ack = self._post_send(np.zeros(1, np.uint8), _ACKS)
        return rest.tobytes()

    def _place(self, tag: int, size: int) -> Array:
        with self._lock:
            memory = self._expected.pop(tag, None)
        if memory is None:
            return np.empty(size, np.uint8)
        if memory.size != size:
            raise RuntimeError(f"block {tag} has {size} bytes where {memory.size} were expected")
        return memory

    def _fill(self, memory: Array, content: Array) -> None:
        with self._lock:  # not after `close` has returned
            if not self._closed:
                memory[:] = content

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            try:
                never = torch.zeros(1, dtype=torch.uint8)
                self._group.recv([never], self._peer, _NEVER).wait(timedelta(milliseconds=1))
            except RuntimeError:  # always, and the connections are closed
                pass
            self._store.close()
            self._expected.clear()
            self._group = self._next = self._ack = None  # its port and threads; who waits has what it waits for

    def _finish(self, last: _Transfer, before: list[_Transfer], size: int) -> None:
        patience = allowed_s(self._deadline_s, size)
        last.finish(patience)
        for transfer in before:
            transfer.finish(patience)

    def _post_send(self, array: Array, tag: int) -> _Transfer:
        return _Transfer(_open(self._group).send([torch.from_numpy(array)], self._peer, tag), array)

    def _post_receive(self, array: Array, tag: int) -> _Transfer:
        return _Transfer(_open(self._group).recv([torch.from_numpy(array)], self._peer, tag), array)

    def _await_frame(self) -> None:
        """Post the next receive, before the sender has sent; if the link is lost, the next ``receive`` says so."""
        try:
            self._next = self._post_receive(self._incoming, _FRAMES)
        except RuntimeError as error:
            self._next = None
            if not self._closed:
                self._cause = self._cause or why(error)

    def _lost(self, error: Exception, late: str) -> LinkLost:
        if self._closed:  # by the other thread, which had a cause, or by the user
            return LinkLost(self._cause or "The link was closed here.")
        if "Application timeout" in str(error):  # of the other thread, which has not said so yet
            late = f"The other end has not answered for {self._deadline_s:g} s."
        self._cause = self._cause or (late if _is_late(error) else why(error))
        self.close()
        return LinkLost(self._cause)


class LinkStore(_Store):  # type: ignore[misc]
    """The store in which two ends make a group: what one sets, it sends to the other through their private channel.

    Groups made in it connect to addresses that the other end itself has said, and to no others.

    Args:
        channel: nothing else is said through it from now on; closed by ``close``.
    """

    def __init__(self, channel: Link) -> None:
        super().__init__()
        self._channel = channel
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: bytes | str) -> None:
        content = value.encode() if isinstance(value, str) else bytes(value)
        self._values[key] = content
        self._channel.send(key.encode() + b"\0" + content)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        return self._values.keys() >= set(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Raises LinkLost if the other end does not set them within the channel's deadline."""
        with self._lock:
            while not self.check(keys):
                key, _, content = self._channel.receive().message.partition(b"\0")
                self._values[key.decode()] = content

    def close(self) -> None:
        self._channel.close()


class _Gloo:
    """An operation on some memory."""

    def __init__(self, work: Any, memory: Array) -> None:
        self._work, self._memory = work, memory

    def finish(self, within_s: float) -> None:
        self._work.wait(timedelta(seconds=within_s))


def join_group(channel: Link, rank: int, host: str, deadline_s: float) -> GlooLink:
    """Meet the other end in a group.

    Args:
        channel: to the other end; closed with the link, or if there is none.
        rank: of this end.
        host: address of this machine at which the group listens.

    Raises:
        RuntimeError, LinkLost: the other end does not come within the deadline.
    """
    store = LinkStore(channel)
    try:
        group = _gloo(_c10d.PrefixStore("gloo", store), rank, host, timedelta(seconds=deadline_s))
        return GlooLink(group, rank, deadline_s, store)
    except BaseException:
        channel.close()
        raise


def _gloo(store: Store, rank: int, host: str, timeout: timedelta) -> Any:
    """A group that listens at ``host`` only."""
    kind = _c10d.ProcessGroupGloo
    if usable("torch", (kind, ("_Options",)), (getattr(kind, "_Options", None), ("_devices", "_timeout", "_threads"))):
        options = kind._Options()
        options._devices = [kind.create_device(hostname=host)]
        options._timeout = timeout
        options._threads = 1  # for collective operations, of which there are none
        return kind(store, rank, 2, options)
    with listening_at(host, "GLOO_SOCKET_IFNAME"):
        return kind(store, rank, 2, timeout)


def _fits(length: int, size: int) -> bool:
    """Whether a message and its block go into one frame."""
    return length + size <= _ROOM


def _open(part: Any) -> Any:
    """A part of a link that is None once the link is closed or lost."""
    if part is None:
        raise RuntimeError("the link is closed")
    return part


def as_tensor(array: Array) -> torch.Tensor:
    """The same memory, also of an array that may not be written (which torch would warn of)."""
    if not array.flags.writeable:
        same: Any = (ctypes.c_ubyte * array.size).from_address(array.ctypes.data)
        array = np.frombuffer(same, np.uint8)
    return torch.from_numpy(array)


def _is_late(error: Exception) -> bool:
    return isinstance(error, TimeoutError) or any(
        text in str(error) for text in ("Timed out waiting", "Application timeout")
    )


def why(error: Exception) -> str:
    """An error of gloo's or of a store's as a sentence."""
    text = str(error)
    if "closed by peer" in text or "reset by peer" in text or "Broken pipe" in text:
        return "The other end has closed the link, or is gone."
    first = re.sub(r"^\[[^]]*\]\s*", "", text.strip().split("\n")[0])
    return f"{first[:200] or type(error).__name__}."
