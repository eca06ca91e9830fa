"""Slots: one preallocated block per rollout, lent to the user and taken back by the garbage collector.

A slot is in exactly one state::

    FREE --take--> FILLING --complete--> FULL --lend--> LENT --last tensor over it collected--> FREE
                      '--give_back (nothing worth delivering)--> FREE

A slot has one *lane* per group; a lane is what one rollout writes into. All lanes of a slot lie in
one block with a constant distance, so that the stack over groups is a view.
"""

from __future__ import annotations

import enum
import gc
import itertools
import math
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from typing_extensions import Self

from muster.errors import SlotsExhausted
from muster.keys import Key
from muster.memory.shared import Arena
from muster.memory.specs import OBJECT, Array, Column

if TYPE_CHECKING:
    import torch

    Memory = Literal["heap", "pinned"] | torch.device | Arena
else:
    from muster.utils import lazy_torch as torch


ALIGNMENT = 64  # bytes: one cache line, and a multiple of every item size
MAX_ROW_VIEWS = 1 << 14  # beyond this many, row views are made when used instead of kept
_loans: dict[int, Any] = {}  # references to the owners of lent slots; one that is gone calls nothing
KEPT_FREE = 2  # one being filled while the user holds another; more than that is given back


class SlotState(enum.Enum):
    """Where a slot is; see the module's picture."""

    FREE = "free"
    FILLING = "filling"
    FULL = "full"
    LENT = "lent"


@dataclass(frozen=True)
class Layout:
    """Where each column lies in a block of memory.

    Args:
        T: time steps per rollout.
        B: environments per group.
        columns: what is stored; keys are unique.
        lanes: groups per slot.
        batch_shape: B as policy and user see it: ``(B,)``, ``()`` for one environment, ``(2, 3)`` for six.
    """

    T: int
    B: int
    columns: tuple[Column, ...]
    lanes: int = 1
    batch_shape: tuple[int, ...] | None = None

    @cached_property
    def lead(self) -> tuple[int, ...]:
        """``batch_shape``, ``(B,)`` by default."""
        return (self.B,) if self.batch_shape is None else self.batch_shape

    def rows(self, column: Column) -> int:
        return self.T + 1 if column.carry else self.T

    @cached_property
    def offsets(self) -> dict[Key, int]:
        """First byte of each tensor column within a lane."""
        ends = itertools.accumulate((self._padded(c) for c in self.tensor_columns), initial=0)
        return {c.key: start for c, start in zip(self.tensor_columns, ends, strict=False)}

    @cached_property
    def lane_bytes(self) -> int:
        return sum(self._padded(c) for c in self.tensor_columns)

    @cached_property
    def tensor_columns(self) -> tuple[Column, ...]:
        return tuple(c for c in self.columns if c.is_tensor)

    @cached_property
    def object_columns(self) -> tuple[Column, ...]:
        return tuple(c for c in self.columns if not c.is_tensor)

    @property
    def nbytes(self) -> int:
        return self.lane_bytes * self.lanes

    def _padded(self, column: Column) -> int:
        size = self.rows(column) * self.B * math.prod(column.shape) * column.dtype.itemsize
        return -(-size // ALIGNMENT) * ALIGNMENT


class Lane:
    """The memory of one rollout: time-major arrays, and views of their rows made once.

    Attributes:
        tensors: ``[T, B, *shape]`` per column (``[T + 1, ...]`` where carried); tensor columns only.
        arrays: the same memory as NumPy arrays, and the object columns. On a device only ``host`` columns have an
            array, which ``pull`` and ``push`` copy.
        data: arrays where all of the lane has them, else tensors (and arrays of objects).
        done_steps: rows that hold complete transitions; where a rollout continues after an error.
        stopped: the rollout ended before row T.
        acts_from: row of the policy's first ``act`` in this rollout.
        cache: what policies and environments keep per lane, by themselves as key.
    """

    def __init__(self, layout: Layout, block: Array | torch.Tensor) -> None:
        self.layout = layout
        self.T, self.B = layout.T, layout.B
        self.arrays: dict[Key, Array] = {}
        tensors: dict[Key, torch.Tensor] = {}
        self.cache: dict[Any, Any] = {}
        self.mirrored = not isinstance(block, np.ndarray)
        self.done_steps = self.acts_from = 0
        self.stopped = False
        for column in layout.tensor_columns:
            shape = (layout.rows(column), self.B, *column.shape)
            start = layout.offsets[column.key]
            part = block[start : start + math.prod(shape) * column.dtype.itemsize]
            if not isinstance(part, np.ndarray):
                tensors[column.key] = part.view(torch_dtype(column.dtype)).reshape(shape)
                if column.host:
                    self.arrays[column.key] = np.zeros(shape, column.dtype)
            else:
                self.arrays[column.key] = part.view(column.dtype).reshape(shape)
        for column in layout.object_columns:
            self.arrays[column.key] = np.empty((layout.rows(column), self.B), OBJECT)
        if self.mirrored:
            self.tensors = tensors
        self.data: dict[Key, Any] = {**self.arrays, **tensors} if self.mirrored else self.arrays

    @cached_property
    def tensors(self) -> dict[Key, torch.Tensor]:
        """See the class."""
        with torch.inference_mode(False):  # rollouts run in it, but environments write outside
            return {column.key: torch.from_numpy(self.arrays[column.key]) for column in self.layout.tensor_columns}

    def rows(self, key: Key) -> Sequence[torch.Tensor] | torch.Tensor:
        """Torch views of the rows, as policies see them: ``[*batch_shape, *shape]``."""
        tensor = self.tensors[key]
        if len(self.layout.lead) != 1:
            tensor = tensor.reshape(len(tensor), *self.layout.lead, *tensor.shape[2:])
        return tensor.unbind(0) if len(tensor) <= MAX_ROW_VIEWS else tensor

    def np_rows(self, key: Key) -> Sequence[Array] | Array:
        """NumPy views of the rows, as policies see them: ``[*batch_shape, *shape]``.

        A row is never a scalar: an unbatched row of scalars is ``[1]``.
        """
        array = self.arrays[key]
        if len(self.layout.lead) != 1 and (self.layout.lead or array.ndim > 2):
            array = array.reshape(len(array), *self.layout.lead, *array.shape[2:])
        return list(array) if len(array) <= MAX_ROW_VIEWS else array

    def pull(self, keys: Iterable[Key]) -> None:
        """Copy columns from the device to their arrays; waits for the device."""
        for key in keys if self.mirrored else ():
            torch.from_numpy(self.arrays[key]).copy_(self.tensors[key])

    def push(self, keys: Iterable[Key]) -> None:
        """Copy columns from their arrays to the device."""
        for key in keys if self.mirrored else ():
            self.tensors[key].copy_(torch.from_numpy(self.arrays[key]))


class Slot:
    """One block of memory with a lane per group.

    Attributes:
        offset: where it lies in an ``Arena``.
    """

    def __init__(self, layout: Layout, memory: Memory = "heap") -> None:
        self.block: Any  # bytes: a NumPy array, on a device a tensor
        self.offset = 0
        if isinstance(memory, Arena):
            self.offset = memory.allocate(layout.nbytes)
            self.block = memory.view(self.offset, layout.nbytes)
            weakref.finalize(self, memory.release, self.offset, layout.nbytes).atexit = False
        elif memory not in ("heap", "pinned"):
            self.block = torch.zeros(layout.nbytes, dtype=torch.uint8, device=memory)
        elif memory == "pinned":
            self.block = torch.zeros(layout.nbytes, dtype=torch.uint8, pin_memory=True).numpy()
        else:
            self.block = _aligned(layout.nbytes)
        self.state = SlotState.FREE
        self.layout = layout
        step = layout.lane_bytes
        self.lanes = [Lane(layout, self.block[i * step : (i + 1) * step]) for i in range(layout.lanes)]

    def begin(self) -> Self:
        """Fill it from the first row on."""
        for lane in self.lanes:
            lane.done_steps, lane.stopped = 0, False
        return self


class SlotRing:
    """The slots of one layout: reused when no tensor refers to them any more, more of them when needed.

    Args:
        layout: of every slot.
        limit_bytes: the ring refuses to grow beyond this.
        memory: ``"heap"``, ``"pinned"`` for transfers to a GPU, the device that slots lie on, or what is shared with
            other processes.
    """

    def __init__(self, layout: Layout, *, limit_bytes: int, memory: Memory = "heap") -> None:
        self.layout = layout
        self.limit_bytes = limit_bytes
        self.memory: Memory = memory
        self._free: deque[Slot] = deque()  # appended to by finalizers, from whatever thread collects
        self._live: weakref.WeakSet[Slot] = weakref.WeakSet()

    def count(self, state: SlotState) -> int:
        """How many slots are in ``state``."""
        return sum(slot.state is state for slot in self._live)

    def take(self) -> Slot:
        """A slot to fill.

        Raises:
            SlotsExhausted: if all slots are lent and another one would pass ``limit_bytes``.
        """
        if not self._free and not self._fits():
            gc.collect()  # a batch in a reference cycle is as good as dropped
            if not self._free and not self._fits():
                raise SlotsExhausted(
                    f"{self.count(SlotState.LENT)} batches of {self.layout.nbytes:,} bytes are still referenced, "
                    f"and another one would pass slot_memory_limit={self.limit_bytes:,} bytes. A batch is a view "
                    f"on Muster's memory and keeps all of it alive as long as any tensor of it lives: drop batches "
                    f"you no longer need, keep `batch.clone()` of small parts, or raise slot_memory_limit."
                )
        if self._free:
            slot = self._free.popleft()
        else:
            slot = Slot(self.layout, self.memory)
            self._live.add(slot)
        slot.state = SlotState.FILLING
        return slot.begin()

    def lend(self, slot: Slot) -> torch.Tensor:
        """The slot's memory as flat bytes, for the user; it comes back when no tensor shares it any more.

        Of a slot on a device it is a copy there, and the slot is free at once: its rows keep their addresses, as CUDA
        graphs need them, and nothing there tells when the last tensor dies.
        """
        if not isinstance(slot.block, np.ndarray):
            memory: torch.Tensor = slot.block.clone()
            self.give_back(slot)
            return memory
        owner = slot.block.view()  # a new array object: its death is the death of the last tensor over it
        slot.state = SlotState.LENT
        loan = weakref.ref(owner, partial(self._end, slot))  # ``weakref.finalize`` takes 5 us longer
        _loans[id(loan)] = loan
        return torch.from_numpy(owner)

    def _end(self, slot: Slot, loan: Any) -> None:
        """The last tensor over a lent slot is gone."""
        del _loans[id(loan)]
        self.give_back(slot)

    def give_back(self, slot: Slot) -> None:
        """Make a slot free again, or drop it when enough are free."""
        slot.state = SlotState.FREE
        if len(self._free) < KEPT_FREE:
            self._free.append(slot)

    def forget_views(self) -> None:
        """Let policies and environments prepare their views of all lanes again."""
        for slot in self._live:
            for lane in slot.lanes:
                lane.cache.clear()

    def _fits(self) -> bool:
        return (len(self._live) + 1) * self.layout.nbytes <= self.limit_bytes


def _aligned(nbytes: int) -> Array:
    """Zeroed bytes that start at a multiple of ``ALIGNMENT``."""
    raw = np.zeros(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes]


def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    """The torch dtype with the same memory."""
    return torch.from_numpy(np.empty(0, dtype)).dtype
