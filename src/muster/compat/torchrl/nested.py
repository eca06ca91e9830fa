"""Nested dicts of weights, as TensorDicts make them. TorchRL is not needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch


def flattened(weights: Any) -> Any:
    """Return a dict of weights with the names of a state dict. Anything that is not a dict is returned unchanged.

    ``{"net": {"weight": w}}``, ``{("net", "weight"): w}`` and ``{"net.weight": w}`` are the same weights. Values that
    are dicts or TensorDicts are nested; arrays become tensors over their memory.
    """
    return dict(_leaves(weights, ())) if _is_nested(weights) and not hasattr(weights, "flatten_keys") else weights


def _leaves(weights: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for key, value in weights.items():
        names = (*path, *map(str, key)) if isinstance(key, tuple) else (*path, str(key))
        if _is_nested(value):
            yield from _leaves(value, names)
        else:
            yield ".".join(names), torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def _is_nested(value: Any) -> bool:
    """Return whether it is a dict, or a TensorDict."""
    return isinstance(value, Mapping) or (hasattr(value, "flatten_keys") and not torch.is_tensor(value))
