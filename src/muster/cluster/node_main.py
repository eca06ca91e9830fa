"""The main loop of a node: it runs a worker pool for the main process.

One session, seen from the node:

1. ``set_up``: the configuration and the policy arrive. Then the first weights (``take_weights``), if
   the policy has any.
2. ``start``: the workers are started and make their groups; their descriptions are sent.
3. ``assign``: the workers get their places. From now on there is a pool, and lanes are laid out
   (``call``), filled (``follow``), and sent back when all requests of a ``LaneRun`` have results.
4. ``close``: the environments are closed, and the workers end.
5. ``bye``, or the link is lost: everything is released. After ``bye`` the node ends; otherwise it
   joins the next session, for which another ``NodeMain`` is made.

An error of a message is an answer if the message has a number; otherwise it is the failure of the
session. Counts in messages never decrease.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from muster.cluster.attention import Attention
from muster.cluster.link import Block, Link, LinkLost
from muster.cluster.messages import LaneRun, NodeSetup, Told
from muster.cluster.node_slots import NodeSlots
from muster.cluster.session import BEAT_S, Outgoing, Session
from muster.errors import MusterError, WorkerError, described
from muster.memory.slots import Slot
from muster.memory.views import BatchView
from muster.restore.pickling import loads
from muster.restore.registered import installed
from muster.weights.buffer import Buffer, Manifest
from muster.weights.shared_memory import SharedMemory, SharedMemoryPublisher
from muster.weights.transport import Publisher
from muster.workers.channel import Channel, WakeUp
from muster.workers.config import WorkerPlace
from muster.workers.failures import send_error
from muster.workers.gaps import Gaps
from muster.workers.launch import START_S, has_fork_server
from muster.workers.main import carry_out
from muster.workers.messages import Answer, RolloutResult, seal_objects
from muster.workers.proxy import status_of
from muster.workers.requests import LayOut, Request
from muster.workers.worker_pool import WorkerPool


def serve(link: Link, node: int) -> bool:
    """Follow the messages of the main process until the session ends.

    Called in the node, in any thread.

    Args:
        link: the node's end of the link; closed by this function.
        node: number of the node.

    Returns:
        True after a goodbye. False if the link was lost: the node can join again. All workers are
            ended.
    """
    return NodeMain(link, node).run()


class _Over(BaseException):
    """The session is over, after a goodbye or without one. Ends all waiting."""

    def __init__(self, *, was_said: bool) -> None:
        super().__init__()
        self.was_said = was_said


@dataclass
class _RunAtWork:
    """A ``LaneRun`` that workers are following, its slot on this node, and its results so far."""

    part: LaneRun
    slot: Slot
    results: list[RolloutResult] = field(default_factory=list)


class NodeMain:
    """One session of a node. The main process calls its public methods (``Tell``)."""

    def __init__(self, link: Link, node: int) -> None:
        self._host = socket.gethostname()
        self._made = ExitStack()
        self._wake_up = WakeUp()
        self._link = link
        self._weights: NodeWeights  # from ``set_up`` on, as the next one
        self._setup: NodeSetup
        self._workers: WorkerPool | None = None  # from ``start`` on
        self._pool: WorkerPool | None = None  # the same, while it is open
        self._gaps = Gaps()
        self._sink: Sink | None = None
        self._slots = NodeSlots()
        self._jobs: dict[int, _RunAtWork] = {}  # by request
        self._attention = Attention(f"{node} ({self._host})")
        self._end = Session(
            "muster-node-main", lambda _: link, self._beat, self._wake_up.ring
        )

    def run(self) -> bool:
        """Run until the end of the session."""
        try:
            self.say()
            while True:
                self._attend()
        except _Over as over:
            return over.was_said
        finally:
            self._made.close()
            self._end.finish("the node has ended the session")
            self._wake_up.close()

    def say(self, block: Block | None = None, tag: int = 0, **report: Any) -> None:
        """Send a report (see ``Told``), with the state of the node at this moment.

        Counts never decrease from message to message.
        """
        self._end.put(lambda: self._said(block, tag, **report))

    def _beat(self) -> Outgoing:
        """Return a heartbeat, called by the thread that sends; or the failure that the node's own
        thread hangs.
        """
        error = self._attention.failure()
        return self._said() if error is None else self._said(failure=send_error(error))

    def _said(
        self, block: Block | None = None, tag: int = 0, **report: Any
    ) -> Outgoing:
        return Outgoing(self._told(**report), block, tag)

    def answer(self, number: int, function: Callable[[], Any]) -> None:
        """Call a function, and send its result or its error."""
        try:
            value = Channel.sealed(function(), "a result")
        except Exception as error:  # noqa: BLE001 (the main process's to raise)
            self._tell_results()  # they were sent before
            self.say(answer=Answer(number, failure=send_error(error)))
        else:
            self._tell_results()
            self.say(answer=Answer(number, value))

    # --- Caller: used while the pool waits for workers --------------------------------------------

    def fileno(self) -> int:
        return self._wake_up.fileno()

    def attends(self) -> None:
        """Note that this thread does not hang."""
        self._attention.renew()

    def hear(self) -> None:
        """Follow urgent messages; raise ``_Over`` if the link is lost."""
        self._wake_up.clear()
        is_lost = bool(self._end.lost)  # after the messages that had arrived
        for item in list(self._end.inbox):
            if getattr(item[0], "urgent", False):
                self._end.inbox.remove(item)
                carry_out(self, item[0])
        if is_lost:
            raise _Over(was_said=False)

    def _attend(self) -> None:
        """Follow all messages in the inbox, then wait."""
        self.attends()
        self.hear()
        try:
            while self._end.inbox:
                self.attends()
                message, block, tag = self._end.inbox.popleft()
                if isinstance(message, Exception):
                    raise message
                received = () if block is None else (block, tag)
                carry_out(self, message, *received)
            if self._pool is None:
                self._wake_up.wait(BEAT_S)
            else:
                self._pool.wait(BEAT_S)
                self._tell_results()
        except LinkLost:
            raise _Over(was_said=False) from None
        except Exception as error:  # noqa: BLE001 (the main process's to raise, which loses this node)
            self.say(failure=send_error(error))
            self._wake_up.wait(BEAT_S)

    # --- called by the main process ---------------------------------------------------------------

    def bye(self) -> None:
        """End the session and the node."""
        raise _Over(was_said=True)

    def stop(self, number: int) -> None:
        """See ``Proxy.stop``."""
        if self._pool is None:
            return
        for handle in self._pool.handles:
            handle.stop(number)

    def beat(self) -> None:
        """Does nothing: a heartbeat of the main process."""

    def set_up(self, setup: NodeSetup, block: Any, tag: int) -> None:
        """Take the configuration and the policy."""
        policy = block.tobytes()
        digest = hashlib.sha256(policy).digest()
        if not hmac.compare_digest(digest, setup.policy_digest):
            raise MusterError(
                "the policy's checksum does not match: it was modified in transit"
            )
        config = replace(setup.config, policy=policy, node=self._attention.node)
        self._setup = replace(setup, config=config)
        missing = [entry for entry in setup.path if entry not in sys.path]
        sys.path.extend(missing)
        self._weights = NodeWeights(self._link, config.count, self._made)
        # The longest of what this thread waits for without looking at its workers: a policy that is
        # made, or is called by the inference server, and a replay buffer.
        phases = ("construct", "policy", "call")
        self._attention.limit([config.timeout(phase) for phase in phases])

    def take_weights(self, manifest: Manifest, block: Any, tag: int) -> None:
        """Publish weights to the workers.

        If the policy has weights, the first ones arrive before ``start``.
        """
        self._weights.receive(manifest, block, tag)

    def start(self) -> None:
        """Start the workers, and send a description of the groups that they have made."""
        config = self._setup.config
        weights = self._weights.publisher
        ticket = None if weights is None else weights.ticket
        if self._setup.buffer is not None:
            self._sink = Sink(self._setup.buffer, self._setup.layout)
        with installed(config.registered):
            self._workers = workers = WorkerPool(
                config,
                ticket,
                self._made,
                light=not has_fork_server(),
                caller=self,
                write=None if self._sink is None else self._sink.write,
            )
        # A fork server that begins imports torch, which is no construction; `workers` ends it
        # itself if it takes longer.
        with self._attention.at_least(START_S):
            workers.start()
        self._infos = workers.built()
        self.say(infos=self._infos)

    def assign(self, place: WorkerPlace) -> None:
        """Tell the workers their places."""
        assert self._workers is not None
        self._workers.open(self._infos, replace(place, columns=None))
        self._pool = self._workers
        if place.columns is not None:
            self.call(place.columns)

    def call(self, request: Request) -> list[Any]:
        """Send a request to all workers; return their answers."""
        assert self._pool is not None
        answers = self._pool.call(request)
        if isinstance(request, LayOut):
            layouts = {
                number: layout
                for of_worker in answers
                for number, layout in of_worker.items()
            }
            self._slots.lay_out(layouts)
        return answers

    def follow(self, parts: Sequence[LaneRun]) -> None:
        """Submit rollout requests to the workers, all at the same time."""
        pool = self._pool
        assert pool is not None
        with pool.hold():
            for part in parts:
                job = _RunAtWork(part, self._slot(part))
                for request in part.requests:
                    self._jobs[request.number] = job
                    own = replace(
                        request,
                        lane=request.lane - part.first,
                        offset=job.slot.offset,
                        nbytes=job.slot.layout.nbytes,
                    )
                    if pool.counters[request.group].dropped:
                        pool.add_result(
                            RolloutResult(own.number, own.group, dropped=True)
                        )
                    elif self._gaps.follows_one(own):
                        pool.add_result(RolloutResult(own.number, own.group, lost=True))
                    else:
                        pool.handle(own.group).submit(own, job.slot)

    def ask_server(self, method: str, args: Sequence[Any]) -> Any:
        """Call a method of the inference server."""
        assert self._pool is not None and self._pool.server is not None
        return self._pool.server.ask(method, *args)

    def close(self) -> None:
        """Close the environments, and end the workers."""
        if self._pool is not None:
            pool, self._pool = self._pool, None
            pool.close()

    def _slot(self, part: LaneRun) -> Slot:
        """The node's slot for a slot of the main process. It is free whenever that one is."""
        assert self._workers is not None
        return self._slots.slot(part, self._workers.arena)

    def _tell_results(self) -> None:
        """Send the results of each ``LaneRun`` that is complete."""
        while (
            self._pool is not None and (result := self._pool.ready_result()) is not None
        ):
            if result.lost:
                self._gaps.begin_with(result.number)
            if result.error is not None:
                result = replace(result, error=send_error(result.error))
            if result.objects:
                result = seal_objects(result, result.objects, Channel.sealed)
            job = self._jobs.pop(result.number, None)
            if job is None:
                self.say(results=[result])
                continue
            job.results.append(result)
            if len(job.results) == len(job.part.requests):
                self.say(self._lanes(job), job.part.tag, results=job.results)

    def _lanes(self, job: _RunAtWork) -> Block | None:
        if self._sink is not None:
            return None
        first = job.part.first
        lanes = [request.lane - first for request in job.part.requests]
        size = job.slot.layout.lane_bytes
        begin = min(lanes) * size
        end = (max(lanes) + 1) * size
        return Block(job.slot.block[begin:end], job.slot)

    def _told(self, **report: Any) -> Told:
        workers = self._workers
        if workers is None:
            return Told(self._host, **report)
        counters = workers.counters
        groups = workers.config.groups
        server = workers.server
        return Told(
            self._host,
            {number: counters[number].counts() for number in groups}
            if counters
            else {},
            [status_of(handle) for handle in workers.handles],
            [number for number in groups if counters[number].dropped]
            if counters
            else [],
            None if server is None else server.stats(),
            **report,
        )


class NodeWeights:
    """The weights of a node's workers, in shared memory.

    Later versions are received directly there.

    Args:
        link: weights are received there.
        workers: number of those of all nodes.
        made: closes the publisher.

    Attributes:
        publisher: to the workers; None: there are no weights yet, because the policy has lazy
            layers.
    """

    def __init__(self, link: Link, workers: int, made: ExitStack) -> None:
        self._link = link
        self._workers = workers
        self._made = made
        self.publisher: Publisher | None = None

    def receive(self, manifest: Manifest, block: Any, tag: int) -> None:
        """Publish received weights to the workers."""
        publisher = self.publisher
        if isinstance(publisher, SharedMemoryPublisher):
            if block is not (room := publisher.lend()):  # they arrived before `expect`
                room[:] = block
            publisher.publish_lent()
        else:
            received = Buffer(block, manifest)
            if publisher is None:
                publisher = SharedMemory().publisher(
                    received.tensors, self._workers, received.version
                )
                self.publisher = publisher
                self._made.callback(publisher.close)
            else:
                publisher.publish(received.tensors, received.version)
        if isinstance(publisher, SharedMemoryPublisher):
            self._link.expect(tag + 1, publisher.lend())


class Sink:
    """The replay buffer that a node writes into.

    Args:
        pickled: with ``write(TensorDict)``, which is done with the memory when it returns, and its
            ``buffer``.
        order: of the batches' dimensions.
    """

    def __init__(self, pickled: bytes, order: Any) -> None:
        self._sink = loads(pickled, "replay_buffer")
        self._order = order
        self._view: BatchView | None = None  # of the newest layout

    def write(self, result: RolloutResult, slot: Slot) -> None:
        """Write a rollout, which is the only one in its slot. Raises WorkerError."""
        for key, array in result.objects.items():
            slot.lanes[0].arrays[key][...] = array
        view = self._view
        if view is None or view.layout is not slot.layout:
            view = BatchView(slot.layout, stacked=False, order=self._order)
            self._view = view
        memory = torch.from_numpy(slot.block)
        try:
            self._sink.write(view.tensordict(memory, slot))
        except Exception as raised:
            raise WorkerError(
                "the replay buffer that this node writes into, a"
                f" {type(self._sink.buffer).__name__}, raised {described(raised)}. The rollout is"
                " not in it, and counts as discarded"
            ) from raised
