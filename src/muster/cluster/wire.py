"""What the main process and a node say to each other, inside the messages of a link.

Main to node: ``("setup", NodeSetup)`` with the policy as a block, ``("weights", Manifest)`` with the weights as one,
``("start", leaf, life, WorkerConfig)``, ``("to", life, tag, message)``, ``("stop", life, order)``,
``("signal", life, number)``, ``("stack", life, seconds)``, ``("kill", life)``, ``("hold",)``, ``("release",)``,
``("ask", number, method, args)``, ``("beat",)`` and ``("bye",)``.

Node to main: ``("joined", NodeInfo)``, ``("started", life, pid)``, ``("from", life, message)`` (a report with its lane
as a block), ``("stack", life, text)``, ``("gone", life, exit code, cells, stack, oom kills)`` (with the lane at work),
``("answer", number, result, Failure or None)``, ``("failed", Failure)``, ``("beat", {life: cells}, InferenceStats or
None)`` and, to a goodbye, ``("bye",)``.

A *life* is one process of a leaf (a worker on a node): what an earlier process says is told from what its successor
does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from muster.memory.views import Order

if TYPE_CHECKING:
    from muster.workers.inference import ServerConfig

WEIGHTS = 1 << 62  # tag of the first weights of a session; the next ones have the next, so that nodes can expect them
BEAT_S = 1.0  # seconds after which each end says something, if only that it is there


@dataclass(frozen=True)
class NodeSetup:
    """What a node is told first.

    Attributes:
        node: its number.
        workers: of all nodes.
        path: of the main process, for what is unpickled.
        start_method: of the leaves.
        service: how a server on the node acts for them; None: leaves act by themselves.
        policy_digest: SHA-256 of the policy, which comes as a block: those are not authenticated.
        buffer: pickled handle of a replay buffer that the node writes into; None: batches go to the main process.
        layout: of those batches.
    """

    node: int
    workers: int
    path: Sequence[str]
    start_method: str | None
    service: ServerConfig | None
    policy_digest: bytes
    buffer: bytes | None = None
    layout: Order = "batch_major"

    def of(self, node: int, leaves: Sequence[int]) -> NodeSetup:
        """The same for another node, with these workers."""
        service = None if self.service is None else replace(self.service, workers=leaves)
        return replace(self, node=node, service=service)


@dataclass(frozen=True)
class NodeInfo:
    """What the main process wants to know of a node."""

    host: str
    pid: int
