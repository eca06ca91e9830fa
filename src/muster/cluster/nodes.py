"""The nodes of a collector: their sessions and their weights.

``Nodes`` lives as long as its collector, over all sessions with all nodes, and also over the pools
of nodes (``NodePool``) that a collector makes one after another. For each node:

1. A proxy asks for a session (``session``), which starts the node with the next epoch.
2. Weights are sent in it when they are published (``publish``), and once at its beginning
   (``post_weights``): always the newest ones at the time when it is their turn.
3. The session is lost, and a later one takes its place; or a pool ends (``end_sessions``), and the
   node waits for the next session; or the collector ends (``close``), and with it the node.

There is one copy of the weights per publish, which is sent to every node. A node's workers share it
in shared memory.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from muster.cluster.carrier import Carrier
from muster.cluster.link import Block
from muster.cluster.messages import WEIGHTS
from muster.cluster.node_main import NodeMain
from muster.cluster.session import END_S, Outgoing, Session
from muster.errors import BadOption
from muster.utils.loans import Loans
from muster.weights.buffer import WRITING, Buffer, Manifest
from muster.weights.choice import meaning_of, node_schemes
from muster.weights.transport import NoPublisher, NoSync, Publisher, Ticket, chosen
from muster.workers.channel import WakeUp
from muster.workers.messages import Tell

if TYPE_CHECKING:
    from muster.weights.transport import Weights


SHUT_DOWN = "the collector was shut down"
KEPT = 2  # buffers: one is written while the other is being sent


class Nodes:
    """All nodes of a collector, over all their sessions.

    Implements ``Transport``: its "workers" are the nodes.

    Args:
        carrier: closed by ``close``, or when this constructor fails.
        of_leaf: number of the node of every worker.
        join_s: seconds for a node to join; None: no limit.
        buffer: a replay buffer into which nodes write directly; None: the main process receives the
            batches.
        enough: number of nodes with which collecting begins; None: all.

    Attributes:
        newest: weights with their manifest, by node.
        wake_up: rung by the number of a node when its message has arrived, or it is lost.
    """

    def __init__(
        self,
        carrier: Carrier,
        of_leaf: Sequence[int],
        join_s: float | None,
        *,
        buffer: Any = None,
        enough: int | None = None,
    ) -> None:
        self.carrier = carrier
        self.of_leaf = list(of_leaf)
        self.count = max(of_leaf) + 1
        self.buffer = buffer
        self.enough = enough
        try:
            self.wake_up = WakeUp()
        except OSError:  # no descriptor is left
            carrier.close()
            raise
        self.newest: dict[int, tuple[Manifest, Block]] = {}
        self._join_s = float("inf") if join_s is None else join_s
        self._owner = os.getpid()
        self._epochs: defaultdict[int, Iterator[int]] = defaultdict(itertools.count)
        self._sessions: dict[int, Session] = {}
        self._sent: dict[int, SentWeights] = {}  # in these sessions

    def session(self, node: int) -> Session:
        """Start a session with a node."""
        connect = partial(
            self.carrier.connect, node, next(self._epochs[node]), self._join_s
        )
        ring = partial(self.wake_up.ring, node)
        session = Session(
            f"muster-node-{node}", connect, lambda: Outgoing(Tell(NodeMain.beat)), ring
        )
        self._sessions[node] = session
        self._sent[node] = SentWeights(lambda: self.newest.get(node))
        return session

    def publisher(
        self, weights: Weights, workers: int, version: int | str = 0
    ) -> Publisher:
        """See ``Transport``."""
        publisher = NodesPublisher(self, weights)
        publisher.publish(weights, version)
        return publisher

    def publish(self, node: int, manifest: Manifest, block: Block) -> None:
        """Send these weights to a node, in this session and later ones."""
        self.newest[node] = manifest, block
        self.post_weights(node)

    def post_weights(self, node: int) -> None:
        """Send weights to a node, if it has a session: the newest ones when it is their turn."""
        if (session := self._sessions.get(node)) is not None:
            session.put_later(self._sent[node].next_message)

    def end_sessions(self, *, bye: bool = False) -> None:
        """End all nodes, or only their sessions (``bye=False``): nodes then wait for the next one."""
        ending = [
            threading.Thread(target=_end, args=(session, bye), daemon=True)
            for session in self._sessions.values()
        ]
        for thread in ending:
            try:
                thread.start()
            except RuntimeError:  # the system allows no more threads
                thread.run()
        for thread in ending:
            if thread.ident is not None:
                thread.join(3 * END_S)

    def close(self) -> None:
        """End all nodes. May be called again; does nothing in a fork of this process."""
        if os.getpid() != self._owner:
            return
        self.end_sessions(bye=True)
        self.carrier.close()
        self.wake_up.close()


def _end(session: Session, bye: bool) -> None:
    is_there = session.is_connected
    if bye and is_there:
        session.post(Tell(NodeMain.bye, urgent=True))
    else:
        session.lose(SHUT_DOWN)
    session.finish(SHUT_DOWN, is_answered=bye and is_there)


class SentWeights:
    """The weights that are sent to a node in one session.

    Args:
        newest: returns the newest weights for the node; None: there are none yet.
    """

    def __init__(self, newest: Callable[[], tuple[Manifest, Block] | None]) -> None:
        self._newest = newest
        self._sent: tuple[Manifest, Block] | None = None  # the last ones
        self._number = 0  # of the next ones

    def next_message(self) -> Outgoing | None:
        """Return the message with the newest weights; None: they were sent."""
        newest = self._newest()
        if newest is None or newest is self._sent:
            return None
        self._sent = newest
        tag = WEIGHTS + self._number
        self._number += 1
        manifest, block = newest
        return Outgoing(Tell(NodeMain.take_weights, (manifest,)), block, tag)


class FirstWeights:
    """Implements ``Transport``: nodes keep the weights with which they start."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes

    def publisher(
        self, weights: Weights, workers: int, version: int | str = 0
    ) -> Publisher:
        """See ``Transport``."""
        self._nodes.publisher(weights, workers, version)
        return NoPublisher(workers)


class NodesPublisher:
    """Implements ``Publisher``. A buffer is reused when its ``Block`` was sent to all nodes: new
    memory costs several times as much as the copy into it.
    """

    def __init__(self, nodes: Nodes, weights: Weights) -> None:
        self._nodes = nodes
        self._manifest = Manifest.of(weights)
        self._sent: Loans[Buffer] = Loans(KEPT)

    def publish(
        self,
        weights: Weights,
        version: int | str,
        workers: Collection[int] | None = None,
    ) -> None:
        receiving = chosen(workers, self._nodes.count)
        free = self._sent.ended(most=1)
        buffer = free[0] if free else Buffer.private(self._manifest)
        buffer.write(weights, version, WRITING)  # numbers are the nodes' own
        block = Block(buffer.memory)
        self._sent.lend(buffer, block)
        for node in receiving:
            self._nodes.publish(node, self._manifest, block)

    def ticket(self, worker: int) -> Ticket:
        """Not available: workers take their weights from their node."""
        raise NotImplementedError

    def close(self) -> None: ...


def nodes_transport(nodes: Nodes, given: Any) -> Nodes | FirstWeights:
    """Check ``weight_sync_schemes`` of a collector with nodes, and return its transport.

    Raises:
        BadOption: it is a scheme of another collector.
    """
    if given is None:
        return nodes
    meaning = meaning_of(given)
    if isinstance(meaning, NoSync):
        return FirstWeights(nodes)
    fitting = node_schemes(nodes.carrier.name)
    if meaning in fitting:
        return nodes
    names = " or ".join(scheme.name for scheme in fitting)
    raise BadOption(
        f"{given!r} is not a way to send weights to nodes that {nodes.carrier.name} connects: leave"
        f" weight_sync_schemes out, or give {names}, which mean the same, or 'none'"
    )
