"""A node's slots: one for each place in the slots of the main process at which its lanes lie.

The node's slot is free whenever that of the main process is, so it is never given back. When rollouts
get another layout, all slots are made again.
"""

from __future__ import annotations

from collections.abc import Mapping

from muster.cluster.messages import LaneRun
from muster.memory.shared import Arena
from muster.memory.slots import Layout, Slot


class NodeSlots:
    """The slots of one session."""

    def __init__(self) -> None:
        self._layouts: Mapping[int, Layout] = {}  # of one lane, by group
        # by offset of the main process' slot, and first lane there
        self._slots: dict[tuple[int, int], Slot] = {}

    def lay_out(self, layouts: Mapping[int, Layout]) -> None:
        """Use these layouts from now on."""
        if layouts != self._layouts:
            self._layouts = layouts
            self._slots.clear()

    def slot(self, run: LaneRun, arena: Arena) -> Slot:
        """Return the slot for a run; new ones are in this memory."""
        place = run.offset, run.first
        slot = self._slots.get(place)
        if slot is None:
            group = run.requests[0].group
            like = self._layouts.get(group)
            if like is None:
                like = next(iter(self._layouts.values()))
            layout = Layout(
                like.T,
                like.B,
                like.columns,
                run.lanes,
                batch_shape=like.batch_shape,
            )
            slot = Slot(layout, arena)
            self._slots[place] = slot
        return slot
