"""A ``gymnasium.vector.VectorEnv`` over Muster's worker processes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import logger, spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.async_vector_env import AsyncState
from gymnasium.vector.utils import batch_differing_spaces, batch_space, iterate

from muster.errors import BadOption
from muster.memory.specs import Array
from muster.utils.cpus import usable_cores
from muster.utils.integers import integer
from muster.vector.vector_workers import VectorWorkers, method_of

# batched action spaces whose values are arrays
ARRAYS = (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)
# methods that ``call`` refuses, as Gymnasium's does
DIRECTLY = ("reset", "step", "close", "_setattr", "_check_spaces")
ABSENT = {
    "envs": "the environments live in the workers. Use call(), get_attr() or set_attr()",
    "processes": (
        "a worker is not a multiprocessing.Process, and has several environments. Its errors name"
        " its pid"
    ),
    "parent_pipes": (
        "results travel through shared memory. Use step_wait(), reset_wait() or call_wait()"
    ),
    "error_queue": "errors are raised by the call that fails",
}


class VectorEnv(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """Environments in Muster's worker processes, several in each, behind Gymnasium's interface.

    Observations, rewards, flags and infos are those of ``gymnasium.vector.SyncVectorEnv`` with the
    same seeds. Methods are those of ``AsyncVectorEnv``: between ``step_async`` and ``step_wait``
    (and the same for ``reset`` and ``call``) the caller can do other work, but call nothing else
    here.

    Environments that draw from global generators (``random``, NumPy's, torch's) have streams of
    their own, which ``reset(seed=...)`` sets: the same seeds give the same numbers, with any number
    of workers.

    Returned arrays belong to the caller (but see ``copy``). Only the process that made it can use
    it.

    ::

        envs = VectorEnv([lambda: gymnasium.make("CartPole-v1")] * 8, num_workers=2, on_failure="restart")

    Args:
        env_fns: functions that make the environments, one for each. Lambdas and closures are
            possible.
        copy: False: returned observations are the shared memory itself, which the step after the
            next overwrites.
        observation_mode: as in ``SyncVectorEnv``: "same", "different", or a pair of batched and
            single space.
        autoreset_mode: as in ``SyncVectorEnv``: when an environment is reset after the end of its
            episode.
        shared_memory: False: observations travel as pickles, as it always is for spaces whose
            values are no arrays.
        context: as in ``AsyncVectorEnv``: "forkserver", "spawn" or None, for ``start_method``.
            "fork", which breaks libraries that use threads, such as torch, is as None.
        daemon: for ``AsyncVectorEnv``'s signature: workers always end with this process, and their
            environments may start processes, which end with the worker.
        worker: None. The loop of a worker cannot be replaced.
        max_concurrency: most environments that are in ``reset`` or ``step`` at a time: limits
            ``num_workers``, each of which executes one environment after another.
        num_workers: number of worker processes; None: one for each CPU that this process may use.
            At most one for each environment.
        on_failure: "raise": raise the error of an environment or worker; ``reset`` starts lost
            workers again. "restart": make the environments again, and return this step as a
            truncation with reward 0, and ``infos["muster"]["error"]``. At most 10 times a minute
            for each worker, and 3 times without a step.
        timeouts: seconds without progress after which a worker counts as hanging, by phase:
            "construct", "call" (300), "reset", "step" (60, for each environment), "close" (5).
            None: no limit.
        start_method: "forkserver" (in milliseconds) or "spawn". None: as the system allows.

    Attributes:
        metadata: that of the first environment, with ``"autoreset_mode"``.
        observations: the latest observations of all environments; see ``copy``.

    Raises:
        BadOption: ``worker`` is given, ``num_workers`` is above ``max_concurrency``, or an option
            has a wrong value.
        EnvError: an environment raised an error, which is the ``__cause__``.
        WorkerDied, WorkerHung: a worker died, or made no progress for too long.
        RuntimeError: the spaces of the environments differ.
        AlreadyPendingCallError, NoAsyncCallError, ClosedEnvironmentError: of Gymnasium, for calls
        in a wrong order.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gymnasium.Env[Any, Any]]],
        copy: bool = True,
        observation_mode: str | tuple[spaces.Space[Any], spaces.Space[Any]] = "same",
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        *,
        shared_memory: bool = True,
        context: Literal["forkserver", "spawn", "fork"] | None = None,
        daemon: bool = True,
        worker: None = None,
        max_concurrency: int | None = None,
        num_workers: int | None = None,
        on_failure: Literal["raise", "restart"] = "raise",
        timeouts: Mapping[str, float | None] | None = None,
        start_method: Literal["forkserver", "spawn"] | None = None,
    ) -> None:
        self.closed = True  # until the workers run
        self.env_fns = env_fns
        self.num_envs = len(env_fns)
        self.copy, self.observation_mode, self.autoreset_mode = (
            copy,
            observation_mode,
            AutoresetMode(autoreset_mode),
        )
        self.shared_memory = shared_memory
        self.context = context
        self.daemon = daemon
        self.worker = worker
        self.max_concurrency = max_concurrency
        if context is not None and start_method not in (None, method_of(context)):
            raise BadOption(
                f"context={context!r} and start_method={start_method!r} differ: pass one of them."
            )
        if worker is not None:
            raise BadOption(
                "worker= is not possible: Muster's workers have a loop of their own. Wrap the"
                " environments in env_fns, choose autoreset_mode=, or use"
                " gymnasium.vector.AsyncVectorEnv."
            )
        self._workers = VectorWorkers(
            list(env_fns),
            self.autoreset_mode,
            num_workers=_limited(num_workers, max_concurrency),
            on_failure=on_failure,
            timeouts=timeouts,
            start_method=start_method if context is None else method_of(context),
        )
        weakref.finalize(self, self._workers.close)
        self.closed = False
        try:
            observations, actions, metadata, render_modes = zip(
                *self._workers.described, strict=True
            )
            self._set_spaces(observations, actions)
            self.metadata = {**metadata[0], "autoreset_mode": self.autoreset_mode}
            self.render_mode = render_modes[0]
            self._workers.open(self.single_observation_space, shared=shared_memory)
        except BaseException:
            self.close()
            raise

    def __getattr__(self, name: str) -> Any:
        kind = type(self).__name__
        if name in ABSENT:
            raise AttributeError(f"{kind}.{name} is not available: {ABSENT[name]}.")
        raise AttributeError(f"{kind!r} object has no attribute {name!r}")

    def _set_spaces(self, observations: Sequence[Any], actions: Sequence[Any]) -> None:
        mode = self.observation_mode
        first = observations[0]
        if isinstance(mode, tuple) and len(mode) == 2:
            if not all(isinstance(space, spaces.Space) for space in mode):
                raise TypeError(
                    f"observation_mode={mode!r}: expected two spaces, batched and single."
                )
            self.observation_space, self.single_observation_space = mode
        elif mode == "same":
            self.single_observation_space, self.observation_space = (
                first,
                batch_space(first, self.num_envs),
            )
        elif mode == "different":
            self.single_observation_space = first
            self.observation_space = batch_differing_spaces(list(observations))
        else:
            raise ValueError(
                "Invalid `observation_mode`, expected: 'same' or 'different' or tuple of single"
                f" and batch observation space, actual got {mode}: observation_mode={mode!r}."
            )
        self.single_action_space, self.action_space = (
            actions[0],
            batch_space(actions[0], self.num_envs),
        )
        for i, (observation, action) in enumerate(
            zip(observations, actions, strict=True)
        ):
            fits = (
                observation == first
                if mode == "same"
                else _alike(observation, self.single_observation_space)
            )
            if not fits:
                remedy = (
                    "the sub-environments observation spaces are not equivalent. If this is"
                    " intentional, use `observation_mode='different'` instead."
                )
                raise RuntimeError(
                    f"Environment {i} has the observation space {observation}, and"
                    f" {self.single_observation_space} was expected with"
                    f" observation_mode={mode!r}{f': {remedy}' if mode == 'same' else '.'}"
                )
            if action != self.single_action_space:
                raise RuntimeError(
                    f"Environment {i} has the action space {action}, and environment 0"
                    f" {actions[0]}."
                )

    # --- resets and steps -------------------------------------------------------------------------

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,  # as in SyncVectorEnv
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Reset the environments; see ``SyncVectorEnv.reset``.

        Args:
            seed: environment i gets ``seed + i``, or item i of a list.
            options: for all environments. ``options["reset_mask"]``, a bool array ``[num_envs]``,
                selects the environments to be reset; it is removed from the dict. The others keep
                their observations.
        """
        self.reset_async(seed=seed, options=options)
        return self.reset_wait()

    def reset_async(
        self,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        """Send a reset to the environments, without waiting for it; see ``reset``."""
        seeds: Sequence[int | None]
        if seed is None or isinstance(seed, (int, np.integer)):
            seeds = [
                None if seed is None else int(seed) + i for i in range(self.num_envs)
            ]
        else:
            seeds = seed
        self._workers.check_open()
        if len(seeds) != self.num_envs:
            raise ValueError(
                f"{len(seeds)} seeds were given for {self.num_envs} environments."
            )
        self._workers.check_idle("reset_async")
        which = list(range(self.num_envs))
        if options is not None and "reset_mask" in options:
            which = np.flatnonzero(self._checked(options.pop("reset_mask"))).tolist()
        self._workers.send_reset(
            {i: {"seed": seeds[i], "options": options} for i in which}
        )

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Wait for the reset that ``reset_async`` has begun, and return what ``reset`` returns.

        Args:
            timeout: seconds; None: the deadlines in ``timeouts``.

        Raises:
            multiprocessing.TimeoutError: the environments took longer. Reset them to go on.
        """
        self._workers.receive_reset(timeout)
        return self._observations(), self._infos()

    def _checked(self, mask: Any) -> Array:
        name = "`options['reset_mask']`"
        if not isinstance(mask, np.ndarray):
            raise TypeError(f"{name} must be a numpy array, got {type(mask)}.")
        if mask.shape != (self.num_envs,):
            raise ValueError(
                f"{name} must have shape `({self.num_envs},)`, got {mask.shape}."
            )
        if mask.dtype != np.bool_:
            raise TypeError(f"{name} must have `dtype=np.bool_`, got {mask.dtype}.")
        if not mask.any():
            raise ValueError(
                f"{name} must contain a boolean array with at least one True value, got"
                f" reset_mask={mask}."
            )
        return mask

    def step(self, actions: Any) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Step all environments; see ``SyncVectorEnv.step``."""
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: Any) -> None:
        """Send the actions to the environments, without waiting for them."""
        if self.autoreset_mode is AutoresetMode.DISABLED:
            self._workers.check_idle("step_async")
            ended = np.flatnonzero(
                self._workers.rows.terminated | self._workers.rows.truncated
            )
            if ended.size:
                raise gymnasium.error.ResetNeeded(
                    f"The episodes of environments {ended.tolist()} have ended, and autoreset_mode"
                    " is DISABLED: call reset(options={'reset_mask': terminations |"
                    " truncations}) before the next step."
                )
        if not (
            isinstance(actions, np.ndarray) and isinstance(self.action_space, ARRAYS)
        ):
            actions = list(iterate(self.action_space, actions))
        self._workers.send(actions)

    def step_wait(
        self, timeout: float | None = None
    ) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Wait for the step that ``step_async`` has begun, and return what ``step`` returns.

        Args:
            timeout: seconds; None: the deadlines in ``timeouts``.

        Raises:
            multiprocessing.TimeoutError: the environments took longer. Reset them to go on.
        """
        workers = self._workers
        workers.receive(timeout)
        rows = workers.rows
        flags = rows.terminated.copy(), rows.truncated.copy()
        return self._observations(), rows.rewards.copy(), *flags, self._infos()

    @property
    def observations(self) -> Any:
        return self._workers.observations

    def _observations(self) -> Any:
        observations = self._workers.observations
        if isinstance(observations, np.ndarray):
            return observations.copy() if self.copy else observations
        return deepcopy(observations) if self.copy else observations

    def _infos(self) -> dict[str, Any]:
        infos: dict[str, Any] = {}
        for i, _, info in self._workers.infos:
            infos = self._add_info(infos, info, i)
        return infos

    # --- calls ------------------------------------------------------------------------------------

    @property  # type: ignore[misc]  # as in SyncVectorEnv
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        """Copies of the environments' random number generators."""
        return self.get_attr("np_random")

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]  # as in SyncVectorEnv
        """The seeds of the environments' random number generators."""
        return self.get_attr("np_random_seed")

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of each environment, and return the results; or return an attribute that is
        not callable.
        """
        self.call_async(name, *args, **kwargs)
        return self.call_wait()

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Send a call to the environments, without waiting for it; see ``call``."""
        if name in DIRECTLY:
            raise BadOption(
                f"Trying to call function `{name}` with `call`, use `{name}` directly instead."
            )

        def call(env: Any) -> Any:
            found = env.get_wrapper_attr(name)
            return found(*args, **kwargs) if callable(found) else found

        self._workers.send_each(call)

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Wait for the call that ``call_async`` has begun, and return what ``call`` returns.

        Args:
            timeout: seconds; None: the deadlines in ``timeouts``.

        Raises:
            multiprocessing.TimeoutError: the environments took longer. The results are discarded.
        """
        return tuple(self._workers.receive_each(timeout))

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return an attribute of each environment."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of each environment: to its item of a list or tuple, or all to one
        value.

        Environments that are made again after a failure get it, too.
        """
        if not isinstance(values, (list, tuple)):
            values = [values] * self.num_envs
        if len(values) != self.num_envs:
            raise ValueError(
                f"{len(values)} values were given for {self.num_envs} environments."
            )
        self._workers.set_attribute(name, dict(enumerate(values)))

    def render(self) -> tuple[Any, ...]:
        """Return the frames of all environments."""
        return self.call("render")

    def close_extras(
        self, timeout: float | None = None, terminate: bool = False
    ) -> None:
        """Close the environments and end the workers. Workers that do not end in time are killed.

        Args:
            timeout: seconds to wait for a call that was sent and not waited for; None:
                ``timeouts["close"]``.
            terminate: kill the workers at once, without closing the environments.
        """
        state = self._workers.state
        self._workers.close(timeout, terminate=terminate)
        if state is not AsyncState.DEFAULT:
            said = f"Calling `close` while waiting for a pending call to `{state.value}` to complete."
            logger.warn(said, stacklevel=3)  # the caller of ``close``


def _limited(num_workers: int | None, max_concurrency: int | None) -> int | None:
    """Return the number of workers that executes at most so many environments at a time."""
    if max_concurrency is None:
        return num_workers
    most = integer("max_concurrency", max_concurrency)
    if num_workers is not None and num_workers > most:
        raise BadOption(
            f"num_workers={num_workers} and max_concurrency={most}: each worker executes an"
            f" environment at a time. Pass num_workers={most}, or leave one of them out."
        )
    return (
        min(most, max(1, int(usable_cores()))) if num_workers is None else num_workers
    )


def _alike(a: Any, b: Any) -> bool:
    """Return whether the values of two spaces have the same structure, shapes and dtypes."""
    if isinstance(a, spaces.Dict) and isinstance(b, spaces.Dict):
        return a.spaces.keys() == b.spaces.keys() and all(
            _alike(a[key], b[key]) for key in a.spaces
        )
    if isinstance(a, spaces.Tuple) and isinstance(b, spaces.Tuple):
        return len(a) == len(b) and all(map(_alike, a.spaces, b.spaces))
    return type(a) is type(b) and a.shape == b.shape and a.dtype == b.dtype
