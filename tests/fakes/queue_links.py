"""Links through memory, and nodes that are threads of this process: real agents, whose workers are
processes.
"""

from __future__ import annotations

import pickle
import queue
import threading
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from tensordict.nn import TensorDictModule

from muster.cluster import node_main
from muster.cluster.link import Block, LinkLost, Received
from muster.cluster.messages import Told
from muster.cluster.node_main import NodeMain
from muster.cluster.session import BEAT_S
from muster.collectors.cluster_options import ClusterOptions
from muster.collectors.clusters import ClusterCollector
from muster.collectors.replay_buffer import ReplaySink
from muster.memory.specs import Array
from tests.waits import wait_until

JOIN_S = 60.0


class QueueLink:
    """Implements ``Link``; any thread may send.

    Attributes:
        other: the other end.
        expected: by tag.
        said: the messages that have come here, in order.
    """

    other: QueueLink

    def __init__(self, deadline_s: float = 60.0) -> None:
        self.expected: dict[int, Array] = {}
        self.said: list[Any] = []
        self._arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._deadline_s, self._lock, self._cause = deadline_s, threading.Lock(), ""

    def send(self, message: bytes, block: Block | None = None, tag: int = 0) -> None:
        if self._cause:
            raise LinkLost(self._cause)
        self.other._arrived.put(
            (message, None if block is None else np.array(block.array), tag)
        )

    def expect(self, tag: int, memory: Array) -> None:
        self.expected[tag] = memory

    def receive(self) -> Received:
        try:
            item = self._arrived.get(timeout=self._deadline_s)
        except queue.Empty:
            raise LinkLost(f"nothing has come for {self._deadline_s:g} s") from None
        if isinstance(item, Exception):
            raise item
        message, block, tag = item
        with self._lock:
            if self._cause:
                raise LinkLost(self._cause)
            memory = self.expected.pop(tag, None)
            if memory is not None:
                memory[:] = block
        self.said.append(pickle.loads(message))
        return Received(message, tag, block if memory is None else memory)

    def fail(self, error: Exception) -> None:
        """Let ``receive`` raise this next."""
        self._arrived.put(error)

    def close(self) -> None:
        self.cut("it was closed")

    def cut(self, cause: str) -> None:
        """Lose it, at both ends."""
        for end in (self, self.other):
            with end._lock:
                end._cause = end._cause or cause
            end._arrived.put(LinkLost(cause))


class LateLink(QueueLink):
    """A node's end, whose result of a rollout is sent when the next one is there."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[Any] = []

    def send(self, message: bytes, block: Block | None = None, tag: int = 0) -> None:
        said = pickle.loads(message)
        if said.results:
            self._kept.append(
                (
                    said.results,
                    None if block is None else Block(np.array(block.array)),
                    tag,
                )
            )
            if len(self._kept) == 1:
                return
            results, block, tag = self._kept.pop(0)
            said = replace(said, results=results)
        super().send(pickle.dumps(said), block, tag)


def pair(end: type[QueueLink] = QueueLink) -> tuple[QueueLink, QueueLink]:
    """Both ends."""
    ours, theirs = QueueLink(), end()
    ours.other, theirs.other = theirs, ours
    return ours, theirs


class QueueCarrier:
    """Implements ``Carrier``.

    Args:
        end: what the nodes' ends are.
        gives_memory: see ``Carrier``.

    Attributes:
        links: the ends of the main process, by node and epoch.
        threads: that were nodes.
        ended: how these ended: what ``serve`` has returned or raised.
    """

    engine = name = "queues"
    address = "the memory of this process"

    def __init__(
        self, end: type[QueueLink] = QueueLink, *, gives_memory: bool = False
    ) -> None:
        self._end = end
        self.gives_memory = gives_memory
        self.links: defaultdict[int, list[QueueLink]] = defaultdict(list)
        self.threads: list[threading.Thread] = []
        self.ended: list[Any] = []
        self.closed = False

    def connect(
        self, node: int, epoch: int, within_s: float, given_up: threading.Event
    ) -> QueueLink:
        ours, theirs = pair(self._end)
        self.links[node].append(ours)
        self.threads.append(served(theirs, node, self.ended))
        return ours

    def close(self) -> None:
        self.closed = True


def served(link: QueueLink, node: int, ended: list[Any]) -> threading.Thread:
    """A thread in which an agent serves."""

    def serve() -> None:
        try:
            ended.append(node_main.serve(link, node))
        except Exception as error:  # noqa: BLE001 (a test looks at it)
            ended.append(error)

    thread = threading.Thread(target=serve, name=f"test-node-{node}", daemon=True)
    thread.start()
    return thread


@dataclass(frozen=True, kw_only=True)
class QueueOptions(ClusterOptions):
    """With a carrier that the test has made."""

    sync: bool = True
    made: Any = None

    def carrier(self, nodes: int, workers: int, deadline_s: float) -> Any:
        return self.made


class QueueCollector(ClusterCollector):
    """With nodes in threads of this process."""

    writes = False

    def __init__(
        self, create_env_fn: Any, policy: Any = None, *, carrier: Any, **options: Any
    ) -> None:
        super().__init__(QueueOptions(create_env_fn, policy, made=carrier, **options))

    def _buffer_of_nodes(self) -> Any:
        return ReplaySink(self.options.replay_buffer) if self.writes else None


class WritingCollector(QueueCollector):
    """Whose nodes write into the replay buffer."""

    writes = True


class GatedBuffer:
    """A replay buffer of this process, whichever copy is asked; ``open_`` lets writes end."""

    open_ = threading.Event()
    writing = threading.Event()
    rows: list[Any] = []  # noqa: RUF012 (shared on purpose)

    def extend(self, batch: Any) -> None:
        self.writing.set()
        assert self.open_.wait(JOIN_S)
        self.rows.append(batch.clone())

    def __len__(self) -> int:
        return sum(batch.numel() for batch in self.rows)


class Greedy(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 2)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return super().forward(observation).argmax(-1)


def net() -> TensorDictModule:
    """A policy for a CartPole."""
    return TensorDictModule(Greedy(), ["observation"], ["action"])


def beats(link: QueueLink) -> int:
    """How many have come."""
    return sum(is_beat(said) for said in list(link.said))


def is_beat(said: Any) -> bool:
    """Whether a message says nothing new."""
    if isinstance(said, Told):
        return not (said.infos or said.results or said.answer or said.failure)
    return said.method is NodeMain.beat  # type: ignore[no-any-return]


def two_beats(link: QueueLink) -> None:
    """Wait until the other end has had time for anything that it does at once."""
    begun = beats(link)
    wait_until(lambda: beats(link) >= begun + 2, 60 * BEAT_S)
