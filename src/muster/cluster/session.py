"""The main process' end of a session with a node."""

from __future__ import annotations

import itertools
import pickle
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from muster.cluster.carrier import Carrier
from muster.cluster.link import Block, Link, LinkLost
from muster.cluster.messages import WEIGHTS, Tell
from muster.cluster.node_main import NodeMain
from muster.cluster.session_end import Outgoing, SessionEnd
from muster.memory.specs import Array
from muster.weights.buffer import Manifest
from muster.workers.channel import WakeUp

SHUT_DOWN = "the collector was shut down"


@dataclass(frozen=True)
class Newest:
    """The newest weights of a node."""

    manifest: Manifest
    block: Block


class Session(SessionEnd):
    """Starts a node, waits until it has joined, and exchanges messages with it until it is lost.

    Args:
        newest: returns the newest weights of the node, when it is their turn to be sent.
        wake_up: see ``SessionEnd``.

    Attributes:
        late: the node did not join in time.
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
        self.late = False
        self._sent: Newest | None = None
        self._weights_tags = itertools.count(WEIGHTS)
        self._tags = itertools.count(1)
        self._given_up = threading.Event()
        super().__init__(f"muster-node-{node}", self._called, lambda: _outgoing(Tell(NodeMain.beat)), wake_up)

    def next_tag(self) -> int:
        return next(self._tags)

    def post(
        self, message: Tell, block: Block | None = None, tag: int = 0, expects: Mapping[int, Array] | None = None
    ) -> None:
        """Put a message into the outbox. Raises the error of pickling it."""
        self.put(lambda: _outgoing(message, block, tag, expects))

    def post_weights(self) -> None:
        """Send weights: the newest ones when it is their turn."""
        if not self.lost:
            self._outbox.put(self._newest_weights)

    def lose(self, why: str) -> None:
        self._given_up.set()
        super().lose(why)

    def end(self, *, bye: bool = True) -> None:
        """End the node, or only the session (``bye=False``): the node then waits for the next one."""
        is_there = self._link is not None and not self.lost
        if bye and is_there:
            self.post(Tell(NodeMain.bye, urgent=True))
        else:
            self.lose(SHUT_DOWN)
        self.finish(SHUT_DOWN, is_answered=bye and is_there)

    def _called(self) -> Link:
        began = time.monotonic()
        try:
            return self._carrier.connect(*self._place, self._join_s, self._given_up)
        except LinkLost:
            self.late = time.monotonic() - began >= self._join_s
            raise

    def _newest_weights(self) -> Outgoing | None:
        newest = self._newest()
        if newest is None or newest is self._sent:
            return None
        self._sent = newest
        return _outgoing(Tell(NodeMain.take_weights, (newest.manifest,)), newest.block, next(self._weights_tags))


def _outgoing(
    message: Tell, block: Block | None = None, tag: int = 0, expects: Mapping[int, Array] | None = None
) -> Outgoing:
    return Outgoing(pickle.dumps(message, pickle.HIGHEST_PROTOCOL), block, tag, expects or {})
