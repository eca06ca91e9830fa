"""Which workers the inference server acts for next."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from muster.workers.config import ServerConfig
from muster.workers.mailbox import LOOK_S, Mailbox
from muster.workers.under_way import Requested, UnderWay


class Client:
    """A worker for which the server acts.

    Attributes:
        worker: number of the worker.
        envs: environments of one of its groups.
        since: time at which its present question was first seen.
    """

    def __init__(
        self, worker: int, under_way: UnderWay, envs: int, since: float = 0.0
    ) -> None:
        self.worker = worker
        self.envs = envs
        self.since = since
        self._under_way = under_way
        self._seen = 0  # number of its present question

    def see(self, question: int) -> None:
        """Note the number of its present question."""
        if question != self._seen:
            self._seen = question
            self.since = time.monotonic()

    def requested(self, number: int) -> Requested:
        """Return its request with this number."""
        return self._under_way.outstanding[number]


class ClientSelection:
    """Selects the clients of each call. Client groups take turns.

    A group is answered when all its workers at work have asked; or enough of them for
    ``max_batch``, or when one has waited for ``max_wait_s``.

    Args:
        groups: numbers of the workers that are answered together.
    """

    def __init__(
        self, config: ServerConfig, groups: Sequence[Sequence[int]], mailbox: Mailbox
    ) -> None:
        self._most = config.max_batch
        self._longest_s = config.max_wait_s
        self._groups = groups
        self._mailbox = mailbox
        self._clients: dict[int, Client] = {}  # by worker
        self._turn = 0  # index of the next client group
        self._holds = 0  # number of entries and exits of ``held``; odd: inside

    def open(
        self, requests: Mapping[int, tuple[int, UnderWay]], envs: Mapping[int, int]
    ) -> None:
        """Begin to select from workers.

        Args:
            requests: first group and requests of each worker.
            envs: number of environments of each group.
        """
        self._clients = {
            worker: Client(worker, under_way, envs[group])
            for worker, (group, under_way) in requests.items()
        }

    @contextmanager
    def held(self) -> Iterator[None]:
        """Select none inside this context: requests submitted in it count as submitted at the same
        time.
        """
        self._holds += 1
        try:
            yield
        finally:
            self._holds += 1
            self._mailbox.wake_up.ring()

    def patience(self) -> float:
        """Return the seconds until a client has waited for ``max_wait_s``; at most ``LOOK_S``."""
        if self._longest_s is None or self._holds % 2:
            return LOOK_S
        since = [
            client.since
            for client in self._clients.values()
            if self._mailbox.question(client.worker)
        ]
        if not since:
            return LOOK_S
        return min(LOOK_S, max(0.0, min(since) + self._longest_s - time.monotonic()))

    def choose(self) -> list[Client]:
        """Return the clients to act for now, in the order of the workers."""
        holds = self._holds
        if holds % 2:
            return []
        for step in range(len(self._groups)):
            turn = (self._turn + step) % len(self._groups)
            chosen = self._of_group(self._groups[turn])
            if (
                chosen and self._holds == holds
            ):  # else requests were submitted while it looked
                self._turn = turn + 1
                return chosen
        return []

    def _of_group(self, group: Sequence[int]) -> list[Client]:
        questions, at_work = self._mailbox.look(group)
        has_bounds = self._most is not None or self._longest_s is not None
        if not questions or (not has_bounds and len(questions) < at_work):
            return []
        asking = [self._clients[worker] for worker, _ in questions]
        for client, (_, number) in zip(asking, questions, strict=True):
            client.see(number)
        if (
            self._most is not None
            and sum(client.envs for client in asking) >= self._most
        ):
            return oldest(asking, self._most)
        if len(asking) == at_work:
            return asking
        if self._longest_s is None:
            return []
        waited_s = time.monotonic() - min(client.since for client in asking)
        return asking if waited_s >= self._longest_s else []


def oldest(clients: Sequence[Client], most: int) -> list[Client]:
    """Return the clients that have waited longest, as many as fit into ``most`` environments, and
    at least one.
    """
    chosen: list[Client] = []
    envs = 0
    for client in sorted(clients, key=lambda client: client.since):
        if chosen and envs + client.envs > most:
            break
        chosen.append(client)
        envs += client.envs
    return sorted(chosen, key=lambda client: client.worker)
