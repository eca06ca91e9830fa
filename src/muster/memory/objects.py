"""Copies of the Python objects in columns without a fixed shape: graphs, sequences, text, values of
custom spaces.

An object in a row belongs to the row: it is copied when it is stored, and again when it is handed
to an environment, a policy or the user. What these keep and change later is never in a row, and
rows can share objects with each other.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import numpy as np

from muster.memory.specs import OBJECT, Array

UNCHANGING = frozenset({str, bytes, int, float, complex, bool, type(None)})
NUMBERS = (
    np.number,
    np.bool_,
    np.str_,
    np.bytes_,
)  # of NumPy's scalars, only ``void`` can change


def copied(value: Any) -> Any:
    """Return a copy of ``value`` that shares no memory with it; values that cannot change are
    returned unchanged.

    Raises:
        TypeError: ``value`` cannot be copied.
    """
    kind = type(value)
    if kind in UNCHANGING:
        return value
    if kind is np.ndarray and value.dtype != OBJECT:
        return value.copy()
    if kind is tuple:
        return tuple([copied(part) for part in value])
    if kind is dict:
        return {name: copied(part) for name, part in value.items()}
    if isinstance(value, tuple) and hasattr(
        kind, "_make"
    ):  # a ``GraphInstance``, most often
        return kind._make([copied(part) for part in value])
    if isinstance(value, NUMBERS):
        return value
    try:
        if _is_tensor(value):
            return value.detach().clone()
        return copy.deepcopy(value)
    except Exception as error:  # a class's own ``__deepcopy__`` can raise anything
        raise TypeError(
            f"a {kind.__module__}.{kind.__qualname__} cannot be copied ({type(error).__name__}:"
            f" {error}), and its owner could change it later. Give its class __deepcopy__, which"
            " may return self if it never changes"
        ) from error


def copied_cells(cells: Array) -> Array:
    """Return an array of the same shape with a copy of each object.

    Raises ``TypeError`` like ``copied``.
    """
    copies = np.empty(cells.shape, OBJECT)
    for place, value in enumerate(cells.flat):
        copies.flat[place] = copied(value)
    return copies


def _is_tensor(value: Any) -> bool:
    """Return whether ``value`` is a tensor or a TensorDict, which copy themselves; imports neither
    package.
    """
    torch, tensordict = sys.modules.get("torch"), sys.modules.get("tensordict")
    if torch is not None and isinstance(value, torch.Tensor):
        return True
    return tensordict is not None and isinstance(value, tensordict.TensorDictBase)
