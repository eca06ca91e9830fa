"""What both ends of a link do where an engine delivers whole messages with their blocks, one after
another.

Such an engine has threads of its own. They put what has arrived into the inbox; the thread that
receives takes it out, and copies blocks into the memory given to ``expect``.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from muster.cluster.link import SLOWEST, Link, LinkLost, Received
from muster.memory.specs import Array

WAITING = 16  # messages that the other end has not read, before the sender waits
WAITING_BYTES = (
    64 << 20
)  # of blocks that the other end has not read, before the sender waits


def has_room(unread: Collection[int], size: int) -> bool:
    """Whether a message may be sent.

    Args:
        unread: bytes of the blocks of messages that the other end has not read.
        size: bytes of the message's block.
    """
    waiting = sum(unread)
    return len(unread) < WAITING and (not waiting or waiting + size <= WAITING_BYTES)


@dataclass(eq=False)
class Frame:
    """A message on its way, with its block (``uint8 [n]``, or None)."""

    message: bytes
    tag: int = 0
    block: Any = None

    @property
    def size(self) -> int:
        """Bytes of the block."""
        return 0 if self.block is None else int(self.block.size)

    def write(self, memory: Array) -> None:
        """Copy the block."""
        memory[:] = self.block

    def whole(self) -> Array:
        """The block in memory of its own."""
        return np.array(self.block)


class End(Link):
    """Takes messages in order, writes blocks where they are expected, and notices silence.

    Args:
        deadline_s: seconds without a message after which the link is lost.
    """

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._changed = threading.Condition()  # held for a short time only
        self._heard = time.monotonic()
        self._inbox: deque[Frame] = deque()
        self._early: dict[
            int, Frame
        ] = {}  # by number, until all earlier messages have arrived
        self._number = 0  # of the message that arrives next
        self._read = 0  # messages
        self._last: int | None = (
            None  # number of messages after which the other end has closed
        )
        self._cause = ""  # why the link is closed
        self._over = ""  # why nothing more arrives, after what has arrived
        self._expected: dict[int, Array] = {}
        self._writing = threading.Lock()  # held while memory is written

    def expect(self, tag: int, memory: Array) -> None:
        with self._writing:
            if not self._cause:
                self._expected[tag] = memory

    def receive(self) -> Received:
        with self._changed:
            while not self._inbox:
                self._wait_for_message(self._heard + self._deadline_s)
            if self._cause:
                raise LinkLost(self._cause)
            frame = self._inbox.popleft()
            self._read += 1
            self._note_read(frame)
        return self._placed(frame)

    def close(self) -> None:
        self._close("The link was closed here.")

    def _note_read(self, frame: Frame) -> None:
        """A message was taken from the inbox. Called with ``_changed`` held."""

    @abstractmethod
    def _tell_closed(self) -> None:
        """Let the other end know that this one is closed. Called once, with ``_changed`` held."""

    def _arrived(self, number: int, frame: Frame) -> None:
        """Put a message into the inbox when all earlier ones have arrived, with ``_changed`` held."""
        self._heard = time.monotonic()
        self._early[number] = frame
        while (following := self._early.pop(self._number, None)) is not None:
            self._number += 1
            self._inbox.append(following)
        self._finish()

    def _closed_there(self, last: int) -> None:
        """The other end has closed the link, after so many messages.

        Called with ``_changed`` held.
        """
        self._last = last
        self._finish()

    def _finish(self) -> None:
        if self._last is not None and self._number >= self._last:
            self._over = self._over or "The other end has closed the link."
        self._changed.notify_all()

    def _wait_for_message(self, deadline: float) -> None:
        """Wait for a change, with ``_changed`` held.

        Raises LinkLost at the deadline, or if none can come.
        """
        self._wait(deadline, deadline, "said anything")

    def _wait(self, until: float, deadline: float, late: str) -> None:
        """Wait for a change until then, with ``_changed`` held.

        Raises LinkLost if it is late, or cannot come.
        """
        if not (self._cause or self._over) and time.monotonic() > deadline:
            self._shut(f"The other end has not {late} for {self._deadline_s:g} s.")
        if self._cause or self._over:
            raise LinkLost(self._cause or self._over)
        if until:
            self._changed.wait(max(0.0, until - time.monotonic()) + 0.01)

    def _check_not_stopped(self) -> None:
        """Close the link if the deadline is over: this process may have been stopped.

        ``_changed`` is held.
        """
        if time.monotonic() - self._heard > self._deadline_s:
            self._shut(
                f"The other end has not said anything for {self._deadline_s:g} s."
            )

    def _placed(self, frame: Frame) -> Received:
        """The message, with its block where it was expected."""
        if frame.block is None:
            return Received(frame.message)
        with self._writing:
            if self._cause:
                raise LinkLost(self._cause)
            memory = self._expected.pop(frame.tag, None)
            if memory is None:
                memory = frame.whole()
            elif memory.size == frame.size:
                frame.write(memory)
        if memory.size != frame.size:
            self._close(
                f"Block {frame.tag} has {frame.size} bytes where {memory.size} were expected."
            )
            raise LinkLost(self._cause)
        return Received(frame.message, frame.tag, memory)

    def _close(self, cause: str) -> None:
        with self._changed:
            self._shut(cause)
        with self._writing:  # nothing is written after this
            self._expected.clear()

    def _shut(self, cause: str) -> None:
        """Close, with ``_changed`` held."""
        if not self._cause:
            self._cause = cause
            self._changed.notify_all()
            self._tell_closed()

    def _allowed_s(self, nbytes: int) -> float:
        """Seconds that so many bytes may take."""
        return self._deadline_s + nbytes / SLOWEST
