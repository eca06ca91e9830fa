"""The engine "torch_distributed": a link whose large blocks go through process groups of
torch.distributed.

::

    main process                                                      node
       |-- SocketLink: message, number of bytes and tag of its block ---->|  authenticated
       |-- process group "down" (gloo, nccl, ...): the block ------------>|  into the memory given to ``expect``
       |<- SocketLink, process group "up" --------------------------------|  the same

Messages, small blocks (``LARGE``), joining and liveness stay on the connection through which the
node has joined (``socket_link.py``). Every session has groups of its own, of two processes each, so
that a lost node costs its own session only.

What it guarantees: ``Link``. A block's number of bytes and tag are announced, authenticated, before
the block. If they do not fit the memory that is expected, the link is lost before the group has
received anything: gloo would end the process.

What it costs: gloo copies blocks from the socket into their memory, and out of their memory into
the socket, in threads of its own, without Python. The two ends agree with each other before and
after a block, which costs 0.5 ms of CPU at each end, so that small blocks stay on the connection.
Per node one thread of gloo and two more that sleep, a listening port and two connections at each
end. With nccl and ucc blocks are copied through buffers on the device.

What it trusts: processes that know the token, and the network. Only what is authenticated is
unpickled. What comes through a group are numbers: they are never unpickled, and neither
authenticated nor encrypted. gloo's ports are open at the address of the link's connection, at both
ends, as long as the session. Both ends check that they have each other (``process_groups.py``). A
stranger who connects to gloo's port at exactly the moment at which a node joins could be taken for
it until then: the session is lost by that, or the process, since gloo aborts if bytes do not follow
its protocol. Later connections to the port are ignored. Use a private network.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import struct
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from muster.cluster.link import Block, Link, LinkLost, Received
from muster.cluster.process_groups import SET_UP_S, Way, two_ways
from muster.cluster.socket_link import SocketLink
from muster.memory.specs import Array

LARGE = (
    4 << 20
)  # bytes; smaller blocks take longer through a group than on the connection
END_S = 1.0  # at the end of the program, for threads that are in torch
# tag and bytes of the block that follows in the group; zeros: there is none
_ANNOUNCED = struct.Struct("<QQ")


@dataclass(frozen=True)
class Groups:
    """What is the same at both ends.

    Attributes:
        backend: of the process groups.
        large: bytes of a block from which on it goes through the group.
    """

    backend: str
    large: int


class DistributedLink(Link):
    """One end. Its groups are made here, while the other end does the same.

    Args:
        channel: the connection through which the node has joined, on which nothing was sent yet.
            Closed by ``close``, or if this constructor fails.
        main: whether this is the main process.
        groups: what the main process has decided.

    Raises:
        LinkLost: the groups could not be made, or the other end has exited.
    """

    def __init__(self, channel: SocketLink, groups: Groups, *, main: bool) -> None:
        self._channel = channel
        self._large = groups.large
        self._ending = threading.Lock()
        self._ways: tuple[Way, Way] | None = (
            None  # to the other end, and from it; None: closed
        )
        try:
            with channel.set_up(SET_UP_S):
                self._ways = two_ways(channel, groups.backend, main=main)
        except BaseException:
            channel.close()
            raise
        _made.update(self._ways)
        _open.add(self)

    def send(self, message: bytes, block: Block | None = None, tag: int = 0) -> None:
        with self._losing():
            if block is None or block.array.size < self._large:
                self._channel.send(_ANNOUNCED.pack(0, 0) + message, block, tag)
                return
            size = block.array.size
            self._channel.send(_ANNOUNCED.pack(tag, size) + message)
            with self._channel.used("read"):
                self._way(0).send(block.array, self._channel.allowed_s(size))

    def expect(self, tag: int, memory: Array) -> None:
        self._channel.expect(tag, memory)

    def receive(self) -> Received:
        with self._losing():
            received = self._channel.receive()
            tag, size = _ANNOUNCED.unpack_from(received.message)
            message = received.message[_ANNOUNCED.size :]
            if not size:
                return Received(message, received.tag, received.block)
            with self._channel.used("sent a block"):
                memory = self._channel.claim(tag, size)
                if memory is None:
                    memory = np.empty(size, np.uint8)
                self._way(1).receive(memory, self._channel.allowed_s(size))
            return Received(message, tag, memory)

    def close(self) -> None:
        self._channel.close()
        self._abort()

    def _way(self, direction: int) -> Way:
        ways = self._ways
        if ways is None:
            raise ConnectionError
        return ways[direction]

    @contextlib.contextmanager
    def _losing(self) -> Iterator[None]:
        """A context in which a lost link ends the other thread's waiting, too."""
        try:
            yield
        except LinkLost:
            self._abort()
            raise

    def _abort(self) -> None:
        """Close the groups, on a connection that is closed.

        On return no expected memory is written.
        """
        with self._ending:  # so that a second caller returns as late as the first
            for way in self._ways or ():
                way.abort()
            # a thread that is in torch has a reference of its own until it returns
            self._ways = None


_open: weakref.WeakSet[DistributedLink] = weakref.WeakSet()
_made: weakref.WeakSet[Way] = weakref.WeakSet()  # also of links that are closed
_kept: list[Way] = []


def _end_all() -> None:
    """At the end of the program: threads leave torch, and do not enter it again to free what is
    torch's.

    Python unwinds a thread that asks for its lock in torch's code, which aborts the process.
    """
    _kept.extend(_made)
    links = list(_open)
    for link in links:
        link.close()
    deadline = time.monotonic() + END_S
    while any(link._channel.is_used for link in links) and time.monotonic() < deadline:
        threading.Event().wait(0.005)


def _keep_in_fork() -> None:
    """In a fork of this process: groups are never freed, since that waits for threads which a fork
    does not have.
    """
    for way in list(_made):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(way))
    _open.clear()  # they are the parent's
    _made.clear()


atexit.register(_end_all)
os.register_at_fork(after_in_child=_keep_in_fork)
