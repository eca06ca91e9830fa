"""How a node's requests are sent to it, and in which pieces its rollouts come back.

Requests whose lanes lie side by side in a slot are one ``LaneRun``: the node fills the same lanes of
a slot of its own, and sends them back as one block, which is received in the slot. A run has all
lanes of the node, also those without a request, so that the node's slots are alike. Where a batch
must not wait for other rollouts of the node, each request is a run with a single lane.

Where an engine can give away the memory in which a block has arrived, a slot that a run fills whole
adopts that memory instead.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from muster.cluster.messages import LaneRun
from muster.memory.slots import Slot
from muster.memory.specs import Array
from muster.rollout.request import RolloutRequest

Request = tuple[RolloutRequest, Slot]
Group = tuple[Slot, list[RolloutRequest]]  # requests whose lanes lie side by side


class LaneRuns:
    """Makes the runs of one node.

    Args:
        groups: of the node.
        apart: each request is a run.
        comes_back: lanes are sent back. False: the node writes them into a replay buffer.
        adopts: slots adopt the memory of their blocks where they can.

    Attributes:
        tags: of blocks in sessions with the node, but not of weights.
    """

    def __init__(
        self,
        groups: Sequence[int],
        *,
        apart: bool,
        comes_back: bool,
        adopts: bool = False,
    ) -> None:
        self._groups = groups
        self._apart = apart
        self._comes_back = comes_back
        self._adopts = adopts
        self._adopting: dict[int, Slot] = {}  # by tag of the block
        self.tags = itertools.count(1)

    def of(self, requests: Sequence[Request]) -> tuple[list[LaneRun], dict[int, Array]]:
        """Return the runs of these requests, and the memory in which they are received, by tag."""
        runs: list[LaneRun] = []
        expected: dict[int, Array] = {}
        for slot, side_by_side in self._grouped(requests):
            one = side_by_side[0]
            lanes = len(self._groups)
            first = one.lane - (one.group - self._groups[0])
            if self._apart or slot.layout.lanes < lanes:
                lanes = 1
                first = one.lane
            tag = next(self.tags)
            run = LaneRun(side_by_side, slot.offset, first, lanes, tag)
            if self._comes_back:
                size = slot.layout.lane_bytes
                begin = one.lane * size
                end = (side_by_side[-1].lane + 1) * size
                if self._adopts and end - begin == slot.block.size:
                    self._adopting[tag] = slot
                else:
                    expected[tag] = slot.block[begin:end]
            runs.append(run)
        return runs, expected

    def has_arrived(self, tag: int, block: Array) -> None:
        """Let the slot of a run adopt its block, unless it was received in the slot.

        Raises:
            ValueError: the block has another size than the slot.
        """
        slot = self._adopting.pop(tag, None)
        if slot is not None:
            slot.adopt(block)

    def forget(self) -> None:
        """Forget the runs of a session that was lost: their blocks will not arrive."""
        self._adopting.clear()

    def _grouped(self, requests: Sequence[Request]) -> list[Group]:
        """Group requests whose lanes lie side by side in a slot."""
        of_slot: dict[int, list[RolloutRequest]] = {}
        slots: dict[int, Slot] = {}
        for request, slot in requests:
            slots[id(slot)] = slot
            of_slot.setdefault(id(slot), []).append(request)
        found: list[Group] = []
        for place, slot in slots.items():
            group: list[RolloutRequest] = []
            in_order = sorted(of_slot[place], key=lambda request: request.lane)
            for request in in_order:
                is_next = bool(group) and request.lane == group[-1].lane + 1
                if self._apart or not is_next:
                    group = []
                    found.append((slot, group))
                group.append(request)
        return found
