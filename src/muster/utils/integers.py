"""Arguments of users that are integers or numbers."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np

from muster.errors import BadOption


def integer(
    name: str,
    value: Any,
    at_least: int | None = 1,
    *,
    of: str = "",
    or_else: str = "",
) -> int:
    """Convert ``value`` to an ``int``; accepts integers of NumPy and torch, but no bool.

    ``at_least`` None: there is no bound. ``of`` (the function with this argument) and ``or_else``
    (another valid value) are for the message of ``BadOption``.
    """
    number = None
    if not isinstance(value, (bool, np.bool_)):
        try:
            number = operator.index(value)
        except TypeError:  # also of arrays
            number = None
    if number is None or (at_least is not None and number < at_least):
        given = f"{of}({name}={value!r})" if of else f"{name}={value!r}"
        bound = "" if at_least is None else f" of at least {at_least}"
        raise BadOption(
            f"{given}: expected an integer{bound}{or_else and f', or {or_else}'}"
        )
    return number


def finite(name: str, value: Any, at_least: float | None = None, *, of: str) -> float:
    """Convert ``value`` to a finite ``float``; accepts numbers of NumPy and torch, but no bool.

    ``at_least`` and ``of``: see ``integer``.
    """
    found = math.nan
    if not isinstance(value, (bool, np.bool_, str, bytes)):
        try:
            found = float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            found = math.nan
    if not math.isfinite(found) or (at_least is not None and found < at_least):
        bound = "" if at_least is None else f" of at least {at_least:g}"
        raise BadOption(f"{of}({name}={value!r}): expected a finite number{bound}")
    return found
