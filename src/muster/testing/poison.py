"""Environments that use the memory of what they returned again, and spoil it before: for
``EnvContract``.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

# methods that return one value of several: they spoil their own last results only
BY_ITSELF = ("observe", "state")
METHODS = ("reset", "step", "last", "recv", *BY_ITSELF)
OF_TORCHRL = ("_reset", "_step")  # ``reset`` and ``step`` are TorchRL's own


def poisoned(env: Any) -> Any:
    """Let an environment reuse its memory: every call overwrites what earlier calls returned, and
    returns it again.

    Arrays and tensors are first filled with values that no environment returns, lists and dicts are
    emptied. The environment's own state is not touched.

    Args:
        env: environment of any kind that ``Collector`` accepts, but functional JAX environments,
            which own no memory: these are returned unchanged.
    """
    is_torchrl = any(cls.__module__.startswith("torchrl.") for cls in type(env).__mro__)
    # TorchRL's first: asked for an unknown attribute, its batched environments start workers
    if not is_torchrl and _is_functional(env):
        return env
    results: dict[Any, Any] = {}
    for name in OF_TORCHRL if is_torchrl else METHODS:
        method = getattr(env, name, None)
        if callable(method):
            setattr(env, name, _spoiling(method, name, results))
    return env


def _is_functional(env: Any) -> bool:
    return hasattr(env, "step_env") or hasattr(env, "observation_size")


def _spoiling(
    method: Callable[..., Any],
    name: str,
    results: dict[Any, Any],
) -> Callable[..., Any]:
    """Return the method, with memory for its results that it shares with other methods."""

    def place(args: Any) -> Any:
        if name not in BY_ITSELF:
            return ""
        return (name, *map(str, args))

    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            key = place(args)
            spoil(results.get(key))
            returned = await method(*args, **kwargs)
            results[key] = refilled(results.get(key), returned)
            return results[key]

        return awaited

    @functools.wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        key = place(args)
        spoil(results.get(key))
        returned = method(*args, **kwargs)
        results[key] = refilled(results.get(key), returned)
        return results[key]

    return called


def spoil(value: Any) -> None:
    """Overwrite all memory of a value that can be overwritten."""
    if isinstance(value, np.ndarray):
        if value.dtype == object:
            for part in value.flat:
                spoil(part)
        value[...] = _garbage(value.dtype.kind)
    elif isinstance(value, (tuple, list)):
        for part in value:
            spoil(part)
        if isinstance(value, list):
            value.clear()
    elif isinstance(value, dict):
        for part in value.values():
            spoil(part)
        value.clear()
    elif hasattr(value, "masked_fill_") or hasattr(
        value, "apply_"
    ):  # a tensor, or a TensorDict
        _spoil_tensors(value)
    elif hasattr(value, "__dict__"):
        for part in vars(value).values():
            spoil(part)


def refilled(memory: Any, value: Any) -> Any:
    """Return a copy of ``value``, in the memory of an earlier one where that has the same type and
    shape.
    """
    if isinstance(value, np.ndarray) and value.dtype != object:
        same_type = type(memory) is type(value)
        if not same_type or memory.shape != value.shape or memory.dtype != value.dtype:
            return value.copy()
        memory[...] = value
        return memory
    if isinstance(value, tuple):
        same_length = isinstance(memory, tuple) and len(memory) == len(value)
        olds = memory if same_length else [None] * len(value)
        parts = [refilled(old, part) for old, part in zip(olds, value, strict=True)]
        kind: Any = type(value)
        return kind._make(parts) if hasattr(kind, "_make") else tuple(parts)
    if type(value) is dict:
        parts_by_name = {name: copied(part) for name, part in value.items()}
        if type(memory) is dict:
            memory.update(parts_by_name)
            return memory
        return parts_by_name
    return copied(value)


def copied(value: Any) -> Any:
    """Return a copy; of what cannot be copied, itself."""
    if hasattr(value, "apply_"):
        return value.clone()
    try:
        return copy.deepcopy(value)
    except Exception:  # noqa: BLE001 (whatever a class raises)
        return value


def _garbage(kind: str) -> Any:
    return {
        "f": np.nan,
        "c": np.nan,
        "b": True,
        "u": 165,
        "i": -77,
        "U": "spoiled",
        "S": b"spoiled",
    }.get(kind)


def _spoil_tensors(value: Any) -> None:
    import torch

    if not isinstance(value, torch.Tensor):
        value.apply(_spoil_tensors, filter_empty=True)
        return
    with torch.no_grad():
        if value.dtype is torch.bool:
            value.fill_(True)
        elif value.is_floating_point():
            value.fill_(float("nan"))
        elif not value.is_complex():
            value.fill_(77)
