"""Cells: the entries of object columns for one environment at one time, and TensorDicts made of
them.

A cell is a Python object. In a ragged column it is a tensor of varying shape, or a TensorDict if it
is a stack whose parts differ in shape (agents with different observations); that contains the stack
only, by the column's last key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
)
from tensordict.utils import is_non_tensor

from muster.keys import Key
from muster.memory.objects import copied
from muster.memory.specs import OBJECT, Array


def take(td: Any, key: Key, lead: tuple[int, ...]) -> Array | None:
    """Return copies of the cells of one leaf, ``[*lead]``; None if no environment has the leaf.

    Raises:
        TypeError: an object cannot be copied.
    """
    out = np.empty(lead, OBJECT)
    for index in np.ndindex(lead):
        node = td[index] if lead else td
        out[index] = _cell(node, key)
    if all(cell is None for cell in out.flat):
        return None
    return out


def assemble(
    leaves: Mapping[Key, Any],
    lead: tuple[int, ...],
    device: torch.device | None = None,
    inner: Mapping[Key, tuple[int, ...]] | None = None,
) -> Any:
    """Make a TensorDict ``[*lead]`` of tensors ``[*lead, *shape]`` and arrays of cells ``[*lead]``.

    The TensorDict is a lazy stack if cells are tensors, since their shapes may differ.

    Args:
        leaves: leaves by key; nested keys make nested TensorDicts.
        lead: batch size.
        device: device of the TensorDict.
        inner: further dimensions of nested TensorDicts, by their keys.
    """
    cells = {}
    for key, value in leaves.items():
        if not torch.is_tensor(value):
            cells[key] = value
    if lead and any(map(_has_tensors, cells.values())):
        parts = []
        for i in range(lead[0]):
            part = {key: _part(value, i) for key, value in leaves.items()}
            parts.append(assemble(part, lead[1:], device, inner))
        return LazyStackedTensorDict.lazy_stack(parts)
    td = TensorDict({}, batch_size=lead, device=device)
    # first, since a stack is a whole node, and other leaves are set into it
    for key, value in cells.items():
        if isinstance(value.flat[0], TensorDictBase):
            add_stack(td, key, joined(value))
    for path, shape in (inner or {}).items():
        if td.get(path, None) is None:
            size = (*lead, *shape)
            td.set(path, TensorDict({}, batch_size=size, device=device))
    for key, value in cells.items():
        first = value.flat[0]
        if torch.is_tensor(first):
            td.set(key, value.item())
        elif not isinstance(first, TensorDictBase):
            td.set(key, stacked_objects(value))
    for key, value in leaves.items():
        if torch.is_tensor(value):
            td.set(key, value)
    return td


def _has_tensors(cells: Array) -> bool:
    return any(torch.is_tensor(cell) for cell in cells.flat)


def add_stack(td: Any, key: Key, stack: Any) -> None:
    """Add ``stack``, whose only leaf has the last part of ``key`` as its name, to ``td`` at
    ``key``.
    """
    # TensorDict (0.14) fails to name the dimensions of a stack in a TensorDict with a device
    if any(td.names):
        inner = [None] * (stack.ndim - td.ndim)
        stack.names = [*td.names, *inner]
    above = key[:-1]
    node = td.get(above, None)
    if node is None:
        td.set(above, stack)
    elif isinstance(node, LazyStackedTensorDict):
        node.update(stack)
    else:  # dense so far
        for name, value in node.items():
            stack.set(name, value)
        td.set(above, stack)


def is_uneven(td: Any, key: Key) -> bool:
    """Return whether a leaf of ``td`` differs in shape between parts, so that it is not available
    as one tensor.
    """
    try:
        td.get(key)
    except (RuntimeError, KeyError):
        return True
    return False


def joined(cells: Array) -> Any:
    """Join cells that are stacks into one stack; the dimensions of ``cells`` come first."""
    if not cells.ndim:
        return cells.item().copy()
    parts = [joined(_part(cells, i)) for i in range(len(cells))]
    return torch.stack(parts, 0)


def stacked_objects(cells: Array) -> Any:
    """Return cells that are Python objects, not copied, as a stack of ``NonTensorData`` with the
    shape of ``cells``.

    ``NonTensorStack.from_list`` would take an object that is a list for a dimension of the stack.
    """
    if not cells.ndim:
        return NonTensorData(cells.item(), batch_size=())
    parts = [stacked_objects(_part(cells, i)) for i in range(len(cells))]
    return NonTensorStack(*parts)


def objects_of(stack: Any) -> Array:
    """Return the objects of a stack of ``NonTensorData``, not copied, ``[*batch_size]``; its
    ``clone`` shares them.
    """
    cells = np.empty(tuple(stack.batch_size), OBJECT)
    if isinstance(stack, NonTensorData):
        for place in range(cells.size):
            cells.flat[place] = stack.data
        return cells
    for i, part in enumerate(stack.unbind(0)):
        if cells.ndim == 1:
            cells[i] = part.data
        else:
            cells[i] = objects_of(part)
    return cells


def _part(value: Any, i: int) -> Any:
    if torch.is_tensor(value):
        return value[i]
    # not ``value[i]``, which would be the object
    return value[i : i + 1].reshape(value.shape[1:])


def _cell(td: Any, key: Key) -> Any:
    node = td
    if len(key) > 1:
        node = td.get(key[:-1], None)
    if node is None:
        return None
    if isinstance(node, LazyStackedTensorDict):
        return node.select(key[-1], strict=False).clone()
    value = node.get(key[-1], None)
    if is_non_tensor(value):
        if isinstance(value, NonTensorStack):
            value = value.tolist()
        else:
            value = value.data
    return copied(value)
