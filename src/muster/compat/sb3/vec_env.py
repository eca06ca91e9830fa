"""A ``stable_baselines3.common.vec_env.VecEnv`` over Muster's worker processes."""

from __future__ import annotations

import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from types import NoneType
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.async_vector_env import AsyncState
from stable_baselines3.common import vec_env

from muster.errors import BadOption, UnsupportedEnv
from muster.memory.specs import Array
from muster.utils.integers import integer
from muster.vector.vector_workers import VectorWorkers, method_of

EnvFn = Callable[[], gymnasium.Env[Any, Any]]
Indices = int | Iterable[int] | None


class NoSuchEnv(BadOption, IndexError):
    """There is no environment of this number."""


def env_fns_of(given: Any, or_else: str = "") -> list[EnvFn]:
    """Return functions that make environments, one for each, as a list.

    Raises ``BadOption`` if they are not; ``or_else`` (another valid value) is for the message.
    """
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise BadOption(
            f"env_fns is of type {type(given).__name__}, expected a list of functions that make the"
            f" environments, such as [make_env] * 8{or_else and f', or {or_else}'}."
        )
    fns = list(given)
    for env_fn in fns:
        if not callable(env_fn):
            raise BadOption(
                f"env_fns has an entry of type {type(env_fn).__name__}, expected functions."
            )
    return fns


class VecEnv(vec_env.VecEnv):
    """Environments in Muster's worker processes, several in each, behind the interface of
    Stable-Baselines3.

    Observations, rewards, dones and infos are those of ``DummyVecEnv`` with the same seeds, an
    ``OrderedDict`` for a ``Dict`` space among them. Returned arrays belong to the caller. Only the
    process that made it can use it.

    Environments that draw from global generators (``random``, NumPy's, torch's) have streams of
    their own, which the seeds of ``seed`` set: the same seeds give the same numbers, with any
    number of workers.

    Args:
        env_fns: functions that make the environments, one for each. Lambdas and closures are
            possible.
        start_method: as in ``SubprocVecEnv``: "forkserver" (in milliseconds) or "spawn". None: as
            the system allows. Also for "fork", which breaks libraries that use threads, such as
            torch.
        num_workers, on_failure, timeouts: see ``muster.compat.gymnasium.VectorEnv``. The error of
            an environment that was made again is ``info["muster"]["error"]``.

    Attributes:
        waiting: a step was sent, and not waited for.
        closed: ``close`` was called.

    Raises:
        EnvError: an environment raised an error, which is the ``__cause__``.
        WorkerDied, WorkerHung: a worker died, or made no progress for too long.
        UnsupportedEnv: observations are not arrays, or dicts and tuples of arrays.
        BadOption: an argument, also of a method, is wrong.
    """

    def __init__(
        self,
        env_fns: Sequence[EnvFn],
        start_method: Literal["forkserver", "spawn", "fork"] | None = None,
        *,
        num_workers: int | None = None,
        on_failure: Literal["raise", "restart"] = "raise",
        timeouts: Mapping[str, float | None] | None = None,
    ) -> None:
        fns = env_fns_of(env_fns)
        self._workers = VectorWorkers(
            fns,
            AutoresetMode.SAME_STEP,
            num_workers=num_workers,
            on_failure=on_failure,
            timeouts=timeouts,
            start_method=None if start_method is None else method_of(start_method),
        )
        weakref.finalize(self, self._workers.close)
        self.closed = False
        try:
            observation_space, action_space, *_ = self._workers.described[0]
            self._workers.open(observation_space)
            if self._workers.rows.obs is None:
                raise UnsupportedEnv(
                    f"Stable-Baselines3 has no observations in a space such as {observation_space}."
                )
            super().__init__(len(fns), observation_space, action_space)
        except BaseException:
            self.close()
            raise

    # --- resets and steps -------------------------------------------------------------------------

    @property
    def waiting(self) -> bool:
        return self._workers.state is AsyncState.WAITING_STEP

    def reset(self) -> Any:
        """Reset all environments, with the seeds of ``seed`` and the options of ``set_options``,
        once.

        The results of a step that was sent and not waited for are discarded.
        """
        self._workers.drop()
        arguments: dict[int, dict[str, Any]] = {}
        for i in range(self.num_envs):
            options = {"options": self._options[i]} if self._options[i] else {}
            arguments[i] = {"seed": self._seeds[i], **options}
        self._workers.reset(arguments)
        self.reset_infos = [{} for _ in range(self.num_envs)]
        for i, _, info in self._workers.infos:
            self.reset_infos[i].update(info)
        self._reset_seeds()
        self._reset_options()
        return self._observations()

    def step_async(self, actions: Array) -> None:
        """Send the actions to the environments, without waiting for them."""
        try:
            has_rows = isinstance(actions, np.ndarray) and actions.ndim > 0
            given = actions if has_rows else list(actions)
        except TypeError as error:  # a number, None
            raise BadOption(
                f"actions={actions!r}: expected an action for each of {self.num_envs} environments."
            ) from error
        self._workers.send(given)

    def step_wait(self) -> tuple[Any, Array, Array, list[dict[str, Any]]]:
        """Wait for the step, and return observations, rewards (float32), dones and infos."""
        self._workers.receive()
        rows = self._workers.rows
        infos = [dict[str, Any]() for _ in range(self.num_envs)]
        dones = rows.terminated | rows.truncated
        for i, kind, info in self._workers.infos:
            if kind == "final":
                self.reset_infos[i] = {}
                infos[i].update(info["final_info"])
                infos[i]["terminal_observation"] = info["final_obs"]
            elif kind == "reset":
                self.reset_infos[i] = info
            else:
                infos[i].update(info)
        for i, cut in enumerate((rows.truncated & ~rows.terminated).tolist()):
            infos[i]["TimeLimit.truncated"] = cut
        return self._observations(), rows.rewards.astype(np.float32), dones, infos

    def _observations(self) -> Any:
        observations = deepcopy(self._workers.observations)
        if isinstance(self.observation_space, spaces.Dict):
            return OrderedDict(
                (key, observations[key]) for key in self.observation_space.spaces
            )
        return observations

    def seed(self, seed: int | None = None) -> Sequence[int | None]:
        """Set the seeds of the next reset: ``seed``, ``seed + 1`` and so on. None: a random one."""
        return super().seed(None if seed is None else integer("seed", seed, 0))

    def set_options(
        self, options: list[dict[str, Any]] | dict[str, Any] | None = None
    ) -> None:
        """Set the options of the next reset: a dict for all environments, or a list with one for
        each.
        """
        if options is not None and not isinstance(options, dict):
            self._check_options(options)
        super().set_options(options)

    def _check_options(self, options: Any) -> None:
        is_list = isinstance(options, (list, tuple)) and len(options) == self.num_envs
        if not is_list or not all(
            isinstance(own, (Mapping, NoneType)) for own in options
        ):
            raise BadOption(
                f"options={options!r}: expected a dict, or a list with a dict for each of"
                f" {self.num_envs} environments."
            )

    def close(self) -> None:
        """Close the environments and end the workers. May be called again."""
        self.closed = True
        self._workers.close()

    # --- calls ------------------------------------------------------------------------------------

    def has_attr(self, attr_name: str) -> bool:
        """Return whether all environments have an attribute, of any type."""

        def has(env: Any) -> bool:
            try:
                env.get_wrapper_attr(attr_name)
            except AttributeError:
                return False
            return True

        return all(self._workers.each(has))

    def get_attr(self, attr_name: str, indices: Indices = None) -> list[Any]:
        """Return an attribute of environments; of all without ``indices``."""
        try:
            return self._workers.each(
                lambda env: env.get_wrapper_attr(attr_name), self._numbers(indices)
            )
        except Exception as error:
            if isinstance(
                error.__cause__, AttributeError
            ):  # expected by ``has_attr`` and SB3
                raise error.__cause__ from error
            raise

    def set_attr(self, attr_name: str, value: Any, indices: Indices = None) -> None:
        """Set an attribute of environments.

        Environments that are made again after a failure get it, too.
        """
        self._workers.set_attribute(
            attr_name, dict.fromkeys(self._numbers(indices), value)
        )

    def env_method(
        self,
        method_name: str,
        *method_args: Any,
        indices: Indices = None,
        **method_kwargs: Any,
    ) -> list[Any]:
        """Call a method of environments, and return the results."""

        def call(env: Any) -> Any:
            return env.get_wrapper_attr(method_name)(*method_args, **method_kwargs)

        return self._workers.each(call, self._numbers(indices))

    def env_is_wrapped(
        self,
        wrapper_class: type[gymnasium.Wrapper[Any, Any, Any, Any]],
        indices: Indices = None,
    ) -> list[bool]:
        """Return whether environments have a wrapper of this class."""

        def is_wrapped(env: Any) -> bool:
            while isinstance(env, gymnasium.Wrapper):
                if isinstance(env, wrapper_class):
                    return True
                env = env.env
            return False

        return self._workers.each(is_wrapped, self._numbers(indices))

    def _numbers(self, indices: Indices) -> list[int]:
        """Return the numbers of environments; negative indices count from the end."""
        if indices is None:
            return list(range(self.num_envs))
        given = indices if isinstance(indices, Iterable) else [indices]
        return [self._number(i) for i in given]

    def _number(self, index: int) -> int:
        i = integer("indices", index, None)
        if not -self.num_envs <= i < self.num_envs:
            raise NoSuchEnv(
                f"indices has {i}, and there are {self.num_envs} environments: expected"
                f" {-self.num_envs} to {self.num_envs - 1}."
            )
        return i % self.num_envs

    def get_images(self) -> Sequence[Array | None]:
        """Return a frame of each environment; None unless the render mode is "rgb_array"."""
        if self.render_mode != "rgb_array":
            said = (
                f"The render mode is {self.render_mode}, but this method assumes it is `rgb_array`"
                " to obtain images."
            )
            warnings.warn(said, stacklevel=2)
            return [None] * self.num_envs
        return self.env_method("render")
