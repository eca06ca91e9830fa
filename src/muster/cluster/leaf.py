"""A worker process on a node, as the agent sees it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from muster.cluster.link import Block
from muster.memory.slots import Lane, Layout, Slot
from muster.rollout.progress import KNOWN, ORDER, reward_key, steps_made
from muster.workers.config import Columns, WorkerConfig, WorkerPlace
from muster.workers.failures import Failure, oom_kills, pack
from muster.workers.launch import has_fork_server, in_process
from muster.workers.messages import GroupInfo, Order
from muster.workers.requests import (
    BIRTH,
    Answer,
    Ask,
    Close,
    Configure,
    Finished,
    LayOut,
    Message,
    Observe,
    Request,
    RolloutRequest,
)

if TYPE_CHECKING:
    from muster.cluster.agent import Agent

Replied = Callable[[Answer], None]
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

    def __init__(self, agent: Agent, index: int, life: int, config: WorkerConfig, method: str | None) -> None:
        self._agent, self.index, self.life, self._config = agent, index, life, config
        self.groups = list(config.groups)
        self.outstanding: dict[int, Order] = {}
        self.is_built = False
        self._served = config.served_by is not None
        self._method = method
        self._tags: dict[int, int] = {}  # by order
        self._slot_of: dict[int, Slot] = {}  # by order
        self._slots: dict[tuple[int, int, int], Slot] = {}  # by group, and place in the main process
        self._layouts: dict[int, Layout] = {}  # by group
        self._laying_out = False  # a question for layouts has no answer
        self._early: list[tuple[int, Message]] = []  # what waits for that: a successor is told everything at once
        self._own = itertools.count(-1, -1)  # numbers of requests that are not the main process's
        self._replies: dict[int, Replied] = {BIRTH: self._built}  # what to do with answers, by number
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
        fds = [self._ledger.fd, self._agent.arena.fd]
        place, config = self._config.place, self._config
        if place is not None:
            self._placed(place)
            config = replace(config, place=replace(place, columns=None))
        if self._served:
            server = self._agent.server
            self._tell(config, fds if server is None else [*fds, *server.lines.fds_for(self.index)])
        else:
            ticket = self._agent.ticket(self.index)
            self._tell(replace(config, ticket=ticket), fds if ticket is None else [*fds, *ticket.fds])
            if ticket is not None:
                ticket.close()
        self._agent.say("started", self.life, self._child.pid)
        if place is not None and place.columns is not None:
            self._lay_out(None, place.columns)

    @property
    def under_way(self) -> Leaf:
        """As of ``WorkerProxy``, for the inference server."""
        return self

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

    def to(self, tag: int, message: Message) -> None:
        """Pass on a message; ``tag`` is that of the block in which an order's lane goes back."""
        if self._laying_out and not isinstance(message, Close):  # answers are told apart by their order alone
            self._early.append((tag, message))
            return
        match message:
            case RolloutRequest():
                self._order(tag, message)
            case Ask(number, request):
                self._call(number, request)
            case _:
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

    def _order(self, tag: int, request: RolloutRequest) -> None:
        order = request.order
        if order.group not in self._layouts:  # it has said why
            self._child.kill()
            return
        place = order.group, request.offset, order.lane
        if place not in self._slots:
            self._slots[place] = Slot(self._layouts[order.group], self._agent.arena)
        slot = self._slot_of[order.number] = self._slots[place]
        self.outstanding[order.number], self._tags[order.number] = order, tag
        if self._agent.server is not None and self._served:
            self._agent.server.lines.expect(self.index, order.number)
        self._tell(RolloutRequest(replace(order, lane=0), slot.offset, len(slot.block)))

    def _call(self, number: int, request: Request) -> None:
        server = self._agent.server if self._served else None
        if isinstance(request, LayOut):
            self._lay_out(number, request.columns)
            return
        if isinstance(request, Configure):
            place = request.place
            self._placed(place)
            self._ask(number, Configure(replace(place, columns=None)), self._pass_on)
            if place.columns is not None:
                self._lay_out(None, place.columns)
            return
        if server is None:
            self._ask(number, request, self._pass_on)
            return
        self._ask(number, request.through(server.actor, self.groups), partial(self._with_server, request))

    def _placed(self, place: WorkerPlace) -> None:
        """The streams of a successor are others."""
        if self._served and self._agent.server is not None and self._config.generation:
            self._agent.server.actor.reseed(self.groups, place.seed, self._config.generation)

    def _lay_out(self, number: int | None, columns: Columns) -> None:
        """Have rollouts prepared; None: nobody in the main process waits for the answer."""
        self._laying_out = True

        def laid_out(answer: Answer) -> None:
            self._laid_out(number, answer)

        def ask(columns: Columns) -> None:
            self._ask(next(self._own), LayOut(columns), laid_out)

        def observed(answer: Answer) -> None:
            if answer.failure is not None:
                laid_out(answer)
                return
            self._agent.when_open(lambda: adopt(answer.value))

        def adopt(content: Any) -> None:
            assert self._agent.server is not None
            ask(replace(columns, served=self._agent.server.ask("adopt", content, columns.policy == "policy")))

        if self._served:
            self._ask(next(self._own), Observe(), observed)
        else:
            ask(columns)

    def _ask(self, number: int, request: Request, replied: Replied) -> None:
        self._replies[number] = replied
        self._tell(Ask(number, request))

    # --- from the process -------------------------------------------------------------------------

    def pump(self) -> None:
        """Take in what it says."""
        try:
            while self._channel.poll():
                message, _ = self._channel.receive()
                match message:
                    case Finished():
                        self._report(message)
                    case Answer(number) if number in self._replies:
                        self._replies.pop(number)(message)
                    case _:
                        self._pass_on(message)
        except EOFError:
            self._child.join(1.0)

    def _pass_on(self, message: Any) -> None:
        self._agent.say("from", self.life, message)

    def _built(self, answer: Answer) -> None:
        if answer.failure is None:
            infos: list[GroupInfo] = answer.value
            self.is_built = True
            self._agent.learn(dict(zip(self.groups, infos, strict=True)))
        self._pass_on(answer)

    def _laid_out(self, number: int | None, answer: Answer) -> None:
        self._laying_out = False
        if answer.failure is None:
            layouts = dict(zip(self.groups, answer.value, strict=True))
            if layouts != self._layouts:
                self._layouts = layouts
                self._slots.clear()
        if number is not None or answer.failure is not None:
            self._pass_on(replace(answer, number=BIRTH if number is None else number))
        early, self._early = self._early, []
        for waited in early:
            self.to(*waited)

    def _with_server(self, request: Request, answer: Answer) -> None:
        if answer.failure is None and self._agent.server is not None:
            request.answered(self._agent.server.actor, self.groups, answer.value)
        self._pass_on(answer)

    def _report(self, message: Finished) -> None:
        report = message.report
        if message.unfinished:  # the order stays under way: its lane goes with the last words
            self._pass_on(message)
            return
        if self._served and self._agent.server is not None:
            self._agent.server.complete(report, _on_server)
        order, tag = self.outstanding.pop(report.number, None), self._tags.pop(report.number, 0)
        slot = self._slot_of.pop(report.number, None)
        writer = self._agent.writer
        if order is None or slot is None or report.lost:
            self._pass_on(message)
        elif writer is not None and report.error is None:
            writer.put(slot, self.life, report)
        else:
            self._agent.say("from", self.life, message, block=Block(slot.block, slot), tag=tag)

    # --- its end ----------------------------------------------------------------------------------

    def has_ended(self) -> bool:
        return self._child.exit_code() is not None

    def kill(self) -> None:
        self._killed = True
        self._child.kill()
        self._child.join(1.0)

    def say_goodbye(self) -> None:
        """How it has ended; with the lane that it was writing."""
        self.pump()  # also of one that was killed: it may have got on just before
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
