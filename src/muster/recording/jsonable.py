"""Python objects that survive JSON unchanged, and no others."""

from __future__ import annotations

import json
from typing import Any


def dumps(value: Any, **options: Any) -> str:
    """``value`` as JSON that reads back equal and of the same types.

    Raises:
        TypeError: it holds something else than str, int, float, bool, None, lists and dicts with str keys;
            JSON would turn tuples into lists, and keys into text, without a word.
    """
    try:
        _check(value)
        return json.dumps(value, **options)
    except (ValueError, RecursionError) as error:  # circular, too deep, or an int of thousands of digits
        raise TypeError(f"{type(value).__name__} cannot be written as JSON: {error}") from error


def _check(value: Any) -> None:
    if isinstance(value, list):
        for item in value:
            _check(item)
    elif type(value) is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise TypeError(f"a dict with the key {key!r} ({type(key).__name__}, not str)")
            _check(item)
    elif value is not None and type(value) not in (str, int, float, bool):
        raise TypeError(f"a {type(value).__module__}.{type(value).__qualname__}")
