"""B environments whose ``reset`` and ``step`` are coroutines, as one env batch: all are awaited at
the same time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import gymnasium
from gymnasium.vector import VectorEnv

from muster.capabilities import AwaitsCoroutines
from muster.envs import checks
from muster.envs.stacked import StackedEnvs
from muster.envs.wrapped import WrappedEnvs
from muster.errors import EnvError, UnsupportedEnv
from muster.keys import Key
from muster.memory.slots import Lane
from muster.memory.specs import Array
from muster.protocols import Step
from muster.utils.event_loop import (
    CoroutineCall,
    CoroutineRunner,
    is_coroutine_function,
)

METHODS = ("reset", "step")
SPACES = ("observation_space", "action_space")


def takes(env: Any) -> bool:
    """Return whether ``env`` is an environment with a coroutine function, or a Gymnasium wrapper
    around one.
    """
    if isinstance(env, type):
        return False
    wrapped = isinstance(env, gymnasium.Wrapper) and takes(env.env)
    return wrapped or any(
        is_coroutine_function(getattr(env, method, None)) for method in METHODS
    )


class CoroutineEnvs(WrappedEnvs, AwaitsCoroutines):
    """Implements ``EnvBatch`` for B environments whose ``reset`` and ``step`` are coroutine
    functions.

    A step sends all actions, waits for all environments, and writes their results like
    ``StackedEnvs``, which also checks them.

    Attributes:
        coroutines: runs the coroutines; its ``timeouts`` are set after construction.

    Raises:
        UnsupportedEnv: an environment lacks a method or space, or only some of its methods are
            coroutine functions.
    """

    def __init__(self, envs: Sequence[Any]) -> None:
        for env in envs:
            _check(env)
        checks.check_distinct(envs, checks.env_name(envs[0]))
        awaited = [AwaitedEnv(env) for env in envs]
        stacked = StackedEnvs(awaited)
        super().__init__(stacked, stacked.spec)
        self.awaited = awaited
        self.coroutines = CoroutineRunner()
        self._stacked = stacked

    def reset(
        self,
        arrays: Mapping[Key, Array],
        row: int,
        which: Sequence[int],
        seeds: Sequence[int] | None,
    ) -> None:
        options = self._stacked.reset_options or {}
        calls = []
        for n, i in enumerate(which):
            one = self.awaited[i]
            seed = None if seeds is None else seeds[n]
            given = checks.seed_argument(
                one.env, seed, self.spec.name, self._stacked.casts
            )
            call = one.begin("reset", **given, **checks.kept_info(options))
            calls.append(call)
        self._run(calls, "reset")
        try:
            self.inner.reset(arrays, row, which, seeds)
        except EnvError as error:
            _mention_others(error, calls)
            raise

    def start(self, lane: Lane) -> Step:
        awaited = self.awaited
        actions = self._stacked.action_rows(lane)
        write = self.inner.start(lane)

        def step(t: int) -> Sequence[int] | None:
            skipped = frozenset(self.bypassed)
            calls = []
            for i, action in enumerate(actions(t)):
                if i not in skipped:
                    calls.append(awaited[i].begin("step", action))
            try:
                self._run(calls, "step")
                return write(t)
            except BaseException as error:  # also Ctrl-C
                self._executed = sum(call.returned for call in calls)
                if isinstance(error, EnvError):
                    _mention_others(error, calls)
                raise

        return step

    def objects(self) -> Sequence[object]:
        return [awaited.env for awaited in self.awaited]

    def close(self) -> None:
        envs = [each.env for each in self.awaited if hasattr(each.env, "close")]
        closes = [CoroutineCall(partial(_close, env)) for env in envs]
        try:
            if closes:
                self.coroutines.run(closes, "close")
                checks.close_all([call.result for call in closes])
        finally:
            self.coroutines.close()

    def _run(self, calls: Sequence[CoroutineCall], phase: str) -> None:
        ready = [call for call in calls if call.error is None]
        if ready:
            self.coroutines.run(ready, phase)


class AwaitedEnv:
    """One environment: ``reset`` and ``step`` return what the coroutine begun last has returned, or
    raise its error.
    """

    def __init__(self, env: Any) -> None:
        self.env = env
        self.unwrapped = getattr(env, "unwrapped", env)
        self.spec = getattr(env, "spec", None)
        self.observation_space = env.observation_space
        self.action_space = env.action_space
        self._call = CoroutineCall(env.reset)

    def begin(
        self,
        method: str,
        *args: Any,
        **kwargs: Any,
    ) -> CoroutineCall:
        """Return a call of a method, for a ``CoroutineRunner``.

        It has an error already if the last one still runs.
        """
        last = self._call
        self._call = CoroutineCall(partial(getattr(self.env, method), *args, **kwargs))
        if last.is_running:
            self._call.error = RuntimeError(
                "its last call was cancelled, and still runs. Do not catch asyncio.CancelledError,"
                " or raise it again"
            )
            self._call.task = last.task
        return self._call

    def reset(self, **_: Any) -> Any:
        return self._call.result()

    def step(self, _: Any) -> Any:
        return self._call.result()


async def _close(env: Any) -> None:
    closed = env.close()  # here, since what it closes belongs to the event loop
    if hasattr(closed, "__await__"):
        await closed


def _check(env: Any) -> None:
    name = type(env).__name__
    if isinstance(env, VectorEnv):
        raise UnsupportedEnv(
            f"{name} is a batch of environments whose methods are coroutine functions. Return a"
            " single environment, and pass num_envs: Muster awaits all of them at the same time."
        )
    required = (*METHODS, *SPACES)
    missing = [attribute for attribute in required if not hasattr(env, attribute)]
    if missing:
        raise UnsupportedEnv(
            f"{name} has no {' and no '.join(missing)}, expected {', '.join(required)}"
        )
    plain = [
        method for method in METHODS if not is_coroutine_function(getattr(env, method))
    ]
    if plain and isinstance(env, gymnasium.Wrapper):
        raise UnsupportedEnv(
            f"{name} calls reset and step of {type(env.unwrapped).__name__}, which are coroutine"
            " functions, without awaiting them: Gymnasium's wrappers are for synchronous"
            " environments. Remove the wrapper (for a time limit, pass max_frames_per_traj), or"
            " define its reset and step with async def."
        )
    if plain:
        other = METHODS[plain[0] == METHODS[0]]
        raise UnsupportedEnv(
            f"{name}.{other} is a coroutine function, but {name}.{plain[0]} is not. Define both"
            " with async def."
        )


def _mention_others(error: EnvError, calls: Sequence[CoroutineCall]) -> None:
    others = sum(call.error is not None for call in calls) - 1
    if others > 0:
        rest = (
            "one other environment" if others == 1 else f"{others} other environments"
        )
        error.args = (f"{error}; {rest} of the group failed too",)
