"""Which columns of rollouts a ``ReplayMemory`` stores, and the rings for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from muster.errors import BadOption, text_of
from muster.keys import FLAGS, Key, dotted, is_below, next_of
from muster.memory.ring import Ring
from muster.memory.sample_arrays import SampleArrays
from muster.memory.specs import Column
from muster.memory.stored_rows import is_stack


class StoredColumns:
    """Makes the rings of a memory, and refuses what they cannot store with ``BadOption``.

    Args:
        capacity, stack: see ``ReplayMemory``.
        keep: keys of further columns.
        arrays: for samples.
    """

    def __init__(
        self,
        capacity: int,
        keep: Sequence[Key],
        stack: int,
        arrays: SampleArrays,
    ) -> None:
        self.keep = list(keep)
        self.stack = stack
        self._capacity = capacity
        self._arrays = arrays

    def of(self, columns: Sequence[Column]) -> list[Column]:
        """Return the columns that are stored."""
        known = [column.key for column in columns]
        for key in self.keep:
            if not any(is_below(there, [key]) for there in known):
                raise BadOption(
                    f"ReplayMemory(keep=): there is no {dotted(key)}. There are"
                    f" {sorted(dotted(key) for key in known if key[0] != 'next')}"
                )
        stored = []
        for column in columns:
            has_role = column.role is not None and not column.hidden
            needed = has_role or is_below(column.key, self.keep)
            if column.is_tensor and (needed or _is_of_step(column)):
                stored.append(column)
            elif needed:
                raise BadOption(
                    f"ReplayMemory stores tensors, and {dotted(column.key)} are Python objects."
                    " Use TorchRL's ReplayBuffer(storage=ListStorage(n)), or make arrays of them"
                    " in the environment"
                )
        return stored

    def rings(
        self,
        columns: Sequence[Column],
        sizes: Sequence[int],
        margin: int,
        device: torch.device | None,
    ) -> list[Ring]:
        """Return empty rings for stored columns."""
        rows = self.rows_of(sizes)
        try:
            return [
                Ring(columns, size, rows, margin, device, self.stack, self._arrays)
                for size in sizes
            ]
        except (MemoryError, ValueError, RuntimeError) as error:
            # NumPy's two, and torch's on a device
            raise BadOption(
                f"ReplayMemory(capacity={self._capacity}) does not fit into the memory:"
                f" {text_of(error)}. Give it a smaller capacity"
            ) from error

    def check_stacks(self, columns: Sequence[Column]) -> None:
        """Raise ``BadOption`` if no observation is a stack of frames, and the option says so."""
        shapes = {
            dotted(column.key): list(column.shape)
            for column in columns
            if column.role == "observation"
        }
        if self.stack > 1 and not any(
            is_stack(shape, self.stack) for shape in shapes.values()
        ):
            raise BadOption(
                f"ReplayMemory(stack={self.stack}): no observation is a stack of {self.stack} frames"
                f" in its first dimension; the shapes are {shapes}. Leave stack out"
            )

    def rows_of(self, sizes: Sequence[int]) -> int:
        """Return the number of rows of each ring."""
        total = sum(sizes)
        if self._capacity < total:
            raise BadOption(
                f"ReplayMemory(capacity={self._capacity}) is smaller than one row of"
                f" {total} environments: a capacity of at least {total} is necessary, and of some"
                " thousand rows is usual"
            )
        return self._capacity // total


def check_same(
    rings: Sequence[Ring],
    columns: Sequence[Column],
    sizes: Sequence[int],
) -> None:
    """Raise ``BadOption`` if rows with these columns do not fit to those that are stored."""
    have = _kinds(rings[0].stored.columns)
    given = _kinds(columns)
    here = [ring.B for ring in rings]
    if have == given and here == list(sizes):
        return
    differing = sorted(
        dotted(key) for key in {*have, *given} if have.get(key) != given.get(key)
    )
    raise BadOption(
        f"this ReplayMemory has transitions of {here} environments, and the collector has"
        f" {list(sizes)}; columns that differ: {differing}. Use a memory of its own"
    )


def _kinds(columns: Sequence[Column]) -> dict[Key, tuple[Any, ...]]:
    return {column.key: (column.shape, column.dtype, column.role) for column in columns}


def described(column: Column) -> list[Any]:
    """Return a column as JSON has it."""
    shape = list(column.shape)
    return [
        list(column.key),
        shape,
        column.dtype.str,
        column.carry,
        column.trailing,
        column.hidden,
        column.role,
        column.ended_by,
    ]


def column_of(described: Sequence[Any]) -> Column:
    """Return the column of ``described``."""
    key, shape, dtype, carry, trailing, hidden, role, *more = described
    ended_by = next(iter(more), None)  # memories that were saved before have none
    return Column(
        tuple(key),
        tuple(shape),
        np.dtype(dtype),
        carry=carry,
        trailing=trailing,
        hidden=hidden,
        role=role,
        ended_by=None if ended_by is None else tuple(ended_by),
    )


def _is_of_step(column: Column) -> bool:
    """Return whether a column is what a step returns to the user, or one of the flags."""
    is_flag = column.key in map(next_of, FLAGS)
    return column.key[0] == "next" and (is_flag or not column.hidden)
