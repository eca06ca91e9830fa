"""Environments in worker processes, which the caller resets and steps together: the parts of a
vector environment.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from gymnasium import spaces
from gymnasium.error import (
    AlreadyPendingCallError,
    ClosedEnvironmentError,
    NoAsyncCallError,
)
from gymnasium.vector import AutoresetMode
from gymnasium.vector.async_vector_env import AsyncState
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from muster.errors import (
    BadOption,
    CollectorClosed,
    CollectorTimeout,
    EnvError,
    MusterError,
)
from muster.restore.pickling import dumps, loads
from muster.rng import seeds_of
from muster.utils.forks import Owner
from muster.vector.env_slice import EnvSlice, Info
from muster.vector.rows import VectorRows
from muster.vector.slices import Inheritance, SliceCall, Slices, TimeIsUp, config_of


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
        infos: those of the last step or reset, in order.
        failure: error after which all environments have to be reset.
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
        config, parts = config_of(
            env_fns,
            mode,
            num_workers,
            on_failure,
            {} if timeouts is None else timeouts,
            start_method,
        )
        self.num_envs = len(env_fns)
        self.infos: list[Info] = []
        self.failure: BaseException | None = None
        self._sent: _Sent | None = None
        self._observations: _Observations  # from ``open`` on
        self._closed = False
        self._owner = Owner("vector environment", "workers")
        self._seeds: list[int | None] = [None] * self.num_envs
        self._attributes: dict[int, dict[str, Any]] = {}  # that the user has set
        self._slices = Slices(config, parts, self._inheritance)
        try:
            call: SliceCall = (EnvSlice.description, ())
            described = dict.fromkeys(range(len(parts)), call)
            answers = self._slices.all(described)
        except BaseException:
            self._slices.close(terminate=False)
            raise
        self.described = [each for n in sorted(answers) for each in answers[n]]

    def open(self, space: spaces.Space[Any], *, shared: bool = True) -> None:
        """Make the shared memory, for observations in this space; not for the observations unless
        ``shared``.
        """
        self._observations = _Observations(space, self.num_envs)
        self._slices.open(space, shared=shared)

    @property
    def rows(self) -> Any:
        """Memory of rewards, flags and observations."""
        return self._slices.rows

    @property
    def state(self) -> AsyncState:
        """The call that was sent and whose results were not taken. DEFAULT: none."""
        return AsyncState.DEFAULT if self._sent is None else self._sent.state

    @property
    def observations(self) -> Any:
        """The latest observations of all environments.

        The step after the next one overwrites them.
        """
        return self._observations.latest(self.rows)

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
            if given.get("seed") is not None:
                self._seeds[i] = given["seed"]
        calls: dict[int, SliceCall] = {}
        for n, part in enumerate(self._slices.parts):
            own = {i - part.start: arguments[i] for i in part if i in arguments}
            half = self._observations.next_half
            calls[n] = (EnvSlice.reset_envs, (half, own))
        if complete:
            self.failure = None
        self._send(_Sent(AsyncState.WAITING_RESET, calls, complete=complete))

    def receive_reset(self, timeout: float | None = None) -> None:
        """Take the results of the reset that was sent; see ``receive``."""
        self.check_open()
        sent, answers = self._receive(AsyncState.WAITING_RESET, timeout)
        self._take(answers)
        if sent.complete:
            self._slices.lost.clear()

    def send(self, actions: Any) -> None:
        """Send a step: an array ``[N, ...]``, or a list with an action for each environment."""
        self.check_idle("step_async")
        if self.failure is not None:
            raise MusterError(self._refusal()) from self.failure
        if len(actions) != self.num_envs:
            raise BadOption(
                f"{len(actions)} actions were given for {self.num_envs} environments."
            )
        calls: dict[int, SliceCall] = {}
        for n, part in enumerate(self._slices.parts):
            own = actions[part.start : part.stop]
            calls[n] = (EnvSlice.step, (self._observations.next_half, own))
        self._send(_Sent(AsyncState.WAITING_STEP, calls))

    def receive(self, timeout: float | None = None) -> None:
        """Take the results of the step that was sent.

        Args:
            timeout: seconds; None: the workers' own deadlines.

        Raises:
            CallTimeout: the results have not arrived in time; all environments have to be reset.
        """
        self.check_open()
        _, answers = self._receive(AsyncState.WAITING_STEP, timeout)
        self._take(answers)
        for n, cause in self._slices.lost.items():
            for i in self._slices.parts[n]:
                self.infos.append(Info(i, "failure", {"muster": {"error": cause}}))
        self._slices.lost.clear()

    def drop(self) -> None:
        """Wait for the results of the call that was sent, if there is one, and discard them.

        Raises no error of it.
        """
        if self.state is not AsyncState.DEFAULT:
            with suppress(MusterError):
                self._receive(self.state, None)

    def _take(self, answers: Mapping[int, bytes | None]) -> None:
        self._observations.turn()
        self.infos = []
        for n, answer in answers.items():
            self._slices.succeeded(n)
            if answer is None:
                continue
            try:
                packed_infos, obs = loads(answer, "the observations of a worker")
                infos = [
                    Info(i, kind, loads(info, f"the info of environment {i}"))
                    for i, kind, info in packed_infos
                ]
            except BadOption as unreadable:
                self.failure = unreadable
                raise
            self.infos += infos
            if obs is not None:
                self._observations.keep(self._slices.parts[n], obs)
            for _, kind, info in infos:
                if kind == "failure" and not self._slices.may_replace(n):
                    error = info["muster"]["error"]
                    self.failure = EnvError(f"{error}\n\nIt was replaced too often.")
                    raise self.failure

    # --- calls ------------------------------------------------------------------------------------

    def each(
        self,
        function: Callable[[Any], Any],
        which: Iterable[int] | None = None,
    ) -> list[Any]:
        """Return the results of a function that is called with each environment, or with those of
        these numbers.
        """
        self.send_each(function, which)
        return self.receive_each()

    def send_each(
        self,
        function: Callable[[Any], Any],
        which: Iterable[int] | None = None,
    ) -> None:
        """Send a function that is called with environments; see ``each``."""
        self.check_idle("call_async")
        called = list(range(self.num_envs) if which is None else which)
        calls: dict[int, SliceCall] = {}
        for n, part in enumerate(self._slices.parts):
            own = [i - part.start for i in called if i in part]
            if own:
                calls[n] = (EnvSlice.each, (own, function))
        self._send(_Sent(AsyncState.WAITING_CALL, calls, which=called))

    def receive_each(self, timeout: float | None = None) -> list[Any]:
        """Return the results of the function that was sent.

        Args:
            timeout: seconds; None: the workers' own deadlines.

        Raises:
            CallTimeout: the results have not arrived in time, and are discarded.
        """
        self.check_open()
        sent, answers = self._receive(AsyncState.WAITING_CALL, timeout)
        results: dict[int, Any] = {}
        for n, answer in answers.items():
            own = [i for i in sent.which if i in self._slices.parts[n]]
            results.update(zip(own, loads(answer, "a result"), strict=True))
        return [results[i] for i in sent.which]

    def set_attribute(self, name: str, values: Mapping[int, Any]) -> None:
        """Set an attribute of environments, by number.

        The environments of a restarted worker get it, too.
        """
        self.check_idle("set_attr")
        for i, value in values.items():
            self._attributes.setdefault(i, {})[name] = value
        calls: dict[int, SliceCall] = {}
        for n, part in enumerate(self._slices.parts):
            own = {i - part.start: values[i] for i in part if i in values}
            if own:
                calls[n] = (EnvSlice.set_attributes, (name, own))
        self._slices.all(calls)

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
            if (
                timeout is not None
                and not terminate
                and self.state is not AsyncState.DEFAULT
            ):
                self._receive(self.state, timeout)
        except CallTimeout:
            terminate = True
        except MusterError:
            pass  # of a call whose results are not needed any more
        finally:
            self._slices.close(terminate=terminate)

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

    def _send(self, sent: _Sent) -> None:
        """Send a call to each worker.

        After an error in a step or reset, all environments have to be reset.
        """
        try:
            for n, call in sent.calls.items():
                self._slices.post(n, call)
        except BaseException as error:  # some have got their calls
            self._failed(sent.state, error)
            raise
        self._sent = sent

    def _receive(
        self,
        state: AsyncState,
        timeout: float | None,
    ) -> tuple[_Sent, dict[int, Any]]:
        """Return the call that was sent, and its results by worker."""
        sent = self._sent
        if sent is None or sent.state is not state:
            raise NoCallPending(state)
        deadline = None if timeout is None else time.monotonic() + timeout
        self._sent = None
        try:
            return sent, self._slices.results(sent.calls, deadline)
        except TimeIsUp:
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
        remedy = "Call reset() to go on."
        if state is AsyncState.WAITING_CALL:
            remedy = "Its results are discarded."
        return f"The call to `{state.value}_wait` has timed out after {timeout} second(s). {remedy}"

    def _inheritance(self, part: range, generation: int | None) -> Inheritance:
        """Return what environments get; see ``Slices``."""
        last: list[Any] | None = None
        seeds: list[int | None] = [None] * len(part)
        if generation is not None:
            last = self._observations.of(part, self.rows)
            for place, i in enumerate(part):
                seed = self._seeds[i]
                if seed is not None:
                    (seeds[place],) = seeds_of(seed, [i], generation)
        attributes = {
            i - part.start: self._attributes[i] for i in part if i in self._attributes
        }
        return last, seeds, dumps(attributes, "attributes")


@dataclass(frozen=True)
class _Sent:
    """A call whose results were not taken yet.

    Attributes:
        state: what it is.
        calls: by worker.
        which: numbers of the environments that a function was sent to.
        complete: it is a reset of all environments.
    """

    state: AsyncState
    calls: Mapping[int, SliceCall]
    which: Sequence[int] = ()
    complete: bool = False


class _Observations:
    """The latest observations of all environments, in shared memory or as objects.

    Args:
        space: observation space of one environment.
        num_envs: number of environments.
    """

    def __init__(self, space: spaces.Space[Any], num_envs: int) -> None:
        self._space = space
        self._batched = batch_space(space, num_envs)
        self._half = 0  # of the shared memory, with the latest observations
        self._objects: list[Any] = [None] * num_envs  # if they are not in shared memory

    @property
    def next_half(self) -> int:
        """Half of the shared memory that the next step writes."""
        return self._half ^ 1

    def turn(self) -> None:
        """Note that the next half has the latest observations."""
        self._half ^= 1

    def keep(self, part: range, obs: Sequence[Any]) -> None:
        """Keep observations that are not in shared memory."""
        self._objects[part.start : part.stop] = obs

    def latest(self, rows: VectorRows) -> Any:
        """Return them in the structure of the space. The step after the next one overwrites them."""
        if rows.obs is not None:
            return rows.obs[self._half]
        empty: Any = create_empty_array(self._space, n=len(self._objects))
        if any(obs is None for obs in self._objects):  # before the first reset
            return empty
        return concatenate(self._space, self._objects, empty)

    def of(self, part: range, rows: VectorRows) -> list[Any]:
        """Return those of some environments."""
        every = list(iterate(self._batched, self.latest(rows)))
        return every[part.start : part.stop]


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
        raise BadOption(
            f"cannot find context for {context!r}: expected one of {sorted(known)}."
        )
    return known[context]
