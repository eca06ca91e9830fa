"""The workers of a vector environment, and calls to them.

A call of a worker is a method of its ``EnvSlice`` with arguments. Small ones go through shared
memory (``Exchange``), and a wake-up of the mailbox says that one is there: the caller answers the
worker's question "what next?" (``_Caller``). Others are messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, Literal, cast

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from muster.errors import BadOption, MusterError, WorkerDied, WorkerHung
from muster.restore.crash_report import EnvFactory
from muster.restore.pickling import dumps, packed
from muster.restore.registered import ids_of_this_process
from muster.rollout.options import Execution
from muster.rollout.progress import ALL_ORDERS, STEPPING
from muster.utils.cpus import usable_cores
from muster.utils.integers import integer
from muster.utils.interrupts import postponed
from muster.vector.env_slice import EnvSlice, execute, open_rows, serve
from muster.vector.rows import Exchange, VectorRows
from muster.workers.config import PoolConfig, WorkerConfig, WorkerPlace
from muster.workers.mailbox import LOOK_S, Mailbox
from muster.workers.messages import Answer, Tell
from muster.workers.options import (
    Restart,
    SupervisionOptions,
    WorkerOptions,
    WorkerSetting,
    check_timeouts,
)
from muster.workers.proxy import WorkerProxy
from muster.workers.supervision import NotAnswered, value_of
from muster.workers.worker_pool import WorkerPool

SliceCall = tuple[
    Callable[..., Any], Sequence[Any]
]  # a method of ``EnvSlice``, and its arguments
# last observations (None: none), seeds and pickled attributes of environments, for ``open_rows``
Inheritance = tuple[Sequence[Any] | None, Sequence[int | None], bytes]
_MOST_RESTARTS = Restart().max_restarts  # as for collectors
_SETTING = WorkerSetting(options=WorkerOptions(execution=Execution(executor=False)))


class TimeIsUp(Exception):
    """The deadline of a call has passed."""


class Slices:
    """The workers of a vector environment; each has a part of its environments.

    1. The constructor starts them; they make their environments.
    2. ``open`` gives them the shared memory for what steps return.
    3. ``post`` sends a call to a worker, ``results`` waits for the results. A lost worker is
       restarted, its successor gets the memory, what the environments inherit, and the call again.
    4. ``close`` ends them.

    Args:
        config: of the workers.
        parts: numbers of the environments of each worker.
        inherit: returns what environments get that take the place of others, by their numbers and
            the number of earlier starts of their worker; None: of first ones.

    Attributes:
        parts: see above.
        handles: the workers.
        rows: memory of rewards, flags and observations; None before ``open``.
        lost: workers whose loss was not reported yet, with its cause.
    """

    def __init__(
        self,
        config: PoolConfig,
        parts: Sequence[range],
        inherit: Callable[[range, int | None], Inheritance],
    ) -> None:
        self.parts = parts
        self.rows: Any = None
        self.lost: dict[int, str] = {}
        self._inherit = inherit
        self._memory: Sequence[Any] = ()  # arguments of ``VectorRows``, and its offset
        count = len(parts)
        caller = _Caller(count)
        self._mailbox = caller.mailbox
        self._serving = [False] * count  # workers that serve calls in shared memory
        self._made = ExitStack()
        self._made.callback(caller.close)
        try:
            self._pool = WorkerPool(config, None, self._made, responder=caller)
            self.handles = cast(list[WorkerProxy], self._pool.handles)
            self._pool.start()
            infos = self._pool.built()
            firsts = {n: part.start for n, part in enumerate(parts)}
            place = WorkerPlace(firsts, parts[-1].stop, False, None)
            self._pool.open(infos, place)
            self._made.callback(self._pool.close)
            # ``starts`` when it got the shared memory
            self._opened: list[int | None] = [None] * count
        except BaseException:
            self._made.close()
            raise

    def open(self, space: spaces.Space[Any], *, shared: bool) -> None:
        """Make the shared memory; see ``VectorWorkers.open``."""
        memory = (space, self.parts[-1].stop, len(self.parts), shared)
        nbytes = VectorRows(*memory).nbytes
        offset = self._pool.arena.allocate(nbytes)
        self._memory = (*memory, offset)
        self.rows = VectorRows(*memory, self._pool.arena.view(offset, nbytes))
        for n in range(len(self.parts)):
            self._ensure(n)

    def close(self, *, terminate: bool) -> None:
        """End the workers; ``terminate``: kill them at once, without closing the environments."""
        if terminate:
            for handle in self.handles:
                if handle.alive:
                    handle.kill()
        if self.rows is not None:
            for n, handle in enumerate(self.handles):
                handle.stop(ALL_ORDERS)
                self.rows.exchanges[n].put_call(b"")
                if self._mailbox.question(n):
                    self._mailbox.answer(n, self._mailbox.question(n))
        self._made.close()

    def succeeded(self, n: int) -> None:
        """Note that a worker has returned what its environments did."""
        self.handles[n].life.has_completed()

    def may_replace(self, n: int) -> bool:
        """Return whether an environment of a worker may be replaced once more, and count that."""
        return self.handles[n].life.may_restart(_MOST_RESTARTS)

    # --- calls ------------------------------------------------------------------------------------

    def all(self, calls: Mapping[int, SliceCall]) -> dict[int, Any]:
        """Send a call to each worker, and return the results, by worker."""
        for n, call in calls.items():
            self.post(n, call)
        return self.results(calls)

    def post(self, n: int, call: SliceCall) -> None:
        """Send a call to a worker; a lost one is started first."""
        self._ensure(n)
        self._post(n, call)

    def _post(self, n: int, call: SliceCall) -> None:
        """Send a call to a worker, through shared memory if it fits."""
        method, args = call
        if method is EnvSlice.step and n in self.lost:
            method = EnvSlice.truncate
            args = args[:1]
        sent = packed((method, args), "the arguments")
        handle = self.handles[n]
        mailbox = self._mailbox
        if self._serving[n] and not mailbox.question(n):
            self._wait()  # for a call whose result was not taken, because of Ctrl-C or an error
            if not mailbox.question(n):
                self._serving[n] = False
                with suppress(MusterError):
                    handle.answer()
                self._ensure(n)
        if self.rows is not None and len(sent) <= Exchange.ROOM:
            self.rows.exchanges[n].put_call(sent)
            if self._serving[n]:
                mailbox.answer(n, mailbox.question(n))
                return
            self._serving[n] = True
            handle.post(partial(self._send_serve, n))
            return
        if self._serving[n]:
            self.rows.exchanges[n].put_call(b"")
            mailbox.answer(n, mailbox.question(n))
            self._serving[n] = False
            answer = handle.answer()
            if answer is None:
                self._ensure(n)
            else:
                value_of(answer)  # raises its failure
        handle.post(lambda number: handle.send(Tell(execute, (sent,), number)))

    def _send_serve(self, n: int, number: int) -> None:
        self._mailbox.expect(n, number)
        self.handles[n].send(Tell(serve, (number,), number))

    def _result(self, n: int, deadline: float | None) -> Answer | None:
        """Return the answer to a call of a worker; None if the worker was lost."""
        if self._serving[n] and self._mailbox.question(n):
            return Answer(0, self.rows.exchanges[n].result())
        self._serving[n] = False
        try:
            # a result that is too large for the shared memory, or an error
            return self.handles[n].answer(deadline)
        except NotAnswered:
            raise TimeIsUp from None

    def _wait(self, deadline: float | None = None) -> None:
        """Wait until all workers that serve calls in shared memory have a result, or are lost."""
        group = range(len(self.parts))
        look = self._mailbox.look

        def ready() -> bool:
            asking, at_work = look(group)
            return len(asking) == at_work

        while not ready():
            seconds = LOOK_S
            if deadline is not None:
                seconds = min(LOOK_S, deadline - time.monotonic())
            if seconds <= 0:
                raise TimeIsUp
            self._mailbox.sleep(ready, seconds)
            if not ready():
                self._look()

    @postponed()
    def _look(self) -> None:
        """Detect workers that have died or hang."""
        self._pool.wait(0.0, revives=False)

    def results(
        self,
        calls: Mapping[int, Any],
        deadline: float | None = None,
    ) -> dict[int, Any]:
        """Return the results of calls, by worker.

        The successor of a lost worker gets its call again.
        """
        results = {}
        for n, call in calls.items():
            try:
                while n not in results:
                    self._wait(deadline)
                    answer = self._result(n, deadline)
                    if answer is None:
                        self.post(n, call)
                    else:
                        results[n] = value_of(answer)
            except MusterError as error:
                self._locate(n, error)
                raise
        return results

    def _ensure(self, n: int) -> None:
        """Give a worker that was started the shared memory, and a successor what its predecessor
        knew.

        Starts a lost worker if its pool does not.
        """
        handle = self.handles[n]
        while self.rows is not None and (
            not handle.alive or handle.starts != self._opened[n]
        ):
            if not handle.alive and not handle.reviving:
                self._pool.begin_or_raise(handle)
            self._pool.wait_for(handle, partial(getattr, handle, "alive"))
            is_successor = self._opened[n] is not None
            if is_successor:
                self.lost[n] = str(handle.cause).partition("\n")[0]
            self._opened[n] = handle.starts
            self._serving[n] = False
            handle.post(partial(self._send_rows, n, is_successor))
            answer = handle.answer()
            if answer is not None:
                value_of(answer)  # raises its failure

    def _send_rows(
        self,
        n: int,
        is_successor: bool,
        number: int,
    ) -> None:
        generation = self.handles[n].config.generation if is_successor else None
        *memory, offset = self._memory
        inherited = self._inherit(self.parts[n], generation)
        self.handles[n].send(Tell(open_rows, (*memory, offset, *inherited), number))

    def _locate(self, n: int, error: MusterError) -> None:
        """Add the environment at work to the error of a worker, and what to do."""
        part = self.parts[n]
        if isinstance(error, (WorkerDied, WorkerHung)) and error.phase in (
            "step",
            "reset",
        ):
            error.env_index = int(self.handles[n].process.status_page.cells[STEPPING])
        index = getattr(error, "env_index", None)
        if index is None:
            return
        error.env_id = part.start + index
        remedy = (
            "Call reset() to go on; with on_failure='restart', a failure truncates the episode"
            " instead."
        )
        error.args = (f"{error}\n\nThe environment is number {error.env_id}. {remedy}",)


class _Caller:
    """The ``Responder`` of a vector environment's workers: the thread that steps them.

    It answers when the user makes the next call, which may take any time.
    """

    def __init__(self, workers: int) -> None:
        self.mailbox = Mailbox(workers, [range(workers)])

    def waits(self, worker: int) -> bool:
        return bool(self.mailbox.question(worker))

    def check(self) -> None:
        """Do nothing: the user has no deadline."""

    def excuse(self, seconds: float) -> None:
        """Do nothing, for the same reason."""

    def lost(self, worker: int, groups: Sequence[int]) -> None:
        self.mailbox.reset(worker)

    def close(self) -> None:
        self.mailbox.close()


def config_of(
    env_fns: Sequence[Callable[[], Any]],
    mode: AutoresetMode,
    num_workers: int | None,
    on_failure: Literal["raise", "restart"],
    timeouts: Mapping[str, float | None],
    start_method: Literal["forkserver", "spawn"] | None,
) -> tuple[PoolConfig, list[range]]:
    """Return the config of the workers, and the numbers of the environments of each."""
    if not env_fns:
        raise BadOption("env_fns is empty: pass a function for each environment.")
    if on_failure not in ("raise", "restart"):
        raise BadOption(f"on_failure={on_failure!r}: expected 'raise' or 'restart'.")
    check_timeouts(timeouts)
    workers = max(1, int(usable_cores()))
    if num_workers is not None:
        workers = integer("num_workers", num_workers)
    count = min(len(env_fns), workers)
    numbers = np.array_split(np.arange(len(env_fns)), count)
    parts = [range(part[0], part[-1] + 1) for part in numbers]
    # without the methods for rollouts
    make = cast(Any, EnvSlice)
    replaces = on_failure == "restart"
    factories = []
    for part in parts:
        own = env_fns[part.start : part.stop]
        factories.append(partial(make, own, part.start, mode, replaces=replaces))
    kwargs = dumps([None], "no arguments")
    options = dumps(_SETTING, "the options")
    configs = []
    for n, factory in enumerate(factories):
        made_by = [dumps(factory, "env_fns")]
        configs.append(
            WorkerConfig(n, [n], made_by, kwargs, b"", False, options, served_by=count)
        )
    origins = [EnvFactory(factory) for factory in factories]
    config = PoolConfig(
        configs,
        dumps(None, "no policy"),
        count,
        None,
        origins,
        None,
        timeouts,
        SupervisionOptions(on_failure=on_failure, start_method=start_method),
        registered=ids_of_this_process(),
    )
    return config, parts
