"""A worker process on a node, as the agent sees it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from muster.memory.slots import Lane, Layout, Slot
from muster.nodes.link import Block
from muster.progress import KNOWN, ORDER, reward_key, steps_made
from muster.sources.failures import Failure, oom_kills, pack
from muster.sources.launch import has_fork_server
from muster.sources.launchers import in_process
from muster.sources.messages import Assignment, GroupInfo, Order, Report, Start

if TYPE_CHECKING:
    from muster.nodes.agent import Agent

Replied = Callable[[str, Any], None]
SEND_S = 60.0  # for a message to a process that does not read


class Leaf:
    """Relays between the main process and a worker process, and does on the way what only the node can do: lanes lie
    in memory of the node, weights and the inference server are the node's.

    Attributes:
        index: of the worker, among those of all nodes.
        life: of the process; see ``wire``.
        groups, outstanding: see ``Handle``.
        unwritten: steps that were reported, but not written into the buffer that they were for.
    """

    def __init__(self, agent: Agent, index: int, life: int, start: Start, method: str | None) -> None:
        self._agent, self.index, self.life, self._start = agent, index, life, start
        self.groups = list(start.groups)
        self.outstanding: dict[int, Order] = {}
        self.is_built = False
        self._served = start.payload.served_by is not None
        self._method = method
        self._tags: dict[int, int] = {}  # by order
        self._slot_of: dict[int, Slot] = {}  # by order
        self._slots: dict[tuple[int, int, int], Slot] = {}  # by group, and place in the main process
        self._layouts: dict[int, Layout] = {}  # by group
        self._laying_out = False  # a question for layouts has no answer
        self._early: list[tuple[int, Any]] = []  # what waits for that: a successor is told everything at once
        self._replies: deque[Replied] = deque([self._built])  # what to do with the next ones
        self._killed = False
        self.unwritten = 0

    @property
    def pid(self) -> int:
        return self._child.pid

    def launch(self) -> None:
        """Start the process."""
        name = f"muster-worker-{self.index}"
        light = self._served and not has_fork_server()
        self._oom_kills = oom_kills()
        self._child, self._channel, self._ledger = in_process(self._method, light=light)(name, True)
        line = self._agent.server.lines.fds_for(self.index) if self._served and self._agent.server else []
        self._tell(self._start, [self._ledger.fd, self._agent.arena.fd, *line])
        self._agent.say("started", self.life, self._child.pid)

    def fds(self) -> list[int]:
        return [self._channel.fileno(), self._child.fileno()]

    def cells(self) -> list[int]:
        """As of now; with the steps that only this machine can count."""
        cells: list[int] = self._ledger.cells.tolist()
        slot = self._slot_of.get(cells[ORDER])
        if slot is not None:
            lane = slot.lanes[0]
            cells[KNOWN] = steps_made(cells, lane, reward_key(lane))
        return cells

    def lane_of(self, number: int) -> Lane:
        """Of an order under way; for the inference server."""
        return self._slot_of[number].lanes[0]

    # --- to the process ---------------------------------------------------------------------------

    def to(self, tag: int, message: Any) -> None:
        """Pass on a message; ``tag`` is that of the block in which an order's lane goes back."""
        kind, *content = message
        if self._laying_out and kind != "close":  # answers are told apart by their order alone
            self._early.append((tag, message))
        elif kind == "order":
            self._order(tag, *content)
        elif kind == "subscribe":
            self._subscribe()
        elif kind == "call":
            self._call(*content)
        else:
            self._tell(message)

    def _tell(self, message: Any, fds: Sequence[int] = ()) -> None:
        """Send it; if the process is dead or does not read, that is seen by its end."""
        try:
            self._channel.send(message, fds, SEND_S)
        except EOFError:
            pass
        except TimeoutError:
            self._child.kill()

    def stop(self, number: int) -> None:
        self._ledger.stop(number)

    def signal(self, number: int) -> None:
        self._child.send_signal(number)

    def stack(self, seconds: float) -> None:
        self._agent.say("stack", self.life, self._ledger.stack(seconds))

    def _order(self, tag: int, order: Order, offset: int, nbytes: int) -> None:
        if order.group not in self._layouts:  # it has said why
            self._child.kill()
            return
        place = order.group, offset, order.lane
        if place not in self._slots:
            self._slots[place] = Slot(self._layouts[order.group], self._agent.arena)
        slot = self._slot_of[order.number] = self._slots[place]
        self.outstanding[order.number], self._tags[order.number] = order, tag
        if self._agent.server is not None and self._served:
            self._agent.server.lines.expect(self.index, order.number)
        self._tell(("order", replace(order, lane=0), slot.offset, len(slot.block)))

    def _subscribe(self) -> None:
        if self._served:  # it has no policy
            self._pass_on("reply", None)
            return
        ticket = self._agent.ticket(self.index)
        self._replies.append(self._pass_on)
        self._tell(("subscribe", ticket), ticket.fds)
        ticket.close()

    def _call(self, method: str, args: Any) -> None:
        server = self._agent.server if self._served else None
        if method == "lay_out":
            self._lay_out(args)
            return
        replied: Replied = self._pass_on
        if server is not None:
            if method == "assign":
                assignment: Assignment = args[0]
                if self._start.incarnation:
                    server.actor.reseed(self.groups, assignment.seed, self._start.incarnation)
            elif method == "set_seed":
                server.actor.reseed(self.groups, args[0])
            elif method == "load":
                args = (server.actor.load(args[0]), *args[1:])
            elif method == "state":
                replied = self._with_streams
        self._ask(method, args, replied)

    def _lay_out(self, args: Any) -> None:
        policy, T, version, columns = args
        self._laying_out = True

        def ask(columns: Any) -> None:
            self._ask("lay_out", (policy, T, version, columns), self._laid_out)

        def observed(kind: str, content: Any) -> None:
            if kind != "reply":
                self._laid_out(kind, content)
                return
            self._agent.when_open(lambda: adopt(content))

        def adopt(content: Any) -> None:
            assert self._agent.server is not None
            ask(self._agent.server.ask("adopt", content, policy == "policy"))

        if self._served:
            self._ask("observe", (), observed)
        else:
            ask(columns)

    def _ask(self, method: str, args: Any, replied: Replied) -> None:
        self._replies.append(replied)
        self._tell(("call", method, args))

    # --- from the process -------------------------------------------------------------------------

    def pump(self) -> None:
        """Take in what it says."""
        try:
            while self._channel.poll():
                (kind, content), _ = self._channel.receive()
                if kind in ("report", "unfinished"):
                    self._report(kind, content)
                elif kind in ("reply", "failed") and self._replies:
                    self._replies.popleft()(kind, content)
                else:
                    self._pass_on(kind, content)
        except EOFError:
            self._child.join(1.0)

    def _pass_on(self, kind: str, content: Any) -> None:
        self._agent.say("from", self.life, (kind, content))

    def _built(self, kind: str, content: Any) -> None:
        if kind == "reply":
            infos: list[GroupInfo] = content
            self.is_built = True
            self._agent.learn(dict(zip(self.groups, infos, strict=True)))
        self._pass_on(kind, content)

    def _laid_out(self, kind: str, content: Any) -> None:
        self._laying_out = False
        if kind == "reply":
            layouts = dict(zip(self.groups, content, strict=True))
            if layouts != self._layouts:
                self._layouts = layouts
                self._slots.clear()
        self._pass_on(kind, content)
        early, self._early = self._early, []
        for waited in early:
            self.to(*waited)

    def _with_streams(self, kind: str, content: Any) -> None:
        if kind == "reply" and self._agent.server is not None:
            self._agent.server.actor.add_streams(self.groups, content)
        self._pass_on(kind, content)

    def _report(self, kind: str, report: Report) -> None:
        if kind == "unfinished":  # the order stays under way: its lane goes with the last words
            self._pass_on(kind, report)
            return
        if self._served and self._agent.server is not None:
            self._agent.server.complete(report, _on_server)
        order, tag = self.outstanding.pop(report.number, None), self._tags.pop(report.number, 0)
        slot = self._slot_of.pop(report.number, None)
        writer = self._agent.writer
        if order is None or slot is None or report.lost:
            self._pass_on(kind, report)
        elif writer is not None and kind == "report" and report.error is None:
            writer.put(slot, self.life, report)
        else:
            self._agent.say("from", self.life, (kind, report), block=Block(slot.block, slot), tag=tag)

    # --- its end ----------------------------------------------------------------------------------

    def has_ended(self) -> bool:
        return self._child.exit_code() is not None

    def kill(self) -> None:
        self._killed = True
        self._child.kill()
        self._child.join(1.0)

    def say_goodbye(self) -> None:
        """How it has ended; with the lane that it was writing."""
        if not self._killed:
            self.pump()
        cells = self.cells() if self._killed else self._ledger.cells.tolist()  # then the lane goes along
        slot, tag = self._slot_of.get(cells[ORDER]), self._tags.get(cells[ORDER], 0)
        stack = "" if self._killed else self._ledger.stack()
        gone = "gone", self.life, self._child.exit_code(), cells, stack, oom_kills() - self._oom_kills
        say = partial(self._agent.say, *gone)
        if slot is not None and not self._killed:
            say = partial(say, block=Block(slot.block, slot), tag=tag)
        if self._agent.writer is None:
            say()
        else:
            self._agent.writer.then(partial(self._say_after_writing, say, cells, slot))
        self.close()
        if self._served and self._agent.server is not None:
            self._agent.server.lost(self.index)

    def _say_after_writing(self, say: Callable[[], None], cells: list[int], slot: Slot | None) -> None:
        """In the writer's thread: what was not written belongs to what it was at."""
        if self.unwritten:
            lane = None if slot is None else slot.lanes[0]
            cells[KNOWN] = self.unwritten + (0 if lane is None else steps_made(cells, lane, reward_key(lane)))
        say()

    def close(self) -> None:
        """Release descriptors, once it has ended."""
        self._child.close()
        self._channel.close()
        self._ledger.close()


def _on_server(error: Exception, seen: Failure) -> Failure:
    """The error of a policy on the node's inference server, where the worker saw it."""
    return pack(error, phase=seen.phase, **vars(seen.where))
