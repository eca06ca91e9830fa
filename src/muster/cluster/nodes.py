"""The nodes of a collector: how they are called, and the weights that they should have.

There is one copy of the weights per publish, which every node gets as it is; on the node they go on in shared memory.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from muster.cluster.carrier import Carrier
from muster.cluster.link import Block
from muster.cluster.session import Newest, Session
from muster.cluster.session_end import END_S
from muster.errors import BadOption
from muster.weights.buffer import WRITING, Buffer, Manifest
from muster.weights.choice import OF_NODES, class_names
from muster.weights.transport import NoPublisher, Publisher, Ticket, chosen
from muster.workers.channel import WakeUp

if TYPE_CHECKING:
    from muster.weights.transport import Weights


KEPT = 2  # buffers that are free; one is written while the other is on its way
_SCHEMES = {  # by ``Carrier.name``
    "torch.distributed": ("DistributedWeightSyncScheme", "RPCWeightSyncScheme"),
    "ray": ("RayWeightSyncScheme",),
}


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


@dataclass(frozen=True)
class NodesTransport:
    """The transport that a collector with nodes uses; its "workers" are the nodes.

    Attributes:
        once: nodes keep the weights that they begin with.
    """

    nodes: Nodes
    once: bool = False

    def publisher(self, weights: Weights, workers: int, version: int | str = 0) -> Publisher:
        publisher = NodesPublisher(self.nodes, weights)
        publisher.publish(weights, version)
        return NoPublisher(workers) if self.once else publisher


class NodesPublisher:
    """Implements ``Publisher``. A buffer is written again when no node has its ``Block`` any more: fresh memory costs
    several times as much as the copy into it.
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
        """Sessions send what is newest, also to nodes that come back."""

    def ticket(self, worker: int) -> Ticket:
        """Workers take their weights from their node."""
        raise NotImplementedError

    def close(self) -> None: ...


def nodes_transport(nodes: Nodes, given: Any) -> NodesTransport:
    """The transport that is meant by ``weight_sync_schemes`` of a collector with nodes.

    Raises:
        BadOption: it is neither what this collector does anyway, nor "none" or ``NoSync()``.
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
