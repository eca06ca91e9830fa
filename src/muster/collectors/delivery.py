"""From a filled slot to the TensorDict that the user gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from muster.collectors.options import CollectorOptions
from muster.errors import BadOption
from muster.group import Group
from muster.keys import Key
from muster.memory.slots import Layout, Slot
from muster.memory.views import BatchView
from muster.sources.in_process import Filled

if TYPE_CHECKING:
    from tensordict import TensorDict


class Delivery:
    """Lends slots as TensorDicts, where the user wants them.

    Args:
        stacked: batches have a leading dimension for the groups.
        hidden: batches show hidden columns; ``hidden_keys`` names them.

    Attributes:
        reused: with ``return_same_td``, the slot to fill again.
    """

    def __init__(self, options: CollectorOptions, *, stacked: bool, hidden: bool = False) -> None:
        self._options, self._stacked, self._hidden = options, stacked, hidden
        self._storing = options.devices["storing_device"]
        self._view: BatchView | None = None
        self._same: tuple[Slot, torch.Tensor, TensorDict] | None = None

    @property
    def reused(self) -> Slot | None:
        return self._same[0] if self._same else None

    def batch(self, filled: Filled) -> TensorDict:
        """The batch in a filled slot; ``[..., rows]`` without ``use_buffers``, if the rollout ended early."""
        view = self._view_of(filled.ring.layout)
        self._same = None if self._same and self._same[0].layout is not filled.slot.layout else self._same
        if self._same:
            return self._refresh(view)
        memory = filled.ring.lend(filled.slot)
        if self._storing is not None and self._storing != memory.device:
            memory = memory.to(self._storing)  # one transfer for all columns; the slot is free afterwards
        batch = view.tensordict(memory, filled.slot)
        if self._options.use_buffers is False and filled.rows < filled.slot.layout.T:
            batch = batch[(slice(None),) * view.time_dim + (slice(0, filled.rows),)]
        if self._options.return_same_td:
            self._same = (filled.slot, memory, batch)
        return batch

    def blank(self, layout: Layout, device: torch.device | None) -> TensorDict:
        """A batch of zeros, in memory of its own; on the ``device`` if there is no storing device."""
        slot = Slot(layout)
        memory = torch.from_numpy(slot.block).to(self._storing or device or "cpu")
        return self._view_of(layout).tensordict(memory, slot)

    def hidden_keys(self, layout: Layout) -> list[Key]:
        return [column.key for column in layout.columns if column.hidden] if self._hidden else []

    def _view_of(self, layout: Layout) -> BatchView:
        if self._view is None or self._view.layout is not layout:
            ragged = [column.key for column in layout.columns if column.ragged]
            if ragged and (self._options.use_buffers or self._options.return_same_td):
                raise BadOption(
                    f"use_buffers=True and return_same_td=True need fixed shapes, and those of {ragged} change. "
                    f"Leave both out, or pad the observations in the environment."
                )
            self._view = BatchView(
                layout,
                stacked=self._stacked,
                order=self._options.layout,
                device=self._storing,
                hidden=self._hidden,
            )
        return self._view

    def _refresh(self, view: BatchView) -> TensorDict:
        """``return_same_td``: the slot was filled again in place; only copies of it need to be renewed."""
        assert self._same is not None
        slot, memory, batch = self._same
        if memory.device.type != "cpu":
            memory.copy_(torch.as_tensor(slot.block))
        view.refresh_objects(batch, slot)
        return batch


def final_observations(groups: Sequence[Group]) -> TensorDict:
    """What ``compact_obs`` leaves out and no later row shows, ``[n]``.

    Returns:
        the observations, ``env`` (global number) and ``row`` (time step in the batch): those after the last step of
        every episode that ended in the batch, and after the batch's last row.
    """
    from tensordict import TensorDict

    parts: list[dict[Any, Any]] = []
    for group in groups:
        for final in group.finals:
            leaves: dict[Any, Any] = {key: torch.from_numpy(leaf) for key, leaf in final.leaves.items()}
            leaves["env"] = torch.from_numpy(group.clock.env_ids[list(final.envs)])
            leaves["row"] = torch.full((len(final.envs),), final.t, dtype=torch.int64)
            parts.append(leaves)
    stacked = [TensorDict(leaves, batch_size=[len(leaves["env"])]) for leaves in parts if len(leaves["env"])]
    if not stacked:
        return TensorDict({}, batch_size=[0])
    joined: TensorDict = torch.cat(stacked)
    return joined[np.lexsort((joined["row"].numpy(), joined["env"].numpy()))]
