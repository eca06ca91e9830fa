"""A worker in a process or thread of its own, as its crew sees it."""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from muster.interrupts import postponed
from muster.memory.slots import Lane, Slot
from muster.memory.specs import Column
from muster.progress import ACTING, ORDER, PHASE, STEPPING, Phase, reward_key, stepped_in_row, steps_made
from muster.sources.launch import Child
from muster.sources.launchers import Setup
from muster.sources.messages import Assignment, GroupInfo, Order, Report, Start
from muster.sources.patience import Patience, Restarted
from muster.sources.pickling import dumps

if TYPE_CHECKING:
    from muster.sources.failures import Failure

SEND_S = 60.0  # for a message to a worker that does not read
WHEN_THERE = ("seed", "check_reset", "reset", "profile")  # calls that absent workers need not hear, or hear later
STACK_S = 0.5  # for the stack of one that hangs


class DetachedWorker:
    """Implements ``Handle``. Between ``start`` and its end it has a process or thread; dead, it can be started again.

    Attributes:
        incarnation: how often it was started before.
        child: its process.
        alive: it has one, as far as is known.
        reports: that have come and nobody has taken.
        unfinished: what it had done of an order when it was terminated from outside; the order is under way.
        reviving: it will be started again by whoever watches over it.
        absent: its node may never come, so nobody waits for its environments to be made; nothing is ordered from it.
        infos: of its groups, once they were made after all; whoever watches over it lets it ``enlist`` then.
        fresh: those of them that the supervisor has not seen.
        assignment: that a successor will get.
        cause: why it is not alive.
    """

    def __init__(self, index: int, setup: Setup, patience: Patience) -> None:
        self.index, self.setup, self.groups = index, setup, list(setup.groups)
        self.incarnation = -1
        self.alive = False
        self.outstanding: dict[int, Order] = {}
        self.reports: deque[Report] = deque()
        self.unfinished: list[Report] = []
        self.reviving = self.absent = False
        self.infos: list[GroupInfo] | None = None
        self.fresh: list[Report] = []
        self.assignment: Assignment
        self.cause: Exception | None = None
        self.child: Child
        self.ledger: Any
        self._channel: Any
        self._patience = patience
        self._slots: dict[int, Slot] = {}  # of orders under way
        self._reported: dict[int, Slot] = {}  # of those with a report, too
        self._replies: deque[tuple[str, Any]] = deque()
        self._ignored = 0  # replies that nobody waits for
        self._asked = self._closing = self._grad = False
        self._laid_out: tuple[Any, ...] = ()

    # --- a process --------------------------------------------------------------------------------

    def start(self) -> None:
        """Start a process, which makes its environments; ``built`` waits for them. A successor is told all that its
        predecessor was, and what it had not done; one that is absent, when it is there.
        """
        self.incarnation = max(0, self.incarnation) if self.absent else self.incarnation + 1
        self._replies.clear()
        setup = self.setup
        self.child, self._channel, self.ledger = setup.launch(f"muster-worker-{self.index}", not self.incarnation)
        self.alive = True
        start = Start(
            self.index, self.incarnation, setup.payload, self.groups, setup.threads, setup.stoppable, setup.in_thread
        )
        line = setup.server.lines.fds_for(self.index) if setup.server is not None else []
        fds = [*([] if setup.in_thread else [self.ledger.fd]), setup.arena.fd, *line]
        self._send(start, [] if setup.remote else fds)
        self._ignored, self.infos = 0, None
        if self.incarnation and not self.absent:
            self._ignored = 1  # the groups that it has built
            self.enlist()

    def enlist(self) -> None:
        """Tell a process all that it needs to know, and what is left to do, without waiting for an answer."""
        if self.incarnation:
            self._patience.restarted(self)
        self._post("assign", self.assignment)
        if self._grad:
            self._post("enable_grad", True)
        if self.setup.server is None:
            self._ignored += 1
            self._send_ticket()
        else:
            self.setup.server.actor.reseed(self.groups, self.assignment.seed, self.incarnation)
        if self._laid_out:
            self._post("lay_out", *self._laid_out)
        for order in self.under_way():
            self._send_order(order)

    def built(self) -> list[GroupInfo]:
        """The groups that the first incarnation has made."""
        infos: list[GroupInfo] = self._reply()
        return infos

    def assign(self, assignment: Assignment) -> None:
        """Tell it its place among all workers."""
        self.assignment = assignment
        if not self.absent:
            self._call("assign", assignment)

    def subscribe(self) -> None:
        """Let it have the weights, if it acts."""
        if self.setup.server is None and not self.absent:
            self._send_ticket()
            self._reply()

    def end(self) -> None:
        """Forget a process that has ended, or end it."""
        if self.alive:
            self.alive = False
            self.child.kill()
            self.child.join(0.0 if self.setup.in_thread else 1.0)
            self.child.close()
            self._channel.close()
            self.ledger.close()
            if self.setup.server is not None:
                self.setup.server.lost(self.index)

    def fds(self) -> list[int]:
        """What becomes readable when there is something to do."""
        return [fd for fd in (self._channel.fileno(), self.child.fileno()) if fd >= 0] if self.alive else []

    def pump(self) -> bool:
        """Take in what has come; False if nothing more can come."""
        try:
            while self._channel.poll():
                (kind, content), _ = self._channel.receive()
                if kind == "report":
                    self._note_report(content)
                elif kind == "unfinished":
                    self.unfinished.append(content)
                elif self.absent and kind == "reply":
                    self.infos, self.absent = content, False
                elif self._ignored and kind == "reply":
                    self._ignored -= 1
                elif kind == "closed":  # unasked; it says next how it ended
                    pass
                elif kind == "ended":
                    return False
                else:
                    self._replies.append((kind, content))
        except EOFError:
            return False
        return True

    # --- Handle -----------------------------------------------------------------------------------

    def prepared(self, policy: str) -> bool:
        return self._laid_out[:1] == (policy,)

    def submit(self, order: Order, slot: Slot) -> None:
        self.outstanding[order.number], self._slots[order.number] = order, slot
        if self.alive:
            if self.setup.server is not None:
                self.setup.server.lines.expect(self.index, order.number)
            self._send_order(order)
        elif not self.reviving:
            self.start()

    def take(self) -> Report | None:
        if not self.reports:
            return None
        report = self.reports.popleft()
        del self.outstanding[report.number], self._reported[report.number]
        return report

    def take_back(self, report: Report) -> None:
        """A report is not to be taken; its order is under way again."""
        self.reports.remove(report)
        self._slots = {report.number: self._reported.pop(report.number), **self._slots}

    def give_back(self) -> list[Order]:
        """Its orders without a report, which it will not follow any more."""
        orders = self.under_way()
        for order in orders:
            del self.outstanding[order.number], self._slots[order.number]
        return orders

    def withdraw(self) -> list[Order]:
        return []  # it has seen all of them

    @postponed()
    def call(self, method: str, *args: Any) -> Any:
        if self.absent and method in WHEN_THERE:
            if method == "seed":
                self.assignment = replace(self.assignment, seed=args[0], static=args[1])
                self._patience.told(self, method, args)
            return None
        if not self.alive and not self.reviving:
            self.start()
        while self.reviving or self.absent:
            with suppress(Restarted):
                self._patience.wait_for(self, lambda: self.alive and not self.absent)
        if method == "layouts":
            self._laid_out = (*args, self._served_columns(acts=args[0] == "policy"))
            return self._call("lay_out", *self._laid_out)
        if method == "profile" and args[0] is not None and not self.setup.in_thread:
            args = dumps(args[0], "on_trace_ready"), args[1]
        if method == "enable_grad":
            self._grad = bool(args[0])
        if method == "seed":
            seed, static = args
            self.assignment = replace(self.assignment, seed=seed, static=static)
            method = "set_seed"
            if self.setup.server is not None:
                self.setup.server.actor.reseed(self.groups, seed)
        if method == "load" and self.setup.server is not None:
            args = (self.setup.server.actor.load(args[0]), *args[1:])
        result = self._call(method, *args)
        if method == "state" and self.setup.server is not None:
            self.setup.server.actor.add_streams(self.groups, result)
        self._patience.told(self, method.removeprefix("set_"), args)
        if method in ("load", "mark_resumed"):
            self._call("forget")
            self._laid_out = ()
        return result

    def begin_close(self) -> None:
        if self.alive and not self._closing:
            self._closing = True
            with suppress(TimeoutError):
                self._send(("close",), timeout=1.0)
            if self._slots:
                self.child.send_signal(signal.SIGTERM)  # in the middle of a rollout

    def close(self) -> None:
        self.begin_close()
        within_s = 0.0 if self.absent else self.setup.close_s  # nobody may ever answer
        deadline = None if within_s is None else time.monotonic() + within_s
        error: Exception | None = None
        try:
            while self.alive:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                (kind, content), _ = self._channel.receive(left)
                if kind in ("report", "unfinished"):
                    self._note_report(content)
                elif kind == "closed":
                    error = content.error() if content is not None else None
                    self.child.join(1.0)
                    break
        except (EOFError, TimeoutError):
            pass
        finally:
            if self.alive:
                self._patience.ends(self)
            self.end()
        if error is not None:
            raise error

    # --- what can be seen from outside ------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        cells = self.ledger.cells
        phase = Phase(cells[PHASE])
        if phase is Phase.STEP and cells[STEPPING] != cells[ACTING]:
            return Phase.POLICY
        return phase

    def signs(self) -> tuple[Any, ...]:
        """They change while the worker gets on."""
        cells = self.ledger.cells
        in_row = self.steps_seen() if cells[PHASE] == Phase.STEP else 0
        return (*(cells[i] for i in (PHASE, ORDER, ACTING, STEPPING)), in_row, len(self.outstanding))

    def as_of(self) -> float:
        """When these were so (``time.monotonic``): what a node tells of its workers is a little old, or more."""
        told_at: float = self.ledger.told_at if self.setup.remote else time.monotonic()
        return told_at

    def under_way(self) -> list[Order]:
        """Orders that it has not reported on; oldest first."""
        return [self.outstanding[number] for number in self._slots]

    def lane_of(self, number: int) -> Lane:
        """Of an order that nobody has taken the report of."""
        slot = self._slots.get(number) or self._reported[number]
        return slot.lanes[self.outstanding[number].lane]

    def awaited(self) -> bool:
        """There is something that it should be doing."""
        return self.alive and (bool(self._slots) or self._asked or self.absent)

    def order_at_work(self) -> Order | None:
        number = self.ledger.cells[ORDER]
        return self.outstanding[number] if number in self._slots else None

    def failure(self) -> Failure | None:
        """Of something that it did before its first order, or unasked."""
        return next((content for kind, content in self._replies if kind == "failed"), None)

    def steps_seen(self) -> int:
        """Steps in the lane at work, from its first row on."""
        order = self.order_at_work()
        if order is None:
            return 0
        return steps_made(self.ledger.cells, lane := self.lane_of(order.number), reward_key(lane))

    def at_work(self, B: int) -> tuple[int, int | None]:
        """Row of the lane at work (-1: none yet), and which of B environments is being stepped, if that can be seen."""
        cells, order = self.ledger.cells, self.order_at_work()
        lane = None if order is None else self.lane_of(order.number)
        index = None if lane is None else stepped_in_row(cells, lane, reward_key(lane))
        return int(cells[ACTING]), index if self.phase is Phase.STEP and index is not None and index < B else None

    def stop(self, number: int) -> None:
        """Orders up to this number end after their current step."""
        if self.alive:
            self.ledger.stop(number)

    def stack(self) -> str:
        """Of a process that hangs."""
        self.ledger.stack()
        self.child.send_signal(signal.SIGUSR1)
        return str(self.ledger.stack(STACK_S))

    # --- parts ------------------------------------------------------------------------------------

    def _call(self, method: str, *args: Any) -> Any:
        while True:
            self._send(("call", method, args))
            try:
                return self._reply()
            except Restarted:
                continue

    def _post(self, method: str, *args: Any) -> None:
        """Call without waiting for an answer."""
        self._ignored += 1
        self._send(("call", method, args))

    def _reply(self) -> Any:
        self._asked = True
        try:
            self._patience.wait_for(self, lambda: bool(self._replies))
        except Restarted:
            raise
        except BaseException:
            self._ignored += self.alive  # it comes when nobody waits for it any more
            raise
        finally:
            self._asked = False
        kind, content = self._replies.popleft()
        if kind == "failed":
            failure: Failure = content
            raise failure.error()
        return content

    def _note_report(self, report: Report) -> None:
        self.reports.append(report)
        self.fresh.append(report)
        self._reported[report.number] = self._slots.pop(report.number)

    def _served_columns(self, *, acts: bool) -> Sequence[Column]:
        """What the server writes for it, or would write."""
        if self.setup.server is None:
            return ()
        observed = self._call("observe")
        columns: Sequence[Column] = self.setup.server.ask("adopt", observed, acts)
        return columns

    def _send_ticket(self) -> None:
        ticket = self.setup.ticket()
        self._send(("subscribe", ticket), ticket.fds)
        ticket.close()

    def _send_order(self, order: Order) -> None:
        slot = self._slots[order.number]
        if self.setup.remote:
            begin = order.lane * slot.layout.lane_bytes
            self._channel.expect(slot.block[begin : begin + slot.layout.lane_bytes])
        self._send(("order", order, slot.offset, slot.layout.nbytes))

    def _send(self, message: Any, fds: Sequence[int] = (), timeout: float | None = SEND_S) -> None:
        try:
            self._channel.send(message, fds, timeout)
        except EOFError:
            pass  # whoever waits for it will find it dead
