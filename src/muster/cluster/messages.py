"""What the main process and a node say to each other, inside the messages of a link.

A message knows what it does where it arrives (``reach``). A block that comes with it is memory: the policy, weights, or
lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from muster.memory.views import Order as DimOrder
from muster.observing.stats import InferenceStats
from muster.workers.config import PoolConfig
from muster.workers.counters import NodeCounts
from muster.workers.failures import SentError
from muster.workers.messages import GroupInfo, RolloutRequest, RolloutResult

if TYPE_CHECKING:
    from muster.cluster.node_main import NodeMain
    from muster.cluster.node_proxy import NodeProxy

WEIGHTS = 1 << 62  # tag of the first weights of a session; the next ones have the next, so that nodes can expect them


# --- to a node -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tell:
    """Call a method of the node (``NodeMain``), with the block of the message and its tag, if it has one.

    Attributes:
        number: of the answer; 0: there is none.
        urgent: it is heard while the node waits for something else.
    """

    method: Callable[..., Any]
    args: tuple[Any, ...] = ()
    number: int = 0
    urgent: bool = False

    def reach(self, main: NodeMain, block: Any, tag: int) -> None:
        """There: do it."""
        args = self.args if block is None else (*self.args, block, tag)
        if self.number:
            main.answer(self.number, lambda: self.method(main, *args))
        else:
            self.method(main, *args)


@dataclass(frozen=True)
class NodeSetup:
    """What a node is told first.

    Attributes:
        config: of its worker pool, without the policy.
        path: of the main process, for what is unpickled.
        policy_digest: SHA-256 of the policy, which comes as a block: those are not authenticated.
        buffer: pickled handle of a replay buffer that the node writes into; None: lanes go to the main process.
        layout: of batches in it.
    """

    config: PoolConfig
    path: Sequence[str]
    policy_digest: bytes
    buffer: bytes | None = None
    layout: DimOrder = "batch_major"


@dataclass(frozen=True)
class LaneRun:
    """Requests whose lanes lie side by side in a slot of the main process.

    Attributes:
        offset: of the slot there, by which the node knows its own.
        first, lanes: the node's lanes in the slot: from which on, and how many.
        tag: of the block in which the requested lanes go back.
    """

    requests: Sequence[RolloutRequest]
    offset: int
    first: int
    lanes: int
    tag: int


# --- from a node -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerTold:
    """How a worker gets on; see ``WorkerStats``."""

    pid: int
    state: str
    phase: str
    restarts: int


@dataclass(frozen=True)
class Told:
    """What goes with every message of a node: how it was when that was sent.

    Attributes:
        counts: by group, since the session began.
        workers: by place among those of the node.
        dropped: groups that no worker runs any more.
    """

    counts: Mapping[int, NodeCounts] = field(default_factory=dict)
    workers: Sequence[WorkerTold] = ()
    dropped: Sequence[int] = ()
    inference: InferenceStats | None = None


class FromNode(Protocol):
    """Anything that a node sends."""

    def reach(self, proxy: NodeProxy) -> None:
        """In the main process: take note of it."""


@dataclass(frozen=True)
class Beat:
    """The node is there."""

    def reach(self, proxy: NodeProxy) -> None:
        """That is all."""


@dataclass(frozen=True)
class Joined:
    """The node is there."""

    host: str
    pid: int

    def reach(self, proxy: NodeProxy) -> None:
        proxy.joined(self)


@dataclass(frozen=True)
class Built:
    """The workers have made their groups."""

    infos: Sequence[GroupInfo]

    def reach(self, proxy: NodeProxy) -> None:
        proxy.built(list(self.infos))


@dataclass(frozen=True)
class Result:
    """What came of a ``LaneRun``; its lanes come as a block, where that is expected. Or about no request."""

    results: Sequence[RolloutResult]

    def reach(self, proxy: NodeProxy) -> None:
        proxy.finished(self.results)


@dataclass(frozen=True)
class Answered:
    """What came of what was asked under this number."""

    number: int
    value: Any = None
    failure: SentError | None = None

    def reach(self, proxy: NodeProxy) -> None:
        proxy.answered(self)


@dataclass(frozen=True)
class Failed:
    """The node cannot go on in this session."""

    error: SentError

    def reach(self, proxy: NodeProxy) -> None:
        proxy.failed(self.error)
