"""The mailbox of an inference server: integers in shared memory, and wake-ups for sleeping
processes.

A question is two numbers, the current request and the row to act on; the observations lie in that
row. A side that waits polls the cells for some microseconds, then sleeps, and waking it costs the
other side a system call. Nothing is queued: a worker has one question at a time. What lies in the
rows is stored before the number that announces it, and loaded after that number; see
``muster.utils.fences``.
"""

from __future__ import annotations

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
from muster.utils.cpus import usable_cores
from muster.utils.fences import keep_order
from muster.workers.channel import WakeUp

ASKED, ANSWERED, ASLEEP, ORDER, ROW, FINISHED, NEWEST, GROUP = range(
    8
)  # the cells of a client
# per client: one cache line of the processor, so that no two workers write into the same one
CELLS = 8
SERVER_SPIN_S = (
    50e-6  # the next question often arrives sooner than a sleeping thread wakes up
)
# if there are more processors than workers; else spinning delays the process that is awaited
WORKER_SPIN_S = 100e-6
LOOK_S = 0.1  # interval of checks for conditions that ring no wake-up


class Mailbox:
    """The server's end. Its clients are all workers.

    Args:
        groups: client groups. A group is answered when all its workers at work have asked, and only
            the last one rings.
    """

    def __init__(self, workers: int, groups: Sequence[Sequence[int]] = ()) -> None:
        self._arena = Arena.create("muster-mailbox")
        self._arena.allocate((workers + 1) * CELLS * 8)
        self.cells = _cells(
            self._arena, workers + 1
        )  # the last ``CELLS`` belong to the server
        self.wake_up = WakeUp()  # of the server
        self._wake_ups = [WakeUp() for _ in range(workers)]
        self._own = workers * CELLS + ASLEEP
        for number, group in enumerate(groups):
            for worker in group:
                self.cells[worker * CELLS + GROUP] = number + 1

    def fds_for(self, worker: int) -> list[int]:
        """Return the descriptors for the ``MailboxClient`` of a worker; this object keeps owning
        them.
        """
        return [self._arena.fd, *self.wake_up.fds, *self._wake_ups[worker].fds]

    def question(self, worker: int) -> int:
        """Return the number of a worker's question that has no answer yet; 0 if there is none."""
        at = worker * CELLS
        asked = int(self.cells[at + ASKED])
        keep_order()
        return asked if asked != abs(self.cells[at + ANSWERED]) else 0

    def request(self, worker: int) -> int:
        """Return the number of the request that a worker's question belongs to."""
        return int(self.cells[worker * CELLS + ORDER])

    def row(self, worker: int) -> int:
        """Return the row of a worker's question."""
        return int(self.cells[worker * CELLS + ROW])

    def look(self, group: Sequence[int]) -> tuple[list[tuple[int, int]], int]:
        """Return the open questions of a group as (worker, number), and the number of its workers
        at work.
        """
        cells = self.cells
        asking = []
        at_work = 0
        for worker in group:
            at = worker * CELLS
            number = cells[at + ASKED]
            answered = cells[at + ANSWERED]
            if number != answered and number != -answered:
                asking.append((worker, number))
                at_work += 1
            elif cells[at + NEWEST] > cells[at + FINISHED]:
                at_work += 1
        keep_order()
        return asking, at_work

    def expect(self, worker: int, request: int) -> None:
        """Count a worker as at work on a request, which may be a failed one that is submitted
        again.
        """
        at = worker * CELLS
        self.cells[at + FINISHED] = min(self.cells[at + FINISHED], request - 1)
        self.cells[at + NEWEST] = max(self.cells[at + NEWEST], request)

    def answer(self, worker: int, number: int, *, failed: bool = False) -> None:
        """Answer a question: the actions are written, or (``failed``) the policy raised an error."""
        at = worker * CELLS
        keep_order()
        self.cells[at + ANSWERED] = -number if failed else number
        keep_order()
        if self.cells[at + ASLEEP]:
            self._wake_ups[worker].ring()

    def sleep(self, ready: Callable[[], bool], seconds: float) -> None:
        """Wait until ``ready()``: poll for a while, then sleep until a worker rings or ``seconds``
        have passed.
        """
        if not _spun(ready, SERVER_SPIN_S):
            self.cells[self._own] = 1
            keep_order()
            if not ready():
                self.wake_up.wait(seconds)
            self.cells[self._own] = 0

    def reset(self, worker: int) -> None:
        """Clear the cells of a lost worker: it has no open question, and is not at work."""
        at = worker * CELLS
        self.cells[at + ANSWERED] = self.cells[at + ASKED]
        self.cells[at + NEWEST] = 0

    def close(self) -> None:
        """Close the memory and the wake-ups. May be called again."""
        self._arena.close()
        for wake_up in (self.wake_up, *self._wake_ups):
            wake_up.close()


class MailboxClient:
    """The end of worker ``number`` of ``workers``, which owns the descriptors from
    ``Mailbox.fds_for``.

    Args:
        given_up: returns whether the results of this worker are ignored from now on.
    """

    def __init__(
        self, number: int, workers: int, fds: list[int], given_up: Callable[[], bool]
    ) -> None:
        self._arena = Arena.attach(fds[0])
        half = 1 + (len(fds) - 1) // 2
        self._server = WakeUp(*fds[1:half])
        self._wake_up = WakeUp(*fds[half:])
        self._all: Any = _cells(self._arena, workers + 1)
        self._cells: Any = self._all[number * CELLS : (number + 1) * CELLS]
        self._servers: Any = self._all[workers * CELLS :]
        others = [n * CELLS for n in range(workers) if n != number]
        mine = self._cells[GROUP]
        self._group = [at for at in others if mine and self._all[at + GROUP] == mine]
        self._spin_s = WORKER_SPIN_S if usable_cores() > workers else 0.0
        self._given_up = given_up
        self._cells[ASLEEP] = 0

    def ask(self, request: int, row: int) -> None:
        """Wait until the server has acted on a row of the lane of a request.

        Raises:
            PolicyError: the policy failed; the server adds its error to the result in the parent.
        """
        cells = self._cells
        cells[ORDER], cells[ROW] = request, row
        number = cells[ASKED] + 1
        keep_order()
        cells[ASKED] = number
        keep_order()
        if self._servers[ASLEEP] and self._is_last():
            self._server.ring()

        def answered() -> bool:
            return bool(cells[ANSWERED] == number or cells[ANSWERED] == -number)

        if not _spun(answered, self._spin_s):
            cells[ASLEEP] = 1
            keep_order()
            while not answered():
                self._wake_up.wait(LOOK_S)
                if self._given_up():
                    raise MusterError(
                        "This worker's rollouts are not awaited any more."
                    )
            cells[ASLEEP] = 0
        keep_order()
        if cells[ANSWERED] != number:
            raise PolicyError("the policy on the inference server raised an error")

    def _is_last(self) -> bool:
        """Return whether all other workers of the group that are at work have asked: then this one
        has to ring.
        """
        cells = self._all
        return all(
            cells[at + NEWEST] <= cells[at + FINISHED]
            or abs(cells[at + ANSWERED]) != cells[at + ASKED]
            for at in self._group
        )

    def finished(self, request: int) -> None:
        """Note the end of a request, and wake the server: it may wait for this worker."""
        self._cells[FINISHED] = request
        keep_order()
        if self._servers[ASLEEP]:
            self._server.ring()

    def close(self) -> None:
        """Close the memory and the wake-ups. May be called again."""
        self._arena.close()
        self._server.close()
        self._wake_up.close()


class ServedPolicy:
    """Implements ``Policy`` by one question per row to the server, which reads and writes the rows
    of the lanes.
    """

    name = "policy"
    path = "server"
    draws_globally = False
    raises = (
        MusterError,
    )  # none of them is raised by the user's policy, which runs in the server

    def __init__(self, mailbox: MailboxClient, progress: Progress) -> None:
        self.mailbox = mailbox
        self._progress = progress
        self._columns: Sequence[Column] = ()

    def first(self, obs: Mapping[Key, Any], rng: GroupRng) -> Outputs:
        """Not called: the server makes the first call, for row 0."""
        raise NotImplementedError

    def learn(self, columns: Sequence[Column]) -> None:
        """Set the columns that the server writes."""
        self._columns = columns

    def columns(self) -> Sequence[Column]:
        return self._columns

    def start(self, lane: Lane, rng: GroupRng) -> Act:
        ask = self.mailbox.ask
        request = int(self._progress.cells[AT_WORK])
        return lambda t: ask(request, t)


def _cells(arena: Arena, clients: int) -> Any:
    return memoryview(arena.view(0, clients * CELLS * 8)).cast("q")  # type: ignore[arg-type]


def _spun(ready: Callable[[], bool], seconds: float) -> bool:
    """Poll ``ready`` for a number of seconds, and return whether it became true."""
    until = time.perf_counter() + seconds if seconds else 0.0
    while not ready():
        if not seconds or time.perf_counter() > until:
            return False
    return True
