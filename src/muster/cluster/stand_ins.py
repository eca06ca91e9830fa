"""What stands in, in the main process, for the channel, the ledger and the process of a worker on a node."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from muster.cluster.wire import BEAT_S
from muster.memory.specs import Array
from muster.rollout.progress import PHASE, Phase
from muster.workers.config import WorkerConfig
from muster.workers.launch import UNKNOWN
from muster.workers.threads import LocalChannel, LocalLedger

if TYPE_CHECKING:
    from muster.cluster.session import Session

END_S = 5.0  # for a node to end a leaf, or to hear that it is not needed any more
WRITTEN_S = 60.0  # for the first, where the leaf's rollouts have to be written into a buffer before


class LeafChannel(LocalChannel):
    """The channel to a process of a leaf; implements what ``WorkerProxy`` needs of ``Channel``.

    Attributes:
        life: number of that process, in this session.
    """

    def __init__(self, session: Session, leaf: int, life: int) -> None:
        super().__init__(session.node.wake_up)
        self.session, self.leaf, self.life = session, leaf, life
        self.ledger, self.child = LeafLedger(self), LeafChild(self)
        self._expects: Array | None = None
        self._lanes: dict[int, Array] = {}  # by order; of those that come back only if something goes wrong

    def expect(self, memory: Array) -> None:
        """The next message is an order; its lane comes back into this memory."""
        self._expects = memory

    def send(self, message: Any, fds: Sequence[int] = (), timeout: float | None = None) -> None:
        if self.closed or self.other.closed:
            raise EOFError("The worker has ended.")
        memory, self._expects = self._expects, None
        if isinstance(message, WorkerConfig):
            self.session.post("start", self.leaf, self.life, message)
        elif memory is None:
            self.session.post("to", self.life, 0, message)
        else:
            tag = self.session.next_tag()
            if self.session.node.setup.buffer is not None:  # a link would expect for ever what is written elsewhere
                self._lanes[message.order.number], memory = memory, None
            self.session.post("to", self.life, tag, message, tag=tag, expects=memory)

    def arrived(self, number: int, block: Array | None) -> None:
        """An order has ended; with its lane, if that has come and was not expected."""
        memory = self._lanes.pop(number, None)
        if memory is not None and block is not None:
            memory[:] = block

    def end(self) -> None:
        """Nothing more will come."""
        self.child.gone.set()
        self.other.close()

    @property
    def needs_end(self) -> bool:
        """It is, or may be, at work on the node."""
        return not self.child.gone.is_set()


class LeafLedger(LocalLedger):
    """Implements what ``WorkerProxy`` needs of ``Ledger``: the cells are those that the node told last.

    Attributes:
        oom_kills: by how much ``failures.oom_kills()`` of the node has grown since the process was started.
    """

    def __init__(self, channel: LeafChannel) -> None:
        super().__init__()
        self._channel = channel
        self.texts: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.oom_kills = 0
        self.cells[PHASE] = int(Phase.CONSTRUCT if channel.session.joined else Phase.JOIN)

    @property
    def told_at(self) -> float:
        """When its node said so (``time.monotonic``)."""
        return self._channel.session.told_at

    def stop(self, number: int) -> None:
        self._channel.session.post("stop", self._channel.life, number)

    def stack(self, within_s: float = 0.0) -> str:
        if within_s and self._channel.needs_end and self._channel.session.is_connected():
            self._channel.session.post("stack", self._channel.life, within_s)
        try:
            return self.texts.get(timeout=within_s + 2 * BEAT_S if within_s else 0)
        except queue.Empty:
            return ""


class LeafChild:
    """Implements ``Child`` for a process on a node."""

    def __init__(self, channel: LeafChannel) -> None:
        self._channel = channel
        self.pid = 0  # until it has started
        self.code: int | None = None
        self.late = False
        self.gone = threading.Event()  # also once its session is lost and nothing can come through the link any more

    @property
    def lost(self) -> str:
        session = self._channel.session
        return f"node {session.node.number}: {session.lost}" if self.code is None and self.gone.is_set() else ""

    def fileno(self) -> int:
        return -1

    def exit_code(self) -> int | None:
        return UNKNOWN if self.code is None and self.gone.is_set() else self.code

    def is_stopped(self) -> bool:
        """Not known here: it could be only as of its node's last beat, and then be wrong. A stack shows it, or none."""
        return False

    def send_signal(self, number: int) -> None:
        if self._channel.needs_end:
            self._channel.session.post("signal", self._channel.life, number)

    def kill(self) -> None:
        if self._channel.needs_end:
            self._channel.session.kill(self._channel.life)

    def join(self, timeout: float) -> bool:
        """As for any process; but a node that does not say in time that the process has ended is lost, for only then
        can nobody write into its lanes any more.
        """
        session = self._channel.session
        if self._channel.needs_end and session.is_connected():
            within_s = max(timeout, END_S if session.node.setup.buffer is None else WRITTEN_S)
            try:
                self.gone.wait(within_s)
            finally:  # also after Ctrl-C: nobody else waits for it
                if not self.gone.is_set():
                    session.lose(f"it has not ended a worker within {within_s:g} s")
                    self.gone.wait(END_S)  # another thread may be about to lose it
        return self.exit_code() is not None

    def close(self) -> None:
        """Nothing to release."""
