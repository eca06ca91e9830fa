"""What runs on a node: starts workers there, and carries messages, lanes and weights between them and the main process.

For a worker (a *leaf*) nothing differs from a collector on one machine: it has a channel, shared memory for its lanes,
weights in shared memory, and where wanted an inference server, all of them the agent's.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import pickle
import queue
import select
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from muster.cluster.leaf import Leaf
from muster.cluster.link import Block, Link, LinkLost, Received
from muster.cluster.wire import BEAT_S, NodeInfo, NodeSetup
from muster.errors import MusterError, WorkerError, described
from muster.memory.shared import Arena
from muster.memory.slots import Slot
from muster.memory.views import BatchView, Order
from muster.restore.pickling import loads
from muster.weights.buffer import Buffer, Manifest
from muster.weights.choice import default_transport
from muster.weights.shared_memory import SharedMemoryPublisher
from muster.weights.transport import Publisher, Ticket
from muster.workers.channel import WakeUp
from muster.workers.config import WorkerConfig
from muster.workers.failures import Failure, pack
from muster.workers.inference import InferenceServer
from muster.workers.messages import GroupInfo, Report
from muster.workers.requests import BIRTH, Answer, Finished

END_S = 5.0  # for a thread whose link is closed


def serve(link: Link, node: int) -> bool:
    """Do what the main process says, until it says goodbye. Called in the node by the engine, in any thread.

    Args:
        link: the node's end; closed here.
        node: number of the node.

    Returns:
        whether it said goodbye; else the link was lost, and the node can join again. All workers are ended.
    """
    with ExitStack() as made:
        threads: list[threading.Thread] = []
        made.callback(_join, threads)
        made.callback(link.close)
        return Agent(link, node, made, threads).run()


class Agent:
    """The state of a node during one session.

    Args:
        made: closes what it opens.
        threads: those that it starts, which end when the link is closed.
    """

    def __init__(self, link: Link, node: int, made: ExitStack, threads: list[threading.Thread]) -> None:
        self.link, self.node, self._made = link, node, made
        self.arena = Arena.create("muster-slots")
        self._wake_up = WakeUp()
        self._inbox: deque[Received | LinkLost] = deque()
        self._outbox: queue.SimpleQueue[tuple[tuple[Any, ...], Block | None, int] | None] = queue.SimpleQueue()
        self._leaves: dict[int, Leaf] = {}  # by life
        self._infos: dict[int, GroupInfo] = {}  # by group
        self._policy: Any = b""
        self._publisher: Publisher | None = None
        self.server: InferenceServer | None = None
        self._hold: ExitStack | None = None
        self.writer: Writer | None = None
        self._setup: NodeSetup
        self._over: bool | None = None  # the main process said goodbye; False: it is lost
        self._waiting: list[Callable[[], None]] = []  # for the server to begin
        self._unwritten: deque[int] = deque()  # lives of leaves that have failed, since the buffer did
        self._threads = threads
        made.callback(self.arena.close)
        made.callback(self._wake_up.close)

    def run(self) -> bool:
        """Until the end of the session."""
        for target, name in ((self._receive, "receives"), (self._send, "sends")):
            thread = threading.Thread(target=target, name=f"muster-agent-{name}", daemon=True)
            thread.start()
            self._threads.append(thread)
        try:
            self.say("joined", NodeInfo(socket.gethostname(), os.getpid()))
            while self._over is None:
                self._attend()
        finally:
            for leaf in list(self._leaves.values()):
                leaf.kill()
                leaf.close()
            self._outbox.put(None)
            self._threads[1].join(BEAT_S)
        return self._over

    def say(self, *message: Any, block: Block | None = None, tag: int = 0) -> None:
        """Have something sent to the main process."""
        self._outbox.put((message, block, tag))

    def ticket(self, leaf: int) -> Ticket | None:
        """To the weights, for a leaf; None: there are none yet, since the policy's layers are lazy."""
        return None if self._publisher is None else self._publisher.ticket(leaf)

    def learn(self, groups: dict[int, GroupInfo]) -> None:
        """Of groups that leaves have made; with all of them the server begins."""
        self._infos |= groups
        service = self._setup.service
        if self.server is None or service is None or self.server.is_open:
            return
        seats = {leaf.index: leaf for leaf in self._leaves.values() if leaf.is_built}
        if set(service.workers) <= seats.keys():
            self.server.open([seats[index] for index in service.workers], self._infos)
            waiting, self._waiting = self._waiting, []
            for function in waiting:
                function()

    def when_open(self, function: Callable[[], None]) -> None:
        """Call it once the server acts, which is when all leaves have made their groups."""
        if self.server is not None and self.server.is_open:
            function()
        else:
            self._waiting.append(function)

    # --- one thing after another ------------------------------------------------------------------

    def _attend(self) -> None:
        """To what has come, after waiting for some of it."""
        poller = select.poll()
        poller.register(self._wake_up.fileno(), select.POLLIN)
        of: dict[int, Leaf] = {}
        for leaf in self._leaves.values():
            for fd in leaf.fds():
                poller.register(fd, select.POLLIN)
                of[fd] = leaf
        ready = [fd for fd, _ in poller.poll(BEAT_S * 1000)]
        self._wake_up.clear()
        for leaf in {of[fd].life: of[fd] for fd in ready if fd in of}.values():
            self._guarded(leaf.pump)
        for leaf in list(self._leaves.values()):
            if leaf.has_ended():
                leaf.say_goodbye()
                del self._leaves[leaf.life]
        while self._unwritten:
            if (life := self._unwritten.popleft()) in self._leaves:
                self._on_kill(life)
        while self._inbox and self._over is None:
            received = self._inbox.popleft()
            if isinstance(received, LinkLost):
                self._over = False
                return
            self._guarded(self._follow, received)

    def _guarded(self, function: Callable[..., Any], *args: Any) -> None:
        try:
            function(*args)
        except Exception as error:  # noqa: BLE001 (the main process's to raise)
            self.say("failed", self._pack(error))

    def _pack(self, error: BaseException) -> Failure:
        return pack(error, phase="call", pid=os.getpid())

    def _follow(self, received: Received) -> None:
        kind, *content = pickle.loads(received.message)
        if kind in ("setup", "weights"):
            getattr(self, f"_on_{kind}")(*content, received.block, received.tag)
        elif kind in ("to", "stop", "signal", "stack"):
            if content[0] in self._leaves:
                getattr(self._leaves[content[0]], kind)(*content[1:])
        else:
            getattr(self, f"_on_{kind}")(*content)

    # --- what the main process says ---------------------------------------------------------------

    def _on_setup(self, setup: NodeSetup, policy: Any, tag: int) -> None:
        pickled = policy.tobytes()
        if not hmac.compare_digest(hashlib.sha256(pickled).digest(), setup.policy_digest):
            raise MusterError("the policy has changed on its way here: somebody interferes with the network")
        self._setup, self._policy = setup, pickled
        sys.path.extend(entry for entry in setup.path if entry not in sys.path)
        if setup.buffer is not None:
            self.writer = Writer(loads(setup.buffer, "replay_buffer"), setup.layout, self._on_written)
            self._made.callback(self.writer.close)

    def _on_weights(self, manifest: Manifest, block: Any, tag: int) -> None:
        if isinstance(self._publisher, SharedMemoryPublisher):
            if block is not (room := self._publisher.lend()):  # they came before they were expected
                room[:] = block
            self._publisher.publish_lent()
        else:
            received = Buffer(block, manifest)
            if self._publisher is None:
                self._publisher = default_transport().publisher(received.tensors, self._setup.workers, received.version)
                self._made.callback(self._publisher.close)
            else:
                self._publisher.publish(received.tensors, received.version)
        if isinstance(self._publisher, SharedMemoryPublisher):
            self.link.expect(tag + 1, self._publisher.lend())
        if self._setup.service is not None and self.server is None:
            self._make_server()

    def _on_start(self, index: int, life: int, config: WorkerConfig) -> None:
        if not config.policy:
            config = replace(config, policy=self._policy)
        leaf = Leaf(self, index, life, config, self._setup.start_method)
        leaf.launch()
        self._leaves[life] = leaf
        if self.server is not None:
            self.server.replace(leaf)

    def _on_kill(self, life: int) -> None:
        if (leaf := self._leaves.pop(life, None)) is not None:
            leaf.kill()
            leaf.say_goodbye()
        else:
            self.say("gone", life, None, [], "", 0)

    def _on_hold(self) -> None:
        if self.server is not None and self._hold is None:
            self._hold = ExitStack()
            self._hold.enter_context(self.server.held())

    def _on_release(self) -> None:
        if self._hold is not None:
            self._hold.close()
            self._hold = None

    def _on_ask(self, number: int, method: str, args: Any) -> None:
        self.when_open(partial(self._answer, number, method, args))

    def _answer(self, number: int, method: str, args: Any) -> None:
        assert self.server is not None
        try:
            self.say("answer", number, self.server.ask(method, *args), None)
        except Exception as error:  # noqa: BLE001 (the main process's to raise)
            self.say("answer", number, None, self._pack(error))

    def _on_beat(self) -> None:
        """It is there."""

    def _on_bye(self) -> None:
        self.say("bye")
        self._over = True

    def _on_written(self, error: Exception | None, life: int, report: Report) -> None:
        """In the writer's thread: a report may go, without its lane. If that was not written, its leaf has failed."""
        if error is None:
            self.say("from", life, Finished(replace(report, elsewhere=True)))
            return
        if (leaf := self._leaves.get(life)) is not None:
            leaf.unwritten += report.executed - sum(report.discarded.values())
        known = {} if leaf is None else {"worker": leaf.index, "pid": leaf.pid}
        failure = pack(error, phase="call", node=f"{self.node} ({socket.gethostname()})", **known)
        self.say("from", life, Finished(replace(report, error=failure), unfinished=True))
        self.say("from", life, Answer(BIRTH, failure=failure))
        self._unwritten.append(life)
        self._wake_up.ring()

    def _make_server(self) -> None:
        service = self._setup.service
        assert service is not None
        ticket = self.ticket(service.workers[0])
        assert ticket is not None, "weights come before the server"
        self.server = InferenceServer(service, self._policy, ticket, self._setup.workers)
        self._made.callback(self.server.close)

    # --- threads ----------------------------------------------------------------------------------

    def _receive(self) -> None:
        try:
            while True:
                self._inbox.append(self.link.receive())
                self._wake_up.ring()
        except BaseException as error:
            self._inbox.append(LinkLost(f"this node cannot receive: {error!r}"))
            self._wake_up.ring()
            if not isinstance(error, LinkLost):
                raise

    def _send(self) -> None:
        beat_at = 0.0
        try:
            while True:
                now = time.monotonic()
                if now >= beat_at:
                    self.link.send(pickle.dumps(self._beat(), pickle.HIGHEST_PROTOCOL))
                    beat_at = now + BEAT_S
                try:
                    item = self._outbox.get(timeout=max(0.0, beat_at - now))
                except queue.Empty:
                    continue
                if item is None:
                    return
                message, block, tag = item
                self.link.send(pickle.dumps(message, pickle.HIGHEST_PROTOCOL), block, tag)
        except LinkLost:
            pass  # this is received as well, after what had come before: perhaps a goodbye
        except BaseException:
            self.link.close()
            raise

    def _beat(self) -> tuple[Any, ...]:
        stats = None if self.server is None else self.server.stats()
        return "beat", {leaf.life: leaf.cells() for leaf in list(self._leaves.values())}, stats


class Writer:
    """A thread that writes what is put, in order.

    Args:
        sink: with ``write(TensorDict)``, which is done with the memory when it returns, and its ``buffer``.
        order: of the batches' dimensions.
        written: called in the thread, for each report: None or what went wrong, its leaf's life, and it.
    """

    def __init__(self, sink: Any, order: Order, written: Callable[[Exception | None, int, Report], None]) -> None:
        self._sink, self._order, self._written = sink, order, written
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._view: BatchView | None = None  # of the newest layout
        self._failed: dict[int, Exception] = {}  # by life; what follows on a rollout that is missing is not written
        self._thread = threading.Thread(target=self._run, name="muster-agent-writes", daemon=True)
        self._thread.start()

    def put(self, slot: Slot, life: int, report: Report) -> None:
        """A rollout is in this slot, which is left alone until the report has gone."""
        self._queue.put(partial(self._write, slot, life, report))

    def then(self, function: Callable[[], None]) -> None:
        """Call it in the thread, once all has been written that was put."""
        self._queue.put(function)

    def close(self) -> None:
        """End the thread, once it has written what was put."""
        self._queue.put(None)
        self._thread.join(END_S)

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            job()

    def _write(self, slot: Slot, life: int, report: Report) -> None:
        if life not in self._failed:
            try:
                self._sink.write(self._batch(slot, report))
            except Exception as raised:  # noqa: BLE001 (the main process's to raise)
                error = WorkerError(
                    f"the replay buffer that this node writes into, a {type(self._sink.buffer).__name__}, raised "
                    f"{described(raised)}. The rollout is not in it, and counts as discarded"
                )
                error.__cause__ = raised
                self._failed[life] = error
        self._written(self._failed.get(life), life, report)

    def _batch(self, slot: Slot, report: Report) -> Any:
        for key, array in report.objects.items():
            slot.lanes[0].arrays[key][...] = array
        if self._view is None or self._view.layout is not slot.layout:
            self._view = BatchView(slot.layout, stacked=False, order=self._order)
        return self._view.tensordict(torch.from_numpy(slot.block), slot)


def _join(threads: list[threading.Thread]) -> None:
    """Once their link is closed: a thread that is in C++ when the interpreter ends aborts the process."""
    for thread in threads:
        thread.join(END_S)
