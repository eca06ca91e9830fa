"""A ``gymnasium.vector.VectorEnv`` over Muster's worker processes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_differing_spaces, batch_space, iterate

from muster.compat.vector_workers import VectorWorkers
from muster.memory.specs import Array

ARRAYS = (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)  # batched action spaces whose values are arrays


class VectorEnv(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """Environments in Muster's worker processes, several in each, behind Gymnasium's interface.

    Observations, rewards, flags and infos are those of ``gymnasium.vector.SyncVectorEnv`` with the same seeds.
    Returned arrays belong to the caller (but see ``copy``). Only the process that made it can use it.

    ::

        envs = VectorEnv([lambda: gymnasium.make("CartPole-v1")] * 8, num_workers=2, on_failure="restart")

    Args:
        env_fns: functions that make the environments, one for each. Lambdas and closures are possible.
        copy: False: returned observations are the shared memory itself, which the step after the next overwrites.
        observation_mode: as in ``SyncVectorEnv``: "same", "different", or a pair of batched and single space.
        autoreset_mode: as in ``SyncVectorEnv``: when an environment is reset after the end of its episode.
        num_workers: number of worker processes; None: one for each CPU that this process may use. At most one for each
            environment.
        on_failure: "raise": raise the error of an environment or worker; ``reset`` starts lost workers again.
            "restart": make the environments again, and return this step as a truncation with reward 0, and
            ``infos["muster"]["error"]``. At most 10 times a minute for each worker, and 3 times without a step.
        timeouts: seconds without progress after which a worker counts as hanging, by phase: "construct", "call" (300),
            "reset", "step" (60, for each environment), "close" (5). None: no limit.
        start_method: "forkserver" (in milliseconds) or "spawn". None: as the system allows.

    Attributes:
        metadata: that of the first environment, with ``"autoreset_mode"``.

    Raises:
        EnvError: an environment raised an error, which is the ``__cause__``.
        WorkerDied, WorkerHung: a worker died, or made no progress for too long.
        RuntimeError: the spaces of the environments differ.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gymnasium.Env[Any, Any]]],
        copy: bool = True,
        observation_mode: str | tuple[spaces.Space[Any], spaces.Space[Any]] = "same",
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        *,
        num_workers: int | None = None,
        on_failure: Literal["raise", "restart"] = "raise",
        timeouts: Mapping[str, float | None] | None = None,
        start_method: Literal["forkserver", "spawn"] | None = None,
    ) -> None:
        self.closed = True  # until the workers run
        self.copy, self.observation_mode, self.autoreset_mode = copy, observation_mode, AutoresetMode(autoreset_mode)
        self.num_envs = len(env_fns)
        self._workers = VectorWorkers(
            list(env_fns),
            self.autoreset_mode,
            num_workers=num_workers,
            on_failure=on_failure,
            timeouts=timeouts,
            start_method=start_method,
        )
        weakref.finalize(self, self._workers.close)
        self.closed = False
        try:
            observations, actions, metadata, render_modes = zip(*self._workers.described, strict=True)
            self._set_spaces(observations, actions)
            self.metadata = {**metadata[0], "autoreset_mode": self.autoreset_mode}
            self.render_mode = render_modes[0]
            self._workers.open(self.single_observation_space)
        except BaseException:
            self.close()
            raise

    def _set_spaces(self, observations: Sequence[Any], actions: Sequence[Any]) -> None:
        mode, first = self.observation_mode, observations[0]
        if isinstance(mode, tuple) and len(mode) == 2:
            if not all(isinstance(space, spaces.Space) for space in mode):
                raise TypeError(f"observation_mode={mode!r}: expected two spaces, batched and single.")
            self.observation_space, self.single_observation_space = mode
        elif mode == "same":
            self.single_observation_space, self.observation_space = first, batch_space(first, self.num_envs)
        elif mode == "different":
            self.single_observation_space = first
            self.observation_space = batch_differing_spaces(list(observations))
        else:
            raise ValueError(f"observation_mode={mode!r}: expected 'same', 'different', or a pair of spaces.")
        self.single_action_space, self.action_space = actions[0], batch_space(actions[0], self.num_envs)
        for i, (observation, action) in enumerate(zip(observations, actions, strict=True)):
            fits = observation == first if mode == "same" else _alike(observation, self.single_observation_space)
            if not fits:
                raise RuntimeError(
                    f"Environment {i} has the observation space {observation}, and {self.single_observation_space} was "
                    f"expected with observation_mode={mode!r}."
                )
            if action != self.single_action_space:
                raise RuntimeError(f"Environment {i} has the action space {action}, and environment 0 {actions[0]}.")

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
            options: for all environments. ``options["reset_mask"]``, a bool array ``[num_envs]``, selects the
                environments to be reset; it is removed from the dict. The others keep their observations.
        """
        seeds: Sequence[int | None]
        if seed is None or isinstance(seed, (int, np.integer)):
            seeds = [None if seed is None else int(seed) + i for i in range(self.num_envs)]
        else:
            seeds = seed
        if len(seeds) != self.num_envs:
            raise ValueError(f"{len(seeds)} seeds were given for {self.num_envs} environments.")
        which = list(range(self.num_envs))
        if options is not None and "reset_mask" in options:
            which = np.flatnonzero(self._checked(options.pop("reset_mask"))).tolist()
        self._workers.reset({i: {"seed": seeds[i], "options": options} for i in which})
        return self._observations(), self._infos()

    def _checked(self, mask: Any) -> Array:
        if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_:
            raise TypeError(f"options['reset_mask'] must be a bool array, got {getattr(mask, 'dtype', type(mask))}.")
        if mask.shape != (self.num_envs,) or not mask.any():
            raise ValueError(f"options['reset_mask'] must have shape {(self.num_envs,)} and a True value, got {mask}.")
        return mask

    def step(self, actions: Any) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Step all environments; see ``SyncVectorEnv.step``."""
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: Any) -> None:
        """Send the actions to the environments, without waiting for them."""
        if self.autoreset_mode is AutoresetMode.DISABLED:
            ended = np.flatnonzero(self._workers.rows.terminated | self._workers.rows.truncated)
            if ended.size and not self._workers.pending:
                raise gymnasium.error.ResetNeeded(
                    f"The episodes of environments {ended.tolist()} have ended, and autoreset_mode is DISABLED: call "
                    "reset(options={'reset_mask': terminations | truncations}) before the next step."
                )
        if not (isinstance(actions, np.ndarray) and isinstance(self.action_space, ARRAYS)):
            actions = list(iterate(self.action_space, actions))
        self._workers.send(actions)

    def step_wait(self) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Wait for the step that ``step_async`` has begun, and return what ``step`` returns."""
        workers = self._workers
        workers.receive()
        rows = workers.rows
        flags = rows.terminated.copy(), rows.truncated.copy()
        return self._observations(), rows.rewards.copy(), *flags, self._infos()

    def _observations(self) -> Any:
        observations = self._workers.observations
        if isinstance(observations, np.ndarray):
            return observations.copy() if self.copy else observations
        return deepcopy(observations) if self.copy else observations

    def _infos(self) -> dict[str, Any]:
        infos: dict[str, Any] = {}
        for i, info in self._workers.infos:
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
        """Call a method of each environment, and return the results; or return an attribute that is not callable."""

        def call(env: Any) -> Any:
            found = env.get_wrapper_attr(name)
            return found(*args, **kwargs) if callable(found) else found

        return tuple(self._workers.each(call))

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return an attribute of each environment."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of each environment: to its item of a list or tuple, or all to one value.

        Environments that are made again after a failure get it, too.
        """
        if not isinstance(values, (list, tuple)):
            values = [values] * self.num_envs
        if len(values) != self.num_envs:
            raise ValueError(f"{len(values)} values were given for {self.num_envs} environments.")
        self._workers.set_attribute(name, dict(enumerate(values)))

    def render(self) -> tuple[Any, ...]:
        """Return the frames of all environments."""
        return self.call("render")

    def close_extras(self, **kwargs: Any) -> None:
        """Close the environments and end the workers."""
        self._workers.close()


def _alike(a: Any, b: Any) -> bool:
    """Return whether the values of two spaces have the same structure, shapes and dtypes."""
    if isinstance(a, spaces.Dict) and isinstance(b, spaces.Dict):
        return a.spaces.keys() == b.spaces.keys() and all(_alike(a[key], b[key]) for key in a.spaces)
    if isinstance(a, spaces.Tuple) and isinstance(b, spaces.Tuple):
        return len(a) == len(b) and all(map(_alike, a.spaces, b.spaces))
    return type(a) is type(b) and a.shape == b.shape and a.dtype == b.dtype
