"""The nodes of a collector: their sessions and their weights.

There is one copy of the weights per publish, which is sent to every node. A node's workers share it in shared memory.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from muster.cluster.carrier import Carrier
from muster.cluster.link import Block, Link, LinkLost
from muster.cluster.messages import WEIGHTS
from muster.cluster.node_main import NodeMain
from muster.cluster.session_end import END_S, Outgoing, SessionEnd
from muster.errors import BadOption
from muster.memory.specs import Array
from muster.weights.buffer import WRITING, Buffer, Manifest
from muster.weights.choice import OF_NODES, class_names
from muster.weights.transport import NoPublisher, Publisher, Ticket, chosen
from muster.workers.channel import WakeUp
from muster.workers.messages import Tell

if TYPE_CHECKING:
    from muster.weights.transport import Weights


SHUT_DOWN = "the collector was shut down"
KEPT = 2  # free buffers; one is written while the other is being sent
_SCHEMES = {  # by ``Carrier.name``
    "torch.distributed": ("DistributedWeightSyncScheme", "RPCWeightSyncScheme"),
    "ray": ("RayWeightSyncScheme",),
}


@dataclass(frozen=True)
class Newest:
    """The newest weights of a node."""

    manifest: Manifest
    block: Block


class Nodes:
    """All nodes of a collector, over all their sessions.

    Args:
        carrier: closed by ``close``, or when this constructor fails.
        of_leaf: number of the node of every worker.
        join_s: seconds for a node to join; None: no limit.

    Attributes:
        buffer: a replay buffer into which nodes write directly; None: the main process receives the batches.
        enough: number of nodes with which collecting begins; None: all.
        newest: weights, by node.
        wake_up: rung by the number of a node when its message has arrived, or it is lost.
    """

    buffer: Any = None
    enough: int | None = None

    def __init__(self, carrier: Carrier, of_leaf: Sequence[int], join_s: float | None) -> None:
        self.carrier, self.of_leaf, self.count = carrier, list(of_leaf), max(of_leaf) + 1
        try:
            self.wake_up = WakeUp()
        except OSError:  # no descriptor is left
            carrier.close()
            raise
        self.newest: dict[int, Newest] = {}
        self.join_s = float("inf") if join_s is None else join_s
        self._owner = os.getpid()
        self._epochs: defaultdict[int, Iterator[int]] = defaultdict(itertools.count)
        self._sessions: dict[int, Session] = {}

    def session(self, node: int) -> Session:
        """Start a session with a node."""
        self._sessions[node] = Session(self, node, next(self._epochs[node]))
        return self._sessions[node]

    def publish(self, node: int, manifest: Manifest, block: Block) -> None:
        """Send these weights to a node, in this session and later ones."""
        self.newest[node] = Newest(manifest, block)
        if node in self._sessions:
            self._sessions[node].post_weights()

    def end_sessions(self, *, bye: bool = False) -> None:
        """End all nodes, or only their sessions (``bye=False``): nodes then wait for the next one."""
        ending = [
            threading.Thread(target=session.end, kwargs={"bye": bye}, daemon=True)
            for session in self._sessions.values()
        ]
        for thread in ending:
            thread.start()
        for thread in ending:
            thread.join(3 * END_S)

    def close(self) -> None:
        """End all nodes. May be called again; does nothing in a fork of this process."""
        if os.getpid() != self._owner:
            return
        self.end_sessions(bye=True)
        self.carrier.close()
        self.wake_up.close()


class Session(SessionEnd):
    """The main process' end of a session: starts a node, and exchanges messages with it until it is lost.

    Attributes:
        late: the node did not join in time.
        tags: for blocks, but not of weights.
    """

    def __init__(self, nodes: Nodes, node: int, epoch: int) -> None:
        self._nodes, self._node, self._epoch = nodes, node, epoch
        self.late = False
        self._sent: Newest | None = None
        self._weights_tags = itertools.count(WEIGHTS)
        self.tags = itertools.count(1)
        self._given_up = threading.Event()
        ring = partial(nodes.wake_up.ring, node)
        super().__init__(f"muster-node-{node}", self._called, lambda: Outgoing(Tell(NodeMain.beat)), ring)

    def post(
        self, message: Tell, block: Block | None = None, tag: int = 0, expects: Mapping[int, Array] | None = None
    ) -> None:
        """Put a message into the outbox. Raises the error of pickling it."""
        self.put(lambda: Outgoing(message, block, tag, expects))

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
        began, within_s = time.monotonic(), self._nodes.join_s
        try:
            return self._nodes.carrier.connect(self._node, self._epoch, within_s, self._given_up)
        except LinkLost:
            self.late = time.monotonic() - began >= within_s
            raise

    def _newest_weights(self) -> Outgoing | None:
        newest = self._nodes.newest.get(self._node)
        if newest is None or newest is self._sent:
            return None
        self._sent = newest
        return Outgoing(Tell(NodeMain.take_weights, (newest.manifest,)), newest.block, next(self._weights_tags))


@dataclass(frozen=True)
class NodesTransport:
    """The transport of a collector with nodes; its "workers" are the nodes.

    Attributes:
        once: nodes keep their first weights.
    """

    nodes: Nodes
    once: bool = False

    def publisher(self, weights: Weights, workers: int, version: int | str = 0) -> Publisher:
        publisher = NodesPublisher(self.nodes, weights)
        publisher.publish(weights, version)
        return NoPublisher(workers) if self.once else publisher


class NodesPublisher:
    """Implements ``Publisher``. A buffer is reused when its ``Block`` was sent to all nodes: new memory costs several
    times as much as the copy into it.
    """

    def __init__(self, nodes: Nodes, weights: Weights) -> None:
        self._nodes, self._manifest = nodes, Manifest.of(weights)
        self._free: deque[Buffer] = deque(maxlen=KEPT)

    def publish(self, weights: Weights, version: int | str, workers: Collection[int] | None = None) -> None:
        receiving = chosen(workers, self._nodes.count)
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = Buffer.private(self._manifest)
        buffer.write(weights, version, WRITING)  # numbers are the nodes' own
        block = Block(buffer.memory)
        weakref.finalize(block, self._free.append, buffer)
        for node in receiving:
            self._nodes.publish(node, self._manifest, block)

    def catch_up(self) -> None:
        """Does nothing: sessions send the newest weights, also to nodes that have joined again."""

    def ticket(self, worker: int) -> Ticket:
        """Not available: workers take their weights from their node."""
        raise NotImplementedError

    def close(self) -> None: ...


def nodes_transport(nodes: Nodes, given: Any) -> NodesTransport:
    """The transport for ``weight_sync_schemes`` of a collector with nodes.

    Raises:
        BadOption: it is a scheme of another collector.
    """
    if given is None:
        return NodesTransport(nodes)
    names = [given] if isinstance(given, str) else class_names(given)
    if not {"none", "NoSync", "NoWeightSyncScheme"}.isdisjoint(names):
        return NodesTransport(nodes, once=True)
    name = nodes.carrier.name
    fitting = _SCHEMES.get(name, tuple(OF_NODES))
    if not set(fitting).isdisjoint(names):
        return NodesTransport(nodes)
    raise BadOption(
        f"{given!r} is no way to send weights to nodes that {name} connects: leave weight_sync_schemes out, or give "
        f"{' or '.join(fitting)}, which mean the same, or 'none'"
    )
