"""Weights for nodes: one copy per publish, which every node gets as it is; on the node they go on in shared memory."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from muster.cluster.link import Block
from muster.errors import BadOption
from muster.weights.buffer import WRITING, Buffer, Manifest
from muster.weights.choice import OF_NODES, class_names
from muster.weights.transport import NoPublisher, Publisher, Ticket, chosen

if TYPE_CHECKING:
    from muster.cluster.nodes import Nodes
    from muster.weights.transport import Weights


KEPT = 2  # buffers that are free; one is written while the other is on its way
_OF_ENGINE = {  # by ``Carrier.name``
    "torch.distributed": ("DistributedWeightSyncScheme",),
    "torch RPC": ("RPCWeightSyncScheme", "DistributedWeightSyncScheme"),
    "ray": ("RayWeightSyncScheme",),
}


class NodesTransport:
    """The transport that a collector with nodes uses; its "workers" are the nodes.

    Args:
        once: nodes keep the weights that they begin with.
    """

    def __init__(self, nodes: Nodes, *, once: bool = False) -> None:
        self._nodes, self._once = nodes, once

    def publisher(self, weights: Weights, workers: int, version: int | str = 0) -> Publisher:
        publisher = NodesPublisher(self._nodes, weights)
        publisher.publish(weights, version)
        return NoPublisher(workers) if self._once else publisher


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
        BadOption: it is neither what this collector's engine does anyway, nor "none" or ``NoSync()``.
    """
    if given is None:
        return NodesTransport(nodes)
    names = [given] if isinstance(given, str) else class_names(given)
    if not {"none", "NoSync", "NoWeightSyncScheme"}.isdisjoint(names):
        return NodesTransport(nodes, once=True)
    engine = nodes.carrier.name
    fitting = _OF_ENGINE.get(engine, tuple(OF_NODES))
    if not set(fitting).isdisjoint(names):
        return NodesTransport(nodes)
    raise BadOption(
        f"{given!r} is no way to send weights to nodes that {engine} connects: leave weight_sync_schemes out, or give "
        f"{' or '.join(fitting)}, which mean the same, or 'none'"
    )
