"""Environments in worker processes, which the caller resets and steps together: the parts of a
vector environment.
"""

from __future__ import annotations

import multiprocessing
import pickle
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from typing import Any, Literal, cast

import numpy as np
from gymnasium import spaces
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector import AutoresetMode
from gymnasium.vector.async_vector_env import AsyncState
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from muster.errors import (
    BadOption,
    CollectorClosed,
    CollectorTimeout,
    EnvError,
    MusterError,
    WorkerDied,
    WorkerHung,
)
from muster.restore.crash_report import EnvFactory
from muster.restore.pickling import dumps
from muster.restore.registered import ids_of_this_process
from muster.rng import seeds_of
from muster.rollout.columns import RolloutOptions
from muster.rollout.progress import ALL_ORDERS, STEPPING
from muster.utils.cpus import usable_cores
from muster.utils.forks import Owner
from muster.utils.integers import integer
from muster.utils.interrupts import postponed
from muster.vector.env_slice import EnvSlice, Exchange, Infos, VectorRows, execute, open_rows, serve
from muster.workers.build import WorkerOptions
from muster.workers.config import PoolConfig, WorkerConfig, WorkerPlace, check_timeouts
from muster.workers.launch import in_process
from muster.workers.lives import Restarted
from muster.workers.mailbox import LOOK_S, Mailbox
from muster.workers.messages import Tell
from muster.workers.proxy import WorkerProxy
from muster.workers.supervision import Supervisor

MAX_RESTARTS = 10  # of a worker within a minute, as for collectors
SliceCall = tuple[Callable[..., Any], Sequence[Any]]  # a method of ``EnvSlice``, and its arguments
PROTOCOL = pickle.HIGHEST_PROTOCOL
_PLAIN = (EnvSlice.step, EnvSlice.truncate)  # without functions and objects of the user
_OPTIONS = WorkerOptions(
    1, True, None, None, None, "random", False, None, False, False, RolloutOptions()
)


class EnvsClosed(CollectorClosed, ClosedEnvironmentError):
    """A vector environment was closed."""


class CallPending(BadOption, AlreadyPendingCallError):
    """A call came while the results of another one were not taken yet."""

    def __init__(self, call: str, pending: AsyncState) -> None:
        message = (
            f"Calling `{call}` while waiting for a pending call to `{pending.value}` to complete."
            f" Call {pending.value}_wait() first."
        )
        AlreadyPendingCallError.__init__(self, message, pending.value)


class NoCallPending(BadOption, NoAsyncCallError):
    """The results of a call were requested that was not made."""

    def __init__(self, awaited: AsyncState) -> None:
        name = awaited.value
        message = (
            f"Calling `{name}_wait` without any prior call to `{name}_async`. There are no results"
            f" without a {name}: call {name}_async(...) first."
        )
        NoAsyncCallError.__init__(self, message, name)


class CallTimeout(CollectorTimeout, multiprocessing.TimeoutError):
    """The results of a call did not arrive within the given time."""


class VectorWorkers:
    """``num_envs`` environments in worker processes.

    Args:
        env_fns: functions that make the environments.
        mode: when an environment that has ended is reset.
        num_workers: number of processes; None: one for each CPU that this process may use.
        on_failure: "raise" or "restart" after a worker dies or hangs, or an environment raises.
        timeouts: seconds without progress after which a worker counts as hanging, by phase.
        start_method: see ``MultiSyncCollector``.

    Attributes:
        described: observation space, action space, metadata and render mode of each environment.
        infos: infos of the last step or reset, as pairs of a number of an environment and its info.
        rows: memory of rewards, flags and observations.
        failure: error after which all environments have to be reset.
        state: the call that was sent and whose results were not taken. DEFAULT: none.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Any]],
        mode: AutoresetMode,
        *,
        num_workers: int | None,
        on_failure: Literal["raise", "restart"],
        timeouts: Mapping[str, float | None] | None,
        start_method: Literal["forkserver", "spawn"] | None,
    ) -> None:
        config, self._parts = _config(
            env_fns, mode, num_workers, on_failure, timeouts or {}, start_method
        )
        self.num_envs = len(env_fns)
        self.infos: Infos = []
        self.state = AsyncState.DEFAULT
        self._calls: dict[int, SliceCall] = {}  # the call that was sent, by worker
        self._called: list[int] = []  # the environments that a function was sent to
        self._is_complete = False  # the reset that was sent is one of all environments
        self._half = 0  # half of ``rows.obs`` with the latest observations
        # the latest observations, if not in ``rows``
        self._objects: list[Any] = [None] * self.num_envs
        self.failure: BaseException | None = None
        self._closed = False
        self._owner = Owner("vector environment", "workers")
        self._seeds: list[int | None] = [None] * self.num_envs
        self._attributes: dict[int, dict[str, Any]] = {}
        self._lost: dict[int, str] = {}  # workers whose loss was not reported yet, with its cause
        count = len(self._parts)
        self._mailbox = _Caller(count)
        self._serving = [False] * count  # workers that serve calls in shared memory
        self._made = ExitStack()
        try:
            self._workers = Supervisor(config, None, self._made)
            self._workers.launch = in_process(start_method, light=True)
            self._workers.server = cast(Any, self._mailbox)
            self._handles = cast(list[WorkerProxy], self._workers.handles)
            self._workers.start()
            infos = self._workers.built()
            firsts = {n: part.start for n, part in enumerate(self._parts)}
            pool = self._workers.pool(infos, WorkerPlace(firsts, self.num_envs, False, None))
            self._made.callback(pool.close)
            # ``starts`` when it got the shared memory
            self._opened: list[int | None] = [None] * len(self._handles)
            self.rows: Any = None
            answers = self._all(dict.fromkeys(range(len(self._parts)), (EnvSlice.description, ())))
            self.described = [each for n in sorted(answers) for each in answers[n]]
        except BaseException:
            self._made.close()
            raise

    def open(self, space: spaces.Space[Any], *, shared: bool = True) -> None:
        """Make the shared memory, for observations in this space; not for the observations unless
        ``shared``.
        """
        self._space = space
        self._shared = shared
        self._batched = batch_space(space, self.num_envs)
        memory = space, self.num_envs, len(self._parts), shared
        nbytes = VectorRows(*memory).nbytes
        self._offset = self._workers.arena.allocate(nbytes)
        self.rows = VectorRows(*memory, self._workers.arena.view(self._offset, nbytes))
        for n in range(len(self._parts)):
            self._ensure(n)

    @property
    def observations(self) -> Any:
        """The latest observations of all environments.

        The step after the next one overwrites them.
        """
        if self.rows.obs is not None:
            return self.rows.obs[self._half]
        empty: Any = create_empty_array(self._space, n=self.num_envs)
        if any(obs is None for obs in self._objects):  # before the first reset
            return empty
        return concatenate(self._space, self._objects, empty)

    # --- steps and resets -------------------------------------------------------------------------

    def reset(self, arguments: Mapping[int, dict[str, Any]]) -> None:
        """Reset environments with these arguments, by number. Starts lost workers again."""
        self.send_reset(arguments)
        self.receive_reset()

    def send_reset(self, arguments: Mapping[int, dict[str, Any]]) -> None:
        """Send a reset of environments; see ``reset``."""
        self.check_idle("reset_async")
        complete = len(arguments) == self.num_envs
        if self.failure is not None and not complete:
            raise MusterError(self._refusal()) from self.failure
        for i, given in arguments.items():
            self._seeds[i] = given["seed"] if given.get("seed") is not None else self._seeds[i]
        calls: dict[int, SliceCall] = {}
        for n, part in enumerate(self._parts):
            own = {i - part.start: arguments[i] for i in part if i in arguments}
            calls[n] = EnvSlice.reset_envs, (self._half ^ 1, own)
        self.failure = None if complete else self.failure
        self._is_complete = complete
        self._send(AsyncState.WAITING_RESET, calls)

    def receive_reset(self, timeout: float | None = None) -> None:
        """Take the results of the reset that was sent; see ``receive``."""
        self.check_open()
        self._take(self._receive(AsyncState.WAITING_RESET, timeout))
        if self._is_complete:
            self._lost.clear()

    def send(self, actions: Any) -> None:
        """Send a step: an array ``[N, ...]``, or a list with an action for each environment."""
        self.check_idle("step_async")
        if self.failure is not None:
            raise MusterError(self._refusal()) from self.failure
        if len(actions) != self.num_envs:
            raise ValueError(f"{len(actions)} actions were given for {self.num_envs} environments.")
        calls: dict[int, SliceCall] = {}
        for n, part in enumerate(self._parts):
            calls[n] = EnvSlice.step, (self._half ^ 1, actions[part.start : part.stop])
        self._send(AsyncState.WAITING_STEP, calls)

    def receive(self, timeout: float | None = None) -> None:
        """Take the results of the step that was sent.

        Args:
            timeout: seconds; None: the workers' own deadlines.

        Raises:
            CallTimeout: the results have not arrived in time; all environments have to be reset.
        """
        self.check_open()
        self._take(self._receive(AsyncState.WAITING_STEP, timeout))
        for n, cause in self._lost.items():
            self.infos += [(i, {"muster": {"error": cause}}) for i in self._parts[n]]
        self._lost.clear()

    def drop(self) -> None:
        """Wait for the results of the call that was sent, if there is one, and discard them.

        Raises no error of it.
        """
        if self.state is not AsyncState.DEFAULT:
            with suppress(MusterError):
                self._receive(self.state, None)

    def _take(self, answers: Mapping[int, bytes | None]) -> None:
        self._half ^= 1
        self.infos = []
        for n, answer in answers.items():
            self._handles[n].record.fruitless = 0
            if answer is None:
                continue
            packed_infos, obs = pickle.loads(answer)
            infos = [(i, pickle.loads(info)) for i, info in packed_infos]
            self.infos += infos
            if obs is not None:
                self._objects[self._parts[n].start : self._parts[n].stop] = obs
            for _, info in infos:
                if "muster" in info and not self._handles[n].record.may_restart(MAX_RESTARTS):
                    self.failure = EnvError(
                        f"{info['muster']['error']}\n\nIt was replaced too often."
                    )
                    raise self.failure

    # --- calls ------------------------------------------------------------------------------------

    def each(self, function: Callable[[Any], Any], which: Iterable[int] | None = None) -> list[Any]:
        """Return the results of a function that is called with each environment, or with those of
        these numbers.
        """
        self.send_each(function, which)
        return self.receive_each()

    def send_each(self, function: Callable[[Any], Any], which: Iterable[int] | None = None) -> None:
        """Send a function that is called with environments; see ``each``."""
        self.check_idle("call_async")
        self._called = list(range(self.num_envs) if which is None else which)
        calls: dict[int, SliceCall] = {}
        for n, part in enumerate(self._parts):
            if own := [i - part.start for i in self._called if i in part]:
                calls[n] = EnvSlice.each, (own, function)
        self._send(AsyncState.WAITING_CALL, calls)

    def receive_each(self, timeout: float | None = None) -> list[Any]:
        """Return the results of the function that was sent.

        Args:
            timeout: seconds; None: the workers' own deadlines.

        Raises:
            CallTimeout: the results have not arrived in time, and are discarded.
        """
        self.check_open()
        results: dict[int, Any] = {}
        for n, answer in self._receive(AsyncState.WAITING_CALL, timeout).items():
            own = [i for i in self._called if i in self._parts[n]]
            results.update(zip(own, pickle.loads(answer), strict=True))
        return [results[i] for i in self._called]

    def set_attribute(self, name: str, values: Mapping[int, Any]) -> None:
        """Set an attribute of environments, by number.

        The environments of a restarted worker get it, too.
        """
        self.check_idle("set_attr")
        for i, value in values.items():
            self._attributes.setdefault(i, {})[name] = value
        calls: dict[int, SliceCall] = {}
        for n, part in enumerate(self._parts):
            if own := {i - part.start: values[i] for i in part if i in values}:
                calls[n] = EnvSlice.set_attributes, (name, own)
        self._all(calls)

    def close(self, timeout: float | None = None, *, terminate: bool = False) -> None:
        """Close the environments and end the workers, by force if necessary. May be called again.

        Args:
            timeout: seconds to wait for the call that was sent, if there is one. None: the deadline
                for closing.
            terminate: kill the workers at once, without closing the environments.
        """
        if self._closed or not self._owner.is_here():
            return
        self._closed = True
        try:
            if timeout is not None and not terminate and self.state is not AsyncState.DEFAULT:
                self._receive(self.state, timeout)
        except CallTimeout:
            terminate = True
        except MusterError:
            pass  # of a call whose results are not needed any more
        finally:
            self._end(terminate=terminate)

    def _end(self, *, terminate: bool) -> None:
        for handle in self._handles if terminate else ():
            if handle.alive:
                handle.kill()
        if self.rows is not None:
            for n, handle in enumerate(self._handles):
                handle.stop(ALL_ORDERS)
                self.rows.exchanges[n].put_call(b"")
                if self._mailbox.question(n):
                    self._mailbox.answer(n, self._mailbox.question(n))
        self._made.close()

    def check_idle(self, call: str) -> None:
        """Raise an error if this call is not possible now: this is closed, or another call is under
        way.
        """
        self.check_open()
        if self.state is not AsyncState.DEFAULT:
            raise CallPending(call, self.state)

    def check_open(self) -> None:
        self._owner.check()
        if self._closed:
            raise EnvsClosed("This vector environment was closed.")

    def _refusal(self) -> str:
        kind = type(self.failure).__name__
        return (
            f"After {kind} in the last call the environments are not at the same step: call"
            " reset()."
        )

    # --- messages ---------------------------------------------------------------------------------

    def _send(self, state: AsyncState, calls: dict[int, SliceCall]) -> None:
        """Send a call to each worker.

        After an error in a step or reset, all environments have to be reset.
        """
        self._calls = calls
        try:
            for n, call in calls.items():
                self._ensure(n)
                self._post(n, call)
        except BaseException as error:  # some have got their calls
            self._failed(state, error)
            raise
        self.state = state

    def _receive(self, state: AsyncState, timeout: float | None) -> dict[int, Any]:
        """Return the results of the call that was sent, by worker."""
        if self.state is not state:
            raise NoCallPending(state)
        deadline = None if timeout is None else time.monotonic() + timeout
        self.state = AsyncState.DEFAULT
        try:
            return self._results(self._calls, deadline)
        except _TimeIsUp:
            error = CallTimeout(self._late(state, timeout))
            self._failed(state, error)
            raise error from None
        except BaseException as error:
            self._failed(state, error)
            raise

    def _failed(self, state: AsyncState, error: BaseException) -> None:
        if state is not AsyncState.WAITING_CALL:
            self.failure = error

    def _late(self, state: AsyncState, timeout: float | None) -> str:
        remedy = (
            "Its results are discarded."
            if state is AsyncState.WAITING_CALL
            else "Call reset() to go on."
        )
        return f"The call to `{state.value}_wait` has timed out after {timeout} second(s). {remedy}"

    def _post(self, n: int, call: SliceCall) -> None:
        """Send a call to a worker, through shared memory if it fits."""
        method, args = call
        if method is EnvSlice.step and n in self._lost:
            method, args = EnvSlice.truncate, args[:1]
        sent = (
            pickle.dumps((method, args), PROTOCOL)
            if method in _PLAIN
            else dumps((method, args), "the arguments")
        )
        handle = self._handles[n]
        mailbox = self._mailbox
        if self._serving[n] and not mailbox.question(n):
            self._wait()  # for a call whose result was not taken, because of Ctrl-C or an error
            if not mailbox.question(n):
                self._serving[n] = False
                with suppress(MusterError, Restarted):
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
            handle.answer()
        handle.post(lambda number: handle.send(Tell(execute, (sent,), number)))

    def _send_serve(self, n: int, number: int) -> None:
        self._mailbox.expect(n, number)
        self._handles[n].send(Tell(serve, (number,), number))

    def _result(self, n: int, deadline: float | None) -> Any:
        """Return the result of a call to a worker. Raises ``Restarted`` if the worker was lost."""
        if self._serving[n] and self._mailbox.question(n):
            return self.rows.exchanges[n].result()
        self._serving[n] = False
        handle = self._handles[n]
        if deadline is not None and not handle.is_answered(deadline):
            raise _TimeIsUp
        return handle.answer()  # a result that is too large for the shared memory, or an error

    def _wait(self, deadline: float | None = None) -> None:
        """Wait until all workers that serve calls in shared memory have a result, or are lost."""
        group = range(len(self._parts))
        look = self._mailbox.look

        def ready() -> bool:
            asking, at_work = look(group)
            return len(asking) == at_work

        while not ready():
            seconds = LOOK_S if deadline is None else min(LOOK_S, deadline - time.monotonic())
            if seconds <= 0:
                raise _TimeIsUp
            self._mailbox.sleep(ready, seconds)
            if not ready():
                self._look()

    @postponed()
    def _look(self) -> None:
        """Detect workers that have died or hang."""
        self._workers.wait(0.0, revives=False)

    def _all(self, calls: dict[int, SliceCall]) -> dict[int, Any]:
        """Send a call to each worker, and return the results, by worker."""
        for n, call in calls.items():
            self._ensure(n)
            self._post(n, call)
        return self._results(calls)

    def _results(self, calls: Mapping[int, Any], deadline: float | None = None) -> dict[int, Any]:
        """Return the results of calls, by worker.

        The successor of a lost worker gets its call again.
        """
        results = {}
        for n, call in calls.items():
            try:
                while n not in results:
                    self._wait(deadline)
                    try:
                        results[n] = self._result(n, deadline)
                    except Restarted:
                        self._ensure(n)
                        self._post(n, call)
            except MusterError as error:
                self._locate(n, error)
                raise
        return results

    def _ensure(self, n: int) -> None:
        """Give a worker that was started the shared memory, and a successor what its predecessor
        knew.

        Starts a lost worker if its supervisor does not.
        """
        handle = self._handles[n]
        while self.rows is not None and (not handle.alive or handle.starts != self._opened[n]):
            if not handle.alive and not handle.reviving:
                self._workers.begin_or_raise(handle)
            with suppress(Restarted):
                self._workers.wait_for(handle, partial(getattr, handle, "alive"))
            is_successor = self._opened[n] is not None
            if is_successor:
                self._lost[n] = str(handle.cause).partition("\n")[0]
            self._opened[n], self._serving[n] = handle.starts, False
            handle.post(partial(self._send_rows, n, is_successor))
            with suppress(Restarted):
                handle.answer()

    def _send_rows(self, n: int, is_successor: bool, number: int) -> None:
        part = self._parts[n]
        generation = self._handles[n].config.generation
        seeds: list[int | None] = [None] * len(part)
        last = None
        if is_successor:
            last = list(iterate(self._batched, self.observations))[part.start : part.stop]
            given = [self._seeds[i] for i in part]
            seeds = [
                None if seed is None else seeds_of(seed, [i], generation)[0]
                for i, seed in zip(part, given, strict=True)
            ]
        attributes = dumps(
            {i - part.start: self._attributes[i] for i in part if i in self._attributes},
            "attributes",
        )
        memory = self._space, self.num_envs, len(self._parts), self._shared, self._offset
        self._handles[n].send(Tell(open_rows, (*memory, last, seeds, attributes), number))

    def _locate(self, n: int, error: MusterError) -> None:
        """Add the environment at work to the error of a worker, and what to do."""
        part = self._parts[n]
        if isinstance(error, (WorkerDied, WorkerHung)) and error.phase in ("step", "reset"):
            error.env_index = int(self._handles[n].process.status_page.cells[STEPPING])
        if (index := getattr(error, "env_index", None)) is None:
            return
        error.env_id = part.start + index
        remedy = (
            "Call reset() to go on; with on_failure='restart', a failure truncates the episode"
            " instead."
        )
        error.args = (f"{error}\n\nThe environment is number {error.env_id}. {remedy}",)


def method_of(context: str) -> Literal["forkserver", "spawn"] | None:
    """Return Muster's start method for one of ``multiprocessing``; None, as the system allows, for
    "fork".
    """
    known: dict[str, Literal["forkserver", "spawn"] | None] = {
        "forkserver": "forkserver",
        "spawn": "spawn",
        "fork": None,
    }
    if context not in known:
        raise BadOption(f"cannot find context for {context!r}: expected one of {sorted(known)}.")
    return known[context]


class _TimeIsUp(Exception):
    """The deadline of a call has passed."""


class _Caller(Mailbox):
    """The caller of a vector environment, in the place of an ``InferenceServer``: it answers the
    workers' questions.
    """

    def __init__(self, workers: int) -> None:
        super().__init__(workers, [range(workers)])
        self.mailbox = self
        self.actor = self
        self.held = nullcontext
        self.waits = self.question

    def open(self, *_: object) -> None:
        """Do nothing: there is no policy."""

    def reseed(self, *_: object) -> None:
        """Do nothing: there are no random streams of a policy."""

    def check(self) -> None:
        """Do nothing: the caller has no deadline."""

    def lost(self, worker: int, groups: Sequence[int]) -> None:
        """Clear the question of a lost worker."""
        self.reset(worker)


def _config(
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
    count = min(
        len(env_fns),
        max(1, int(usable_cores())) if num_workers is None else integer("num_workers", num_workers),
    )
    parts = [
        range(part[0], part[-1] + 1) for part in np.array_split(np.arange(len(env_fns)), count)
    ]
    # without the methods for rollouts
    replaces, make = on_failure == "restart", cast(Any, EnvSlice)
    factories = [
        partial(make, env_fns[part.start : part.stop], part.start, mode, replaces=replaces)
        for part in parts
    ]
    kwargs, options = dumps([None], "no arguments"), dumps(_OPTIONS, "the options")
    workers = [
        WorkerConfig(
            n, [n], [dumps(factory, "env_fns")], kwargs, b"", False, options, served_by=count
        )
        for n, factory in enumerate(factories)
    ]
    origins = [EnvFactory(factory) for factory in factories]
    config = PoolConfig(
        workers,
        dumps(None, "no policy"),
        count,
        None,
        origins,
        None,
        None,
        on_failure,
        timeouts,
        MAX_RESTARTS,
        start_method,
        registered=ids_of_this_process(),
    )
    return config, parts
