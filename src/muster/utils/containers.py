"""Lists and dicts from users, who also pass those of configuration libraries (OmegaConf, ...)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def is_several(value: Any) -> bool:
    """Return whether ``value`` is a list, a tuple, or another sequence of values; a text is one."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))
