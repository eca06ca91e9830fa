"""``dm_env.Environment`` as a ``gymnasium.Env``: time steps become transitions, specs become
spaces.

This module does not import ``dm_env``: it recognizes specs by their attributes.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from muster.envs.checks import check_distinct
from muster.envs.spaces import observation_codec
from muster.envs.stacked import StackedEnvs
from muster.errors import BadEnvOutput, BadOption, UnsupportedEnv, UnsupportedSpace
from muster.memory.specs import Array
from muster.protocols import EnvBatch

# dm_env.StepType
FIRST = 0
LAST = 2


def takes(obj: Any) -> bool:
    """Return whether ``obj`` is a ``dm_env.Environment``; does not import ``dm_env``."""
    module = sys.modules.get("dm_env")
    return module is not None and isinstance(obj, module.Environment)


def adapt(envs: list[Any], device: Any) -> EnvBatch:
    """Return the env batch of B ``dm_env`` environments, stepped one after another; ``device`` has
    no effect.
    """
    check_distinct(envs, type(envs[0]).__name__)
    return StackedEnvs([DmEnv(env) for env in envs])


class DmEnv(gymnasium.Env[Any, Any]):
    """One ``dm_env.Environment`` (of dm_control, bsuite, your own)::

        env = DmEnv(suite.load("cartpole", "swingup"))
        env.observation_space  # Dict('position': Box(-inf, inf, (3,), float64), 'velocity': ...)

    A ``LAST`` step with discount 0 is ``terminated``, with any other discount ``truncated``.
    Discounts are available as ``info["discount"]`` only. Spaces have the dtypes of the specs,
    float64 included, except ``DiscreteArray`` (Discrete, int64) and bool (MultiBinary, int8).
    Actions are passed in the dtype, lists and tuples of the spec.

    dm_env has no seeds. ``reset(seed=s)`` calls ``env.seed(s)`` if that method exists. Otherwise it
    reseeds, in place, the NumPy generators ``env.random_state`` (dm_control's composer),
    ``env.task.random`` (its suite) and ``env._rng`` (bsuite). If there are none, it warns once, and
    the environment remains unseeded: its factory determines its randomness, if any.

    Args:
        env: environment, owned (and closed) by this object.

    Raises:
        UnsupportedEnv: a reward or discount is not a single number per step.
        UnsupportedSpace: a spec has no fixed-size dtype, such as ``StringArray``.
    """

    def __init__(self, env: Any) -> None:
        self.env = env
        self._name = type(env).__name__
        for kind in ("reward", "discount"):
            spec = getattr(env, f"{kind}_spec")()
            if getattr(spec, "shape", None) != ():
                raise UnsupportedEnv(
                    f"{self._name}.{kind}_spec() is {spec}, expected one number per step (shape"
                    " ()). Wrap it in a dm_env.Environment that adds them up, or that is the"
                    " environment of one agent."
                )
        self._action_spec = env.action_spec()
        self.action_space = _space(self._action_spec, f"{self._name}.action_spec()")
        self.observation_space = _space(
            env.observation_spec(), f"{self._name}.observation_spec()"
        )
        self._codec = observation_codec(self.observation_space)
        self._warned = False

    def reset(
        self,
        *,
        seed: int | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        if options:
            raise BadOption(
                f"{self._name}.reset() takes no options, but {sorted(options)} were given. Leave"
                " them out."
            )
        super().reset(seed=seed)
        if seed is not None and not _reseed(self.env, seed) and not self._warned:
            self._warned = True
            warnings.warn(
                f"{self._name} has no random generator that Muster finds, so seed {seed} had no"
                " effect. If it is random, seed it where it is made, or give it a method"
                " seed(seed).",
                stacklevel=2,
            )
        got = self.env.reset()
        if got.step_type != FIRST:
            raise BadEnvOutput(
                f"{self._name}.reset() returned step_type {got.step_type!r}, expected FIRST"
            )
        return self._observe(got.observation), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        got = self.env.step(_as_spec(self._action_spec, action))
        if got.step_type == FIRST:
            raise BadEnvOutput(
                f"{self._name}.step() began a new episode (step_type FIRST) although the last one"
                " had not ended: it must return LAST first"
            )
        last = bool(got.step_type == LAST)
        discount = got.discount
        if last and (discount is None or np.ndim(discount) != 0):
            raise BadEnvOutput(
                f"{self._name}.step() returned LAST with discount {discount!r}, expected a number"
            )
        terminated = bool(last and discount == 0)
        truncated = last and not terminated
        info = {"discount": discount}
        return self._observe(got.observation), got.reward, terminated, truncated, info

    def close(self) -> None:
        self.env.close()

    def _observe(self, value: Any) -> Any:
        """Return the observation in the dtypes of its space, where that is lossless."""
        leaves = []
        specs = self._codec.specs.values()
        for leaf, spec in zip(self._codec.flatten(value), specs, strict=True):
            leaves.append(_cast(leaf, spec.dtype))
        return self._codec.build(leaves)


def _space(spec: Any, where: str) -> spaces.Space[Any]:
    if isinstance(spec, Mapping):
        named = {key: _space(part, f"{where}[{key!r}]") for key, part in spec.items()}
        return spaces.Dict(named)
    if isinstance(spec, (list, tuple)):
        return spaces.Tuple(
            [_space(part, f"{where}[{i}]") for i, part in enumerate(spec)]
        )
    dtype = getattr(spec, "dtype", None)
    if dtype is None or dtype.kind not in "biuf":
        raise UnsupportedSpace(
            f"{where} is {spec!r}, expected arrays of numbers or bools; wrap the environment"
        )
    if hasattr(spec, "num_values"):
        return spaces.Discrete(int(spec.num_values))
    if dtype.kind == "b":
        return spaces.MultiBinary(spec.shape)
    if dtype.kind == "f":
        least, most = -np.inf, np.inf
    else:
        least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    low = np.full(spec.shape, getattr(spec, "minimum", least), dtype)
    high = np.full(spec.shape, getattr(spec, "maximum", most), dtype)
    return spaces.Box(low, high, dtype=dtype.type)


def _as_spec(spec: Any, action: Any) -> Any:
    if isinstance(spec, Mapping):
        return {key: _as_spec(part, action[key]) for key, part in spec.items()}
    if isinstance(spec, (list, tuple)):
        parts = []
        for part, value in zip(spec, action, strict=True):
            parts.append(_as_spec(part, value))
        if hasattr(spec, "_fields"):  # a named tuple
            return type(spec)(*parts)
        return type(spec)(parts)
    # for shape () a scalar, which is hashable and an index
    return np.asarray(action, spec.dtype)[()]


def _cast(value: Any, dtype: np.dtype[Any]) -> Array:
    """Convert ``value`` to an array, of ``dtype`` if that is lossless; else ``StackedEnvs`` reports
    the problem.
    """
    array = np.asarray(value)
    # the dtype of a Python number is arbitrary
    scalar = not isinstance(value, np.ndarray) and array.ndim == 0
    casting: Any = "same_kind" if scalar else "safe"
    return array.astype(dtype) if np.can_cast(array.dtype, dtype, casting) else array


def _reseed(env: Any, seed: int) -> bool:
    """Seed all generators that are found, and return whether there are any."""
    if callable(own := getattr(env, "seed", None)):
        own(seed)
        return True
    found = False
    task = getattr(env, "task", None)
    for rng in (
        getattr(env, "random_state", None),
        getattr(task, "random", None),
        getattr(env, "_rng", None),
    ):
        if isinstance(rng, np.random.RandomState):
            rng.seed(seed % 2**32)
            found = True
        elif isinstance(rng, np.random.Generator):
            fresh = type(rng.bit_generator)(seed)
            rng.bit_generator.state = fresh.state
            found = True
    return found
