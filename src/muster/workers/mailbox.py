"""The mailbox of an inference server: integers in shared memory, and wake-ups for workers that are asleep.

A question is two numbers, the request at work and the row to act on; the observations lie in that row. A side that
waits looks at the cells for some microseconds, then sleeps, and waking it costs the other side a system call. Nothing
is queued: a worker has one question at a time. Cells are seen in the order in which they were written, as on x86.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from muster.errors import MusterError, PolicyError
from muster.keys import Key
from muster.memory.shared import Arena
from muster.memory.slots import Lane
from muster.memory.specs import Column
from muster.protocols import Act, Outputs
from muster.rng import GroupRng
from muster.rollout.progress import ORDER as AT_WORK
from muster.rollout.progress import Progress
from muster.workers.channel import WakeUp

ASKED, ANSWERED, ASLEEP, ORDER, ROW, FINISHED, NEWEST, GROUP = range(8)  # of a client
CELLS = 8  # per client: one cache line of the processor, so that no two workers write into the same one
SERVER_SPIN_S = 50e-6  # the next question often comes sooner than a sleeper wakes up
WORKER_SPIN_S = 100e-6  # if there is a processor for everybody; else who spins keeps others from what it waits for
LOOK_S = 0.1  # between two looks at what is not announced


class Mailbox:
    """The server's end, for all workers: its clients.

    Args:
        workers: their number.
        groups: workers who are answered together, when all of them that are at work have asked; they ring only then.

    Attributes:
        cells: ``CELLS`` of each client; the last ones are the server's own.
        wake_up: the server's.
    """

    def __init__(self, workers: int, groups: Sequence[Sequence[int]] = ()) -> None:
        self._arena = Arena.create("muster-mailbox")
        self._arena.allocate((workers + 1) * CELLS * 8)
        self.cells = _cells(self._arena, workers + 1)
        self.wake_up = WakeUp()
        self._wake_ups = [WakeUp() for _ in range(workers)]
        self._own = workers * CELLS + ASLEEP
        for number, group in enumerate(groups):
            for worker in group:
                self.cells[worker * CELLS + GROUP] = number + 1

    def fds_for(self, worker: int) -> list[int]:
        """What a worker needs for ``MailboxClient``; they stay this object's."""
        return [self._arena.fd, *self.wake_up.fds, *self._wake_ups[worker].fds]

    def question(self, worker: int) -> int:
        """The number of a worker's question that has no answer yet; 0: there is none."""
        at = worker * CELLS
        asked = int(self.cells[at + ASKED])
        return asked if asked != abs(self.cells[at + ANSWERED]) else 0

    def request(self, worker: int) -> int:
        """That a worker asks for."""
        return int(self.cells[worker * CELLS + ORDER])

    def row(self, worker: int) -> int:
        """That it wants acted on."""
        return int(self.cells[worker * CELLS + ROW])

    def look(self, group: Sequence[int]) -> tuple[list[tuple[int, int]], int]:
        """Who of a group asks, with the number of the question; and how many are at work, those included."""
        cells, asking, at_work = self.cells, [], 0
        for worker in group:
            at = worker * CELLS
            number, answered = cells[at + ASKED], cells[at + ANSWERED]
            if number != answered and number != -answered:
                asking.append((worker, number))
                at_work += 1
            elif cells[at + NEWEST] > cells[at + FINISHED]:
                at_work += 1
        return asking, at_work

    def expect(self, worker: int, request: int) -> None:
        """A worker is given a request, perhaps one that it had done with: it failed, and is to go on."""
        at = worker * CELLS
        self.cells[at + FINISHED] = min(self.cells[at + FINISHED], request - 1)
        self.cells[at + NEWEST] = max(self.cells[at + NEWEST], request)

    def answer(self, worker: int, number: int, *, failed: bool = False) -> None:
        """The row is acted on, or never will be."""
        at = worker * CELLS
        self.cells[at + ANSWERED] = -number if failed else number
        if self.cells[at + ASLEEP]:
            self._wake_ups[worker].ring()

    def sleep(self, ready: Callable[[], bool], seconds: float) -> None:
        """Until something is so: look for a while, then sleep until some worker rings, or the time is over."""
        if not _spun(ready, SERVER_SPIN_S):
            self.cells[self._own] = 1
            if not ready():
                self.wake_up.wait(seconds)
            self.cells[self._own] = 0

    def reset(self, worker: int) -> None:
        """Forget a worker that is gone."""
        at = worker * CELLS
        self.cells[at + ANSWERED] = self.cells[at + ASKED]
        self.cells[at + NEWEST] = 0

    def close(self) -> None:
        """May be called again."""
        self._arena.close()
        for wake_up in (self.wake_up, *self._wake_ups):
            wake_up.close()


class MailboxClient:
    """A worker's end.

    Args:
        number: of the worker.
        workers: their number.
        fds: see ``Mailbox.fds_for``; owned by this object from now on.
        given_up: says whether this worker is not awaited any more.
    """

    def __init__(self, number: int, workers: int, fds: list[int], given_up: Callable[[], bool]) -> None:
        self._arena = Arena.attach(fds[0])
        half = 1 + (len(fds) - 1) // 2
        self._server, self._wake_up = WakeUp(*fds[1:half]), WakeUp(*fds[half:])
        self._all: Any = _cells(self._arena, workers + 1)
        self._cells: Any = self._all[number * CELLS : (number + 1) * CELLS]
        self._servers: Any = self._all[workers * CELLS :]
        others = [n * CELLS for n in range(workers) if n != number]
        mine = self._cells[GROUP]
        self._group = [at for at in others if mine and self._all[at + GROUP] == mine]
        self._spin_s = spin_s(workers)
        self._given_up = given_up
        self._cells[ASLEEP] = 0

    def ask(self, request: int, row: int) -> None:
        """Have a row of the lane of a request acted on.

        Raises:
            PolicyError: that could not be done; the server says why where the batch is waited for.
        """
        cells = self._cells
        cells[ORDER], cells[ROW] = request, row
        number = cells[ASKED] + 1
        cells[ASKED] = number
        if self._servers[ASLEEP] and self._is_last():
            self._server.ring()

        def answered() -> bool:
            return bool(cells[ANSWERED] == number or cells[ANSWERED] == -number)

        if not _spun(answered, self._spin_s):
            cells[ASLEEP] = 1
            while not answered():
                self._wake_up.wait(LOOK_S)
                if self._given_up():
                    raise MusterError("This worker's rollouts are not awaited any more.")
            cells[ASLEEP] = 0
        if cells[ANSWERED] != number:
            raise PolicyError("the policy on the inference server raised an error")

    def _is_last(self) -> bool:
        """All others of the group that are at work have asked, too: no other will ring."""
        cells = self._all
        return all(
            cells[at + NEWEST] <= cells[at + FINISHED] or abs(cells[at + ANSWERED]) != cells[at + ASKED]
            for at in self._group
        )

    def finished(self, request: int) -> None:
        """A request is over; others may be waiting for this worker."""
        self._cells[FINISHED] = request
        if self._servers[ASLEEP]:
            self._server.ring()

    def close(self) -> None:
        """May be called again."""
        self._arena.close()
        self._server.close()
        self._wake_up.close()


class ServedPolicy:
    """Implements ``Policy``: the server acts, in the very rows of the lanes. Every row is a question to the server.

    Args:
        mailbox: of the server.
        progress: says which request is at work.
    """

    name, path, draws_globally = "policy", "server", False
    raises = (MusterError,)  # the user's policy is elsewhere

    def __init__(self, mailbox: MailboxClient, progress: Progress) -> None:
        self.mailbox = mailbox
        self._progress = progress
        self._columns: Sequence[Column] = ()

    def first(self, obs: Mapping[Key, Any], rng: GroupRng) -> Outputs:
        """The server makes the first call, for row 0."""
        raise NotImplementedError

    def learn(self, columns: Sequence[Column]) -> None:
        """The server knows by now which columns there are."""
        self._columns = columns

    def columns(self) -> Sequence[Column]:
        return self._columns

    def start(self, lane: Lane, rng: GroupRng) -> Act:
        ask, request = self.mailbox.ask, int(self._progress.cells[AT_WORK])
        return lambda t: ask(request, t)


def _cells(arena: Arena, clients: int) -> Any:
    return memoryview(arena.view(0, clients * CELLS * 8)).cast("q")  # type: ignore[arg-type]


def spin_s(workers: int) -> float:
    """How long a worker looks before it sleeps."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return WORKER_SPIN_S if usable > workers else 0.0


def _spun(ready: Callable[[], bool], seconds: float) -> bool:
    """Whether something comes true while one looks at it for a while."""
    until = time.perf_counter() + seconds if seconds else 0.0
    while not ready():
        if not seconds or time.perf_counter() > until:
            return False
    return True
