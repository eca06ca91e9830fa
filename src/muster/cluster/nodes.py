"""The nodes of a collector: how they are called, and the weights that they should have."""

from __future__ import annotations

import itertools
import os
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from muster.cluster.link import Block, Carrier
from muster.cluster.session import END_S, Newest, Session
from muster.weights.buffer import Manifest
from muster.workers.channel import WakeUp


class Nodes:
    """All nodes of a collector, over all sessions with them.

    Args:
        of_leaf: number of the node of every worker.
        join_s: seconds for a node to join; None is for ever.

    Attributes:
        buffer: a replay buffer that nodes write into themselves; None: batches come here.
        enough: how many have to be there for a beginning; None: all.
        newest: weights, by node.
        wake_up: rung when a node has said something, or is lost.
    """

    buffer: Any = None
    enough: int | None = None

    def __init__(self, carrier: Carrier, of_leaf: Sequence[int], join_s: float | None) -> None:
        self.carrier, self.of_leaf, self.count = carrier, list(of_leaf), max(of_leaf) + 1
        self.wake_up = WakeUp()
        self.newest: dict[int, Newest] = {}
        self._join_s = float("inf") if join_s is None else join_s
        self._owner = os.getpid()
        self._epochs: defaultdict[int, Iterator[int]] = defaultdict(itertools.count)
        self._sessions: dict[int, Session] = {}

    def session(self, node: int) -> Session:
        """Call a node."""
        epoch = next(self._epochs[node])
        session = Session(self.carrier, node, epoch, self._join_s, lambda: self.newest.get(node), self.wake_up)
        self._sessions[node] = session
        return session

    def publish(self, node: int, manifest: Manifest, block: Block) -> None:
        """These weights are what the workers of a node take from now on."""
        self.newest[node] = Newest(manifest, block)
        if node in self._sessions:
            self._sessions[node].post_weights()

    def end_sessions(self, *, bye: bool = False) -> None:
        """Let nodes end or, without a goodbye, wait for the next session."""
        ending = [
            threading.Thread(target=session.end, kwargs={"bye": bye}, daemon=True)
            for session in self._sessions.values()
        ]
        for thread in ending:
            thread.start()
        for thread in ending:
            thread.join(3 * END_S)

    def close(self) -> None:
        """Let all nodes end; may be called again. A fork of this process has none."""
        if os.getpid() != self._owner:
            return
        self.end_sessions(bye=True)
        self.carrier.close()
        self.wake_up.close()
