"""Central inference: one thread of the collector's process acts for all workers, which only step environments.

It reads observations in the rows that workers have written, and writes actions beside them; see ``actor``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
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
from muster.workers.mailbox import LOOK_S, Mailbox
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
    def client_groups(self) -> list[Sequence[int]]:
        """All workers together, or half of them stepping while the other half is acted for."""
        half = -(-len(self.workers) // 2) if self.alternating else len(self.workers)
        return [part for part in (self.workers[:half], self.workers[half:]) if part]


@dataclass
class _Client:
    """A worker as the server sees it."""

    worker: int
    handle: WorkerProxy
    envs: int  # of a group
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
        mailbox: of the workers.
    """

    def __init__(self, config: ServerConfig, policy: bytes, ticket: Ticket, workers: int) -> None:
        self._config, self._client_groups = config, config.client_groups
        lockstep = config.max_wait_s is None and config.max_batch is None
        self.mailbox = Mailbox(workers, self._client_groups if lockstep else ())
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
        self._clients: dict[int, _Client] = {}  # by worker
        self._rollouts: dict[int, ServedRollout] = {}  # by request, until they are complete
        self._turn = 0  # of the client groups
        self._chosen: list[_Client] = []
        self._holds = 0  # begun and ended ones; odd: workers are being given work
        self._acting = threading.Lock()
        self._acting_since: float | None = None
        self._told: Exception | None = None  # the last error in a result
        self._calls: list[tuple[Future[Any], Callable[[], Any]]] = []  # for the thread to make
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
        self._clients = {h.index: _Client(h.index, h, infos[h.groups[0]].num_envs) for h in handles}
        self._thread.start()
        if (threads := self._config.threads) is not None:
            users = torch.get_num_threads()
            self._in_thread(lambda: _limit_threads(threads))
            torch.set_num_threads(users)  # for threads that the user will start

    @contextmanager
    def held(self) -> Iterator[None]:
        """Meanwhile the server does not act: workers that are given work here count as at work together."""
        self._holds += 1
        try:
            yield
        finally:
            self._holds += 1
            self.mailbox.wake_up.ring()

    def settle(self) -> None:
        """A batch is complete, or will not be now: the user's random streams are the global ones again."""
        with self._between_calls():
            self.actor.settle()

    def ask(self, method: str, *args: Any, group: int | None = None) -> Any:
        """What a method of the actor returns, in its thread; ``group`` says which server, where there are several."""
        return self._in_thread(lambda: getattr(self.actor, method)(*args))

    def complete(self, result: RolloutResult) -> None:
        """Add what a worker does not know of its request: version, path, and why the policy failed."""
        rollout = self._rollouts.pop(result.number, None)  # it goes on after an error with the newest weights
        if rollout is None:  # nothing was asked
            return
        result.version, result.path = rollout.version, self.actor.path(rollout)
        if result.error is not None and rollout.error is not None:
            again = rollout.error is self._told  # the same call, which failed for several workers
            seen = result.error
            result.error, result.lost = (None, True) if again else (on_server(rollout.error, seen), False)
            self._told = rollout.error

    def waits(self, worker: int) -> bool:
        """A worker waits for the server."""
        return bool(self.mailbox.question(worker))

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

    def lost(self, worker: int, groups: Sequence[int]) -> None:
        """A worker with these groups is gone and not waited for."""
        with self._between_calls():  # its lane may be used again from here on
            self.mailbox.reset(worker)
        for number, rollout in list(self._rollouts.items()):
            if rollout.group in groups:
                self._rollouts.pop(number, None)
        self.mailbox.wake_up.ring()

    def close(self) -> None:
        """End the thread; may be called again."""
        self._closing = True
        if self._thread.is_alive():
            self.mailbox.wake_up.ring()
            self._thread.join(1.0)
        if not self._thread.is_alive():  # else it is in a policy that does not return
            self._weights.close()
            self.mailbox.close()

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            while self._calls:
                future, function = self._calls.pop(0)
                self._acting_since = time.monotonic()
                try:
                    future.set_result(function())
                except BaseException as error:  # noqa: BLE001 (raised where it is waited for)
                    future.set_exception(error)
                self._acting_since = None
            if self._wanted():
                chosen, self._chosen = self._chosen, []
                if chosen:
                    self._serve(chosen)
            else:
                self.mailbox.sleep(self._wanted, self._patience())

    def _in_thread(self, function: Callable[[], Any]) -> Any:
        """What a function returns or raises in the thread."""
        future: Future[Any] = Future()
        self._calls.append((future, function))
        self.mailbox.wake_up.ring()
        with allowed():
            while not wait([future], LOOK_S).done:
                self.check()
        return future.result()

    def _wanted(self) -> bool:
        """There is something to do; whom to act for is kept."""
        self._chosen = self._chosen or self._choose()
        return bool(self._closing or self._calls or self._chosen)

    def _patience(self) -> float:
        """Seconds until a client has waited long enough."""
        longest = self._config.max_wait_s
        if longest is None or self._holds % 2:
            return LOOK_S
        since = [client.since for client in self._clients.values() if self.mailbox.question(client.worker)]
        if not since:
            return LOOK_S
        return min(LOOK_S, max(0.0, min(since) + longest - time.monotonic()))

    def _choose(self) -> list[_Client]:
        """Whom to act for now, in the order of the workers; client groups take turns."""
        holds, groups = self._holds, self._client_groups
        for step in range(len(groups) if holds % 2 == 0 else 0):
            turn = (self._turn + step) % len(groups)
            chosen = self._of_group(groups[turn])
            if chosen and self._holds == holds:  # else some of them may not have been at work yet when it looked
                self._turn = turn + 1
                return chosen
        return []

    def _of_group(self, group: Sequence[int]) -> list[_Client]:
        questions, at_work = self.mailbox.look(group)
        most, longest = self._config.max_batch, self._config.max_wait_s
        if not questions or (most is None and longest is None and len(questions) < at_work):
            return []
        asking = [self._clients[worker] for worker, _ in questions]
        for client, (_, number) in zip(asking, questions, strict=True):
            if number != client.seen:
                client.seen, client.since = number, time.monotonic()
        if most is not None and sum(client.envs for client in asking) >= most:
            return _oldest(asking, most)
        late = longest is not None and time.monotonic() - min(client.since for client in asking) >= longest
        return asking if late or len(asking) == at_work else []

    def _serve(self, clients: list[_Client]) -> None:
        with self._acting:
            questions = [(client, number) for client in clients if (number := self.mailbox.question(client.worker))]
            if not questions:  # they are lost
                return
            began = self._acting_since = time.monotonic()
            error: Exception | None = None
            asked: list[tuple[ServedRollout, int]] = []
            try:
                asked += [(self._rollout(client), self.mailbox.row(client.worker)) for client, _ in questions]
                self.actor.act(asked)
            except OWN as known:
                error = known
            except BaseException as unknown:  # noqa: BLE001 (raised where the batch is waited for)
                error = policy_error(self.actor.any_policy(), unknown, asked[0][1] if asked else 0)
                error.__cause__ = unknown
            for rollout, _ in asked:
                rollout.error = error
            self._acting_since = None
            self._stats = self._stats.plus(sum(client.envs for client, _ in questions), time.monotonic() - began)
            for client, number in questions:
                self.mailbox.answer(client.worker, number, failed=error is not None)

    def _rollout(self, client: _Client) -> ServedRollout:
        number = self.mailbox.request(client.worker)
        if number not in self._rollouts:
            requested = client.handle.under_way.outstanding[number]
            self._rollouts[number] = self.actor.begin(number, requested.request.group, requested.lane)
        return self._rollouts[number]


def _limit_threads(number: int) -> None:
    """Of this thread, for good."""
    torch.set_num_threads(number)
    torch.get_num_threads()  # else its first computation takes over the number that was last set anywhere


def _oldest(clients: Sequence[_Client], most: int) -> list[_Client]:
    """Those that have waited longest, as many as fit, but one at least."""
    chosen: list[_Client] = []
    envs = 0
    for client in sorted(clients, key=lambda client: client.since):
        if chosen and envs + client.envs > most:
            break
        chosen.append(client)
        envs += client.envs
    return sorted(chosen, key=lambda client: client.worker)
