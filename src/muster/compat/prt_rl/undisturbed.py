"""A call of a policy that leaves nothing behind: not in random generators, and not in what the policy remembers."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


@contextmanager
def undisturbed(policy: Any, device: torch.device) -> Iterator[None]:
    """Undo afterwards what happens to the process's generators (those of ``device``, too) and to ``policy``.

    Of the policy, and of all modules in it, these are attributes, and the contents of tensors, arrays, generators,
    lists and dicts among them. Parameters are left alone: to act is not to learn.
    """
    parts = list(policy.modules()) if isinstance(policy, torch.nn.Module) else [policy]
    memory = [restore for part in parts for restore in _restoring(getattr(part, "__dict__", None))]
    numpy_state, python_state = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)
        for restore in memory:
            restore()


def _restoring(value: Any) -> list[Callable[[], object]]:
    """Functions that bring back the contents that ``value`` has now."""
    if isinstance(value, torch.nn.Parameter):
        return []
    if isinstance(value, torch.Tensor):
        return [_restoring_tensor(value)]
    if isinstance(value, np.ndarray):
        numbers = value.copy()
        return [lambda: np.copyto(value, numbers)]
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return [lambda: value.set_state(state)]
    if isinstance(value, np.random.Generator):
        bits, before = value.bit_generator, copy.deepcopy(value.bit_generator.state)
        return [lambda: setattr(bits, "state", before)]
    if isinstance(value, dict):
        return [*_restoring_all(value.values()), _refilling(value, dict(value), value.update)]
    if isinstance(value, (list, deque)):
        return [*_restoring_all(value), _refilling(value, list(value), value.extend)]
    return _restoring_all(value) if isinstance(value, tuple) else []


def _restoring_all(values: Any) -> list[Callable[[], object]]:
    return [restore for value in values for restore in _restoring(value)]


def _refilling(container: Any, items: Any, fill: Callable[[Any], object]) -> Callable[[], object]:
    def refill() -> None:
        container.clear()
        fill(items)

    return refill


def _restoring_tensor(value: torch.Tensor) -> Callable[[], object]:
    content = value.detach().clone()

    def restore() -> None:
        with torch.inference_mode(value.is_inference()):
            value.data.copy_(content)  # data: a graph that has it sees no change, as there is none

    return restore
