"""Checks of returned values against the spaces: shape and dtype always, bounds by option.

Values of another dtype than that of the space are cast if it can hold them; ``Casts`` decides that
for all adapters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache, partial
from typing import Any

import numpy as np

from muster.errors import (
    BadEnvOutput,
    BadOption,
    EnvError,
    UnsupportedEnv,
    UnsupportedSpace,
    described,
    shown,
)
from muster.keys import Key, dotted, next_of
from muster.memory.objects import copied
from muster.memory.slots import Lane
from muster.memory.specs import OBJECT, Array, ArraySpec, Specs

NUMBERS = "biuf"  # kinds of dtypes
FIX = "Fix the environment, or correct its space with a gymnasium wrapper."
OLD_API = " (Environments of Gym before 0.26 return this: shimmy's GymV21CompatibilityV0 wraps them.)"


def the_only(envs: Sequence[Any]) -> Any:
    """Return the only environment object, which is a batch itself; ``BadOption`` if there are
    several.
    """
    if len(envs) > 1:
        raise BadOption(
            f"num_envs={len(envs)} was given, but {type(envs[0]).__name__} is a batch of"
            " environments already: say how many where it is made, or pass a list of factories for"
            " several groups."
        )
    return envs[0]


def env_name(env: Any) -> str:
    """Return the name for messages: the env id, or the class."""
    spec = getattr(env, "spec", None)
    env_id = getattr(spec, "id", None)
    return env_id or type(getattr(env, "unwrapped", env)).__name__


def check_distinct(envs: Sequence[Any], name: str) -> None:
    """Raise ``UnsupportedEnv`` if an environment object occurs twice."""
    objects = {id(env) for env in envs}
    if len(objects) < len(envs):
        raise UnsupportedEnv(
            f"{name}: the factory returned the same object twice; return a new env per call"
        )


def check_arrays(name: str, *specs: Specs) -> None:
    """Raise ``UnsupportedSpace`` if a leaf is not an array; for adapters that cannot store Python
    objects.
    """
    for part in specs:
        for key, spec in part.items():
            if not spec.is_tensor:
                raise UnsupportedSpace(
                    f"{name}: {dotted(key)} has a space whose values are not arrays"
                )


def check_next_rows(name: str, keys: Sequence[Key], lane: Lane) -> None:
    """Raise ``BadOption`` if a lane on a device has no rows for the last observations."""
    if any(next_of(key) not in lane.tensors for key in keys):
        raise BadOption(
            f"{name}: compact_obs=True keeps last observations aside when an episode"
            " ends, which only the device knows. Leave it out."
        )


def close_all(closes: Sequence[Callable[[], Any]]) -> None:
    """Call all functions, the last one first, even if some of them raise errors."""
    with ExitStack() as stack:
        for close in closes:
            stack.callback(close)


def close_envs(numbered: Iterable[tuple[int, Any]], name: str) -> None:
    """Close the user's environments, given with their numbers, the last one first, even if some of
    them raise errors.

    Raises ``EnvError`` for one that does.
    """
    closes = [
        partial(call, env, "close", f"{name}[{i}]", index=i)
        for i, env in numbered
        if hasattr(env, "close")
    ]
    close_all(closes)


def call(
    env: Any,
    method: str,
    who: str,
    *args: Any,
    index: int | None = None,
    **kwargs: Any,
) -> Any:
    """Call a method of the user's environment and return its result; an error becomes an
    ``EnvError`` of ``who``.
    """
    try:
        return getattr(env, method)(*args, **kwargs)
    except Exception as error:
        if is_explained(error, env):
            raise
        raise EnvError(
            f"{who}.{method} raised {described(error)}", env_index=index
        ) from error


def seed_argument(
    env: Any,
    seed: Any,
    name: str,
    casts: Casts,
) -> dict[str, Any]:
    """Return the seed as an argument of ``env.reset``; none, if its ``reset`` takes no seed.

    The seed then goes to the environment's method ``seed``. Without one, there is a warning.
    """
    if takes_seed(env):
        return {"seed": seed}
    if seed is None:
        return {}
    if callable(getattr(env, "seed", None)):
        call(env, "seed", name, seed)
        return {}
    casts.warn(
        f"{name}.reset takes no seed, and there is no method seed: the same seed does not give the"
        " same episodes. Let reset take seed=None."
    )
    return {}


def takes_seed(env: Any) -> bool:
    """Return whether ``env.reset`` takes a seed."""
    reset = getattr(env, "reset", None)
    return _takes_seed(getattr(reset, "__func__", reset))


@lru_cache(maxsize=256)
def _takes_seed(reset: Any) -> bool:
    try:
        parameters = inspect.signature(reset).parameters.values()
    except (TypeError, ValueError):  # no function of Python
        return True
    return any(
        one.kind is one.VAR_KEYWORD
        or (one.name == "seed" and one.kind is not one.POSITIONAL_ONLY)
        for one in parameters
    )


def is_explained(error: BaseException, env: Any) -> bool:
    """Return whether ``error`` is from an adapter of Muster that checks values itself; it is then
    raised unchanged.
    """
    ours = type(env).__module__.startswith("muster.envs.")
    return ours and issubclass(type(error), (BadEnvOutput, UnsupportedEnv))


def reset_pair(got: Any, who: str) -> tuple[Any, Any]:
    """Return observation and info from the result of ``reset``; raise ``BadEnvOutput`` if it is not
    such a pair.
    """
    if not isinstance(got, tuple) or len(got) != 2:
        size = f" of {len(got)}" if isinstance(got, tuple) else ""
        old = "" if isinstance(got, tuple) else OLD_API
        raise BadEnvOutput(
            f"{who}.reset returned {type(got).__name__}{size}, expected (observation, info). {FIX}{old}"
        )
    observation, info = got
    if not isinstance(info, Mapping):
        raise BadEnvOutput(
            f"{who}.reset returned {described_value(info)} as info, expected a dict. {FIX}"
        )
    return observation, info


def step_values(got: Any, who: str) -> tuple[Any, Any, Any, Any, Any]:
    """Return the result of ``step``; raise ``BadEnvOutput`` unless it is a tuple of five values."""
    if not isinstance(got, tuple) or len(got) != 5:
        size = f" of {len(got)}" if isinstance(got, tuple) else ""
        old = OLD_API if size == " of 4" else ""
        raise BadEnvOutput(
            f"{who} returned {type(got).__name__}{size}, expected (observation, reward, terminated,"
            f" truncated, info). {FIX}{old}"
        )
    return got


def batch_seed(seeds: Sequence[int]) -> Any:
    """Return seeds in Gymnasium's convention for batches: an int s stands for s, s + 1, ..."""
    first = int(seeds[0])
    given = list(seeds)
    if given == list(range(first, first + len(given))):
        return first
    return given


def leaf_problem(value: Any, spec: ArraySpec) -> str | None:
    """Describe the problem of ``value``, as the end of "it is ..."; None: no problem."""
    if isinstance(value, np.ndarray):
        if value.shape != spec.shape:
            return f"an array of shape {value.shape} and dtype {value.dtype}"
        if value.dtype == spec.dtype:
            return None
        return f"an array of dtype {value.dtype} (shape {value.shape})"
    if spec.shape == () and isinstance(value, (int, float, np.generic)):
        kind = "iub" if spec.dtype.kind in "iub" else "iubf"
        if np.asarray(value).dtype.kind in kind:
            return None
    return f"{described_value(value)}"


def stored_copy(value: Any, what: str) -> Any:
    """Return the copy of an object leaf that a row keeps; ``BadEnvOutput`` if it cannot be copied."""
    try:
        return copied(value)
    except TypeError as error:
        raise BadEnvOutput(f"{what} is {error}") from error


def kept_info(info: Any) -> Any:
    """Return infos, or options, with copies of their dicts, lists and arrays: environments may
    change them later.

    Raises ``BadEnvOutput`` if one of them contains itself.
    """
    try:
        return _kept(info)
    except RecursionError as error:
        inside = [name for name in info if _is_endless(info[name])]
        raise BadEnvOutput(
            f"the info of an environment contains itself, or thousands of levels: {', '.join(map(repr, inside))}."
            " Leave that out"
        ) from error


def _kept(info: Any) -> Any:
    if isinstance(info, dict):
        return {name: _kept(value) for name, value in info.items()}
    if isinstance(info, np.ndarray):
        return info.copy()
    if isinstance(info, list):
        return [_kept(value) for value in info]
    return info


def _is_endless(info: Any) -> bool:
    try:
        _kept(info)
    except RecursionError:
        return True
    return False


def as_flag(value: Any, name: str, who: str) -> bool:
    """Convert True, False, 0, 1, or a zero-dimensional array of those to a bool; else raise
    ``BadEnvOutput``.
    """
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    scalar = isinstance(value, (int, np.integer))
    if isinstance(value, np.ndarray):
        scalar = value.shape == () and value.dtype.kind in "biu"
    if scalar and value in (0, 1):
        return bool(value)
    raise BadEnvOutput(
        f"{who}: {name} is {described_value(value)}, expected a bool. {FIX}"
    )


def reward_problem(value: Any) -> str | None:
    """Describe the problem of a reward; None: no problem.

    Finiteness is checked once per rollout.
    """
    scalar = isinstance(value, (bool, int, float, np.generic))
    if isinstance(value, np.ndarray):
        scalar = value.shape == ()
    if scalar and np.asarray(value).dtype.kind in NUMBERS:
        return None
    return f"reward is {described_value(value)}, expected a number"


class Casts:
    """Decides about values of another dtype than that of their space, and about rewards of shape
    ``(1,)``.

    They are cast (then ``any`` is True) if the space's dtype can hold their values: floats and
    integers as a wider or narrower float of the same range, whole numbers as integers. One warning
    per cause. ``refused``: cast nothing. ``pending``: warnings that were not taken yet.
    """

    def __init__(self, name: str) -> None:
        self.refused = False
        self.any = False
        self._name = name
        self._texts: set[str] = set()
        self.pending: list[str] = []

    def refuse(self) -> None:
        """Cast nothing from now on."""
        self.refused = True

    def problem(
        self,
        value: Any,
        spec: ArraySpec,
        what: str,
    ) -> str | None:
        """Describe the problem of the leaf ``what``, as the end of "it is ..."; None if it can be
        assigned to a row.
        """
        problem = leaf_problem(value, spec)
        if problem is None or not _keeps_values(value, spec):
            return problem
        if self.refused:
            return f"{problem}, which validate='full' does not cast"
        self.note(
            f"{what} has dtype {np.asarray(value).dtype}, but its space says {spec.dtype}"
        )
        return None

    def check(
        self,
        value: Any,
        spec: ArraySpec,
        what: str,
        who: str,
    ) -> None:
        """Raise ``BadEnvOutput`` if the leaf ``what``, returned by ``who``, has a ``problem``."""
        if problem := self.problem(value, spec, what):
            raise BadEnvOutput(
                f"{who}: {what} is {problem}, but its space says {spec}. {FIX}"
            )

    def reward_problem(self, value: Any) -> str | None:
        """Describe the problem of one environment's reward; None if ``number`` can convert it."""
        problem = reward_problem(value)
        if problem is None:
            return None
        array_of_one = isinstance(value, np.ndarray) and value.shape == (1,)
        if not array_of_one or value.dtype.kind not in NUMBERS:
            return problem
        if self.refused:
            return f"{problem}: validate='full' takes no array of one"
        self.note("the reward has shape (1,), expected a number")
        return None

    def note(self, cause: str) -> None:
        """Record a cast, and warn of ``cause``, a text that does not depend on environment or step."""
        self.any = True
        self.warn(f"{self._name}: {cause}. It is cast. {FIX}")

    def warn(self, text: str) -> None:
        """Add a warning for the user's process, once per text."""
        if text not in self._texts:
            self._texts.add(text)
            self.pending.append(text)

    def take_warnings(self) -> list[str]:
        new = self.pending
        self.pending = []
        return new


def number(value: Any) -> Any:
    """Convert a reward that ``Casts.reward_problem`` accepts to a number."""
    return value.item() if isinstance(value, np.ndarray) else value


def _keeps_values(value: Any, spec: ArraySpec) -> bool:
    """Return whether ``value`` can be assigned to an array of ``spec`` with no loss but digits of
    floats.
    """
    if not isinstance(value, (np.ndarray, np.generic, int, float)):
        return False
    array = np.asarray(value)
    if array.shape != spec.shape:
        return False
    if array.dtype.kind not in NUMBERS or spec.dtype.kind not in NUMBERS:
        return False
    if spec.dtype.kind == "f":
        try:
            with np.errstate(over="raise"):
                array.astype(spec.dtype)
        except FloatingPointError:
            return False
        return True
    with np.errstate(invalid="ignore"):
        return bool((array.astype(spec.dtype) == array).all())


def values_problem(array: Array, spec: ArraySpec) -> tuple[tuple[int, ...], str] | None:
    """Return the first index at which ``array`` (``[..., *shape]``) is out of bounds of ``spec``,
    and the reason.
    """
    if spec.dtype == OBJECT:
        return None
    # like ``all``, six times as fast if small
    if array.dtype.kind == "f" and 0 in np.isfinite(array).tobytes():
        return _first(~np.isfinite(array), array, "not finite")
    if spec.low is not None and 1 in (array < spec.low).tobytes():
        return _first(
            array < spec.low, array, f"below the space's low {_bound(spec.low)}"
        )
    if spec.high is not None and 1 in (array > spec.high).tobytes():
        return _first(
            array > spec.high, array, f"above the space's high {_bound(spec.high)}"
        )
    return None


def _first(bad: Array, array: Array, why: str) -> tuple[tuple[int, ...], str]:
    place = tuple(int(i) for i in np.argwhere(bad)[0])
    return place, f"{array[place]} is {why}"


def _bound(bound: Array) -> str:
    low = bound.min()
    high = bound.max()
    if (bound == bound.flat[0]).all():
        return str(low)
    return f"{low} to {high}"


def described_value(value: Any) -> str:
    """Describe a value for an error message: by type and text, or by shape and dtype."""
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape} and dtype {value.dtype}"
    text = shown(lambda: repr(value))
    if len(text) > 60:
        text = text[:57] + "..."
    return f"{type(value).__name__} {text}"
