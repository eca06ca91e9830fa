"""The environments of one worker of a vector environment, and the calls that the worker executes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import concatenate

from muster.env_spec import EnvSpec
from muster.envs import checks, coroutines
from muster.envs.build import advice_for
from muster.errors import EnvError, UnsupportedEnv, described
from muster.memory.objects import copied
from muster.protocols import EnvBatch
from muster.restore.pickling import packed, unpickle
from muster.rng import GroupRng, UserStreams, seeds_of
from muster.rollout.progress import ACTING, ORDER, PHASE, STEPPING, STOP, Phase
from muster.vector.rows import VectorRows, part_of

if TYPE_CHECKING:
    from muster.workers.main import WorkerMain

# "final": ``final_obs`` and ``final_info`` of an episode that ended, with SAME_STEP; "failure": why an
# environment was made again
InfoKind = Literal["step", "final", "reset", "failure"]
# ``(number, kind, pickled info)``: pickled at once, since the environment may change it in its next call
PackedInfos = list[tuple[int, InfoKind, bytes]]

RETURNED = "what the environments returned"  # in errors
REMEDY = "Let the environment return values that can be pickled."


class Info(NamedTuple):
    """An info that is not empty; an environment may have several of different kinds.

    Attributes:
        env: number of the environment.
        kind: where it comes from, which its keys do not tell: they are the environment's.
        values: the info.
    """

    env: int
    kind: InfoKind
    values: dict[str, Any]


# --- messages to a worker -------------------------------------------------------------------------


def execute(main: WorkerMain, call: bytes) -> Any:
    """Call a pickled method of the worker's ``EnvSlice`` with its arguments."""
    method, args = unpickle(call)
    return method(main.built[0], *args)


def serve(main: WorkerMain, number: int) -> bytes | None:
    """Execute calls in shared memory, until one is empty, or its result is too large; return that.

    Args:
        number: number of the answer.
    """
    envs: Any = main.built[0]
    calls = 0
    cells = main.progress.cells
    exchange = envs.shared.exchange
    mailbox = main.mailbox
    assert mailbox is not None
    try:
        while (call := exchange.call()) is not None:
            calls += 1
            cells[ORDER] += (
                1  # a sign of life, also if the worker has only one environment
            )
            method, args = call
            result: bytes | None = method(envs, *args)
            if cells[STOP] or (result is not None and len(result) > exchange.ROOM):
                return result
            exchange.put_result(result)
            cells[PHASE] = Phase.IDLE
            mailbox.ask(1, calls)
        return None
    finally:
        mailbox.finished(number)


def open_rows(main: WorkerMain, *args: Any) -> None:
    """Call ``EnvSlice.open``."""
    envs: Any = main.built[0]
    envs.open(main, *args)


class EnvSlice(EnvBatch):
    """The environments ``first``, ``first + 1``, ... of a vector environment.

    They are stepped one after another.

    Each environment has global random streams of its own (``random``, NumPy's and torch's), which
    its seed determines: what it draws depends neither on the other environments nor on the number
    of workers.

    Args:
        env_fns: functions that make the environments.
        mode: when an environment that has ended is reset.
        replaces: make an environment again if it raises an error, instead of raising that.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Any]],
        first: int,
        mode: AutoresetMode,
        *,
        replaces: bool,
    ) -> None:
        self._env_fns = env_fns
        self._first = first
        self._mode = mode
        self._replaces = replaces
        self.num_envs = len(env_fns)
        self._streams = _EnvStreams(len(env_fns))
        self.envs: list[Any] = []
        try:
            for i in range(self.num_envs):
                self.envs.append(self._made(i))
        except BaseException:
            with suppress(Exception):
                self.close()
            raise
        name = type(self.envs[0]).__name__
        # no rollout is made
        self.spec = EnvSpec(name, self.num_envs, (self.num_envs,), {}, {})
        self._due = [
            False
        ] * self.num_envs  # environments to be reset before the next step
        self._histories = [_History(None) for _ in env_fns]

    def objects(self) -> Sequence[object]:
        return self.envs

    def description(self) -> list[tuple[Any, Any, Any, Any]]:
        """Return the observation space, action space, metadata and render mode of each environment."""
        return [
            (env.observation_space, env.action_space, env.metadata, env.render_mode)
            for env in self.envs
        ]

    def open(
        self,
        main: WorkerMain,
        space: spaces.Space[Any],
        num_envs: int,
        workers: int,
        shared: bool,
        offset: int,
        last: Sequence[Any] | None,
        seeds: Sequence[int | None],
        attributes: bytes,
    ) -> None:
        """Use the shared memory, and continue where the worker's predecessor ended.

        Args:
            main: main loop of the worker.
            space: observation space of one environment.
            num_envs, workers: number of environments of all workers, and of workers.
            shared: observations are in shared memory, if their space allows it.
            offset: offset of the shared memory in the arena.
            last: last observations of the worker's environments. None: it has no predecessor.
            seeds: seeds of the next reset, unless that has its own; None: no seed.
            attributes: attributes that the user has set, by environment of the worker; pickled.
        """
        # the caller waits: run at once, other than below an inference server
        if hasattr(os, "SCHED_OTHER"):
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        memory = (space, num_envs, workers, shared)
        nbytes = VectorRows(*memory).nbytes
        rows = VectorRows(*memory, main.arena.view(offset, nbytes))
        own = range(self._first, self._first + self.num_envs)
        worker = main.config.index
        self.shared = _SharedRows(rows, own, worker, space, main.progress.cells, last)
        self._histories = [_History(seed) for seed in seeds]
        for i, values in unpickle(attributes).items():
            for name, value in values.items():
                self.set_attribute(i, name, value)

    # --- steps and resets -------------------------------------------------------------------------

    def step(self, half: int, actions: Iterable[Any]) -> bytes | None:
        """Step all environments, and write what they return.

        Returns:
            pickle of the infos that are not empty, and of observations if they are not in shared
            memory; None: neither.
        """
        infos: PackedInfos = []
        shared = self.shared
        rewards = shared.rewards
        ended = shared.terminated
        cut = shared.truncated
        cells = shared.cells
        mode = self._mode
        cells[PHASE] = Phase.STEP
        for i, action in enumerate(actions):
            cells[ACTING] = cells[STEPPING] = i
            if self._due[i] and mode is AutoresetMode.NEXT_STEP:
                shared.put(i, 0.0)
                self._add(infos, i, "reset", self._reset(i, {}, infos))
                cells[PHASE] = Phase.STEP
                continue
            self._streams.use(i)
            try:
                obs, reward, terminated, truncated, info = self.envs[i].step(action)
                rewards[i] = reward
                ended[i] = terminated
                cut[i] = truncated
            except Exception as error:  # noqa: BLE001 (raised, unless the environment is replaced)
                self._replace(i, "step", error, infos)
                self._truncate(i, infos)
                continue
            if terminated or truncated:
                if mode is AutoresetMode.SAME_STEP:
                    self._reset_after(i, obs, info, infos)
                    cells[PHASE] = Phase.STEP
                    continue
                self._due[i] = True
            self._keep(i, "step", obs)
            self._add(infos, i, "step", info)
        return shared.write(half, infos)

    def truncate(self, half: int) -> bytes | None:
        """Truncate all episodes, whose environments were lost with the predecessor, instead of a
        step.
        """
        infos: PackedInfos = []
        for i in range(self.num_envs):
            self._truncate(i, infos)
        return self.shared.write(half, infos)

    def reset_envs(
        self,
        half: int,
        arguments: Mapping[int, dict[str, Any]],
    ) -> bytes | None:
        """Reset environments with these arguments, by index; see ``step`` for the result."""
        infos: PackedInfos = []
        for i, given in arguments.items():
            self.shared.put(i, 0.0)
            self._add(infos, i, "reset", self._reset(i, given, infos))
        return self.shared.write(half, infos)

    def _reset(
        self,
        i: int,
        given: dict[str, Any],
        infos: PackedInfos,
    ) -> dict[str, Any]:
        """Reset an environment, keep its observation, and return the info."""
        cells = self.shared.cells
        cells[PHASE] = Phase.RESET
        cells[ACTING] = cells[STEPPING] = i
        history = self._histories[i]
        arguments = history.arguments(given)
        self._streams.use(i, arguments.get("seed"))
        try:
            obs, info = self.envs[i].reset(**arguments)
        except Exception as error:  # noqa: BLE001 (raised, unless the environment is replaced)
            self._replace(i, "reset", error, infos)
            self._streams.use(i, history.next_seed)
            try:
                obs, info = self.envs[i].reset(
                    **(arguments | {"seed": history.next_seed})
                )
            except Exception as again:
                raise self._error(i, "reset", again) from again
        history.was_reset()
        self._keep(i, "reset", obs)
        self._due[i] = False
        result: dict[str, Any] = info
        return result

    def _keep(
        self,
        i: int,
        method: str,
        obs: Any,
    ) -> None:
        """Copy an observation, whose memory the environment may use again, and others of this
        worker may share.
        """
        try:
            self.shared.obs[i] = copied(obs)
        except TypeError as error:
            raise self._error(i, method, error) from error

    def _truncate(self, i: int, infos: PackedInfos) -> None:
        """Truncate the episode of a new environment, whose predecessor was lost."""
        self.shared.put(i, 0.0, truncated=True)
        self._due[i] = True
        if self._mode is AutoresetMode.SAME_STEP:
            self._reset_after(i, self.shared.obs[i], {}, infos)

    def _reset_after(
        self,
        i: int,
        obs: Any,
        info: dict[str, Any],
        infos: PackedInfos,
    ) -> None:
        """Reset an environment whose episode has ended with this observation and info."""
        self._add(infos, i, "final", {"final_obs": obs, "final_info": info})
        self._add(infos, i, "reset", self._reset(i, {}, infos))

    def _add(
        self,
        infos: PackedInfos,
        i: int,
        kind: InfoKind,
        info: dict[str, Any],
    ) -> None:
        if info:
            number = self._first + i
            data = packed(info, f"the info of environment {number}", REMEDY)
            infos.append((number, kind, data))

    # --- failures ---------------------------------------------------------------------------------

    def _replace(
        self,
        i: int,
        method: str,
        error: Exception,
        infos: PackedInfos,
    ) -> None:
        """Make an environment again, after it raised an error; or raise that."""
        failure = self._error(i, method, error)
        if not self._replaces:
            raise failure from error
        with suppress(Exception):
            self.envs[i].close()
        self.envs[i] = self._made(i)
        history = self._histories[i]
        for name, value in history.attributes.items():
            self.envs[i].set_wrapper_attr(name, value)
        history.was_replaced(self._first + i)
        self._add(infos, i, "failure", {"muster": {"error": str(failure)}})

    def _error(
        self,
        i: int,
        method: str,
        error: Exception,
    ) -> EnvError:
        name = type(self.envs[i]).__name__
        return EnvError(
            f"environment {self._first + i} ({name}): {method} raised {described(error)}",
            env_index=i,
        )

    def _made(self, i: int) -> Any:
        name = f"env_fns[{self._first + i}]"
        self._streams.use(i)
        try:
            env = self._env_fns[i]()
        except Exception as error:
            raise EnvError(
                f"environment {self._first + i}: {name} raised"
                f" {described(error)}{advice_for(error)}",
                env_index=i,
            ) from error
        if coroutines.takes(env):
            raise UnsupportedEnv(
                f"{name} returned {type(env).__name__}, whose methods are coroutine functions."
                " Vector environments step their environments one after another: use a collector,"
                " or define reset and step without async."
            )
        return env

    # --- attributes, and the end ------------------------------------------------------------------

    def set_attribute(
        self,
        i: int,
        name: str,
        value: Any,
    ) -> None:
        """Set an attribute of an environment, and of its successors."""
        self._streams.use(i)
        self.envs[i].set_wrapper_attr(name, value)
        self._histories[i].attributes[name] = value

    def set_attributes(self, name: str, values: Mapping[int, Any]) -> None:
        """Set an attribute of environments, by index."""
        self.shared.cells[PHASE] = Phase.CALL
        for i, value in values.items():
            self.set_attribute(i, name, value)

    def each(self, which: Sequence[int], function: Callable[[Any], Any]) -> bytes:
        """Return the pickled results of a function that is called with each of these environments."""
        self.shared.cells[PHASE] = Phase.CALL
        results = []
        for i in which:
            self._streams.use(i)
            try:
                results.append(function(self.envs[i]))
            except Exception as error:
                raise self._error(i, "the call", error) from error
        return packed(results, RETURNED, REMEDY)

    def close(self) -> None:
        checks.close_all([env.close for env in self.envs])


class _SharedRows:
    """What this worker shares with its caller.

    Args:
        rows: memory of all workers.
        own: numbers of this worker's environments.
        worker: number of this worker.
        space: observation space of one environment.
        cells: progress of this worker.
        last: last observations of the environments. None: none yet.

    Attributes:
        rewards, terminated, truncated: arrays ``[n]``, for the caller.
        exchange: the worker's calls and results.
        cells: see above.
        obs: latest observation of each environment, which ``write`` shows to the caller.
    """

    def __init__(
        self,
        rows: VectorRows,
        own: range,
        worker: int,
        space: spaces.Space[Any],
        cells: Any,
        last: Sequence[Any] | None,
    ) -> None:
        begin = own.start
        end = own.stop
        self.rewards = rows.rewards[begin:end]
        self.terminated = rows.terminated[begin:end]
        self.truncated = rows.truncated[begin:end]
        self.exchange = rows.exchanges[worker]
        self.cells = cells
        self.obs: list[Any] = [None] * len(own)
        if last is not None:
            self.obs = list(last)
        self._space = space
        self._halves: list[Any] | None = None
        if rows.obs is not None:
            self._halves = [part_of(half, begin, end) for half in rows.obs]

    def put(
        self,
        i: int,
        reward: float,
        *,
        truncated: bool = False,
    ) -> None:
        """Set the reward and flags of an environment that has not stepped."""
        self.rewards[i] = reward
        self.terminated[i] = False
        self.truncated[i] = truncated

    def write(self, half: int, infos: PackedInfos) -> bytes | None:
        """Show the latest observations to the caller; see ``EnvSlice.step`` for the result."""
        if self._halves is None:
            return packed((infos, self.obs), RETURNED, REMEDY)
        concatenate(self._space, self.obs, self._halves[half])
        return packed((infos, None), RETURNED) if infos else None


class _EnvStreams:
    """Global random streams of each environment.

    Args:
        count: number of environments.
    """

    def __init__(self, count: int) -> None:
        self._streams = [GroupRng(None) for _ in range(count)]
        self._drawing: int | None = (
            None  # the environment whose streams are the global ones
        )
        self._replaced: UserStreams | None = None  # those that they have replaced
        self._has_torch = False  # torch was loaded by then

    def use(self, i: int, seed: Any = None) -> None:
        """Make the streams of an environment the global ones; with a ``seed``, from their
        beginning.
        """
        has_torch = "torch" in sys.modules  # an environment may import it at any time
        if self._drawing == i and seed is None and has_torch == self._has_torch:
            return
        if self._drawing is not None and self._replaced is not None:
            self._streams[self._drawing].remove(self._replaced)
            self._drawing = None
        # others are refused by the environment
        if isinstance(seed, (int, np.integer)) and seed >= 0:
            self._streams[i] = GroupRng(int(seed))
        self._replaced = self._streams[i].install()
        self._drawing = i
        self._has_torch = has_torch


class _History:
    """What the successor of an environment gets, if the environment raises an error.

    Attributes:
        attributes: values that the user has set, by name.
        next_seed: seed of the next reset, unless that has its own; None: no seed.
    """

    def __init__(self, next_seed: int | None) -> None:
        self.attributes: dict[str, Any] = {}
        self.next_seed = next_seed
        self._seed: int | None = None  # of the last reset with a seed
        self._replacements = 0  # since then

    def arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a reset, for which the user has given these."""
        if given.get("seed") is not None:
            self._seed = given["seed"]
            self._replacements = 0
            return given
        if self.next_seed is None:
            return given
        return {**given, "seed": self.next_seed}

    def was_reset(self) -> None:
        """Forget the seed of the reset that was made."""
        self.next_seed = None

    def was_replaced(self, env_id: int) -> None:
        """Choose a seed for the new environment: its episodes differ from those before."""
        self._replacements += 1
        if self._seed is not None:
            (self.next_seed,) = seeds_of(self._seed, [env_id], self._replacements)
