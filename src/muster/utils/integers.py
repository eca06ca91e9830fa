"""Integer arguments of users."""

from __future__ import annotations

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
