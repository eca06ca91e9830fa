"""Is what an environment returned what its spaces promise? Shape and dtype always, values by option."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from muster.errors import BadEnvOutput, BadOption, shown
from muster.memory.specs import OBJECT, Array, ArraySpec

FIX = "Fix the environment, or correct its space with a gymnasium wrapper."


def the_only(envs: Sequence[Any]) -> Any:
    """The one environment object, where it is a batch already.

    Raises:
        BadOption: there are several.
    """
    if len(envs) > 1:
        raise BadOption(
            f"num_envs={len(envs)} was given, but {type(envs[0]).__name__} is a batch of environments already: say how "
            f"many where it is made, or pass a list of factories for several groups."
        )
    return envs[0]


def explains_itself(env: Any) -> bool:
    """``env`` is an adapter of Muster's that looks at values itself, so its ``BadEnvOutput`` is passed on as it is.

    The same error from any other environment is only something that it raised, perhaps of a collector inside.
    """
    return type(env).__module__.startswith("muster.envs.")


def leaf_problem(value: Any, spec: ArraySpec) -> str | None:
    """What is wrong with ``value``, as the end of "it is ...", or None."""
    if isinstance(value, np.ndarray):
        if value.shape != spec.shape:
            return f"an array of shape {value.shape} and dtype {value.dtype}"
        return None if value.dtype == spec.dtype else f"an array of dtype {value.dtype} (shape {value.shape})"
    if spec.shape == () and isinstance(value, (int, float, np.generic)):
        kind = "iub" if spec.dtype.kind in "iub" else "iubf"
        if np.asarray(value).dtype.kind in kind:
            return None
    return f"{_describe(value)}"


def as_flag(value: Any, name: str, who: str) -> bool:
    """``value`` as a bool, if it is one.

    Raises:
        BadEnvOutput: anything but True, False, 0, 1 or a zero-dimensional array of those.
    """
    if isinstance(value, (bool, np.bool_)) or (isinstance(value, (int, np.integer)) and value in (0, 1)):
        return bool(value)
    if isinstance(value, np.ndarray) and value.shape == () and value.dtype.kind in "biu" and value in (0, 1):
        return bool(value)
    raise BadEnvOutput(f"{who}: {name} is {_describe(value)}, expected a bool. {FIX}")


def reward_problem(value: Any) -> str | None:
    """What is wrong with a reward, or None; finiteness is checked once per rollout."""
    scalar = isinstance(value, (bool, int, float, np.generic)) or (isinstance(value, np.ndarray) and value.shape == ())
    if scalar and np.asarray(value).dtype.kind in "biuf":
        return None
    return f"reward is {_describe(value)}, expected a number"


def values_problem(array: Array, spec: ArraySpec) -> tuple[tuple[int, ...], str] | None:
    """First place at which ``array`` (``[..., *shape]``) leaves the bounds of ``spec``, and why."""
    if spec.dtype == OBJECT:
        return None
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        return _first(~np.isfinite(array), array, "not finite")
    if spec.low is not None and (array < spec.low).any():
        return _first(array < spec.low, array, f"below the space's low {_bound(spec.low)}")
    if spec.high is not None and (array > spec.high).any():
        return _first(array > spec.high, array, f"above the space's high {_bound(spec.high)}")
    return None


def _first(bad: Array, array: Array, why: str) -> tuple[tuple[int, ...], str]:
    place = tuple(int(i) for i in np.argwhere(bad)[0])
    return place, f"{array[place]} is {why}"


def _bound(bound: Array) -> str:
    return str(bound.min()) if (bound == bound.flat[0]).all() else f"{bound.min()} to {bound.max()}"


def _describe(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape} and dtype {value.dtype}"
    text = shown(lambda: repr(value))
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
