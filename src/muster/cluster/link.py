"""Messages and blocks of bytes between the main process and a node.

::

    link = carrier.connect(2, epoch=0, ...)  # starts node 2, and waits until it is there
    link.expect(17, memory)                  # where the block with tag 17 will go
    link.send(b"...")

    node_main.serve(link)                    # in the node, with its end

A link is one *session* of one node: when it is lost, the node is started again with the next epoch, and nothing that
was sent in an earlier session is ever received in a later one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from muster.memory.specs import Array

AGENT = "muster.cluster.node_main:serve"  # what a node runs: ``serve(link, node)``; True: the main process said goodbye
SLOWEST = 10e6  # bytes per second; a block that comes more slowly counts as one that does not come


def allowed_s(deadline_s: float, nbytes: int) -> float:
    """How long so many bytes may take, where messages may take ``deadline_s``."""
    return deadline_s + nbytes / SLOWEST


class LinkLost(EOFError):
    """Nothing more can be sent or received in this session; the text says why, for people."""


@dataclass(frozen=True, eq=False)
class Block:
    """Bytes for one node or for many; not changed as long as this object is in use.

    Attributes:
        array: ``uint8 [n]``.
        owner: what keeps the memory from being used for something else, if anything has to.
    """

    array: Array
    owner: Any = None


@dataclass(frozen=True)
class Received:
    """A message, and the block that came with it, if any: in the memory that was expected to take it, else in new."""

    message: bytes
    tag: int = 0
    block: Array | None = None


class Link(Protocol):
    """One end. One thread sends, another receives, any may expect and close."""

    def send(self, message: bytes, block: Block | None = None, tag: int = 0) -> None:
        """Send a message, and a block after it. On return the block's memory may be written again.

        Args:
            tag: a number that no other block of this session has; more than 0 with a block.

        Raises:
            LinkLost: also if the other end does not read for as long as the link's deadline.
        """

    def expect(self, tag: int, memory: Array) -> None:
        """Let the block with this tag arrive in ``memory`` (uint8, exactly as long as the block), without a copy where
        the link can. Nothing else may write there until it has come or the link is closed.
        """

    def receive(self) -> Received:
        """Wait for the next message; messages and blocks arrive in the order in which they were sent.

        Raises:
            LinkLost: the other end has closed the link or is gone, or nothing has come for the link's deadline. (Both
                ends send something every second.)
        """

    def close(self) -> None:
        """End the session: a thread that waits in ``send`` or ``receive`` gets ``LinkLost``, on both ends. No
        expected memory is written after this returns. May be called again, from any thread.
        """
