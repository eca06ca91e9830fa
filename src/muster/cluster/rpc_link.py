"""Links over torch RPC: blocks travel as its tensors, messages through the connection by which the node has joined.

::

    block    deliver(session, tag, block), a function that is called in the other process
    message  the connection, authenticated as for torch.distributed

A message follows its block. So RPC decides nothing but how bytes travel: order, liveness and closing are those of the
connection.
"""

from __future__ import annotations

import ctypes
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed import rpc
from torch.distributed.rpc.functions import async_execution
from torch.futures import Future

from muster.cluster.link import Block, Link, LinkLost, Received, allowed_s
from muster.cluster.rpc_agent import RpcAgent
from muster.memory.specs import Array

if TYPE_CHECKING:
    from torch._C._distributed_rpc import WorkerInfo

ROOM_BYTES = 1 << 26  # of blocks whose messages were not received yet
BEAT_S = 1.0
BEAT = (1 << 64) - 1  # tag of a message that says only that a block is still on its way

_EMPTY = Block(np.empty(0, np.uint8))
_CLOSED = "The link was closed here."
_GONE = "The other end has closed the link, or is gone."
_open: dict[str, RpcLink] = {}  # by session; this process' ends


class RpcLink:
    """One end of a session.

    Args:
        channel: to the other end, for this session alone; is closed by ``close``.
        session: a name that no other session has, known to both ends.
        deadline_s: seconds for which nothing may come.
        device: blocks are sent from there, and arrive on the device that it stands for at the other end. None: the CPU.
    """

    def __init__(self, channel: Link, session: str, deadline_s: float, device: str | None = None) -> None:
        self._channel, self._session, self._deadline_s, self._device = channel, session, deadline_s, device
        self._agent: RpcAgent
        self._peer: WorkerInfo | None = None
        self._changed = threading.Condition()  # held while expected memory is written
        self._delivered: dict[int, Array] = {}  # blocks whose messages were not received yet
        self._waiting: dict[int, Future[bool]] = {}  # by tag, the answers to deliveries for which there is no room
        self._expected: dict[int, Array] = {}
        self._cause = ""  # why it is lost
        _open[session] = self

    def begin(self, agent: RpcAgent, peer: WorkerInfo) -> None:
        """The other end can be called from now on."""
        self._agent, self._peer = agent, peer

    def send(self, message: bytes, block: Block | None = None, tag: int = 0) -> None:
        if block is None:
            self._tell(message)
            return
        tensor = as_tensor(block.array)
        if self._device is not None:
            tensor = tensor.to(self._device)
        within_s = allowed_s(self._deadline_s, block.array.size)
        try:
            accepted = self._deliver(tag, tensor, within_s)
        except RuntimeError as error:
            late = "timeout" in str(error)
            raise self._lost(f"The other end has not read for {within_s:g} s." if late else _GONE) from None
        if not accepted:
            raise self._lost(_GONE)
        self._tell(message, tag)

    def expect(self, tag: int, memory: Array) -> None:
        """As in ``Link``; does nothing once the link is lost."""
        with self._changed:
            if not self._cause:
                self._expected[tag] = memory

    def receive(self) -> Received:
        try:
            got = self._channel.receive()
            while got.tag == BEAT:
                got = self._channel.receive()
        except LinkLost as lost:
            raise self._lost(str(lost)) from None
        return Received(got.message, got.tag, self._take(got.tag)) if got.tag else got

    def close(self) -> None:
        self._lost(_CLOSED)
        with self._changed:
            peer, self._peer = self._peer, None
        if peer is not None:
            self._agent.forget(peer)

    def take_in(self, tag: int, tensor: torch.Tensor) -> Future[bool]:
        """Keep a block until its message is received. The result is set when there is room for more: True; or when
        the link is lost: False.
        """
        answer: Future[bool] = Future()
        with self._changed:
            is_lost, is_full = bool(self._cause), self._is_full()
            if not is_lost:
                self._delivered[tag] = tensor.cpu().numpy()
                if is_full:
                    self._waiting[tag] = answer
                    return answer
        answer.set_result(not is_lost)
        return answer

    def _deliver(self, tag: int, tensor: torch.Tensor, within_s: float) -> bool:
        """Call the other end, and wait until it has room for more; whether it will have. Meanwhile it is sent beats."""
        with self._changed:
            peer = self._peer
            if self._cause or peer is None:
                raise self._lost(_CLOSED)
        deadline = time.monotonic() + within_s + BEAT_S  # RPC keeps its own, a bit earlier
        future = rpc.rpc_async(peer, deliver, args=(self._session, tag, tensor), timeout=within_s)
        future.add_done_callback(self._wake)
        while not self._is_answered(future):
            if time.monotonic() > deadline:
                raise RuntimeError("timeout")
            self._tell(b"", BEAT)
        return bool(future.wait())

    def _is_answered(self, future: Future[bool]) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: future.done() or self._cause, BEAT_S)
            return future.done()

    def _wake(self, _: Future[bool]) -> None:
        with self._changed:
            self._changed.notify_all()

    def _tell(self, message: bytes, tag: int = 0) -> None:
        try:
            self._channel.send(message, _EMPTY if tag else None, tag)
        except LinkLost as lost:
            raise self._lost(str(lost)) from None

    def _take(self, tag: int) -> Array:
        with self._changed:
            block, memory = self._delivered.pop(tag, None), self._expected.pop(tag, None)
            cause = self._cause
            if block is None:
                cause = cause or f"Block {tag} has not come with its message."
            elif memory is not None and memory.size != block.size:
                cause = cause or f"Block {tag} has {block.size} bytes where {memory.size} were expected."
            elif memory is not None and not cause:
                memory[:] = block
                block = memory
            answered = [] if self._is_full() else list(self._waiting.values())
            if answered:
                self._waiting.clear()
        for answer in answered:
            answer.set_result(True)
        if block is None or cause:
            raise self._lost(cause)
        return block

    def _is_full(self) -> bool:
        sizes = (block.size for tag, block in self._delivered.items() if tag not in self._waiting)
        return sum(sizes) >= ROOM_BYTES

    def _lost(self, cause: str) -> LinkLost:
        """Close everything; the error to raise. ``cause`` is why, unless the link was lost before."""
        with self._changed:
            self._cause = self._cause or cause
            self._expected.clear()
            self._delivered.clear()
            refused = list(self._waiting.values())
            self._waiting.clear()
            self._changed.notify_all()
        _open.pop(self._session, None)
        self._channel.close()
        for answer in refused:
            answer.set_result(False)
        return LinkLost(self._cause)


@async_execution  # type: ignore[untyped-decorator]
def deliver(session: str, tag: int, block: torch.Tensor) -> Future[bool]:
    """Called by the other end. (What it raised would be printed here.)"""
    link = _open.get(session)
    if link is not None:
        return link.take_in(tag, block)
    answer: Future[bool] = Future()
    answer.set_result(False)
    return answer


def as_tensor(array: Array) -> torch.Tensor:
    """The same memory, also of an array that may not be written (which torch would warn of)."""
    if not array.flags.writeable:
        same: Any = (ctypes.c_ubyte * array.size).from_address(array.ctypes.data)
        array = np.frombuffer(same, np.uint8)
    return torch.from_numpy(array)
