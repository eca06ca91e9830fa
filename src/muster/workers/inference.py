"""Central inference: one thread of the collector's process acts for all workers, which only step
environments.

It reads observations in the rows that workers have written, and writes actions into the same rows;
see ``actor``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from muster.env_spec import EnvSpec
from muster.errors import MusterError, described
from muster.observing.stats import InferenceStats
from muster.restore.pickling import unpickled
from muster.rollout.acting import OWN, policy_error
from muster.utils.exits import EndingThread
from muster.utils.interrupts import allowed
from muster.utils.locks import while_held
from muster.weights.transport import Ticket
from muster.workers.actor import Actor, ServedRollout
from muster.workers.build import made_policy, on_this_machine
from muster.workers.config import PoolConfig
from muster.workers.failures import on_server, server_hung
from muster.workers.mailbox import LOOK_S, Mailbox
from muster.workers.messages import RolloutResult
from muster.workers.selection import Client, ClientSelection
from muster.workers.under_way import UnderWay

LOST_S = 5.0  # timeout for a call of the policy that may write into the lane of a lost worker


class _CallTime:
    """How long the present call of the policy takes, without the time for which this process was
    stopped.

    The thread that calls the policy begins and ends; another one asks and excuses.
    """

    def __init__(self) -> None:
        self._excused_s = 0.0
        self._begun: float | None = None  # None: between two calls

    def begin(self) -> None:
        """Begin, also again: a coroutine has a deadline of its own."""
        self._begun = self._now()

    def end(self) -> None:
        """Note that the call has ended."""
        self._begun = None

    def excuse(self, seconds: float) -> None:
        """Take so many seconds out of the present call."""
        self._excused_s += seconds

    def seconds(self) -> float:
        """Return the seconds since the call has begun; 0 between calls."""
        begun = self._begun
        return 0.0 if begun is None else max(0.0, self._now() - begun)

    def _now(self) -> float:
        return time.monotonic() - self._excused_s


class InferenceServer:
    """Acts for the workers of a pool, in a thread of its own, with a policy of its own.

    Attributes:
        actor: policy and random streams; only the server's thread uses them while workers are at
            work.
    """

    def __init__(self, pool: PoolConfig, ticket: Ticket) -> None:
        assert pool.server is not None
        config = pool.server
        self._torch_threads = config.threads
        self._deadline_s = pool.timeout("policy")
        every = [worker.index for worker in pool.workers]
        half = -(-len(every) // 2) if config.alternating else len(every)
        groups = [part for part in (every[:half], every[half:]) if part]
        lockstep = config.max_wait_s is None and config.max_batch is None
        self.mailbox = Mailbox(pool.count, groups if lockstep else ())
        self._selection = ClientSelection(config, groups, self.mailbox)
        self._chosen: list[Client] = []  # clients to act for next
        setting = on_this_machine(unpickled(config.setting, "the options"))
        own = made_policy(pool.workers[0], pool.policy, setting)
        weights = ticket.open(ticket.fds)
        ticket.close()
        self.actor = Actor(
            own,
            setting,
            weights,
            exclusive=config.exclusive,
            keeps_streams=config.keeps_streams,
            look=self._look,
        )
        self._rollouts: dict[int, ServedRollout] = {}  # incomplete rollouts, by request
        self._acting = threading.Lock()
        self._call_time = _CallTime()
        self._raised: Exception | None = (
            None  # the last error that was put into a result
        )
        self._calls: list[
            tuple[Future[Any], Callable[[], Any]]
        ] = []  # for the thread to make
        self._stats = InferenceStats()
        self._closing = False
        self._ended_by: BaseException | None = None  # error that has ended the thread
        self._thread = EndingThread(self._run, "muster-inference", self._ask_to_end)

    # --- called by the collector ------------------------------------------------------------------

    def open(
        self, clients: Mapping[int, tuple[int, UnderWay]], infos: Mapping[int, EnvSpec]
    ) -> None:
        """Start to act for workers.

        Args:
            clients: first group and requests of each worker, by its number.
            infos: descriptions of all groups.

        Raises:
            BadOption: one policy call cannot act for all of them.
        """
        self.actor.open(infos)
        envs = {group: info.num_envs for group, info in infos.items()}
        self._selection.open(clients, envs)
        self._thread.start()
        if (threads := self._torch_threads) is not None:
            users = torch.get_num_threads()
            self._in_thread(lambda: _limit_threads(threads))
            torch.set_num_threads(
                users
            )  # restore the default for threads that the user will start

    def held(self) -> AbstractContextManager[None]:
        """Return a context in which requests count as submitted at the same time."""
        return self._selection.held()

    def settle(self) -> None:
        """Make the user's random streams the global ones again, after a batch or an error."""
        self._between_calls(self.actor.settle)

    def ask(self, method: str, *args: Any, group: int | None = None) -> Any:
        """Call a method of the actor in the thread; ``group`` selects the server where there are
        several.
        """
        return self._in_thread(lambda: getattr(self.actor, method)(*args))

    def completed(self, result: RolloutResult) -> RolloutResult:
        """Return a result with the data that its worker does not have: version, path, and the error
        of the policy.

        One call that failed for several workers is raised once: other results are lost with it.
        """
        rollout = self._rollouts.get(result.number)
        if rollout is None:  # the worker has asked no question
            return result
        known = replace(result, version=rollout.version, path=self.actor.path(rollout))
        if result.error is None or rollout.error is None:
            return known
        is_raised = rollout.error is self._raised
        self._raised = rollout.error
        if is_raised:
            return replace(known, error=None, lost=True)
        return replace(known, error=on_server(rollout.error, result.error), lost=False)

    def forget(self, number: int) -> None:
        """Forget a rollout that has a result.

        After an error, the same request continues with the newest weights.
        """
        self._rollouts.pop(number, None)

    def waits(self, worker: int) -> bool:
        """Return whether a worker waits for the server."""
        return bool(self.mailbox.question(worker))

    def _between_calls(self, function: Callable[[], Any]) -> None:
        """Call a function between two calls of the policy, or after a timeout if a call hangs."""
        longest = LOST_S
        if self._deadline_s is not None:
            longest = min(longest, self._deadline_s)
        left = max(0.0, longest - self._call_time.seconds())
        while_held(self._acting, left, lambda held: function())

    def excuse(self, seconds: float) -> None:
        self._call_time.excuse(seconds)

    def check(self) -> None:
        """Raise ``WorkerHung`` if the policy does not return, ``MusterError`` if the thread has
        ended.
        """
        seconds, deadline = self._call_time.seconds(), self._deadline_s
        if deadline is not None and seconds > deadline:
            raise server_hung(self._thread.ident, seconds=seconds, deadline=deadline)
        if not self._thread.is_alive():
            why = (
                ""
                if self._ended_by is None
                else f" because of {described(self._ended_by)}"
            )
            raise MusterError(
                f"The inference server of this collector has ended{why}. Make another collector."
            ) from self._ended_by

    def _look(self) -> bool:
        """Restart the deadline of the call: a coroutine has one of its own.

        Return whether the server is closing.
        """
        self._call_time.begin()
        return self._closing

    def stats(self) -> InferenceStats:
        return self._stats

    def lost(self, worker: int, groups: Sequence[int]) -> None:
        """Remove a lost worker with these groups."""
        self._between_calls(
            lambda: self.mailbox.reset(worker)
        )  # its lane may be reused after this
        for number, rollout in list(self._rollouts.items()):
            if rollout.group in groups:
                self._rollouts.pop(number, None)
        self.mailbox.wake_up.ring()

    def _ask_to_end(self) -> None:
        self._closing = True
        self.mailbox.wake_up.ring()

    def close(self) -> None:
        """End the thread and release its resources. May be called again."""
        self._closing = True
        if self._thread.is_alive():
            self._ask_to_end()
            self._thread.join(1.0)
        if (
            not self._thread.is_alive()
        ):  # else the policy does not return, and still uses them
            self.actor.close()
            self.mailbox.close()

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._act_until_closing()
        except BaseException as error:  # noqa: BLE001 (``check`` raises it to the user)
            self._ended_by = error

    def _act_until_closing(self) -> None:
        while not self._closing:
            while self._calls:
                future, function = self._calls.pop(0)
                self._call_time.begin()
                try:
                    future.set_result(function())
                except BaseException as error:  # noqa: BLE001 (raised in the calling thread)
                    future.set_exception(error)
                self._call_time.end()
            if self._has_work():
                chosen, self._chosen = self._chosen, []
                if chosen:
                    self._serve(chosen)
            else:
                self.mailbox.sleep(self._has_work, self._selection.patience())

    def _in_thread(self, function: Callable[[], Any]) -> Any:
        """Call a function in the thread, and return its value or raise its error here."""
        future: Future[Any] = Future()
        self._calls.append((future, function))
        self.mailbox.wake_up.ring()
        with allowed():
            while not wait([future], LOOK_S).done:
                self.check()
        return future.result()

    def _has_work(self) -> bool:
        """Return whether there is something to do. Stores the clients to act for."""
        self._chosen = self._chosen or self._selection.choose()
        return bool(self._closing or self._calls or self._chosen)

    def _serve(self, clients: list[Client]) -> None:
        with self._acting:
            questions = [
                (client, number)
                for client in clients
                if (number := self.mailbox.question(client.worker))
            ]
            if not questions:  # the workers were lost
                return
            began = time.monotonic()
            self._call_time.begin()
            error: Exception | None = None
            asked: list[tuple[ServedRollout, int]] = []
            try:
                for client, _ in questions:
                    row = self.mailbox.row(client.worker)
                    asked.append((self._rollout(client), row))
                self.actor.act(asked)
            except OWN as known:
                error = known
            except BaseException as unknown:  # noqa: BLE001 (raised to the user by the schedule)
                first_row = asked[0][1] if asked else 0
                error = policy_error(self.actor.any_policy(), unknown, first_row)
                error.__cause__ = unknown
            for rollout, _ in asked:
                rollout.end_call(error)
            self._call_time.end()
            self._stats = self._stats.plus(
                sum(client.envs for client, _ in questions), time.monotonic() - began
            )
            for client, number in questions:
                self.mailbox.answer(client.worker, number, failed=error is not None)

    def _rollout(self, client: Client) -> ServedRollout:
        number = self.mailbox.request(client.worker)
        if number not in self._rollouts:
            requested = client.requested(number)
            self._rollouts[number] = self.actor.begin(requested.request, requested.slot)
        return self._rollouts[number]


def _limit_threads(number: int) -> None:
    """Set the number of torch threads of the calling thread permanently."""
    torch.set_num_threads(number)
    torch.get_num_threads()  # else its first computation adopts the number set last by any thread
