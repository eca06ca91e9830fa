"""A process that plays nodes with what a real one was heard to say, with one worker; see
``schedule_simulation``.
"""

from __future__ import annotations

import heapq
import itertools
import math
import os
import pickle
import random
import select
import socket
import statistics
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from muster.cluster.carrier import Carrier
from muster.cluster.link import Block, Link, LinkLost, Received
from muster.cluster.messages import Told
from muster.cluster.node_main import NodeMain
from muster.cluster.session import BEAT_S
from muster.memory.specs import Array
from muster.workers.counters import NodeCounts
from muster.workers.messages import Answer, RolloutResult, Tell

HEADER = struct.Struct("=QQQ")  # bytes of the message, bytes of the block, tag
READ = 1 << 20
ONE_WAY_S = 0.2e-3  # of a message, in a data centre


# --- a link over a socket pair --------------------------------------------------------------------


class SocketLink:
    """Implements ``Link``; blocks go from the socket straight into the memory that was expected."""

    def __init__(self, sock: socket.socket, deadline_s: float = 120.0) -> None:
        sock.settimeout(deadline_s)
        self._sock = sock
        self._expected: dict[int, Array] = {}

    def send(self, message: bytes, block: Block | None = None, tag: int = 0) -> None:
        array = b"" if block is None else memoryview(np.ascontiguousarray(block.array))
        try:
            self._sock.sendall(HEADER.pack(len(message), len(array), tag) + message)
            if len(array):
                self._sock.sendall(array)
        except OSError as error:
            raise LinkLost(str(error)) from None

    def expect(self, tag: int, memory: Array) -> None:
        self._expected[tag] = memory

    def receive(self) -> Received:
        length, size, tag = HEADER.unpack(self._read(bytearray(HEADER.size)))
        message = bytes(self._read(bytearray(length)))
        if not size:
            return Received(message)
        memory = self._expected.pop(tag, None)
        block = np.empty(size, np.uint8) if memory is None else memory
        self._read(block)
        return Received(message, tag, block)

    def close(self) -> None:
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def _read(self, into: Any) -> Any:
        view = memoryview(into).cast("B")
        while view:
            try:
                count = self._sock.recv_into(view)
            except OSError as error:
                raise LinkLost(str(error)) from None
            if not count:
                raise LinkLost("the other end is closed")
            view = view[count:]
        return into


class Pairs(Carrier):
    """A carrier whose links are there from the beginning."""

    engine = name = "socket pairs"
    address = "sockets of this process"

    def __init__(self, links: list[Link]) -> None:
        self._links = links

    def connect(
        self, node: int, epoch: int, within_s: float, given_up: threading.Event
    ) -> Link:
        if epoch:
            raise LinkLost("these nodes live once")
        return self._links[node]

    def close(self) -> None:
        """Nothing was started."""


# --- recording ------------------------------------------------------------------------------------


@dataclass
class Recording:
    """What a node with one worker has said.

    Attributes:
        answers: to messages and requests, by name.
        result, lane: of a rollout.
        workers: as it has told of them.
        seconds: that rollouts took.
    """

    answers: dict[str, Any] = field(default_factory=dict)
    result: Any = None
    lane: bytes = b""
    workers: Any = ()
    seconds: list[float] = field(default_factory=list)

    @property
    def latency(self) -> tuple[float, float]:
        """Median, and standard deviation of the logarithm, of a lognormal."""
        logs = [math.log(s) for s in self.seconds]
        return math.exp(statistics.median(logs)), statistics.stdev(logs)


class RecordingLink(SocketLink):
    """Writes down what goes to and comes from a node with one worker."""

    def __init__(self, sock: socket.socket, recording: Recording) -> None:
        super().__init__(sock)
        self._recording = recording
        self._asked: dict[int, str] = {}

    def send(self, message: bytes, block: Block | None = None, tag: int = 0) -> None:
        said = pickle.loads(message)
        if said.number:
            self._asked[said.number] = _name(said)
        super().send(message, block, tag)

    def receive(self) -> Received:
        received = super().receive()
        told = pickle.loads(received.message)
        recording = self._recording
        recording.workers = told.workers
        if told.infos is not None:
            recording.answers["Start"] = told.infos
        elif told.answer is not None:
            recording.answers[self._asked.get(told.answer.number, "")] = (
                told.answer.value
            )
        elif told.results and received.block is not None:
            (recording.result,) = told.results
            recording.seconds.append(recording.result.timing.total / 1e9)
            recording.lane = received.block.tobytes()
        return received


def _name(said: Tell) -> str:
    """Of a question."""
    return type(said.args[0]).__name__ if said.args else said.method.__name__


# --- playing --------------------------------------------------------------------------------------


class Player:
    """Plays one node with one worker; see ``messages`` for what it hears and says."""

    def __init__(self, farm: Farm, number: int, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.farm, self.number, self.sock = farm, number, sock
        self.out: deque[memoryview] = deque()
        self._data = bytearray()
        self._skip = 0  # bytes of a block that nobody looks at
        self._group, self._executed = number, 0
        self._busy_until = 0.0
        self._say(0.0)
        self._beat()

    def read(self) -> bool:
        """What has come; False at the end."""
        try:
            data = self.sock.recv(READ)
        except BlockingIOError:
            return True
        except ConnectionResetError:
            return False
        self._data += data
        while self._next():
            pass
        return bool(data)

    def write(self) -> bool:
        """What can be sent now; whether that was all."""
        while self.out:
            try:
                sent = self.sock.sendmsg(list(itertools.islice(self.out, 8)))
            except BlockingIOError:
                return False
            except (BrokenPipeError, ConnectionResetError):
                self.out.clear()
                return True
            while sent:
                first = self.out[0]
                if sent < len(first):
                    self.out[0] = first[sent:]
                    break
                sent -= len(self.out.popleft())
        return True

    def _next(self) -> bool:
        skipped = min(self._skip, len(self._data))
        del self._data[:skipped]
        self._skip -= skipped
        if self._skip or len(self._data) < HEADER.size:
            return False
        length, size, _ = HEADER.unpack_from(self._data)
        end = HEADER.size + length
        if len(self._data) < end:
            return False
        message = pickle.loads(bytes(self._data[HEADER.size : end]))
        del self._data[:end]
        self._skip = size
        self._follow(message)
        return True

    def _follow(self, message: Tell) -> None:
        answers = self.farm.recording.answers
        if message.method is NodeMain.set_up:
            (self._group,) = message.args[0].config.groups
        elif message.method is NodeMain.start:
            self._say(0.0, infos=answers["Start"])
        elif message.method is NodeMain.follow:
            for run in message.args[0]:
                self._roll(run.tag, run.requests[0])
        elif message.method is NodeMain.bye:
            self.sock.shutdown(socket.SHUT_RDWR)
        elif message.number:
            self._say(
                0.0,
                answer=Answer(message.number, self._own(answers.get(_name(message)))),
            )

    def _own(self, answer: Any) -> Any:
        """As if the recorded group were this node's."""
        if isinstance(answer, list) and answer and isinstance(answer[0], dict):
            return [
                {self._group: value}
                for of_worker in answer
                for value in of_worker.values()
            ]
        return answer

    def _roll(self, tag: int, request: Any) -> None:
        """One rollout after the other, as in a worker."""
        begin = max(time.monotonic() + ONE_WAY_S, self._busy_until)
        self._busy_until = begin + self.farm.rollout_s()
        result: RolloutResult = replace(
            self.farm.recording.result, number=request.number, group=self._group
        )
        self.farm.at(self._busy_until + ONE_WAY_S, self, {"results": [result]}, tag)

    def _beat(self) -> None:
        self._say(BEAT_S)
        self.farm.at(time.monotonic() + BEAT_S, self, None, 0)

    def due(self, report: Any, tag: int) -> None:
        """Say what it is time for; None: one more beat."""
        if report is None:
            self._beat()
            return
        lane = self.farm.lane if tag else memoryview(b"")
        self._executed += report["results"][0].executed if tag else 0
        counts = {self._group: NodeCounts(self._executed)}
        said = Told(
            f"node-{self.number}", counts, self.farm.recording.workers, **report
        )
        told = pickle.dumps(said, pickle.HIGHEST_PROTOCOL)
        self.out.append(memoryview(HEADER.pack(len(told), len(lane), tag) + told))
        if tag:
            self.out.append(lane)
        self.farm.flush(self)

    def _say(self, after_s: float, **report: Any) -> None:
        self.farm.at(time.monotonic() + after_s + ONE_WAY_S, self, report, 0)


class Farm:
    """All nodes, in one thread.

    Args:
        socks: their ends.
        seed: of the latencies.
    """

    def __init__(
        self, recording: Recording, socks: list[socket.socket], seed: int = 0
    ) -> None:
        self.recording, self.lane = recording, memoryview(recording.lane)
        self._median, self._sigma = recording.latency
        self._random = random.Random(seed)
        self._queue: list[tuple[float, int, Player, Any, int]] = []
        self._turns = itertools.count()
        self._poller = select.epoll()
        self._players = {
            sock.fileno(): Player(self, i, sock) for i, sock in enumerate(socks)
        }
        for fd in self._players:
            self._poller.register(fd, select.EPOLLIN)

    def rollout_s(self) -> float:
        """Seconds of a rollout, as recorded."""
        return self._random.lognormvariate(math.log(self._median), self._sigma)

    def at(self, when: float, player: Player, report: Any, tag: int) -> None:
        """Say something later."""
        heapq.heappush(self._queue, (when, next(self._turns), player, report, tag))

    def flush(self, player: Player) -> None:
        """Send what can be sent; the rest when there is room."""
        events = select.EPOLLIN if player.write() else select.EPOLLIN | select.EPOLLOUT
        self._poller.modify(player.sock.fileno(), events)

    def run(self) -> None:
        """Until nobody listens any more."""
        while self._players:
            now = time.monotonic()
            while self._queue and self._queue[0][0] <= now:
                _, _, player, report, tag = heapq.heappop(self._queue)
                if player.sock.fileno() in self._players:
                    player.due(report, tag)
            wait = (
                max(0.0, self._queue[0][0] - time.monotonic()) if self._queue else 1.0
            )
            for fd, events in self._poller.poll(wait):
                player = self._players[fd]
                if events & select.EPOLLOUT:
                    self.flush(player)
                if events & ~select.EPOLLOUT and not player.read():
                    self._poller.unregister(fd)
                    del self._players[fd]


def play(recording: Recording, nodes: int) -> tuple[int, list[Link]]:
    """Start the process that plays the nodes; its id, and the links to them."""
    pairs = [socket.socketpair() for _ in range(nodes)]
    pid = os.fork()  # this process has no other thread yet
    if not pid:
        for here, _ in pairs:
            here.close()
        try:
            Farm(recording, [there for _, there in pairs]).run()
        finally:
            os._exit(0)
    for _, there in pairs:
        there.close()
    return pid, [SocketLink(here) for here, _ in pairs]
