"""The engine "ray": a link whose messages are calls of an actor, and whose blocks are in Ray's
object store.

::

    main process                                        actor
       |-- call: exchange(message) ------------------------>|  received in the order of sending
       |<------------------ result: messages, a block ------|  as soon as the node has something to send

A call carries a message to the node, and returns with the node's next messages. So a request and
its result cost one call, and a node without anything to send costs none: at least one call is open
all the time. Large blocks to nodes are put into the store once for all nodes, and fetched by the
machines of the nodes. Large blocks from nodes are results of calls, and are copied once, from the
store of this machine into the memory given to ``expect``; those without such memory are given away
where they lie.

What it guarantees: ``Link``. Ray may execute calls in another order than they were made in, so
messages and calls are numbered. Both ends count what the other end has received, and wait where it
does not read.

What it costs: per rollout of a node one call of the main process, which for small batches is what a
call of Ray costs. Two copies of a large block, into the store and out of it, and one more between
the stores of two machines.

What it trusts: Ray. A process that can connect to the cluster can call the actor, and run code in
it. Ray's token and TLS settings say which can (docs/engines.md). Muster listens at no port.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import ray

from muster.cluster.end import WAITING, End, Frame, has_room
from muster.cluster.link import Block, LinkLost, Received
from muster.cluster.ray_runtime import RayConnection, first_line, keep_connected_for
from muster.memory.specs import Array
from muster.utils.attributes import named

# bytes of a block that travels in the message; Ray stores what has more than 100 kB
SMALL = 1 << 16
OPEN = 4  # calls that wait for messages of the node
THREADS = OPEN + 4  # of the actor: one serves, others receive

POLL_S = 0.25  # seconds after which a thread that waits for Ray looks whether the link is closed

PUSH, EXCHANGE, PULL, END = range(
    4
)  # what a call of the actor is for, see ``NodeEnd.handle``
# what it is for; its number, if it returns messages; number of its message
_CALL = struct.Struct("<BQQ")
_UP = struct.Struct("<Q?")  # messages read; whether the node has closed
# bytes of the message, tag and bytes of its block, whether the block follows
_FRAME = struct.Struct("<QQQ?")


class RayFrame(Frame):
    """A message on its way, with its block."""

    @property
    def is_large(self) -> bool:
        return self.size > SMALL

    def packed(self) -> bytes:
        """Return the message, and the block if it is small."""
        head = _FRAME.pack(len(self.message), self.tag, self.size, not self.is_large)
        if self.block is None or self.is_large:
            return head + self.message
        small: bytes = self.block.tobytes()
        return head + self.message + small


class OutgoingFrame(RayFrame):
    """A message that a node sends in a call's result.

    A small block is copied here. A large one is in the memory of its owner until Ray has stored it,
    which shows in the end of the last reference to ``block``.

    Attributes:
        is_stored: set when the owner's memory is not used any more; None: there is no large block.
    """

    def __init__(self, message: bytes, tag: int, block: Array | None) -> None:
        super().__init__(message, tag, block)
        self.is_stored: threading.Event | None = None
        if block is None:
            return
        if not self.is_large:
            self.block = np.array(block)
            return
        self.block = block.view()
        self.is_stored = threading.Event()
        weakref.finalize(self.block, self.is_stored.set).atexit = False

    def give_away(self) -> Array:
        """Return the block, without keeping a reference to it."""
        block: Array = self.block
        self.block = None
        return block


def unpacked(
    packed: bytes, start: int, large: Array | None, cls: type[RayFrame] = RayFrame
) -> list[RayFrame]:
    """The frames from ``start`` on.

    ``large`` is the block of the one frame whose block does not follow.
    """
    frames = []
    while start < len(packed):
        length, tag, size, follows = _FRAME.unpack_from(packed, start)
        start += _FRAME.size
        message = packed[start : start + length]
        start += length
        block = None
        if tag and follows:
            block = np.frombuffer(packed, np.uint8, size, start)
            start += size
        elif tag:
            block = large
        frames.append(cls(message, tag, block))
    return frames


class ResultFrame(RayFrame):
    """A message in a call's result. The memory of a large block is given away where it can be."""

    def whole(self) -> Array:
        """The block in memory that nothing else uses: in Ray's store, if it can be written."""
        if not self.is_large:
            return super().whole()
        return writable(self.block)


class StoreMemory:
    """Memory of an object in Ray's store, which lives as long as the last array over this.

    NumPy makes arrays over it (``np.asarray``).

    Args:
        block: ``uint8 [n]``, as Ray returns it.
    """

    def __init__(self, block: Array) -> None:
        self.block = block
        self.__array_interface__ = {
            "shape": block.shape,
            "typestr": "|u1",
            "data": (block.ctypes.data, False),
            "version": 3,
        }


def writable(block: Array) -> Array:
    """The block of a call's result as an array that may be written, without a copy if possible.

    Arrays from Ray are read-only, since others may have a reference to the same object. Nothing
    else refers to the result of a call of ours, and the store moves or frees no object in use. The
    kernel says whether its memory can be written; if not, this is a copy.
    """
    memory = StoreMemory(block)
    array = np.asarray(memory)
    read, write = os.pipe()
    try:
        os.write(write, block[:1].data)
        os.readv(read, [array[:1].data])  # the same byte; an error instead of a crash
    except OSError:
        return np.array(block)
    finally:
        os.close(read)
        os.close(write)
    keep_connected_for(memory)
    return array


class StoredBlocks:
    """Large blocks in Ray's store: each is put there once, for all links.

    A block is freed after its ``Block`` and the next one. Where the store still has an older one,
    it writes a new block of the same size where another one was, which takes a sixth of the time of
    memory that was not used before.
    """

    def __init__(self) -> None:
        self._newest: deque[Any] = deque(maxlen=1)
        self._refs: weakref.WeakKeyDictionary[Block, Any] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def ref(self, block: Block) -> Any:
        with self._lock:
            ref = self._refs.get(block)
            if ref is None:
                ref = ray.put(block.array)
                self._refs[block] = ref
                self._newest.append(ref)
            return ref


class MainEnd(End):
    """The end of the main process.

    Calls return in the order in which they were made, so that the receiving thread waits for the
    oldest one.

    Args:
        handle: the method ``handle`` of an actor with an ``ActorMain``.
        blocks: of all links.
        deadline_s: seconds without a message after which the link is lost.
        ended: returns why the actor has ended; None while it runs.
    """

    def __init__(
        self,
        handle: Any,
        blocks: StoredBlocks,
        deadline_s: float,
        ended: Callable[[], str | None],
    ) -> None:
        super().__init__(deadline_s)
        self._call = handle
        self._tell = handle.options(num_returns=0)
        self._blocks = blocks
        self._ended = ended
        self._connection = RayConnection()
        self._sent = 0
        # bytes of the blocks of messages that the node has not read
        self._unread: deque[int] = deque()
        self._calls = 0  # that return with messages of the node
        self._open: deque[Future[Any]] = (
            deque()
        )  # the results of those that have not returned
        self._begin(PULL)

    def send(self, message: bytes, block: Block | None = None, tag: int = 0) -> None:
        frame = RayFrame(message, tag, None if block is None else block.array)
        deadline = time.monotonic() + self._allowed_s(frame.size)
        with self._changed:
            while self._cause or self._over or not has_room(self._unread, frame.size):
                until = min(deadline, time.monotonic() + POLL_S)
                self._wait(until, deadline, "read")
                self._look_at_ray()
                self._over = self._over or self._ended() or ""
        ref = None
        if block is not None and frame.is_large:
            ref = self._stored(block)
        with self._changed:
            number = self._sent
            self._sent += 1
            self._unread.append(frame.size)
            if ref is None and len(self._open) < OPEN:
                self._begin(EXCHANGE, number, frame.packed())
                return
        packed = _CALL.pack(PUSH, 0, number) + frame.packed()
        with self._of_ray():
            if ref is None:
                self._tell.remote(packed)
            else:
                self._tell.remote(
                    packed, ref
                )  # the block is freed when the call has ended

    def receive(self) -> Received:
        while not self._inbox:
            self._return()
        return super().receive()

    def _stored(self, block: Block) -> Any:
        """A reference to a block in Ray's store."""
        with self._of_ray():
            return self._blocks.ref(block)

    def _begin(self, what: int, number: int = 0, packed: bytes = b"") -> None:
        """Begin a call that returns with messages of the node. Called by one thread at a time."""
        with self._of_ray():
            head = _CALL.pack(what, self._calls, number)
            result = self._call.remote(head + packed)
            self._open.append(result.future())
            self._calls += 1

    @contextlib.contextmanager
    def _of_ray(self) -> Iterator[None]:
        """A context for what Ray does; its errors lose the link."""
        try:
            self._connection.check()
            yield
        except (
            Exception,
            SystemExit,
        ) as error:  # Ray raises even these when it is shut down
            self._close(self._reason(error))
            raise LinkLost(self._cause) from error

    def _reason(self, error: BaseException) -> str:
        """Why Ray has failed, for the user."""
        try:
            self._connection.check()
        except RuntimeError as shut_down:
            return first_line(shut_down)
        return first_line(error)

    def _return(self) -> None:
        """Wait until the oldest call has returned, and take its messages; or return after a while.

        The thread waits in Python. One that is in ``ray.get`` while the user calls ``ray.shutdown``
        and ``ray.init`` makes Ray abort the process.
        """
        deadline = self._heard + self._deadline_s
        with self._changed:
            self._look_at_ray()
            self._wait(
                0.0, deadline, "said anything"
            )  # raises LinkLost if no call is open
        oldest = self._open[0]
        try:
            left = max(0.0, deadline - time.monotonic())
            result = oldest.result(min(POLL_S, left))
        except (Exception, SystemExit):  # noqa: BLE001 (Ray's, or it has not returned in this time)
            failure = oldest.exception() if oldest.done() else None
            if failure is not None:
                with self._changed:
                    self._over = self._over or self._reason(failure)
                    self._changed.notify_all()
            return
        with self._changed:
            self._heard = time.monotonic()
            self._open.popleft()
            packed = result
            large = None
            if isinstance(result, tuple):
                packed, large = result
            read, is_closed = _UP.unpack_from(packed)
            for _ in range(read - self._sent + len(self._unread)):
                self._unread.popleft()
            self._inbox.extend(unpacked(packed, _UP.size, large, ResultFrame))
            if is_closed:
                self._over = self._over or "The other end has closed the link."
            elif not self._open:
                self._begin(PULL)
            self._changed.notify_all()

    def _look_at_ray(self) -> None:
        """Lose the link if this process has left Ray, which completes no call any more; with
        ``_changed`` held.
        """
        try:
            self._connection.check()
        except RuntimeError as error:
            self._over = self._over or first_line(error)

    def _tell_closed(self) -> None:
        with contextlib.suppress(
            Exception
        ):  # the actor ends with its connection to Ray
            self._connection.check()
            end = _CALL.pack(END, 0, self._sent)
            self._tell.remote(end)


class NodeEnd(End):
    """The end of the node.

    Calls of the main process, each in a thread of its own, are executed by ``handle``.
    """

    def __init__(self, deadline_s: float) -> None:
        super().__init__(deadline_s)
        self._outbox: deque[OutgoingFrame] = deque()
        self._returned = 0  # calls
        self._told = 0  # messages of which the main process knows that they were read
        self._owes = False  # it has to know more

    def send(self, message: bytes, block: Block | None = None, tag: int = 0) -> None:
        frame = OutgoingFrame(message, tag, None if block is None else block.array)
        deadline = time.monotonic() + self._allowed_s(frame.size)
        with self._changed:
            self._check_not_stopped()
            while self._cause or self._over or len(self._outbox) >= WAITING:
                self._wait(deadline, deadline, "read")
            self._outbox.append(frame)
            self._changed.notify_all()
            if frame.is_stored is None:
                return
            self._wait_until_taken(frame, deadline)
        if not frame.is_stored.wait(self._allowed_s(0)):
            self._close("Ray has not stored a block in time.")
            raise LinkLost(self._cause)

    def _wait_until_taken(self, frame: OutgoingFrame, deadline: float) -> None:
        """Wait until a call has taken the frame, and with it its block; with ``_changed`` held."""
        try:
            while frame in self._outbox:
                self._wait(deadline, deadline, "read")
        except LinkLost:
            self._outbox.remove(frame)
            raise

    # --- called by the main process ---------------------------------------------------------------

    def handle(self, packed: bytes, large: Array | None = None) -> Any:
        """Receive the message in a call, and return the next messages of the node if the call waits
        for them.

        Args:
            packed: what the call is for, its number, and its message.
            large: the block of the message, if it is large.
        """
        what, call, number = _CALL.unpack_from(packed)
        if what in (PUSH, EXCHANGE):
            with self._changed:
                (frame,) = unpacked(packed, _CALL.size, large)
                self._arrived(number, frame)
        if what == END:
            with self._changed:
                self._closed_there(number)
        return self._pull(call) if what in (EXCHANGE, PULL) else None

    def _pull(self, call: int) -> Any:
        """Wait until all earlier calls have returned and there is something to send, and return it."""
        with self._changed:
            self._heard = time.monotonic()
            self._changed.wait_for(lambda: self._returned == call and self._has_news())
            taken: list[OutgoingFrame] = []
            size = 0
            while self._outbox and size <= SMALL:
                if taken and self._outbox[0].is_large:
                    break  # it goes alone
                frame = self._outbox.popleft()
                taken.append(frame)
                size += len(frame.message) + frame.size
            is_closed = bool(self._cause or self._over) and not self._outbox
            head = _UP.pack(self._read, is_closed)
            packed = head + b"".join(frame.packed() for frame in taken)
            self._returned += 1
            self._told = self._read
            self._owes = False
            self._changed.notify_all()
        if taken and taken[-1].is_large:
            # Ray has the only reference to the block, so that its end can be noticed
            return packed, taken[-1].give_away()
        return packed

    def _has_news(self) -> bool:
        return bool(self._outbox or self._cause or self._over or self._owes)

    def _note_read(self, frame: Frame) -> None:
        if frame.size > SMALL or self._read - self._told >= WAITING // 2:
            self._owes = True
            self._changed.notify_all()

    def _tell_closed(self) -> None:
        """The open calls return, and say so."""


class ActorMain:
    """The object in the actor of a node.

    Args:
        node: its number.
        target: the function that the node runs, "module:function".
        deadline_s: seconds without a message after which the link is lost.
    """

    def __init__(self, node: int, target: str, deadline_s: float) -> None:
        self._function = named(target)  # raises at once if it does not exist
        self._node = node
        self._end = NodeEnd(deadline_s)
        self.handle = self._end.handle

    def serve(self) -> bool:
        """Run the node for one session."""
        try:
            return bool(self._function(self._end, self._node))
        finally:
            self._end.close()
