"""The node's end of a link over Ray: an actor that the main process calls, with the agent in one of its threads."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from typing import Any

import ray

from muster.cluster.link import Block, LinkLost, Received
from muster.cluster.ray_runtime import views_are_fine
from muster.memory.specs import Array
from muster.utils.attributes import named

WAITS = ("serve", "arrive", "depart")  # methods of ``NodeActor`` that wait: each has a thread of its own
WAITING = 8  # messages at either end, before the sender has to wait
POLL_S = 10.0  # for which an answer without messages is held back

Departed = tuple[bytes, int, Any, int]  # a message, the tag, reference and size of its block


class ExpectedBlocks:
    """Where blocks go, for one end of a link."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._memory: dict[int, Array] = {}
        self._closed = False

    def expect(self, tag: int, memory: Array) -> None:
        with self._lock:
            if not self._closed:
                self._memory[tag] = memory

    def put(self, tag: int, view: Array) -> Array | None:
        """Copy a block to where it is expected. None: nowhere."""
        with self._lock:
            memory = self._memory.pop(tag, None)
            if memory is not None:
                memory[:] = view
            return memory

    def close(self) -> None:
        """Nothing is written after this returns."""
        with self._lock:
            self._closed = True
            self._memory.clear()


class NodeEnd:
    """The ``Link`` that the agent gets. Blocks that nobody expects are read-only views of Ray's store.

    Args:
        deadline_s: silence after which the main process is lost.
    """

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._changed = threading.Condition()
        self._inbox: deque[Received] = deque()
        self._early: dict[int, Received] = {}  # by number; Ray may call methods in another order than they were sent
        self._next = 0
        self._last: int | None = None  # the main process has closed, after so many messages
        self._outbox: deque[Departed] = deque()
        self._expected = ExpectedBlocks()
        self._heard = self._taken = time.monotonic()
        self._closed = ""

    # --- for the agent ------------------------------------------------------------------------

    def send(self, message: bytes, block: Block | None = None, tag: int = 0) -> None:
        self._check()
        ref, size = (None, 0) if block is None else (ray.put(block.array), block.array.nbytes)  # copies
        with self._changed:
            while len(self._outbox) >= WAITING:
                self._wait(self._taken + self._deadline_s, "the main process has not taken anything for")
            if not self._outbox:
                self._taken = time.monotonic()
            self._outbox.append((message, tag, ref, size))
            self._changed.notify_all()

    def expect(self, tag: int, memory: Array) -> None:
        self._expected.expect(tag, memory)

    def receive(self) -> Received:
        with self._changed:
            while not self._inbox:
                self._wait(self._heard + self._deadline_s, "the main process has said nothing for")
            received = self._inbox.popleft()
            self._changed.notify_all()
        if received.block is None:
            return received
        memory = self._expected.put(received.tag, received.block)
        return received if memory is None else Received(received.message, received.tag, memory)

    def close(self, why: str = "the node closed the link") -> None:
        with self._changed:
            self._closed = self._closed or why
            self._changed.notify_all()
        self._expected.close()

    def _check(self) -> None:
        """Raise LinkLost if the session is over; also if this process was stopped for so long that it must be."""
        silence = time.monotonic() - self._heard
        if silence > self._deadline_s:
            self.close(f"the main process has said nothing for {self._deadline_s:g} s")
        if self._closed:
            raise LinkLost(f"the link to the main process is closed: {self._closed}")

    def _wait(self, deadline: float, silent: str) -> None:
        """Wait for a change; with ``_changed`` held. What has come before the end is received first."""
        if not self._closed and self._last is not None and self._next >= self._last:
            self._closed = "the main process closed it"
        if not self._closed and time.monotonic() > deadline:
            self._closed = f"{silent} {self._deadline_s:g} s"
        if self._closed:
            raise LinkLost(f"the link to the main process is closed: {self._closed}")
        self._changed.wait(max(0.0, deadline - time.monotonic()) + 0.01)

    # --- for the main process -----------------------------------------------------------------

    def arrive(self, number: int, message: bytes, tag: int, block: Array | None) -> str:
        """Take a message; returns when there is room for another, or why there will be none."""
        with self._changed:
            self._heard = time.monotonic()
            self._early[number] = Received(message, tag, block)
            while (received := self._early.pop(self._next, None)) is not None:
                self._next += 1
                self._inbox.append(received)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closed or len(self._inbox) < WAITING)
            return self._closed

    def depart(self) -> tuple[list[Departed], str]:
        """What the agent has sent since, as soon as it has; and, after the last, why there will be no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._outbox or self._closed or self._last is not None, POLL_S)
            sent = list(self._outbox)
            self._outbox.clear()
            self._taken = time.monotonic()
            self._changed.notify_all()
            return sent, self._closed or ("" if self._last is None else "it was closed in the main process")

    def end(self, last: int) -> None:
        """The main process has closed, after ``last`` messages."""
        with self._changed:
            self._last = last
            self._changed.notify_all()


class NodeActor:
    """What runs in the actor's process.

    Args:
        node: its number.
        target: "module:function" of a link and a number, which returns whether the main process said goodbye.
        deadline_s: silence after which the link is lost.
    """

    def __init__(self, node: int, target: str, deadline_s: float) -> None:
        views_are_fine()
        self._function = named(target)
        self._node, self._end = node, NodeEnd(deadline_s)
        self.arrive, self.depart, self.end = self._end.arrive, self._end.depart, self._end.end

    def hello(self) -> tuple[str, str, int]:
        """Host, id of the Ray node, and process."""
        return socket.gethostname(), ray.get_runtime_context().get_node_id(), os.getpid()

    def serve(self) -> bool:
        """Run the agent."""
        why = "its agent has ended"
        try:
            return bool(self._function(self._end, self._node))
        except BaseException as error:
            why = f"its agent failed: {type(error).__name__}: {error}"
            raise
        finally:
            self._end.close(why)
