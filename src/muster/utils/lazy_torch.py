"""``torch``, imported on first use: workers that only step environments never import it.

Modules that these workers import have, instead of ``import torch``::

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
    # later uses skip this function
    value = globals()[name] = getattr(importlib.import_module("torch"), name)
    return value
