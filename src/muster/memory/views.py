"""What the user gets: a ``TensorDict`` over a slot's memory, batch dimensions first, time last."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from muster.keys import Key
from muster.memory.slots import Layout, Slot
from muster.memory.specs import Column

if TYPE_CHECKING:
    from tensordict import TensorDict

Order = Literal["batch_major", "time_major"]
Nested = dict[str, Any]


@dataclass(frozen=True)
class _Leaf:
    key: Key
    dtype: torch.dtype
    offset: int  # in items
    size: tuple[int, ...]
    stride: tuple[int, ...]


class BatchView:
    """Turns the bytes of a slot into a ``TensorDict``, without copying.

    Args:
        layout: of the slots.
        stacked: the batch has a leading dimension for the groups.
        order: ``"batch_major"`` is ``[W, B, T]``, ``"time_major"`` is ``[T, W, B]``.
        device: the batch's stated device (``batch.device``), or None.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        stacked: bool,
        order: Order = "batch_major",
        device: torch.device | None = None,
    ) -> None:
        self.layout = layout
        self.device = device
        dims = [layout.lanes] * stacked + [layout.B] * layout.batched
        time_first = order == "time_major"
        self.batch_size = torch.Size([layout.T, *dims] if time_first else [*dims, layout.T])
        self.names = ["time", *[None] * len(dims)] if time_first else [*[None] * len(dims), "time"]
        self._stacked, self._batched, self._time_first = stacked, layout.batched, time_first
        self._leaves = [self._leaf(layout, c) for c in layout.tensor_columns]
        self._objects = layout.object_columns

    def tensordict(self, memory: torch.Tensor, slot: Slot) -> TensorDict:
        """The batch over ``memory`` (flat bytes, from ``SlotRing.lend`` or a copy of them)."""
        storage = memory.untyped_storage()
        first = memory.storage_offset()
        root: Nested = {}
        for leaf in self._leaves:
            # Not as_strided: its results would share one version counter, and a change of one leaf would
            # look to autograd like a change of all.
            tensor = torch.empty(0, dtype=leaf.dtype, device=memory.device)
            shift = first // leaf.dtype.itemsize
            tensor.set_(storage, shift + leaf.offset, leaf.size, leaf.stride)
            _set(root, leaf.key, tensor)
        for column in self._objects:
            _set(root, column.key, self._non_tensor(column, slot))
        return self._wrap(root)

    def _wrap(self, root: Nested) -> TensorDict:
        """Without TensorDict's checks: the shapes were made here, and a batch of few steps would be mostly checking."""
        from tensordict import TensorDict

        entries = {key: self._wrap(value) if type(value) is dict else value for key, value in root.items()}
        return TensorDict._new_unsafe(entries, batch_size=self.batch_size, names=self.names, device=self.device)

    def refresh_objects(self, batch: TensorDict, slot: Slot) -> None:
        """Replace the non-tensor entries of ``batch`` by what ``slot`` holds now."""
        for column in self._objects:
            batch.set(column.key, self._non_tensor(column, slot))

    def _leaf(self, layout: Layout, column: Column) -> _Leaf:
        item = column.dtype.itemsize
        row = math.prod(column.shape)
        inner = [math.prod(column.shape[i + 1 :]) for i in range(len(column.shape))]
        size, stride = list(column.shape), inner
        if column.trailing:
            size, stride = [*size, 1], [*stride, 1]
        lead: list[tuple[int, int]] = []
        if self._stacked:
            lead.append((layout.lanes, layout.lane_bytes // item))
        if self._batched:
            lead.append((layout.B, row))
        time = (layout.T, layout.B * row)
        lead = [time, *lead] if self._time_first else [*lead, time]
        return _Leaf(
            column.key,
            torch.from_numpy(np.empty(0, column.dtype)).dtype,
            layout.offsets[column.key] // item,
            tuple(n for n, _ in lead) + tuple(size),
            tuple(s for _, s in lead) + tuple(stride),
        )

    def _non_tensor(self, column: Column, slot: Slot) -> Any:
        """Python objects as a stack of ``NonTensorData``; a shallow copy, since lists cannot be lent."""
        from tensordict import NonTensorStack

        stack = np.stack([lane.arrays[column.key][: self.batch_time] for lane in slot.lanes])  # [W, T, B]
        if not self._batched:
            stack = stack[:, :, 0]
        stack = np.moveaxis(stack, 1, 0 if self._time_first else -1)
        if not self._stacked:
            stack = stack[0] if not self._time_first else stack[:, 0]
        return NonTensorStack.from_list(stack.tolist())

    @property
    def batch_time(self) -> int:
        return self.batch_size[0 if self._time_first else -1]


def _set(root: Nested, key: Key, value: Any) -> None:
    for part in key[:-1]:
        root = root.setdefault(part, {})
    root[key[-1]] = value
