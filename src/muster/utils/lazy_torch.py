"""``torch``, imported when something of it is first used: workers that only step environments never do.

Modules on their path have, in the place of ``import torch``::

    if TYPE_CHECKING:
        import torch
    else:
        from muster.utils import lazy_torch as torch
"""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    value = globals()[name] = getattr(importlib.import_module("torch"), name)  # the next time without this function
    return value
