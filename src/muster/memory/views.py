"""The user's batch: a ``TensorDict`` over a slot's memory, with batch dimensions first and time
last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch

from muster.keys import Key
from muster.memory.objects import copied_cells
from muster.memory.slots import Layout, Slot, torch_dtype
from muster.memory.specs import Array, Column
from muster.utils.private_names import tensordict_maker

if TYPE_CHECKING:
    from tensordict import TensorDict

Order = Literal["batch_major", "time_major"]


class _Leaf(NamedTuple):
    path: Key  # key of the nested TensorDict that contains the leaf
    name: str
    dtype: np.dtype[Any]
    offset: int  # in bytes
    size: tuple[int, ...]
    stride: tuple[int, ...]  # in bytes


@dataclass(frozen=True)
class _Node:
    """A TensorDict: the root or a nested one.

    Its children come before it in ``BatchView._nodes``.
    """

    path: Key
    batch_size: torch.Size
    names: list[str | None]


class BatchView:
    """Turns the bytes of a slot into a ``TensorDict``, without copying.

    Args:
        layout: layout of the slots.
        stacked: the batch has a dimension for the groups, W.
        order: ``"batch_major"`` is ``[W, B, T]``, ``"time_major"`` is ``[T, W, B]``.
        device: value of ``batch.device``.
        hidden: include hidden columns.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        stacked: bool,
        order: Order = "batch_major",
        device: torch.device | None = None,
        hidden: bool = False,
    ) -> None:
        self.layout = layout
        self.device = device
        dims = list(layout.lead)
        if stacked:
            dims.insert(0, layout.lanes)
        time_first = order == "time_major"
        self.time_dim = 0 if time_first else len(dims)
        self.names: list[str | None] = [None] * len(dims)
        self.names.insert(self.time_dim, "time")
        dims.insert(self.time_dim, layout.T)
        self.batch_size = torch.Size(dims)
        self._stacked = stacked
        self._time_first = time_first
        self._leaves = []
        self._objects = []
        for column in layout.columns:
            if column.hidden and not hidden:
                continue
            if column.is_tensor:
                self._leaves.append(self._leaf(layout, column))
            else:
                self._objects.append(column)
        inner: dict[Key, tuple[int, ...]] = {}
        for column in layout.tensor_columns:
            if column.inner:
                inner[column.key[:-1]] = column.shape[: column.inner]
        keys = [(*leaf.path, leaf.name) for leaf in self._leaves]
        keys += [column.key for column in self._objects if not column.ragged]
        paths: dict[Key, None] = {}  # in order
        for key in keys:
            for depth in range(1, len(key)):
                paths[key[:depth]] = None
        self._nodes = []
        deepest_first = sorted(paths, key=len, reverse=True)
        for path in (*deepest_first, ()):
            self._nodes.append(self._node(path, inner.get(path, ())))
        self._leaves = self._ordered(())

    def tensordict(
        self,
        memory: torch.Tensor | Sequence[torch.Tensor],
        slot: Slot,
    ) -> TensorDict:
        """Return the batch over ``memory``.

        Args:
            memory: flat bytes (from ``SlotRing.lend``, or a copy of them), or a tensor for each
                part of ``arrange``.
            slot: the slot that contains the objects.
        """
        # tensors made in inference mode would remain inference tensors
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self.tensordict(memory, slot)
        entries: dict[Key, dict[str, Any]] = {}
        for node in self._nodes:
            entries[node.path] = {}
        if isinstance(memory, torch.Tensor):
            memory = self._tensors(memory)
        for leaf, tensor in zip(self._leaves, memory, strict=True):
            entries[leaf.path][leaf.name] = tensor
        for column in self._objects:
            if not column.ragged:
                *path, name = column.key
                entries[tuple(path)][name] = self._non_tensor(column, slot)
        # Without TensorDict's checks: the shapes are known, and checks would dominate the time of a
        # short batch.
        make: Any = tensordict_maker()
        batch: Any = None
        for node in self._nodes:
            batch = make(
                entries[node.path],
                batch_size=node.batch_size,
                names=node.names,
                device=self.device,
            )
            if node.path:
                *above, name = node.path
                entries[tuple(above)][name] = batch
        for column in self._objects:
            if column.ragged:
                cells = _filled(self._cells(column, slot))
                batch = _add_ragged(batch, column.key, cells, self.time_dim)
                batch.names = self.names  # stacking loses them
        return batch

    def _ordered(self, path: Key) -> list[_Leaf]:
        """Return the leaves of a node in the order in which they end with it: ``lend_parts``
        notices the last end.
        """
        leaves = [leaf for leaf in self._leaves if leaf.path == path]
        for node in self._nodes:
            if node.path and node.path[:-1] == path:
                leaves += self._ordered(node.path)
        return leaves

    def arrange(self, slot: Slot) -> None:
        """Make the parts of a slot in host memory, unless this view has made them already."""
        if slot.arranged_by is not self:
            slot.arrange(self, self._arrays(slot.block))

    def _arrays(self, block: Array) -> list[Array]:
        arrays = []
        for leaf in self._leaves:
            array = np.ndarray(leaf.size, leaf.dtype, block, leaf.offset, leaf.stride)
            arrays.append(array)
        return arrays

    def _tensors(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Return a tensor for each leaf, over flat bytes.

        Not by as_strided: its results share one version counter, so autograd would take a change of
        one leaf for a change of all. Each leaf has a storage of its own, as ``set_`` takes twice as
        long.
        """
        if memory.device.type == "cpu":
            arrays = self._arrays(memory.numpy())
            return [torch.from_numpy(array) for array in arrays]
        tensors = []
        for leaf in self._leaves:
            item = leaf.dtype.itemsize
            stride = tuple(step // item for step in leaf.stride)
            dtype = torch_dtype(leaf.dtype)
            tensor = torch.empty(0, dtype=dtype, device=memory.device)
            first = (memory.storage_offset() + leaf.offset) // item
            storage = memory.untyped_storage()
            tensors.append(tensor.set_(storage, first, leaf.size, stride))
        return tensors

    def _node(self, path: Key, inner: tuple[int, ...]) -> _Node:
        size = torch.Size((*self.batch_size, *inner))
        names = self.names + [None] * len(inner)
        return _Node(path, size, names)

    def refresh_objects(self, batch: TensorDict, slot: Slot) -> None:
        """Replace the non-tensor entries of ``batch`` by the current ones of ``slot``."""
        for column in self._objects:
            batch.set(column.key, self._non_tensor(column, slot))

    def _leaf(self, layout: Layout, column: Column) -> _Leaf:
        item = column.dtype.itemsize
        row = item * math.prod(column.shape)
        size = list(column.shape)
        stride = []
        for dim in range(len(column.shape)):
            cells = math.prod(column.shape[dim + 1 :])
            stride.append(item * cells)
        if column.trailing:
            size.append(1)
            stride.append(item)
        lead: list[tuple[int, int]] = []
        if self._stacked:
            lead.append((layout.lanes, layout.lane_bytes))
        for dim, n in enumerate(layout.lead):
            rows = math.prod(layout.lead[dim + 1 :])
            lead.append((n, row * rows))
        time = (layout.T, layout.B * row)
        if self._time_first:
            lead.insert(0, time)
        else:
            lead.append(time)
        sizes = [n for n, _ in lead]
        steps = [step for _, step in lead]
        return _Leaf(
            path=column.key[:-1],
            name=column.key[-1],
            dtype=column.dtype,
            offset=layout.offsets[column.key],
            size=(*sizes, *size),
            stride=(*steps, *stride),
        )

    def _non_tensor(self, column: Column, slot: Slot) -> Any:
        """Return Python objects as a stack of ``NonTensorData``: copies, since objects cannot be
        lent.
        """
        from muster.memory.cells import stacked_objects

        stack = stacked_objects(self._cells(column, slot))
        if self.device is None:
            return stack
        return stack.to(self.device)

    def _cells(self, column: Column, slot: Slot) -> Array:
        """Return copies of the objects of a column, in the shape of the batch.

        Other rows may share the originals.
        """
        T = self.layout.T
        dims = self.layout.lead
        rows = []
        for lane in slot.lanes:
            cells = lane.arrays[column.key][:T]
            rows.append(cells.reshape(T, *dims))
        stack = np.stack(rows, axis=1)  # [T, W, ...]
        if not self._stacked:
            stack = stack[:, 0]
        if not self._time_first:
            stack = np.moveaxis(stack, 0, -1)
        return copied_cells(stack)


def _add_ragged(
    batch: Any,
    key: Key,
    cells: Array,
    time: int,
) -> Any:
    """Add a column whose cells differ in shape to the batch, as a lazy stack like TorchRL's.

    Cells that are TensorDicts (see ``cells``) become a nested lazy stack. With tensors, the whole
    batch becomes a lazy stack, since a dense TensorDict can contain dense tensors only.
    """
    from tensordict import LazyStackedTensorDict, TensorDictBase

    if not cells.ndim:
        copy = batch.clone(False)
        return copy.set(key, cells.item())
    if isinstance(cells.flat[0], TensorDictBase):
        from muster.memory.cells import add_stack, joined

        add_stack(batch, key, joined(cells))
        return batch
    parts = []
    of_times = _parts(cells, time)
    for part, cell in zip(batch.unbind(time), of_times, strict=True):
        parts.append(_add_ragged(part, key, cell, 0))
    return LazyStackedTensorDict.lazy_stack(parts, time)


def _filled(cells: Array) -> Array:
    """Fill cells without a step with zeros, in the shape of the first other cell."""
    present = [cell for cell in cells.flat if cell is not None]
    if not present:
        return cells
    for index in np.ndindex(cells.shape):
        if cells[index] is None:
            cells[index] = torch.zeros_like(present[0])
    return cells


def _parts(cells: Array, dim: int) -> list[Array]:
    """Unbind an array of objects along ``dim``, without NumPy's conversion of the objects."""
    moved = np.moveaxis(cells, dim, 0)
    shape = moved.shape[1:]
    parts = []
    for i in range(len(moved)):
        parts.append(moved[i : i + 1].reshape(shape))
    return parts
