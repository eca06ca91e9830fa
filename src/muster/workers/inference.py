"""Central inference: one thread of the collector's process acts for all workers, which only step environments.

It reads observations in the rows that workers have written, and writes actions beside them; see ``actor``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from muster.errors import MusterError
from muster.observing.stats import InferenceStats
from muster.restore.pickling import unpickled
from muster.rollout.acting import OWN, policy_error
from muster.utils.interrupts import allowed
from muster.weights.transport import Ticket
from muster.workers.actor import Actor, ServedRollout
from muster.workers.config import made_policy
from muster.workers.failures import on_server, server_hung
from muster.workers.lines import LOOK_S, Lines
from muster.workers.messages import GroupInfo, RolloutResult

if TYPE_CHECKING:
    from muster.workers.proxy import WorkerProxy

LOST_S = 5.0  # for a call of the policy to end that writes into the lane of a worker that is gone


@dataclass(frozen=True)
class ServerConfig:
    """What an inference server is made from, but for its policy and weights; see ``MultiOptions``. Can be pickled.

    Attributes:
        workers: numbers of those that it acts for.
        options: ``WorkerOptions``; for a node pickled by ``pickling.dumps``.
        is_factory: the policy is made by what is given as such.
        alternating: half of them step while the other half is acted for.
        max_batch: environments of one call; None: no bound.
        max_wait_s: how long the first to ask waits for others that are at work; None: until all ask.
        threads: of torch; None leaves them as they are.
        deadline_s: for a call of the policy; None is for ever.
        exclusive: the user's thread waits meanwhile; see ``Actor``.
        keeps_streams: see there.
    """

    workers: Sequence[int]
    options: Any
    is_factory: bool
    alternating: bool
    max_batch: int | None
    max_wait_s: float | None
    threads: int | None
    deadline_s: float | None
    exclusive: bool = True
    keeps_streams: bool = True

    @property
    def teams(self) -> list[Sequence[int]]:
        """All workers together, or half of them stepping while the other half is acted for."""
        half = -(-len(self.workers) // 2) if self.alternating else len(self.workers)
        return [part for part in (self.workers[:half], self.workers[half:]) if part]


@dataclass
class _Seat:
    """A worker as the server sees it."""

    worker: int
    handle: WorkerProxy
    envs: int  # of a group
    rollout: ServedRollout | None = None
    since: float = 0.0  # when its question was first seen
    seen: int = 0  # the number of that question


class InferenceServer:
    """Acts for workers, in a thread of its own.

    Args:
        policy: pickled; the server makes its own.
        ticket: to the weights.
        workers: of all servers that share the weights.

    Attributes:
        actor: the policy; the thread's while workers are at work.
        lines: to the workers.
    """

    def __init__(self, config: ServerConfig, policy: bytes, ticket: Ticket, workers: int) -> None:
        self._config, self._teams = config, config.teams
        lockstep = config.max_wait_s is None and config.max_batch is None
        self.lines = Lines(workers, self._teams if lockstep else ())
        own = made_policy(policy, is_factory=config.is_factory)
        self._weights = ticket.open(ticket.fds)
        ticket.close()
        self.actor = Actor(
            own,
            unpickled(config.options, "the options"),
            self._weights,
            exclusive=config.exclusive,
            keeps_streams=config.keeps_streams,
        )
        self._seats: dict[int, _Seat] = {}  # by worker
        self._rollouts: dict[int, ServedRollout] = {}  # by request, until they are complete
        self._turn = 0  # of the teams
        self._chosen: list[_Seat] = []
        self._held = threading.Event()
        self._acting = threading.Lock()
        self._acting_since: float | None = None
        self._told: Exception | None = None  # the last error in a result
        self._jobs: list[_ThreadCall] = []
        self._stats = InferenceStats()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="muster-inference", daemon=True)

    # --- called by the collector ------------------------------------------------------------------

    def open(self, handles: Sequence[WorkerProxy], infos: Mapping[int, GroupInfo]) -> None:
        """Begin to act for these workers; ``infos`` are those of their groups, by number.

        Raises:
            BadOption: it cannot, for their environments.
        """
        self.actor.open(infos)
        self._seats = {h.index: _Seat(h.index, h, infos[h.groups[0]].num_envs) for h in handles}
        self._thread.start()
        if (threads := self._config.threads) is not None:
            users = torch.get_num_threads()
            self._in_thread(lambda: _limit_threads(threads))
            torch.set_num_threads(users)  # for threads that the user will start

    @contextmanager
    def held(self) -> Iterator[None]:
        """Meanwhile nobody is acted for: those who are given work here count as at work together."""
        self._held.set()
        try:
            yield
        finally:
            self._held.clear()
            self.lines.wake_up.ring()

    def settle(self) -> None:
        """A batch is complete, or will not be now: the user's random streams are the global ones again."""
        with self._between_calls():
            self.actor.settle()

    def ask(self, method: str, *args: Any, group: int | None = None) -> Any:
        """What a method of the actor returns, in its thread; ``group`` says which server, where there are several."""
        return self._in_thread(lambda: getattr(self.actor, method)(*args))

    def complete(self, result: RolloutResult) -> None:
        """Add what a worker does not know of its request: version, path, and why the policy failed."""
        rollout = self._rollouts.pop(result.number, None)
        if rollout is None:  # nothing was asked
            return
        for seat in self._seats.values():
            if seat.rollout is rollout:
                seat.rollout = None  # if it goes on after an error, it does so with the newest weights
        result.version, result.path = rollout.version, self.actor.path(rollout)
        if result.error is not None and rollout.error is not None:
            again = rollout.error is self._told  # the same call, which failed for several workers
            seen = result.error
            result.error, result.lost = (None, True) if again else (on_server(rollout.error, seen), False)
            self._told = rollout.error

    def waits(self, worker: int) -> bool:
        """A worker waits for the server."""
        return bool(self.lines.question(worker))

    @contextmanager
    def _between_calls(self) -> Iterator[None]:
        """Not while the policy acts, but where it hangs."""
        longest = min(LOST_S, LOST_S if self._config.deadline_s is None else self._config.deadline_s)
        between = self._acting.acquire(timeout=max(0.0, longest - self.acting_for()))
        try:
            yield
        finally:
            if between:
                self._acting.release()

    def acting_for(self) -> float:
        """Seconds since the present call of the policy began; 0 between calls."""
        since = self._acting_since
        return 0.0 if since is None else time.monotonic() - since

    def check(self) -> None:
        """Raise ``WorkerHung`` if the policy does not return, ``MusterError`` if the thread has ended."""
        seconds, deadline = self.acting_for(), self._config.deadline_s
        if deadline is not None and seconds > deadline:
            raise server_hung(self._thread.ident, seconds=seconds, deadline=deadline)
        if not self._thread.is_alive():
            raise MusterError("The inference server of this collector has ended; make another collector.")

    def stats(self) -> InferenceStats:
        return self._stats

    def lost(self, worker: int) -> None:
        """A worker is gone: nobody waits for it."""
        with self._between_calls():  # its lane may be used again from here on
            self.lines.reset(worker)
        seat = self._seats.get(worker)
        if seat is not None and seat.rollout is not None:
            self._rollouts.pop(seat.rollout.number, None)
            seat.rollout = None
        self.lines.wake_up.ring()

    def close(self) -> None:
        """End the thread; may be called again."""
        self._closing = True
        if self._thread.is_alive():
            self.lines.wake_up.ring()
            self._thread.join(1.0)
        if not self._thread.is_alive():  # else it is in a policy that does not return
            self._weights.close()
            self.lines.close()

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            while self._jobs:
                self._acting_since = time.monotonic()
                self._jobs.pop(0).run()
                self._acting_since = None
            if self._wanted():
                chosen, self._chosen = self._chosen, []
                if chosen:
                    self._serve(chosen)
            else:
                self.lines.sleep(self._wanted, self._patience())

    def _in_thread(self, function: Callable[[], Any]) -> Any:
        """What a function returns or raises in the thread."""
        job = _ThreadCall(function)
        self._jobs.append(job)
        self.lines.wake_up.ring()
        return job.result(self.check)

    def _wanted(self) -> bool:
        """There is something to do; whom to act for is kept."""
        self._chosen = self._chosen or self._choose()
        return bool(self._closing or self._jobs or self._chosen)

    def _patience(self) -> float:
        """Seconds until somebody has waited long enough."""
        wait = self._config.max_wait_s
        if wait is None or self._held.is_set():
            return LOOK_S
        since = [seat.since for seat in self._seats.values() if self.lines.question(seat.worker)]
        if not since:
            return LOOK_S
        return min(LOOK_S, max(0.0, min(since) + wait - time.monotonic()))

    def _choose(self) -> list[_Seat]:
        """Whom to act for now, in the order of the workers; teams take turns."""
        if self._held.is_set():
            return []
        teams = self._teams
        for step in range(len(teams)):
            turn = (self._turn + step) % len(teams)
            if chosen := self._of_team(teams[turn]):
                self._turn = turn + 1
                return chosen
        return []

    def _of_team(self, team: Sequence[int]) -> list[_Seat]:
        questions, at_work = self.lines.look(team)
        most, wait = self._config.max_batch, self._config.max_wait_s
        if not questions or (most is None and wait is None and len(questions) < at_work):
            return []
        asking = [self._seats[worker] for worker, _ in questions]
        for seat, (_, number) in zip(asking, questions, strict=True):
            if number != seat.seen:
                seat.seen, seat.since = number, time.monotonic()
        if most is not None and sum(seat.envs for seat in asking) >= most:
            return _oldest(asking, most)
        late = wait is not None and time.monotonic() - min(seat.since for seat in asking) >= wait
        return asking if late or len(asking) == at_work else []

    def _serve(self, seats: list[_Seat]) -> None:
        with self._acting:
            questions = [(seat, self.lines.question(seat.worker)) for seat in seats]
            seats = [seat for seat, number in questions if number]  # as opposed to ``lost``
            numbers = [number for _, number in questions if number]
            if not seats:
                return
            began = self._acting_since = time.monotonic()
            error: Exception | None = None
            asked: list[tuple[ServedRollout, int]] = []
            try:
                asked += [(self._rollout(seat), self.lines.row(seat.worker)) for seat in seats]
                self.actor.act(asked)
            except OWN as known:
                error = known
            except BaseException as unknown:  # noqa: BLE001 (raised where the batch is waited for)
                error = policy_error(self.actor.any_policy(), unknown, asked[0][1] if asked else 0)
                error.__cause__ = unknown
            for rollout, _ in asked:
                rollout.error = error
            self._acting_since = None
            self._stats = self._stats.plus(sum(seat.envs for seat in seats), time.monotonic() - began)
            for seat, number in zip(seats, numbers, strict=True):
                self.lines.answer(seat.worker, number, failed=error is not None)

    def _rollout(self, seat: _Seat) -> ServedRollout:
        number = self.lines.request(seat.worker)
        if seat.rollout is None or seat.rollout.number != number:
            requests = seat.handle.under_way
            group, lane = requests.outstanding[number].group, requests.lane_of(number)
            seat.rollout = self._rollouts[number] = self.actor.begin(number, group, lane)
        return seat.rollout


def _limit_threads(number: int) -> None:
    """Of this thread, for good."""
    torch.set_num_threads(number)
    torch.get_num_threads()  # else its first computation takes over the number that was last set anywhere


def _oldest(seats: Sequence[_Seat], most: int) -> list[_Seat]:
    """Those that have waited longest, as many as fit, but one at least."""
    chosen: list[_Seat] = []
    envs = 0
    for seat in sorted(seats, key=lambda seat: seat.since):
        if chosen and envs + seat.envs > most:
            break
        chosen.append(seat)
        envs += seat.envs
    return sorted(chosen, key=lambda seat: seat.worker)


class _ThreadCall:
    """Something else that the thread is to do."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._done = threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._value = self._function()
        except BaseException as error:  # noqa: BLE001 (raised where it is waited for)
            self._error = error
        self._done.set()

    def result(self, check: Callable[[], None]) -> Any:
        """What it returns or raises; ``check`` raises if that will never be."""
        with allowed():
            while not self._done.wait(LOOK_S):
                check()
        if self._error is not None:
            raise self._error
        return self._value
