"""The engine "rpc": a link whose messages are calls of torch RPC, and whose blocks are tensors in
these calls.

::

    main process                                   node
       |-- deliver(number, message, tensors) ------>|  put into the inbox, in the order of the numbers
       |<------------------------- None ------------|  as soon as it was read
       |<-------- deliver(number, message, tensors) |
       |-- None ----------------------------------->|

Both ends do the same. A call returns when its message was read, so that the number and size of open
calls say what the other end has not read. TensorPipe sends tensors out of their own memory, and
receives them in new memory, from where they are copied to where they are expected.

What it guarantees: ``Link``. RPC executes calls with threads in any order, so messages are
numbered. Every call names its session, so that no call reaches another one. A call that fails loses
the link; an end that hears nothing makes a call every second, which fails if the other process has
ended.

What it costs: two calls per rollout of a node, and one copy of a block, besides the memory that
TensorPipe takes for it.

What it trusts: every process that can connect to the agent of this process or of a node, because
torch RPC calls any function for it, without authentication and encryption (docs/engines.md).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed import rpc
from torch.distributed.rpc import WorkerInfo  # type: ignore[attr-defined]
from torch.futures import Future

from muster.cluster.end import End, Frame, has_room
from muster.cluster.link import Block, LinkLost, Received
from muster.memory.specs import Array
from muster.utils.texts import first_line

SMALL = 1 << 16  # bytes of a block that is pickled with its message
# bytes of a tensor: malloc uses the memory of such tensors again, which takes a third of the CPU
# time
PART = 8 << 20
PROBE_S = 1.0  # seconds without a message after which an end looks whether the other process runs
GONE = -1  # instead of a number of messages: there is no such session

Key = tuple[str, bool]  # a session, and whether this is the end of the main process

_ends: weakref.WeakValueDictionary[Key, RpcEnd] = weakref.WeakValueDictionary()


@dataclass(eq=False)
class RpcFrame(Frame):
    """A message that has arrived, with its block.

    Attributes:
        block: ``uint8 [n]`` each, one after another; None: there is no block.
        answer: completed when the message was read.
    """

    block: Sequence[Array] | None = None
    answer: Any = None

    @property
    def size(self) -> int:
        return sum(part.size for part in self.block or ())

    def write(self, memory: Array) -> None:
        at = 0
        for part in self.block or ():
            memory[at : at + part.size] = part
            at += part.size

    def whole(self) -> Array:
        parts = self.block or ()
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


class RpcEnd(End):
    """One end, for as long as there is a reference to it.

    Args:
        peer: the agent of the other process.
        session: its name; no other session has it.
        main: whether this is the main process.
        deadline_s: seconds without a message after which the link is lost.
    """

    def __init__(
        self, peer: WorkerInfo, session: str, *, main: bool, deadline_s: float
    ) -> None:
        super().__init__(deadline_s)
        self._peer = peer
        self._there: Key = session, not main
        self._sent = 0  # messages
        # bytes of the blocks of messages that the other end has not read, by number
        self._unread: dict[int, int] = {}
        self._probed = 0.0  # when ``receive`` has called the other end last
        self._open = 0  # other calls that have not returned
        _ends[session, main] = self

    def send(self, message: bytes, block: Block | None = None, tag: int = 0) -> None:
        array = None if block is None else block.array
        size = 0 if array is None else array.size
        small, large = _packed(array)
        allowed_s = self._allowed_s(size)
        deadline = time.monotonic() + allowed_s
        with self._changed:
            self._check_not_stopped()
            while (
                self._cause or self._over or not has_room(self._unread.values(), size)
            ):
                self._wait(deadline, deadline, "read")
            number, self._sent = self._sent, self._sent + 1
            self._unread[number] = size
        self._call(
            deliver,
            (number, message, tag, small, *large),
            2 * allowed_s,
            lambda: self._unread.pop(number),
            block,
        )
        if large:
            self._wait_until_read(number, deadline)

    def check(self, within_s: float, failure: str) -> None:
        """Call the other end.

        Raises LinkLost, with the text ``failure``, if it does not answer in this time.
        """
        self._call(ask, (), within_s)
        with self._changed:
            self._changed.wait_for(lambda: self._over or not self._open, 2 * within_s)
            if self._over or self._open:
                raise LinkLost(f"{failure}: {self._over or 'it is late'}")

    def flush(self, within_s: float) -> None:
        """Wait until the other end has read everything and knows that this end is closed, or is
        lost.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._over or not (self._unread or self._open), within_s
            )

    def _wait_until_read(self, number: int, deadline: float) -> None:
        """Wait until the memory of the block is not used any more."""
        with self._changed:
            while number in self._unread:
                self._wait(deadline, deadline, "read")

    def _call(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        timeout_s: float,
        answered: Callable[[], Any] | None = None,
        owner: Any = None,
    ) -> None:
        """Call a function of the other process with the session and arguments.

        Args:
            answered: called with ``_changed`` held when the call has returned or failed.
            owner: an object that keeps the memory of tensors reserved until then.
        """

        def ended(closed: int | None, failure: str) -> None:
            nonlocal owner
            owner = None
            with self._changed:
                if answered is None:
                    self._open -= 1
                else:
                    answered()
                if failure:
                    self._over = self._over or f"The other end is gone ({failure})."
                elif closed is not None:
                    self._closed_there(self._number if closed == GONE else closed)
                self._changed.notify_all()

        def returned(call: Future[Any]) -> None:
            try:
                closed = call.wait()
            except Exception as error:  # noqa: BLE001 (RPC's, of any kind)
                ended(None, first_line(error))
            else:
                ended(closed, "")

        if answered is None:
            with self._changed:
                self._open += 1
        try:
            rpc.rpc_async(
                self._peer, function, (self._there, *args), timeout=timeout_s
            ).add_done_callback(returned)
        except Exception as error:  # noqa: BLE001 (the agent was shut down)
            ended(None, first_line(error))

    def _wait_for_message(self, deadline: float) -> None:
        until = max(self._heard, self._probed) + PROBE_S
        if time.monotonic() > until:
            self._probed = time.monotonic()
            self._call(ask, (), self._deadline_s)
        self._wait(min(until, deadline), deadline, "said anything")

    def _placed(self, frame: Frame) -> Received:
        assert isinstance(frame, RpcFrame)
        try:
            return super()._placed(frame)
        finally:
            frame.answer.set_result(self._closed_after())

    def _closed_after(self) -> int | None:
        """Number of messages that this end has sent, if it is closed."""
        return self._sent if self._cause else None

    def _tell_closed(self) -> None:
        unread = [*self._inbox, *self._early.values()]
        self._inbox.clear()
        self._early.clear()
        for frame in unread:
            frame.answer.set_result(self._sent)  # type: ignore[attr-defined]
        self._call(end, (self._sent,), self._deadline_s)

    # --- called by the other process --------------------------------------------------------------

    def delivered(self, number: int, frame: RpcFrame) -> None:
        """Take a message that has arrived."""
        with self._changed:
            if self._cause:
                frame.answer.set_result(self._sent)
            else:
                self._arrived(number, frame)

    def asked(self) -> int | None:
        """Answer that this process runs."""
        with self._changed:
            return self._closed_after()

    def ended(self, last: int) -> None:
        """Note that the other end is closed."""
        with self._changed:
            self._closed_there(last)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def deliver(
    key: Key,
    number: int,
    message: bytes,
    tag: int,
    small: bytes | None,
    *large: torch.Tensor,
) -> Future[Any]:
    """Take a message of the other end.

    Returns:
        None when it was read; or the number of messages after which this end has closed the link,
        or ``GONE``.
    """
    answer: Future[Any] = Future()
    found = _ends.get(key)
    if found is None:
        answer.set_result(GONE)
        return answer
    block = None
    if small is not None:
        block = [np.array(np.frombuffer(small, np.uint8))]
    elif large:
        block = [part.numpy() for part in large]
    found.delivered(number, RpcFrame(message, tag, block, answer))
    return answer


def ask(key: Key) -> int | None:
    """Return None, or the number of messages after which this end has closed the link, or ``GONE``."""
    found = _ends.get(key)
    return GONE if found is None else found.asked()


def end(key: Key, last: int) -> None:
    """Note that the other end is closed, after so many messages."""
    found = _ends.get(key)
    if found is not None:
        found.ended(last)


def _packed(array: Array | None) -> tuple[bytes | None, Sequence[torch.Tensor]]:
    """A block as bytes, or as tensors over its memory if it is large."""
    if array is None:
        return None, ()
    if array.size <= SMALL:
        return array.tobytes(), ()
    if not array.flags.writeable:  # PyTorch has no tensors that are read-only
        array = np.array(array)
    return None, torch.split(torch.from_numpy(array), PART)
