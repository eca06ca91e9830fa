"""The messages between the main process and a node: ``Tell`` to a node, ``Told`` from it, and the
records in them.

A block that belongs to a message is memory: the policy, weights, or lanes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from muster.env_spec import EnvSpec
from muster.memory.views import Order as DimOrder
from muster.observing.stats import InferenceStats
from muster.rollout.request import RolloutRequest
from muster.workers.config import PoolConfig
from muster.workers.counters import NodeCounts
from muster.workers.failures import SentError
from muster.workers.messages import Answer, RolloutResult, WorkerStatus

# tag of the first weights of a session; the next ones have the next, so that nodes can expect them
WEIGHTS = 1 << 62


# --- to a node ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NodeSetup:
    """The first message of a session.

    Attributes:
        config: of the node's worker pool, without the policy.
        path: ``sys.path`` of the main process, for unpickling.
        policy_digest: SHA-256 of the policy, which is sent as a block; blocks are not
            authenticated.
        buffer: pickled handle of a replay buffer that the node writes into; None: lanes are sent to
            the main process.
        layout: of batches in the buffer.
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
        offset: of the slot in the main process; the node has a slot of its own for each offset.
        first, lanes: the node's lanes in the slot: the first, and their number.
        tag: of the block in which the lanes are sent back.
    """

    requests: Sequence[RolloutRequest]
    offset: int
    first: int
    lanes: int
    tag: int


# --- from a node ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Told:
    """A message of a node: its state, and what it reports. Without a report it is a heartbeat.

    Attributes:
        host: name of its machine.
        counts: by group, since the session began.
        workers: in the order of the node's workers.
        dropped: groups whose worker was dropped.
        infos: the workers have made their groups.
        results: those of a ``LaneRun``, with its lanes as a block; or one that belongs to no
            request.
        answer: to a ``Tell``.
        failure: the node cannot go on in this session.
    """

    host: str = ""
    counts: Mapping[int, NodeCounts] = field(default_factory=dict)
    workers: Sequence[WorkerStatus] = ()
    dropped: Sequence[int] = ()
    inference: InferenceStats | None = None
    infos: Sequence[EnvSpec] | None = None
    results: Sequence[RolloutResult] = ()
    answer: Answer | None = None
    failure: SentError | None = None
