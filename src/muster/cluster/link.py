"""A link: messages and blocks of bytes between the main process and a node; the contract of all
engines.

::

    link = carrier.connect(2, epoch=0, ...)  # starts node 2, and waits until it has joined
    link.expect(17, memory)                  # the block with tag 17 will be written there
    link.send(b"...")

    node_main.serve(link, 2)                 # in the node, with the other end

A link is one *session* of one node. When it is lost, the node is started again with the next epoch.
Nothing that was sent in an earlier session is received in a later one.

An engine is a ``Carrier``, which starts nodes and gives a link for each session, and the two ends
of that link:

===================  =================================  ==========================================
engine               what carries messages and blocks   files
===================  =================================  ==========================================
"ray"                calls of an actor, and Ray's       ``ray_link.py``, ``ray_nodes.py``
                     object store
"torch_distributed"  large blocks: process groups of    ``distributed_link.py``,
                     torch.distributed; the rest as     ``process_groups.py``, ``distributed.py``
                     with "direct"
"rpc"                calls of torch RPC                 ``rpc_link.py``, ``rpc_nodes.py``
"direct"             one TCP connection per node, with  ``socket_link.py``, ``direct.py``
                     a token of ours
===================  =================================  ==========================================

``tests/contract/test_links.py`` holds all engines to what is said here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from muster.memory.specs import Array

# the function that a node runs; it returns True after a goodbye
AGENT = "muster.cluster.node_main:serve"
SLOWEST = 10e6  # bytes per second; a slower block counts as lost


class LinkLost(EOFError):
    """Nothing more can be sent or received in this session. The text says why, for the user."""


class NotJoined(LinkLost):
    """The node has not joined in time."""


class OtherMuster(LinkLost):
    """The node has another version of Muster, so that no session with it is possible."""


class WrongToken(LinkLost):
    """The other end does not know the token of this end."""


@dataclass(frozen=True, eq=False)
class Block:
    """Bytes for one node or for many. They are not changed while this object is in use.

    Attributes:
        array: ``uint8 [n]``.
        owner: an object that keeps the memory reserved; None if none has to.
    """

    array: Array
    owner: Any = None


@dataclass(frozen=True)
class Received:
    """A message and its block, if it has one.

    The block is in the memory given to ``expect``, else in memory that nothing else uses.
    """

    message: bytes
    tag: int = 0
    block: Array | None = None


class Link(ABC):
    """One end of a session.

    One thread sends, while another receives: an engine may need both to go on.

    Any thread may call ``expect`` and ``close``.
    """

    @abstractmethod
    def send(self, message: bytes, block: Block | None = None, tag: int = 0) -> None:
        """Send a message, and a block after it. On return the block's memory may be written again.

        Args:
            tag: a number that no other block of this session has; greater than 0 with a block.

        Raises:
            LinkLost: the link is closed or lost, or the other end has not read for the link's
                deadline.
        """

    @abstractmethod
    def expect(self, tag: int, memory: Array) -> None:
        """Receive the block with this tag in ``memory`` (uint8, exactly as long as the block).

        Nothing else may write there until the block has been received or the link is closed. Does
        nothing after that.
        """

    @abstractmethod
    def receive(self) -> Received:
        """Wait for the next message.

        Messages and blocks arrive in the order in which they were sent.

        Raises:
            LinkLost: the other end has closed the link or exited, or nothing has arrived for the
                link's deadline. (Both ends send a message every second.)
        """

    @abstractmethod
    def close(self) -> None:
        """End the session: on both ends, a thread that waits in ``send`` or ``receive`` gets
        ``LinkLost``.

        No expected memory is written after this returns. May be called again, from any thread.
        """


class ExplainedLink(Link):
    """A link whose loss is explained by a function that knows more about the other end.

    Args:
        link: the link; closed by ``close``.
        explain: returns a better error for a lost link. It is not called after ``close``.
    """

    def __init__(self, link: Link, explain: Callable[[LinkLost], LinkLost]) -> None:
        self._link = link
        self._explain: Callable[[LinkLost], LinkLost] | None = explain

    def send(self, message: bytes, block: Block | None = None, tag: int = 0) -> None:
        try:
            self._link.send(message, block, tag)
        except LinkLost as lost:
            raise self._explained(lost) from None

    def expect(self, tag: int, memory: Array) -> None:
        self._link.expect(tag, memory)

    def receive(self) -> Received:
        try:
            return self._link.receive()
        except LinkLost as lost:
            raise self._explained(lost) from None

    def close(self) -> None:
        self._explain = None
        self._link.close()

    def _explained(self, lost: LinkLost) -> LinkLost:
        explain = self._explain
        return lost if explain is None else explain(lost)
