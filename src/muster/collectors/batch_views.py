"""From filled slots to the user's TensorDicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from muster.collectors.options import CollectorOptions
from muster.episodes.plain import Place
from muster.errors import BadOption
from muster.keys import Key
from muster.memory.objects import copied_cells
from muster.memory.slots import Layout, Slot, SlotRing, as_tensor
from muster.memory.specs import OBJECT, Array
from muster.memory.views import BatchView
from muster.rollout.marks import Final
from muster.workers.schedule import FilledSlot

if TYPE_CHECKING:
    from tensordict import TensorDict


VIEWS = 1024  # maximum number of cached views, one per ring


class BatchViews:
    """Lends slots as TensorDicts, on the storing device.

    Args:
        stacked: batches have a leading dimension for the groups.
        cat_dim: dimension along which slots are concatenated; None: a batch is one slot.
        hidden: batches show hidden columns; ``hidden_keys`` returns their keys.

    Attributes:
        reused: the slot to fill again with ``return_same_td``, else None.
        shows_hidden: batches show hidden columns.
    """

    def __init__(
        self,
        options: CollectorOptions,
        *,
        stacked: bool,
        cat_dim: int | None = None,
        hidden: bool = False,
    ) -> None:
        self._options = options
        self._stacked = stacked
        self.cat_dim = cat_dim
        self.shows_hidden = hidden
        self._storing = options.devices.storing
        # by the id of their layouts, which the views keep alive
        self._views: dict[int, BatchView] = {}
        # Lent slots whose batch was not returned yet, by id. Their memory keeps the slots alive.
        self._prepared: dict[int, tuple[Any, TensorDict | None]] = {}
        self._same: _SameBatch | None = None

    def place(self, rows: torch.device | None) -> Place:
        """Return where batches are, if the rows are on the device ``rows`` (None: the host)."""
        return Place(
            self._storing or rows or torch.device("cpu"),
            shown=self._storing is not None,
        )

    @property
    def reuses(self) -> bool:
        """Whether all batches are in the same slot."""
        return self._options.return_same_td

    @property
    def reused(self) -> Slot | None:
        return self._same.slot if self._same else None

    def batch(self, filled: FilledSlot) -> TensorDict:
        """Return the batch in filled slots.

        If the batch cannot be made (no memory for a copy, for instance), call this again, or
        ``give_up``.
        """
        if self.cat_dim is not None:
            return self._concatenated(filled, self.cat_dim)
        ring, slot = filled.slots[0]
        view = self._view_of(ring.layout)
        if self._same is not None and self._same.slot.layout is slot.layout:
            return self._same.refreshed(view)
        self._same = None
        memory, made = self._lent(ring, slot, view)
        if made is None:
            if self._storing is not None and self._storing != memory.device:
                # one transfer for all columns; the slot is free afterwards
                memory = memory.to(self._storing)
            made = view.tensordict(memory, slot)
        del self._prepared[id(slot)]
        if self._options.return_same_td:
            self._same = _SameBatch(slot, memory, made)
        return made

    def prepare(self, ring: SlotRing, slot: Slot) -> None:
        """Make the batch of a slot while the slot is being filled, if that is possible."""
        late = (
            ring.layout.object_columns
            or self._storing is not None
            or self._options.return_same_td
        )
        if not late and self.cat_dim is None and id(slot) not in self._prepared:
            memory = ring.lend_ahead(slot)
            self._prepared[id(slot)] = (
                memory,
                self._view_of(ring.layout).tensordict(memory, slot),
            )

    def drop(self, slot: Slot) -> None:
        """Forget what was prepared for a slot."""
        self._prepared.pop(id(slot), None)

    def give_up(self, filled: FilledSlot) -> None:
        """Release slots whose batch will not be delivered."""
        for ring, slot in filled.slots:
            self._lent(ring, slot, None)
            self.drop(slot)

    def _concatenated(self, filled: FilledSlot, dim: int) -> TensorDict:
        """Return a copy of the slots, concatenated; the slots are free at once."""
        parts = []
        for (ring, slot), result in zip(filled.slots, filled.results, strict=True):
            view = self._view_of(ring.layout)
            part = view.tensordict(self._lent(ring, slot, None)[0], slot)
            over_time = dim % part.ndim == view.time_dim
            parts.append(
                part[(slice(None),) * view.time_dim + (slice(0, result.rows),)]
                if over_time
                else part
            )
        batch: TensorDict = torch.cat(parts, dim)
        set_names(batch, parts[0].names)
        batch = batch if self._storing is None else batch.to(self._storing)
        for _, slot in filled.slots:
            self.drop(slot)
        return batch

    def _lent(
        self, ring: SlotRing, slot: Slot, view: BatchView | None
    ) -> tuple[Any, TensorDict | None]:
        """Return a full slot's memory and its prepared batch, if any; it stays lent until its batch
        is complete.

        Args:
            view: the memory may be that of parts, for this view. None: it is one tensor.
        """
        lent = self._prepared.get(id(slot))
        if lent is not None:
            ring.lent_ahead(slot)
        elif (
            view is None
            or not ring.lends_parts
            or self._storing is not None
            or self._options.return_same_td
        ):
            lent = ring.lend(slot), None
        else:
            view.arrange(slot)
            lent = ring.lend_parts(slot), None
        self._prepared[id(slot)] = lent
        return lent

    def blank(self, layout: Layout, device: torch.device | None) -> TensorDict:
        """Return a batch of zeros in its own memory, on the storing device, else on ``device``,
        else on the CPU.
        """
        slot = Slot(layout)
        memory = torch.from_numpy(slot.block).to(self._storing or device or "cpu")
        return self._view_of(layout).tensordict(memory, slot)

    def show_hidden(self) -> None:
        """Show hidden columns in all later batches."""
        self.shows_hidden = True
        self._views.clear()

    def hidden_keys(self, layout: Layout) -> list[Key]:
        return (
            [column.key for column in layout.columns if column.hidden]
            if self.shows_hidden
            else []
        )

    def _view_of(self, layout: Layout) -> BatchView:
        if id(layout) not in self._views:
            ragged = [column.key for column in layout.columns if column.ragged]
            if ragged and self._options.return_same_td:
                raise BadOption(
                    f"return_same_td=True needs fixed shapes, and those of {ragged} change. Leave"
                    " it out, or pad the observations in the environment."
                )
            if len(self._views) >= VIEWS:
                self._views.clear()
            self._views[id(layout)] = BatchView(
                layout,
                stacked=self._stacked or layout.lanes > 1,
                order=self._options.layout,
                device=self._storing,
                hidden=self.shows_hidden,
            )
        return self._views[id(layout)]


class _SameBatch:
    """The batch of ``return_same_td``: one TensorDict over a slot that is filled in place again and
    again.

    Args:
        slot: the slot.
        memory: its memory, or the copy on the storing device.
        batch: the TensorDict.
    """

    def __init__(self, slot: Slot, memory: torch.Tensor, batch: TensorDict) -> None:
        self.slot = slot
        self._memory = memory
        self._batch = batch
        self._names = list(batch.names)
        self._tensors: dict[Any, torch.Tensor] = {}
        for key in batch.keys(True, True):
            column = batch.get(key)
            if isinstance(column, torch.Tensor):
                self._tensors[key] = column

    def refreshed(self, view: BatchView) -> TensorDict:
        """Return the TensorDict as it was made, with the present values of the slot.

        Columns that were added or replaced since (``collect`` adds some, a postproc or the user
        others) are those of an earlier batch.
        """
        batch = self._batch
        if self._memory.device.type != "cpu":
            self._memory.copy_(as_tensor(self.slot.block))
        for key in list(batch.keys(True, True)):
            if key not in self._tensors and isinstance(batch.get(key), torch.Tensor):
                batch.del_(key)
        for key, tensor in self._tensors.items():
            if batch.get(key, None) is not tensor:
                batch.set(key, tensor)
        set_names(batch, self._names)
        view.refresh_objects(batch, self.slot)
        return batch


def set_names(batch: TensorDict, names: Sequence[str | None]) -> None:
    """Set the names of the batch's dimensions."""
    batch.names = list(names)


def final_observations(finals: Sequence[tuple[Array, Sequence[Final]]]) -> TensorDict:
    """Return the observations that ``compact_obs`` omits and no later row contains, ``[n]``.

    Args:
        finals: last observations of each group, with the global numbers of its environments.

    Returns:
        the observations, ``env`` (global number) and ``row`` (time step in the batch): of the last
        step of every episode that ended in the batch, and of the batch's last row.
    """
    from tensordict import TensorDict

    from muster.memory.cells import stacked_objects

    parts: list[dict[Any, Any]] = []
    for env_ids, of_group in finals:
        for final in of_group:
            leaves: dict[Any, Any] = {
                key: (
                    stacked_objects(copied_cells(leaf))
                    if leaf.dtype == OBJECT
                    else torch.from_numpy(leaf)
                )
                for key, leaf in final.leaves.items()
                if len(final.envs)
            }
            leaves["env"] = torch.from_numpy(env_ids[list(final.envs)])
            leaves["row"] = torch.full_like(leaves["env"], final.t)
            parts.append(leaves)
    stacked = [
        TensorDict(leaves, batch_size=[len(leaves["env"])])
        for leaves in parts
        if len(leaves["env"])
    ]
    if not stacked:
        return TensorDict({}, batch_size=[0])
    joined: TensorDict = torch.cat(stacked)
    return joined[np.lexsort((joined["row"].numpy(), joined["env"].numpy()))]
