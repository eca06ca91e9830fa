"""One session with a node, in the main process: from bringing it to life until it is lost."""

from __future__ import annotations

import itertools
import pickle
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from muster.cluster.link import Block, Link, LinkLost
from muster.cluster.stand_ins import END_S, LeafChannel
from muster.cluster.wire import BEAT_S, WEIGHTS, NodeInfo
from muster.errors import CollectorTimeout, WorkerDied
from muster.memory.specs import Array
from muster.observing.stats import InferenceStats
from muster.rollout.progress import ORDER, PHASE, Phase
from muster.weights.buffer import Manifest
from muster.workers.failures import Failure, Where
from muster.workers.launch import UNKNOWN
from muster.workers.requests import Finished

if TYPE_CHECKING:
    from muster.cluster.node import Node

ASK_S = 60.0  # for an answer of a node's inference server


@dataclass(frozen=True)
class _Item:
    """Something to be sent, pickled by whom it comes from; ``expects`` is the memory that the block with this tag will
    come back in, and ``life`` the process of a leaf that the message is for.
    """

    message: bytes
    life: int | None = None
    block: Block | None = None
    tag: int = 0
    expects: Array | None = None


_LAST = _Item(b"")  # is not sent: nothing comes after it


@dataclass(frozen=True)
class Newest:
    """What is newest for a node."""

    manifest: Manifest
    block: Block


class Session:
    """From bringing a node to life until it is lost. A thread sends what is posted, another takes what comes.

    Attributes:
        lost: why nothing more goes through; empty before.
        joined: the node is there.
        told_at: when it last said how its workers get on (``time.monotonic``).
    """

    def __init__(self, node: Node, epoch: int) -> None:
        self.node, self.epoch = node, epoch
        self.lost, self.joined, self.told_at = "", False, 0.0
        self._link: Link | None = None
        self._leaves: dict[int, LeafChannel] = {}  # by life
        self._lives, self._tags, self._numbers = itertools.count(1), itertools.count(1), itertools.count(1)
        self._outbox: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._sent: Newest | None = None
        self._weights_tags = itertools.count(WEIGHTS)
        self._killed: set[int] = set()  # lives
        self._given_up = threading.Event()
        self._answers: dict[int, queue.SimpleQueue[tuple[Any, Failure | None]]] = {}
        self._losing = threading.Lock()
        self._block: Array | None = None  # that came with the present message
        self.post("setup", node.setup, block=node.policy, tag=self.next_tag())
        self.post_weights()
        name = f"muster-node-{node.number}"
        self._sender = threading.Thread(target=self._send, name=f"{name}-sends", daemon=True)
        self._receiver = threading.Thread(target=self._receive, name=f"{name}-receives", daemon=True)
        self._sender.start()

    def start(self, leaf: int) -> LeafChannel:
        """The channel to a new process of a leaf; what is sent first starts it."""
        with self._losing:
            channel = LeafChannel(self, leaf, next(self._lives))
            self._leaves[channel.life] = channel
            if self.lost:
                channel.end()
        return channel

    def post(self, *message: Any, block: Block | None = None, tag: int = 0, expects: Array | None = None) -> None:
        """Have it sent after all that was posted before. Raises what pickling it does."""
        life = message[2] if message[0] == "start" else message[1] if message[0] == "to" else None
        self._outbox.put(_Item(_pickled(*message), life, block, tag, expects))

    def post_weights(self) -> None:
        """Have the newest weights sent; those that are newest when it is their turn."""
        self._outbox.put(None)

    def kill(self, life: int) -> None:
        """End a process of a leaf; what was posted for it and not sent is not sent any more."""
        self._killed.add(life)
        self.post("kill", life)

    def next_tag(self) -> int:
        return next(self._tags)

    def ask(self, method: str, args: Sequence[Any]) -> Any:
        """What the node's inference server answers."""
        number = next(self._numbers)
        answer = self._answers[number] = queue.SimpleQueue()
        try:
            if self.lost:
                raise WorkerDied(f"node {self.node.number} was lost: {self.lost}")
            self.post("ask", number, method, args)
            result, failure = answer.get(timeout=ASK_S)
        except queue.Empty:
            raise CollectorTimeout(f"node {self.node.number} has not answered in {ASK_S:g} s.") from None
        finally:
            del self._answers[number]
        if failure is not None:
            raise failure.error()
        return result

    def lose(self, why: str) -> None:
        """Nothing that was sent or will be counts any more."""
        with self._losing:
            if self.lost:
                return
            self.lost = why
            leaves = list(self._leaves.values())
        self._given_up.set()
        self.post("beat")  # wakes the sender
        if self._link is not None:
            self._link.close()
        for leaf in leaves:  # all of them, before anybody hears of one
            leaf.child.gone.set()
        for leaf in leaves:
            leaf.end()
        for answer in list(self._answers.values()):
            answer.put((None, Failure("WorkerDied", f"node {self.node.number} was lost: {why}", "call", Where())))

    def end(self, *, bye: bool = True) -> None:
        """Say goodbye; or let the node wait for the next session."""
        if bye and not self.lost and (self.joined or self._link is not None):
            self.post("bye")
            self._outbox.put(_LAST)
            self._sender.join(END_S)
            if self._receiver.ident is not None:
                self._receiver.join(END_S)  # a link that is closed at once may be found so before the goodbye is read
        self.lose("the collector was shut down")
        for thread in (self._sender, self._receiver):
            if thread.ident is not None:  # it was started; one that waits in C++ when the interpreter ends aborts it
                thread.join(END_S)

    def is_connected(self) -> bool:
        return self._link is not None

    # --- threads ----------------------------------------------------------------------------------

    def _send(self) -> None:
        try:
            self._link = link = self._connect()
            if self.lost:
                link.close()
            self._receiver.start()
            while not self.lost:
                item = self._next()
                if item is _LAST:
                    return
                if item is not None and item.life not in self._killed:
                    if item.expects is not None:
                        link.expect(item.tag, item.expects)
                    link.send(item.message, item.block, item.tag if item.block else 0)
        except LinkLost as error:
            self.lose(str(error) or "the link was closed")
        except Exception as error:  # noqa: BLE001 (whoever waits for a leaf raises it)
            self.lose(f"{type(error).__name__}: {error}")

    def _connect(self) -> Link:
        node, began = self.node, time.monotonic()
        try:
            return node.carrier.connect(node.number, self.epoch, node.join_s, self._given_up)
        except LinkLost:
            if time.monotonic() - began >= node.join_s:
                with self._losing:
                    for leaf in self._leaves.values():
                        leaf.child.late = True
            raise

    def _next(self) -> _Item | None:
        """What to send next, if only a beat; None if there are no newer weights."""
        try:
            item = self._outbox.get(timeout=BEAT_S)
        except queue.Empty:
            return _Item(_pickled("beat"))
        if item is not None:
            return item
        newest = self.node.newest
        if newest is None or newest is self._sent:
            return None
        self._sent = newest
        return _Item(_pickled("weights", newest.manifest), None, newest.block, next(self._weights_tags))

    def _receive(self) -> None:
        assert self._link is not None
        try:
            while not self.lost:
                received = self._link.receive()
                kind, *content = pickle.loads(received.message)
                self._block = received.block
                getattr(self, f"_on_{kind}")(*content)
        except LinkLost as error:
            self.lose(str(error) or "the link was closed")
        except Exception as error:  # noqa: BLE001
            self.lose(f"it said something that cannot be understood ({type(error).__name__}: {error})")

    # --- what nodes say ---------------------------------------------------------------------------

    def _on_joined(self, info: NodeInfo) -> None:
        with self._losing:
            self.node.info, self.joined = info, True
            for leaf in self._leaves.values():  # a process takes a while to start, too
                leaf.ledger.cells[PHASE] = int(Phase.CONSTRUCT)

    def _on_started(self, life: int, pid: int) -> None:
        leaf = self._leaves[life]
        leaf.child.pid, leaf.ledger.cells[PHASE] = pid, int(Phase.CONSTRUCT)

    def _on_from(self, life: int, message: Any) -> None:
        if isinstance(message, Finished):
            self._ended(self._leaves[life], message.report.number)
        self._leaves[life].put(message)

    def _on_bye(self) -> None:
        self.lose("it was told goodbye")

    def _on_beat(self, cells: dict[int, list[int]], inference: InferenceStats | None) -> None:
        self.node.inference = inference
        for life, values in cells.items():
            if life in self._leaves:
                self._leaves[life].ledger.cells[:] = values
        self.told_at = time.monotonic()

    def _on_stack(self, life: int, text: str) -> None:
        self._leaves[life].ledger.texts.put(text)

    def _on_gone(self, life: int, code: int | None, cells: list[int], stack: str, oom_kills: int) -> None:
        leaf = self._leaves.pop(life, None)
        self._killed.discard(life)
        if leaf is None:  # that was said before
            return
        if cells:  # it was started
            leaf.ledger.cells[:] = cells
            self._ended(leaf, cells[ORDER])
        leaf.ledger.oom_kills = oom_kills
        leaf.ledger.texts.put(stack)
        leaf.child.code = UNKNOWN if code is None else code
        leaf.end()

    def _ended(self, leaf: LeafChannel, order: int) -> None:
        with self._losing:  # once lost, the lane is another's
            if not self.lost:
                leaf.arrived(order, self._block)

    def _on_answer(self, number: int, result: Any, failure: Failure | None) -> None:
        if number in self._answers:
            self._answers[number].put((result, failure))

    def _on_failed(self, failure: Failure) -> None:
        self.lose(str(failure.error()))


def _pickled(*message: Any) -> bytes:
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
