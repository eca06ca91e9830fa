"""Links over torch.distributed: one process group of two ranks per node and session, beside the user's own groups.

Messages and, unless another backend is asked for, blocks go through gloo. Rank 0 is the main process. A message, with
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
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import torch.distributed

from muster.errors import BadOption
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


class Transfer(Protocol):
    """Something that is on its way; has what it needs for as long as it lasts."""

    def finish(self, within_s: float) -> None:
        """Wait for its end; raises RuntimeError or TimeoutError."""


class Blocks(Protocol):
    """How large blocks travel: in the order in which they are sent."""

    def send(self, block: Block) -> Transfer: ...

    def receive(self, memory: Array) -> Transfer: ...

    def close(self) -> None: ...


class GlooLink:
    """One end of a session.

    Args:
        group: of two ranks.
        rank: of this end.
        deadline_s: seconds for which nothing may come.
        blocks: how these travel; through ``group`` by default.
        store: in which ``group`` was made; closed with the link.
    """

    def __init__(
        self, group: Any, rank: int, deadline_s: float, blocks: Blocks | None = None, store: LinkStore | None = None
    ) -> None:
        self._group, self._peer, self._deadline_s, self._store = group, 1 - rank, deadline_s, store
        self._short = HANDSHAKE  # what comes from an unknown process must fit into a frame
        self._blocks = blocks or _GlooBlocks(group, self._peer)
        self._expected: dict[int, Array] = {}
        self._outgoing, self._incoming = np.zeros(FRAME_BYTES, np.uint8), np.zeros(FRAME_BYTES, np.uint8)
        self._lock = threading.Lock()
        self._closed = False
        self._cause: str | None = None  # of the first failure, which makes the others
        self._next: Transfer | None = None
        self._ack: Transfer | None = None
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
                sent: list[Transfer] = []
                if rest:
                    sent.append(self._post_send(np.frombuffer(bytearray(rest), np.uint8), _RESTS))
                if block is not None and array.size:
                    sent.append(self._blocks.send(block))
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
        coming: list[Transfer] = []
        if length:
            coming.append(self._post_receive(rest, _RESTS))
        if block is not None and block.size:
            coming.append(self._blocks.receive(block))
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
            self._blocks.close()
            if self._store is not None:
                self._store.close()
            self._expected.clear()
            self._group = self._next = self._ack = None  # its port and threads; who waits has what it waits for

    def _finish(self, last: Transfer, before: list[Transfer], size: int) -> None:
        patience = allowed_s(self._deadline_s, size)
        last.finish(patience)
        for transfer in before:
            transfer.finish(patience)

    def _post_send(self, array: Array, tag: int) -> Transfer:
        return _Gloo(_open(self._group).send([torch.from_numpy(array)], self._peer, tag), array)

    def _post_receive(self, array: Array, tag: int) -> Transfer:
        return _Gloo(_open(self._group).recv([torch.from_numpy(array)], self._peer, tag), array)

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


class _GlooBlocks:
    """Right out of and into their memory."""

    def __init__(self, group: Any, peer: int) -> None:
        self._group, self._peer = group, peer

    def send(self, block: Block) -> Transfer:
        tensor = block.form("torch", as_tensor)
        return _Gloo(_open(self._group).send([tensor], self._peer, _BLOCKS), block.array)

    def receive(self, memory: Array) -> Transfer:
        return _Gloo(_open(self._group).recv([torch.from_numpy(memory)], self._peer, _BLOCKS), memory)

    def close(self) -> None:
        """The group's connections are closed, so that nothing writes into expected memory any more."""
        self._group = None


class _Cuda:
    """A block on its way through memory of the device."""

    def __init__(self, work: Any, staging: torch.Tensor, memory: Array | None) -> None:
        self._work, self._staging, self._memory = work, staging, memory

    def finish(self, within_s: float) -> None:
        deadline = time.monotonic() + within_s
        pause = threading.Event()
        while not self._work.is_completed():  # waiting for it would have no deadline
            if time.monotonic() > deadline:
                raise TimeoutError
            pause.wait(0.0005)
        if self._memory is not None:
            self._work.wait()  # makes the stream of the copy wait
            torch.from_numpy(self._memory).copy_(self._staging)


class _CudaBlocks:
    """Through a CUDA device (NCCL); one group for each direction, since a group does one thing after the other.

    Never run so far: it needs a CUDA device for each of two processes.
    """

    def __init__(self, out: Any, back: Any, peer: int) -> None:
        self._out, self._back, self._peer = out, back, peer
        self._device = torch.device("cuda", torch.cuda.current_device())

    def send(self, block: Block) -> Transfer:
        staging = block.form("torch", as_tensor).to(self._device)
        return _Cuda(self._out.send([staging], self._peer, 0), staging, None)

    def receive(self, memory: Array) -> Transfer:
        staging = torch.empty(memory.size, dtype=torch.uint8, device=self._device)
        return _Cuda(self._back.recv([staging], self._peer, 0), staging, memory)

    def close(self) -> None:
        for group in (self._out, self._back):
            group.abort()


def check_backend(backend: str) -> None:
    """Raise BadOption unless blocks can go through it here."""
    if backend not in ("gloo", "nccl", "ucc", "mpi"):
        raise BadOption(
            f"backend={backend!r} is unknown to torch.distributed collectors; there are gloo, nccl and ucc."
        )
    if backend != "gloo" and not getattr(_c10d, f"is_{backend}_available")():
        raise BadOption(f"backend={backend!r}: this PyTorch was built without it; use backend='gloo'.")
    if backend == "nccl" and not torch.cuda.is_available():
        raise BadOption("backend='nccl' needs a CUDA device in every process; use backend='gloo'.")
    if backend == "mpi":
        raise BadOption(
            "backend='mpi': MPI fixes its processes when mpirun starts, so that no node could be started or come back. "
            "Use backend='gloo', which can run over the same network."
        )


def join_group(channel: Link, rank: int, host: str, backend: str, deadline_s: float) -> GlooLink:
    """Meet the other end in a group.

    Args:
        channel: to the other end; closed with the link, or if there is none.
        rank: of this end.
        host: address of this machine at which the group listens.

    Raises:
        RuntimeError, LinkLost: the other end does not come within the deadline.
    """
    try:
        return _group_link(LinkStore(channel), rank, host, backend, deadline_s)
    except BaseException:
        channel.close()
        raise


def _group_link(store: LinkStore, rank: int, host: str, backend: str, deadline_s: float) -> GlooLink:
    group = _gloo(_c10d.PrefixStore("gloo", store), rank, host, timedelta(seconds=deadline_s))
    if backend == "gloo":
        return GlooLink(group, rank, deadline_s, store=store)
    make = {"nccl": _nccl, "ucc": _ucc}[backend]
    return GlooLink(group, rank, deadline_s, make(store, rank, deadline_s), store)


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


def _nccl(store: Store, rank: int, deadline_s: float) -> Blocks:
    options = _c10d.ProcessGroupNCCL.Options()
    if usable("torch", (options, ("_timeout",))):  # else nccl's own, of ten minutes
        options._timeout = timedelta(seconds=deadline_s)
    to_node, to_main = (
        _c10d.ProcessGroupNCCL(_c10d.PrefixStore(name, store), rank, 2, options) for name in ("to_node", "to_main")
    )
    return _CudaBlocks(to_node, to_main, 1) if rank == 0 else _CudaBlocks(to_main, to_node, 0)


def _ucc(store: Store, rank: int, deadline_s: float) -> Blocks:
    timeout = timedelta(seconds=deadline_s)
    group = _c10d.ProcessGroupUCC(_c10d.PrefixStore("ucc", store), rank, 2, timeout)
    return _GlooBlocks(group, 1 - rank)


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
