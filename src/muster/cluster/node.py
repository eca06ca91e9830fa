"""The nodes of a collector, as its main process sees them."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from muster.cluster.link import Block, Carrier
from muster.cluster.session import Newest, Session
from muster.cluster.stand_ins import END_S, LeafChannel, LeafChild, LeafLedger
from muster.cluster.wire import NodeInfo, NodeSetup
from muster.errors import WorkerDied
from muster.observing.stats import InferenceStats
from muster.weights.buffer import Manifest
from muster.workers.channel import WakeUp


class Node:
    """One node, over all sessions with it.

    Args:
        join_s: seconds for it to join; None is for ever.
        wake_up: rung when a leaf has something to say.

    Attributes:
        setup, policy: what it is told first, in every session.
        info: of the node that joined last.
        inference: what its server has done, as far as it has told.
        server_knows: what servers were told last, by method; those of later sessions are told again.
    """

    setup: NodeSetup
    policy: Block

    def __init__(self, carrier: Carrier, number: int, join_s: float | None, wake_up: WakeUp) -> None:
        self.carrier, self.number, self.wake_up = carrier, number, wake_up
        self.join_s = float("inf") if join_s is None else join_s
        self.info: NodeInfo | None = None
        self.inference: InferenceStats | None = None
        self.newest: Newest | None = None
        self.server_knows: dict[str, Sequence[Any]] = {}
        self._epochs = itertools.count()
        self._session: Session | None = None

    def session(self) -> Session:
        """The present one; a new one if there is none that works."""
        if self._session is None or self._session.lost:
            self.inference = None
            self._session = Session(self, next(self._epochs))
            for method, args in self.server_knows.items():
                self._session.post("ask", 0, method, args)  # nobody waits for an answer with that number
        return self._session

    @property
    def present(self) -> Session | None:
        """The session with it, if it has joined and was not lost since."""
        session = self._session
        return session if session is not None and session.joined and not session.lost else None

    def publish(self, manifest: Manifest, block: Block) -> None:
        """These weights are what its leaves take from now on."""
        self.newest = Newest(manifest, block)
        if self._session is not None and not self._session.lost:
            self._session.post_weights()

    def ask(self, method: str, args: Sequence[Any]) -> Any:
        """What its server answers, once its workers are there.

        Raises:
            WorkerDied: the node is lost: who waits would wait for workers that nobody has started.
        """
        if self._session is None:
            raise WorkerDied(f"node {self.number} was never asked to come")
        return self._session.ask(method, args)

    def tell(self, *message: Any) -> None:
        """Anybody who is there."""
        if self._session is not None and not self._session.lost:
            self._session.post(*message)

    def close(self, *, bye: bool = True) -> None:
        if self._session is not None:
            self._session.end(bye=bye)


class Nodes:
    """All nodes of a collector; also the weights' publisher for them, and what its schedule knows of their servers.

    Args:
        of_leaf: number of the node of every worker.
        join_s: see ``Node``.

    Attributes:
        buffer: a replay buffer that nodes write into themselves; None: batches come here.
        enough: how many have to be there for a beginning; None: all.
    """

    buffer: Any = None
    enough: int | None = None

    def __init__(self, carrier: Carrier, of_leaf: Sequence[int], join_s: float | None) -> None:
        self.wake_up = WakeUp()
        self._owner = os.getpid()
        self.of_leaf, self.carrier = list(of_leaf), carrier  # a leaf has one group, of the same number
        self.nodes = [Node(carrier, number, join_s, self.wake_up) for number in range(max(of_leaf) + 1)]

    def prepare(self, setups: Sequence[NodeSetup], policy: bytes) -> None:
        """Say what nodes are told first.

        Args:
            policy: pickled.
        """
        block = Block(np.frombuffer(policy, np.uint8))
        for node, setup in zip(self.nodes, setups, strict=True):
            node.setup, node.policy = setup, block

    def launch(self, leaf: int) -> Callable[[str, bool], tuple[LeafChild, LeafChannel, LeafLedger]]:
        """See ``WorkerHost.start``."""

        def start(name: str, preload: bool) -> tuple[LeafChild, LeafChannel, LeafLedger]:
            channel = self.node_of(leaf).session().start(leaf)
            return channel.child, channel, channel.ledger

        return start

    def node_of(self, leaf: int) -> Node:
        return self.nodes[self.of_leaf[leaf]]

    def leaves(self, node: int) -> list[int]:
        """Its workers."""
        return [leaf for leaf, of in enumerate(self.of_leaf) if of == node]

    def where(self, leaf: int) -> str:
        """The host and number of a worker's node, for people."""
        node = self.node_of(leaf)
        return f"{node.number}" if node.info is None else f"{node.number} ({node.info.host})"

    def close(self) -> None:
        """Let all nodes end; may be called again. A fork of this process has none."""
        if os.getpid() != self._owner:
            return
        self.end_sessions(bye=True)
        self.carrier.close()
        self.wake_up.close()

    def end_sessions(self, *, bye: bool = False) -> None:
        """Let nodes end or, without a goodbye, wait for the next session."""
        ending = [threading.Thread(target=node.close, kwargs={"bye": bye}, daemon=True) for node in self.nodes]
        for thread in ending:
            thread.start()
        for thread in ending:
            thread.join(2 * END_S)

    # --- as ``InferenceServer``, of which there is one on every node ---------------------------------

    @contextmanager
    def held(self) -> Iterator[None]:
        """See ``InferenceServer.held``."""
        try:
            self._tell("hold")
            yield
        finally:
            self._tell("release")

    def settle(self) -> None:
        """Nodes have no user whose random streams are to be kept."""

    def ask(self, method: str, *args: Any, group: int | None = None) -> Any:
        """What the server for a group answers. None: all of them are told, those that are not there when they come; the
        first answer.
        """
        if group is not None:
            return self.node_of(group).ask(method, args)
        answers = []
        for node in self.nodes:
            node.server_knows[method] = args
            if (session := node.present) is not None:
                answers.append(session.ask(method, args))
            else:
                node.tell("ask", 0, method, args)
        return answers[0] if answers else None

    def stats(self) -> InferenceStats:
        """Over all nodes."""
        told = [node.inference for node in self.nodes if node.inference is not None]
        return InferenceStats(sum(s.calls for s in told), sum(s.rows for s in told), sum(s.busy_s for s in told))

    def _tell(self, *message: Any) -> None:
        for node in self.nodes:
            node.tell(*message)
