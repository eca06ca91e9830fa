"""One session with a node, in the main process: a thread sends what is posted, another takes what comes."""

from __future__ import annotations

import itertools
import pickle
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from muster.cluster.link import Block, Carrier, Link, LinkLost
from muster.cluster.messages import BEAT_S, WEIGHTS, Bye, Tell, Told
from muster.cluster.node_main import NodeMain
from muster.memory.specs import Array
from muster.weights.buffer import Manifest
from muster.workers.channel import WakeUp

END_S = 5.0  # for a node to hear that it is not needed any more


@dataclass(frozen=True)
class Newest:
    """What is newest for a node."""

    manifest: Manifest
    block: Block


@dataclass(frozen=True)
class _Item:
    """Something to be sent; ``expects`` is the memory that blocks will come back in, by tag."""

    message: bytes
    block: Block | None = None
    tag: int = 0
    expects: dict[int, Array] | None = None


_LAST = _Item(b"")  # is not sent: nothing comes after it


class Session:
    """From bringing a node to life until it is lost.

    Args:
        newest: the weights that are newest for the node when it is their turn to be sent.
        wake_up: rung when something has come, or the node is lost.

    Attributes:
        inbox: messages that have come, with how the node was, and a block.
        lost: why nothing more goes through; empty before.
        late: the node has not come in time.
    """

    def __init__(
        self,
        carrier: Carrier,
        node: int,
        epoch: int,
        join_s: float,
        newest: Callable[[], Newest | None],
        wake_up: WakeUp,
    ) -> None:
        self._carrier, self._place, self._join_s, self._newest = carrier, (node, epoch), join_s, newest
        self._wake_up = wake_up
        self.inbox: deque[tuple[Any, Told, Array | None]] = deque()
        self.lost, self.late = "", False
        self._link: Link | None = None
        self._outbox: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._sent: Newest | None = None
        self._weights_tags = itertools.count(WEIGHTS)
        self._tags = itertools.count(1)
        self._given_up, self._said_bye = threading.Event(), threading.Event()
        self._losing = threading.Lock()
        name = f"muster-node-{node}"
        self._sender = threading.Thread(target=self._send, name=f"{name}-sends", daemon=True)
        self._receiver = threading.Thread(target=self._receive, name=f"{name}-receives", daemon=True)
        self._sender.start()

    def next_tag(self) -> int:
        return next(self._tags)

    def post(
        self, message: Tell, block: Block | None = None, tag: int = 0, expects: dict[int, Array] | None = None
    ) -> None:
        """Have it sent after all that was posted before. Raises what pickling it does."""
        self._outbox.put(_Item(pickle.dumps(message, pickle.HIGHEST_PROTOCOL), block, tag, expects))

    def post_weights(self) -> None:
        """Have the newest weights sent; those that are newest when it is their turn."""
        if not self.lost:
            self._outbox.put(None)

    def lose(self, why: str) -> None:
        """Nothing that was sent or will be counts any more; when this returns, no expected memory is written."""
        self._given_up.set()
        with self._losing:
            if self._link is not None:
                self._link.close()
            self.lost = self.lost or why  # only now, since whoever sees it uses that memory again
        self._outbox.put(_LAST)
        self._wake_up.ring()

    def end(self, *, bye: bool = True) -> None:
        """Say goodbye; or let the node wait for the next session."""
        if bye and not self.lost and self._link is not None:
            self.post(Tell(NodeMain.bye, urgent=True))
            self._outbox.put(_LAST)
            self._sender.join(END_S)
            self._said_bye.wait(END_S)  # a link that is closed at once may be found so before the goodbye is read
        self.lose("the collector was shut down")
        for thread in (self._sender, self._receiver):
            if thread.ident is not None:  # it was started; one that waits in C++ when the interpreter ends aborts it
                thread.join(END_S)

    # --- threads ----------------------------------------------------------------------------------

    def _send(self) -> None:
        try:
            link = self._connect()
            with self._losing:
                self._link = link
                if self.lost:
                    link.close()
            self._receiver.start()
            while not self.lost:
                item = self._next()
                if item is _LAST:
                    return
                if item is not None:
                    for tag, memory in (item.expects or {}).items():
                        link.expect(tag, memory)
                    link.send(item.message, item.block, item.tag if item.block else 0)
        except LinkLost as error:
            self.lose(str(error) or "the link was closed")
        except Exception as error:  # noqa: BLE001 (who waits for the node raises it)
            self.lose(f"{type(error).__name__}: {error}")

    def _connect(self) -> Link:
        began = time.monotonic()
        try:
            return self._carrier.connect(*self._place, self._join_s, self._given_up)
        except LinkLost:
            self.late = time.monotonic() - began >= self._join_s
            raise

    def _next(self) -> _Item | None:
        """What to send next, if only a beat; None if there are no newer weights."""
        try:
            item = self._outbox.get(timeout=BEAT_S)
        except queue.Empty:
            return _Item(pickle.dumps(Tell(NodeMain.beat)))
        newest = self._newest()
        if item is not None:
            return item
        if newest is None or newest is self._sent:
            return None
        self._sent = newest
        message = pickle.dumps(Tell(NodeMain.take_weights, (newest.manifest,)), pickle.HIGHEST_PROTOCOL)
        return _Item(message, newest.block, next(self._weights_tags))

    def _receive(self) -> None:
        assert self._link is not None
        try:
            while not self.lost:
                received = self._link.receive()
                message, told = pickle.loads(received.message)
                if isinstance(message, Bye):
                    self._said_bye.set()
                self.inbox.append((message, told, received.block))
                self._wake_up.ring()
        except LinkLost as error:
            self.lose(str(error) or "the link was closed")
        except Exception as error:  # noqa: BLE001
            self.lose(f"it said something that cannot be understood ({type(error).__name__}: {error})")
        finally:
            self._said_bye.set()
