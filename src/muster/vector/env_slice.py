"""The environments of one worker of a vector environment, and the shared memory for what they
return.
"""

from __future__ import annotations

import math
import os
import pickle
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import concatenate, create_empty_array

from muster.env_spec import EnvSpec
from muster.envs import checks, coroutines
from muster.envs.build import advice_for
from muster.errors import EnvError, UnsupportedEnv, described
from muster.memory.objects import copied
from muster.memory.specs import Array
from muster.protocols import EnvBatch
from muster.restore.pickling import dumps
from muster.rng import GroupRng, UserStreams, seeds_of
from muster.rollout.progress import ACTING, ORDER, PHASE, STEPPING, STOP, Phase

if TYPE_CHECKING:
    from muster.workers.main import WorkerMain

LINE = 64  # bytes of a cache line
# a step writes one half of the observations, and the last observations stay in the other
HALVES = 2

Infos = list[tuple[int, dict[str, Any]]]  # of environments, by their number; one can have two
# the same, pickled at once: the environment may change them in its next call
PackedInfos = list[tuple[int, bytes]]


class VectorRows:
    """Rewards, flags and observations of all environments, and the calls of their workers, in
    shared memory.

    Args:
        space: observation space of one environment.
        num_envs: number of environments, N.
        workers: number of workers.
        shared: False: no memory for observations, which travel as pickles.
        block: memory ``uint8 [nbytes]``. None: only compute ``nbytes``.

    Attributes:
        rewards, terminated, truncated: arrays ``[N]``.
        exchanges: memory for the calls of each worker.
        obs: observations ``[N, ...]`` in the structure of ``space``, for each half. None: not
            ``shared``, or a part of the space has Python objects as values, which travel as
            pickles.
    """

    def __init__(
        self,
        space: spaces.Space[Any],
        num_envs: int,
        workers: int,
        shared: bool = True,
        block: Array | None = None,
    ) -> None:
        self._block = block
        self.nbytes = 0
        self.rewards = self._array((num_envs,), np.float64)
        self.terminated = self._array((num_envs,), np.bool_)
        self.truncated = self._array((num_envs,), np.bool_)
        exchanges = [self._array((Exchange.NBYTES,), np.uint8) for _ in range(workers)]
        self.exchanges = [] if block is None else [Exchange(each) for each in exchanges]
        self.obs: list[Any] | None = None
        if shared and _has_arrays(space):
            self.obs = [
                create_empty_array(space, n=num_envs, fn=self._array) for _ in range(HALVES)
            ]

    def _array(self, shape: tuple[int, ...], dtype: Any) -> Array:
        dtype = np.dtype(dtype)
        begin = -(-self.nbytes // LINE) * LINE
        self.nbytes = begin + math.prod(shape) * dtype.itemsize
        if self._block is None:
            return np.empty(0, dtype)
        rows: Array = self._block[begin : self.nbytes].view(dtype).reshape(shape)
        return rows


def _has_arrays(space: spaces.Space[Any]) -> bool:
    """Return whether the values of a space are arrays of one shape and dtype, or dicts and tuples
    of such arrays.
    """
    if isinstance(space, spaces.Dict):
        return all(map(_has_arrays, space.spaces.values()))
    if isinstance(space, spaces.Tuple):
        return all(map(_has_arrays, space.spaces))
    return isinstance(
        space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
    )


def part_of(tree: Any, begin: int, end: int) -> Any:
    """Return views of rows of all arrays in a structure of dicts and tuples."""
    if isinstance(tree, dict):
        return {key: part_of(value, begin, end) for key, value in tree.items()}
    if isinstance(tree, tuple):
        return tuple(part_of(value, begin, end) for value in tree)
    return tree[begin:end]


class Exchange:
    """Shared memory for the next call of a worker and for its result, as pickles.

    Args:
        block: memory ``uint8 [NBYTES]``.
    """

    ROOM = 1 << 18  # bytes of one pickle; larger ones travel as messages
    NBYTES = LINE + 2 * ROOM

    def __init__(self, block: Array) -> None:
        self._lengths: Any = memoryview(block[:LINE]).cast("q")  # type: ignore[arg-type]
        parts = block[LINE : LINE + self.ROOM], block[LINE + self.ROOM :]
        self._call, self._result = (memoryview(part) for part in parts)  # type: ignore[arg-type]

    def put_call(self, call: bytes) -> None:
        """Set the next call; empty: the worker returns to its messages."""
        self._call[: len(call)] = call
        self._lengths[0] = len(call)

    def call(self) -> Any:
        """Return the unpickled call; None: it is empty."""
        length = self._lengths[0]
        return pickle.loads(self._call[:length]) if length else None

    def put_result(self, result: bytes | None) -> None:
        length = 0 if result is None else len(result)
        self._result[:length] = result or b""
        self._lengths[1] = length

    def result(self) -> bytes | None:
        return bytes(self._result[: self._lengths[1]]) or None


# --- messages to a worker -------------------------------------------------------------------------


def execute(main: WorkerMain, call: bytes) -> Any:
    """Call a pickled method of the worker's ``EnvSlice`` with its arguments."""
    method, args = pickle.loads(call)
    return method(main.built[0], *args)


def serve(main: WorkerMain, number: int) -> bytes | None:
    """Execute calls in shared memory, until one is empty, or its result is too large; return that.

    Args:
        number: number of the answer.
    """
    envs: Any = main.built[0]
    calls = 0
    cells = main.progress.cells
    exchange = envs.exchange
    mailbox = main.mailbox
    assert mailbox is not None
    try:
        while (call := exchange.call()) is not None:
            calls += 1
            cells[ORDER] += 1  # a sign of life, also if the worker has only one environment
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
        self._streams = [GroupRng(None) for _ in env_fns]
        self._drawing: int | None = None  # the environment whose streams are the global ones
        self._replaced_streams: UserStreams | None = None  # those that they have replaced
        self._has_torch = False  # torch was loaded by then
        self.envs: list[Any] = []
        try:
            for i in range(self.num_envs):
                self.envs.append(self._made(i))
        except BaseException:
            with suppress(Exception):
                self.close()
            raise
        name = type(self.envs[0]).__name__
        self.spec = EnvSpec(name, self.num_envs, (self.num_envs,), {}, {})  # no rollout is made
        self._obs: list[Any] = [None] * self.num_envs
        self._due = [False] * self.num_envs  # environments to be reset before the next step
        self._seeds: list[int | None] = [None] * self.num_envs  # of the last reset with a seed
        self._next_seeds: list[int | None] = [None] * self.num_envs
        self._replaced = [0] * self.num_envs
        self._attributes: dict[int, dict[str, Any]] = {}

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
        nbytes = VectorRows(space, num_envs, workers, shared).nbytes
        rows = VectorRows(space, num_envs, workers, shared, main.arena.view(offset, nbytes))
        begin = self._first
        end = self._first + self.num_envs
        self._space = space
        self._cells = main.progress.cells
        self.exchange = rows.exchanges[main.config.index]
        self._rewards = rows.rewards[begin:end]
        self._terminated = rows.terminated[begin:end]
        self._truncated = rows.truncated[begin:end]
        self._halves = (
            None if rows.obs is None else [part_of(half, begin, end) for half in rows.obs]
        )
        if last is not None:
            self._obs = list(last)
        self._next_seeds = list(seeds)
        for i, values in pickle.loads(attributes).items():
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
        cells = self._cells
        mode = self._mode
        cells[PHASE] = Phase.STEP
        for i, action in enumerate(actions):
            cells[ACTING] = cells[STEPPING] = i
            if self._due[i] and mode is AutoresetMode.NEXT_STEP:
                self._rewards[i], self._terminated[i], self._truncated[i] = 0.0, False, False
                self._add(infos, i, self._reset(i, {}, infos))
                cells[PHASE] = Phase.STEP
                continue
            self._draw_from(i)
            try:
                obs, reward, terminated, truncated, info = self.envs[i].step(action)
                self._rewards[i], self._terminated[i], self._truncated[i] = (
                    reward,
                    terminated,
                    truncated,
                )
            except Exception as error:  # noqa: BLE001 (raised, unless the environment is replaced)
                self._replace(i, "step", error, infos)
                self._truncate(i, infos)
                continue
            if terminated or truncated:
                if mode is AutoresetMode.SAME_STEP:
                    self._add(infos, i, {"final_obs": obs, "final_info": info})
                    self._add(infos, i, self._reset(i, {}, infos))
                    cells[PHASE] = Phase.STEP
                    continue
                self._due[i] = True
            self._keep(i, "step", obs)
            self._add(infos, i, info)
        return self._write(half, infos)

    def truncate(self, half: int) -> bytes | None:
        """Truncate all episodes, whose environments were lost with the predecessor, instead of a
        step.
        """
        infos: PackedInfos = []
        for i in range(self.num_envs):
            self._truncate(i, infos)
        return self._write(half, infos)

    def reset_envs(self, half: int, arguments: Mapping[int, dict[str, Any]]) -> bytes | None:
        """Reset environments with these arguments, by index; see ``step`` for the result."""
        infos: PackedInfos = []
        for i, given in arguments.items():
            self._rewards[i], self._terminated[i], self._truncated[i] = 0.0, False, False
            self._add(infos, i, self._reset(i, given, infos))
        return self._write(half, infos)

    def _reset(self, i: int, arguments: dict[str, Any], infos: PackedInfos) -> dict[str, Any]:
        """Reset an environment, keep its observation, and return the info."""
        self._cells[PHASE] = Phase.RESET
        self._cells[ACTING] = self._cells[STEPPING] = i
        if arguments.get("seed") is not None:
            self._seeds[i], self._replaced[i] = arguments["seed"], 0
        elif self._next_seeds[i] is not None:
            arguments = {**arguments, "seed": self._next_seeds[i]}
        self._draw_from(i, arguments.get("seed"))
        try:
            obs, info = self.envs[i].reset(**arguments)
        except Exception as error:  # noqa: BLE001 (raised, unless the environment is replaced)
            self._replace(i, "reset", error, infos)
            self._draw_from(i, self._next_seeds[i])
            try:
                obs, info = self.envs[i].reset(**{**arguments, "seed": self._next_seeds[i]})
            except Exception as again:
                raise self._error(i, "reset", again) from again
        self._next_seeds[i] = None
        self._keep(i, "reset", obs)
        self._due[i] = False
        result: dict[str, Any] = info
        return result

    def _keep(self, i: int, method: str, obs: Any) -> None:
        """Copy an observation, whose memory the environment may use again, and others of this
        worker may share.
        """
        try:
            self._obs[i] = copied(obs)
        except TypeError as error:
            raise self._error(i, method, error) from error

    def _truncate(self, i: int, infos: PackedInfos) -> None:
        """Truncate the episode of a new environment, whose predecessor was lost."""
        self._rewards[i], self._terminated[i], self._truncated[i] = 0.0, False, True
        self._due[i] = True
        if self._mode is AutoresetMode.SAME_STEP:
            self._add(infos, i, {"final_obs": self._obs[i], "final_info": {}})
            self._add(infos, i, self._reset(i, {}, infos))

    def _add(self, infos: PackedInfos, i: int, info: dict[str, Any]) -> None:
        if info:
            infos.append((self._first + i, packed(info)))

    def _write(self, half: int, infos: PackedInfos) -> bytes | None:
        if self._halves is None:
            return packed((infos, self._obs))
        concatenate(self._space, self._obs, self._halves[half])
        return packed((infos, None)) if infos else None

    def _draw_from(self, i: int, seed: Any = None) -> None:
        """Make the streams of an environment the global ones; with a ``seed``, from their
        beginning.
        """
        has_torch = "torch" in sys.modules  # an environment may import it at any time
        if self._drawing == i and seed is None and has_torch == self._has_torch:
            return
        if self._drawing is not None and self._replaced_streams is not None:
            self._streams[self._drawing].remove(self._replaced_streams)
            self._drawing = None
        # others are refused by the environment
        if isinstance(seed, (int, np.integer)) and seed >= 0:
            self._streams[i] = GroupRng(int(seed))
        self._replaced_streams = self._streams[i].install()
        self._drawing = i
        self._has_torch = has_torch

    # --- failures ---------------------------------------------------------------------------------

    def _replace(self, i: int, method: str, error: Exception, infos: PackedInfos) -> None:
        """Make an environment again, after it raised an error; or raise that."""
        failure = self._error(i, method, error)
        if not self._replaces:
            raise failure from error
        with suppress(Exception):
            self.envs[i].close()
        self.envs[i] = self._made(i)
        self._replaced[i] += 1
        for name, value in self._attributes.get(i, {}).items():
            self.envs[i].set_wrapper_attr(name, value)
        if (seed := self._seeds[i]) is not None:
            (self._next_seeds[i],) = seeds_of(seed, [self._first + i], self._replaced[i])
        self._add(infos, i, {"muster": {"error": str(failure)}})

    def _error(self, i: int, method: str, error: Exception) -> EnvError:
        name = type(self.envs[i]).__name__
        return EnvError(
            f"environment {self._first + i} ({name}): {method} raised {described(error)}",
            env_index=i,
        )

    def _made(self, i: int) -> Any:
        name = f"env_fns[{self._first + i}]"
        self._draw_from(i)
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

    def set_attribute(self, i: int, name: str, value: Any) -> None:
        """Set an attribute of an environment, and of its successors."""
        self._draw_from(i)
        self.envs[i].set_wrapper_attr(name, value)
        self._attributes.setdefault(i, {})[name] = value

    def set_attributes(self, name: str, values: Mapping[int, Any]) -> None:
        """Set an attribute of environments, by index."""
        self._cells[PHASE] = Phase.CALL
        for i, value in values.items():
            self.set_attribute(i, name, value)

    def each(self, which: Sequence[int], function: Callable[[Any], Any]) -> bytes:
        """Return the pickled results of a function that is called with each of these environments."""
        self._cells[PHASE] = Phase.CALL
        results = []
        for i in which:
            self._draw_from(i)
            try:
                results.append(function(self.envs[i]))
            except Exception as error:
                raise self._error(i, "the call", error) from error
        return packed(results)

    def close(self) -> None:
        checks.close_all([env.close for env in self.envs])


def packed(value: Any, what: str = "what the environments returned") -> bytes:
    """Pickle a value, called ``what`` in the error about what cannot be pickled."""
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:  # noqa: BLE001 (cloudpickle may be able to)
        return dumps(value, what)
