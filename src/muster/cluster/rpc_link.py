"""Links over torch RPC: what one end sends is the argument of a function that is called in the other.

::

    deliver(session, number, message, tag, block)   returns once there is room for more
    announce(session, size)                         a block is coming that may take longer than the deadline
    leave(session)                                  the caller closes; returns when the other end knows what has arrived
    watch(session)                                  returns when the other end closes, and fails when it is gone

All of them return whether the session is still open there.

Blocks travel beside the messages, unpickled and uncopied, into new memory of torch's, and are copied from there into
the memory that was expected to take them.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed import rpc
from torch.distributed.rpc.functions import async_execution
from torch.futures import Future

from muster.cluster.link import SLOWEST, Block, LinkLost, Received, allowed_s
from muster.cluster.rpc_agent import RpcAgent
from muster.memory.specs import Array

if TYPE_CHECKING:
    from torch._C._distributed_rpc import WorkerInfo
else:
    from torch.distributed.rpc import WorkerInfo

ROOM_MESSAGES, ROOM_BYTES = 64, 1 << 26  # that have arrived, but were not received yet
LEAVE_S = 1.0  # for which ``close`` waits for the other end
ANNOUNCED = SLOWEST  # bytes; a smaller block is there within a second

_open: dict[str, RpcLink] = {}  # by session; this process' ends
_CLOSED = "The link was closed here."
_GONE = "The other end has closed the link, or is gone."


class RpcLink:
    """One end of a session.

    Args:
        session: a name that no other session has, known to both ends.
        deadline_s: seconds for which nothing may come.
        device: blocks are sent from there, and arrive on the device that it stands for at the other end. None: the CPU.
    """

    def __init__(self, session: str, deadline_s: float, device: str | None = None) -> None:
        self._session, self._deadline_s, self._device = session, deadline_s, device
        self._agent: RpcAgent
        self._peer: WorkerInfo | None = None
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._inbox: deque[Received] = deque()
        self._waiting: list[Future[bool]] = []  # calls of the other end, for which there was no room
        self._delivered = 0
        self._patience_s = deadline_s
        self._expected: dict[int, Array] = {}
        self._watchers: list[Future[bool]] = []
        self._calling = False  # a call is under way
        self._leaving: list[Future[bool]] = []  # the other end, which waits for that
        self._cause: str | None = None  # why it is lost
        self._closed = False
        _open[session] = self

    def begin(self, agent: RpcAgent, peer: WorkerInfo) -> None:
        """The other end can be called from now on.

        Raises:
            LinkLost: it is gone.
        """
        self._agent, self._peer = agent, peer
        try:
            end = rpc.rpc_async(peer, watch, args=(self._session,), timeout=0)
        except RuntimeError:
            raise self._lost(_GONE) from None
        end.add_done_callback(lambda _: self._lose(_GONE))

    def send(self, message: bytes, block: Block | None = None, tag: int = 0) -> None:
        size = 0 if block is None else block.array.size
        tensor = None if block is None else block.form("torch", as_tensor)
        if tensor is not None and self._device is not None:
            tensor = tensor.to(self._device)
        if size > ANNOUNCED:
            self._call(announce, (self._session, size), 0)
        self._call(deliver, (self._session, next(self._numbers), message, tag, tensor), size)

    def expect(self, tag: int, memory: Array) -> None:
        """As in ``Link``; does nothing once the link is lost."""
        with self._changed:
            if self._cause is None:
                self._expected[tag] = memory

    def receive(self) -> Received:
        with self._changed:
            begin = time.monotonic()
            while not self._inbox and self._cause is None:
                left = begin + self._patience_s - time.monotonic()  # an announcement makes it longer
                if left <= 0:
                    break
                self._changed.wait(left)
            received, returns = None, list[Future[bool]]()
            if self._inbox and not self._closed:  # what came before the link was lost, too
                received, returns = self._take()
        if received is None:
            raise self._lost(f"Nothing has come from the other end for {self._patience_s:g} s.")
        _answer(returns, True)
        return received

    def close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed, tells = True, self._cause is None and self._peer is not None
            self._cause = self._cause or _CLOSED
            self._expected.clear()
            refused, self._waiting = self._waiting, []
            self._changed.notify_all()
        _answer(refused, False)
        if tells:
            self._take_leave()
        self._lose(_CLOSED)
        if self._peer is not None:
            self._agent.forget(self._peer)

    # -------------------------------------------------------------------- called by the other end, in threads of RPC

    def deliver(self, number: int, message: bytes, tag: int, tensor: torch.Tensor | None) -> Future[bool]:
        """Take a message in; the other end waits until the result is set: whether there is room for more."""
        future: Future[bool] = Future()
        with self._changed:
            if self._cause is not None or number != self._delivered:
                return _done(False)
            self._delivered += 1
            try:
                block = None if tensor is None else self._place(tag, tensor)
            except ValueError as error:
                self._cause = str(error)
                self._changed.notify_all()
                return _done(False)
            self._inbox.append(Received(message, tag, block))
            self._waiting.append(future)
            self._patience_s = self._deadline_s
            returns = self._admitted()
            self._changed.notify_all()
        _answer(returns, True)
        return future

    def announce(self, size: int) -> bool:
        """A block of so many bytes comes next."""
        with self._changed:
            self._patience_s = allowed_s(self._deadline_s, size)
            self._changed.notify_all()
        return True

    def watch(self) -> Future[bool]:
        """The result is set when this end is lost or closed."""
        with self._changed:
            if self._cause is not None:
                return _done(False)
            self._watchers.append(Future())
            return self._watchers[-1]

    def leave(self) -> Future[bool]:
        """The other end closes. The result is set when no call of this one is under way."""
        with self._changed:
            if not self._calling:
                return _done(True)
            self._leaving.append(Future())
            return self._leaving[-1]

    # ---------------------------------------------------------------------------------------------------------------

    def _take_leave(self) -> None:
        """Wait until the other end knows that what it has sent has arrived: this process may end right after."""
        with contextlib.suppress(RuntimeError):
            rpc.rpc_async(self._peer, leave, args=(self._session,), timeout=LEAVE_S).wait()

    def _call(self, function: Callable[..., Any], args: tuple[Any, ...], size: int) -> None:
        """Call a function of the other end, and wait until it has returned."""
        within_s = allowed_s(self._deadline_s, size)
        with self._changed:
            if self._cause is not None:
                raise LinkLost(_CLOSED if self._closed else self._cause)
            self._calling = True
        try:
            future = rpc.rpc_async(self._peer, function, args=args, timeout=within_s)
            future.add_done_callback(self._wake)
            with self._changed:
                self._changed.wait_for(lambda: future.done() or self._cause is not None, within_s + 1.0)
                if not future.done():
                    raise RuntimeError(self._cause or "timeout")
            if not future.wait():
                raise RuntimeError("the other end has closed")
        except RuntimeError as error:
            late = "timeout" in str(error)
            raise self._lost(f"The other end has not read for {within_s:g} s." if late else _GONE) from None
        finally:
            with self._changed:
                self._calling = False
                returns, self._leaving = self._leaving, []
            _answer(returns, True)

    def _wake(self, _: Future[bool]) -> None:
        with self._changed:
            self._changed.notify_all()

    def _place(self, tag: int, tensor: torch.Tensor) -> Array:
        """Under the lock, so that nothing is written once the link is closed."""
        block: Array = tensor.cpu().numpy()
        memory = self._expected.pop(tag, None)
        if memory is None:
            return block
        if memory.size != block.size:
            raise ValueError(f"Block {tag} has {block.size} bytes where {memory.size} were expected.")
        memory[:] = block
        return memory

    def _take(self) -> tuple[Received, list[Future[bool]]]:
        return self._inbox.popleft(), self._admitted()

    def _admitted(self) -> list[Future[bool]]:
        """Of the calls that wait for room, those that need wait no longer."""
        size = sum(received.block.size for received in self._inbox if received.block is not None)
        if len(self._inbox) > ROOM_MESSAGES or size > ROOM_BYTES:
            return []
        returns, self._waiting = self._waiting, []
        return returns

    def _lost(self, cause: str) -> LinkLost:
        """The error to raise; ``cause`` is why, unless the link was lost before."""
        self._lose(cause)
        return LinkLost(_CLOSED if self._closed else self._cause)

    def _lose(self, cause: str) -> None:
        with self._changed:
            if self._cause is None:
                self._cause = cause
            _open.pop(self._session, None)
            self._expected.clear()
            watchers, self._watchers = self._watchers, []
            refused, self._waiting = self._waiting, []
            self._changed.notify_all()
        _answer(refused, False)
        _answer(watchers, False)


@async_execution  # type: ignore[untyped-decorator]
def deliver(session: str, number: int, message: bytes, tag: int, block: torch.Tensor | None) -> Future[bool]:
    """See the module. (What these functions raised would be printed here.)"""
    link = _open.get(session)
    return _done(False) if link is None else link.deliver(number, message, tag, block)


def announce(session: str, size: int) -> bool:
    """See the module."""
    link = _open.get(session)
    return link is not None and link.announce(size)


@async_execution  # type: ignore[untyped-decorator]
def leave(session: str) -> Future[bool]:
    """See the module."""
    link = _open.get(session)
    return _done(False) if link is None else link.leave()


@async_execution  # type: ignore[untyped-decorator]
def watch(session: str) -> Future[bool]:
    """See the module."""
    link = _open.get(session)
    return _done(False) if link is None else link.watch()


def as_tensor(array: Array) -> torch.Tensor:
    """The same memory, also of an array that may not be written (which torch would warn of)."""
    if not array.flags.writeable:
        same: Any = (ctypes.c_ubyte * array.size).from_address(array.ctypes.data)
        array = np.frombuffer(same, np.uint8)
    return torch.from_numpy(array)


def _done(result: bool) -> Future[bool]:
    future: Future[bool] = Future()
    future.set_result(result)
    return future


def _answer(futures: list[Future[bool]], result: bool) -> None:
    for future in futures:
        future.set_result(result)
