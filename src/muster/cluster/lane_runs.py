"""How a node's requests are sent to it, and in which pieces its rollouts come back.

Requests whose lanes lie side by side in a slot are one ``LaneRun``: the node fills the same lanes of
a slot of its own, and sends them back as one block, which is received in the slot. A run has all
lanes of the node, also those without a request, so that the node's slots are alike. Where a batch
must not wait for other rollouts of the node, each request is a run with a single lane.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from muster.cluster.messages import LaneRun
from muster.memory.slots import Slot
from muster.memory.specs import Array
from muster.rollout.request import RolloutRequest


class LaneRuns:
    """Makes the runs of one node.

    Args:
        groups: of the node.
        apart: each request is a run.
        comes_back: lanes are sent back. False: the node writes them into a replay buffer.

    Attributes:
        tags: of blocks in sessions with the node, but not of weights.
    """

    def __init__(self, groups: Sequence[int], *, apart: bool, comes_back: bool) -> None:
        self._groups = groups
        self._apart = apart
        self._comes_back = comes_back
        self.tags = itertools.count(1)

    def of(
        self, requests: Sequence[tuple[RolloutRequest, Slot]]
    ) -> tuple[list[LaneRun], dict[int, Array]]:
        """Return the runs of these requests, and the memory in which they are received, by tag."""
        runs: list[LaneRun] = []
        expected: dict[int, Array] = {}
        for slot, side_by_side in self._grouped(requests):
            first_request = side_by_side[0]
            lanes = len(self._groups)
            first = first_request.lane - (first_request.group - self._groups[0])
            if self._apart or slot.layout.lanes < lanes:
                lanes = 1
                first = first_request.lane
            run = LaneRun(side_by_side, slot.offset, first, lanes, next(self.tags))
            if self._comes_back:
                begin = first_request.lane * slot.layout.lane_bytes
                end = (side_by_side[-1].lane + 1) * slot.layout.lane_bytes
                expected[run.tag] = slot.block[begin:end]
            runs.append(run)
        return runs, expected

    def _grouped(
        self, requests: Sequence[tuple[RolloutRequest, Slot]]
    ) -> list[tuple[Slot, list[RolloutRequest]]]:
        """Group requests whose lanes lie side by side in a slot."""
        of_slot: dict[int, list[RolloutRequest]] = {}
        slots: dict[int, Slot] = {}
        for request, slot in requests:
            slots[id(slot)] = slot
            of_slot.setdefault(id(slot), []).append(request)
        found: list[tuple[Slot, list[RolloutRequest]]] = []
        for place, slot in slots.items():
            group: list[RolloutRequest] = []
            for request in sorted(of_slot[place], key=lambda request: request.lane):
                if not group or self._apart or request.lane != group[-1].lane + 1:
                    group = []
                    found.append((slot, group))
                group.append(request)
        return found
