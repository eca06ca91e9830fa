"""One end of a session, in the main process or in a node.

1. The sending thread connects. ``lose`` may end that.
2. The sending thread sends the messages of the outbox, in the order of ``post``, and heartbeats when
   it is empty. The receiving thread puts messages into the inbox, and rings.
3. The session is lost, once and for all: the other end has closed it or is silent, ``lose`` was
   called, or a message could not be made. ``lost`` says why. Messages that had arrived stay in the
   inbox. No memory that was expected is written any more.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from muster.cluster.link import Block, Link, LinkLost, NotJoined, OtherMuster
from muster.memory.specs import Array
from muster.restore.pickling import packed, unpickle

BEAT_S = 1.0  # seconds after which an idle end sends a heartbeat
END_S = 5.0  # for a thread whose link is closed


class Outgoing:
    """A message to send, which is pickled now.

    ``expects`` is the memory in which blocks will be received, by tag.
    """

    def __init__(
        self,
        message: Any,
        block: Block | None = None,
        tag: int = 0,
        expects: Mapping[int, Array] | None = None,
    ) -> None:
        self.message = packed(message, "a message")
        self.block = block
        self.tag = tag
        self.expects = expects or {}


class Session:
    """One end of a session: connects, then sends and receives until the link is lost.

    Args:
        name: of the threads.
        connect: returns the link; called by the thread that sends, with an event that is set when
            the session is lost.
        beat: returns the heartbeat, which is sent when the outbox is empty.
        ring: called when a message has arrived, or the link is lost.

    Attributes:
        inbox: received messages (or the errors of unpickling them), each with its block and tag.
        lost: why the link is lost; empty before.
        late: the node did not join in time.
        mismatch: the node has another version of Muster.
    """

    def __init__(
        self,
        name: str,
        connect: Callable[[threading.Event], Link],
        beat: Callable[[], Outgoing],
        ring: Callable[[], None],
    ) -> None:
        self._connect = connect
        self._beat = beat
        self._ring = ring
        self.inbox: deque[tuple[Any, Array | None, int]] = deque()
        self.lost = ""
        self.late = False
        self.mismatch = False
        self._link: Link | None = None
        self._given_up = threading.Event()
        self._outbox: queue.SimpleQueue[Callable[[], Outgoing | None] | None] = (
            queue.SimpleQueue()
        )
        self._putting = threading.Lock()
        self._losing = threading.Lock()
        self._sender = threading.Thread(
            target=self._send, name=f"{name}-sends", daemon=True
        )
        self._receiver = threading.Thread(
            target=self._receive, name=f"{name}-receives", daemon=True
        )
        self._sender.start()

    @property
    def is_connected(self) -> bool:
        return self._link is not None and not self.lost

    def post(
        self,
        message: Any,
        block: Block | None = None,
        tag: int = 0,
        expects: Mapping[int, Array] | None = None,
    ) -> None:
        """Put a message into the outbox; see ``Outgoing``. Raises the error of pickling it."""
        self.put(lambda: Outgoing(message, block, tag, expects))

    def put(self, make: Callable[[], Outgoing]) -> None:
        """Put a message into the outbox.

        It is made at once; no heartbeat is made at the same time.
        """
        with self._putting:
            made = make()
            self._outbox.put(lambda: made)

    def put_later(self, make: Callable[[], Outgoing | None]) -> None:
        """Put a message into the outbox that is made when it is its turn; None: there is nothing to
        send.
        """
        if not self.lost:
            self._outbox.put(make)

    def lose(self, why: str) -> None:
        """Close the link. After this returns, no expected memory is written."""
        self._given_up.set()
        with self._losing:
            if self._link is not None:
                self._link.close()
            self.lost = (
                self.lost or why
            )  # only now, since a reader of this uses that memory again
        self._outbox.put(None)
        self._ring()

    def finish(self, why: str, *, is_answered: bool = False) -> None:
        """Send all messages of the outbox, and end.

        Args:
            why: the reason for ``lost``.
            is_answered: wait until the other end has closed the link, so that it can read
                everything.
        """
        self._outbox.put(None)
        self._sender.join(END_S)
        if is_answered and self._receiver.ident is not None:
            self._receiver.join(END_S)
        self.lose(why)
        for thread in (self._sender, self._receiver):
            if thread.ident is not None:  # it was started
                thread.join(END_S)

    # --- threads ----------------------------------------------------------------------------------

    def _send(self) -> None:
        try:
            link = self._connect(self._given_up)
        except BaseException as error:  # noqa: BLE001 (``lost`` has it; libraries raise SystemExit in threads)
            self.late = isinstance(error, NotJoined)
            self.mismatch = isinstance(error, OtherMuster)
            self.lose(_text(error))
            return
        with self._losing:
            self._link = link
            if self.lost:
                link.close()
        try:
            self._receiver.start()
            while not self.lost and (item := self._next()) is not None:
                for tag, memory in item.expects.items():
                    link.expect(tag, memory)
                link.send(item.message, item.block, item.tag if item.block else 0)
        except LinkLost:
            pass  # the receiving thread notices it too, after the messages that had arrived
        except BaseException as error:  # noqa: BLE001
            self.lose(_text(error))

    def _next(self) -> Outgoing | None:
        """The next message, or a heartbeat; None: the session ends."""
        while True:
            try:
                make = self._outbox.get(timeout=BEAT_S)
            except queue.Empty:
                with self._putting:
                    if self._outbox.empty():
                        return self._beat()
                continue
            if make is None or (item := make()) is not None:
                return None if make is None else item

    def _receive(self) -> None:
        assert self._link is not None
        try:
            while not self.lost:
                received = self._link.receive()
                try:
                    message = unpickle(received.message)
                except Exception as error:  # noqa: BLE001 (raised by the reader of the inbox)
                    message = error
                self.inbox.append((message, received.block, received.tag))
                self._ring()
        except BaseException as error:  # noqa: BLE001
            self.lose(_text(error))


def _text(error: BaseException) -> str:
    if isinstance(error, LinkLost):
        return str(error) or "the link was closed"
    return f"{type(error).__name__}: {error}"
