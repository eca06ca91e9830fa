"""What the schedules have in common: slots for groups, and what becomes of full ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import numpy as np

from muster.episodes.rules import Rule
from muster.errors import BadOption
from muster.memory.slots import Layout, Slot, SlotRing, SlotState
from muster.rollout.bootstrap import Bootstrap
from muster.rollout.marks import blank
from muster.workers.config import Columns
from muster.workers.messages import RolloutResult
from muster.workers.pool import Handle, WorkerPool, start_dead
from muster.workers.requests import LayOut

if TYPE_CHECKING:
    from muster.memory.slots import Memory


class FilledSlot(NamedTuple):
    """What a batch is made of.

    Attributes:
        slots: complete ones, with their rings. Several are to be concatenated.
        results: what came of the rollouts in their lanes, in order.
    """

    slots: list[tuple[SlotRing, Slot]]
    results: list[RolloutResult]

    @property
    def layout(self) -> Layout:
        return self.slots[0][0].layout

    @property
    def frames(self) -> int:
        """Valid steps."""
        return sum(result.frames for result in self.results)


@dataclass
class CollectRequest:
    """What the next batches should be like.

    Attributes:
        policy: who acts in the n-th batch from now: "policy" or "random".
        version: of the weights; None: workers take the newest.
        limit: valid steps; None is all.
        closes: it is a whole batch, and not a part of one.
        spans: record what happens when.
        batches: how many may be begun from now on; None: any number.
        rows: time steps of rollouts; None: as many as always.
        rule: which episodes are wanted of a group, see ``Group.rule``; None: all.
        bootstrap: see ``RolloutRequest``.
    """

    policy: Callable[[int], str]
    version: int | str | None = None
    limit: int | None = None
    closes: bool = True
    spans: bool = False
    batches: int | None = None
    rows: int | None = None
    rule: Callable[[int], Rule | None] | None = None
    bootstrap: Bootstrap | None = None


RINGS = 4  # of different shapes, kept for when rollouts of an earlier length are wanted again


class Bundle:
    """Groups whose lanes lie in one slot.

    Args:
        groups: their numbers.
        limit_bytes, memory: see ``SlotRing``.

    Attributes:
        laid_out: the slots are for what the groups write now.
    """

    def __init__(self, groups: Sequence[int], *, limit_bytes: int, memory: Memory) -> None:
        self.groups = list(groups)
        self._limit_bytes, self._memory = limit_bytes, memory
        self._ring: SlotRing | None = None
        self._rings: list[SlotRing] = []  # that were used last, with the current one at the end
        self.laid_out = False

    @property
    def ring(self) -> SlotRing:
        assert self._ring is not None, "no policy has been chosen"
        return self._ring

    def lay_out(self, layouts: Sequence[Layout], names: Sequence[str]) -> None:
        """Use slots in which the groups can write side by side.

        Raises:
            BadOption: they cannot.
        """
        if any(_shape(layout) != _shape(layouts[0]) for layout in layouts):
            raise BadOption(
                "the groups of create_env_fn differ in number of environments, spaces or policy outputs, so they "
                "cannot share a batch: "
                + "; ".join(f"{name}: {layout.B} environments" for name, layout in zip(names, layouts, strict=True))
            )
        self.laid_out = True
        first = layouts[0]
        self._ring = self.ring_of(Layout(first.T, first.B, first.columns, len(layouts), batch_shape=first.batch_shape))

    def ring_of(self, layout: Layout) -> SlotRing:
        """Slots of this layout, made if there are none."""
        ring = next((ring for ring in self._rings if ring.layout == layout), None)
        if ring is None:
            ring = SlotRing(layout, limit_bytes=self._limit_bytes, memory=self._memory)
        self._rings = [*[other for other in self._rings if other is not ring][1 - RINGS :], ring]
        return ring

    def slots(self, state: SlotState) -> int:
        return sum(ring.count(state) for ring in self._rings)

    def forget(self) -> None:
        """Look again what is to be written, and where."""
        for ring in self._rings:
            ring.forget_views()
        self.laid_out = False


class Ahead(Protocol):
    """Does while workers fill slots what would otherwise be done when they are full."""

    def prepare(self, ring: SlotRing, slot: Slot) -> None:
        """A slot is being filled."""

    def drop(self, slot: Slot) -> bool:
        """It will never be full; whether it comes back to its ring by itself."""


class Schedule(ABC):
    """Who works when, and what becomes a batch.

    Args:
        pool: who does the work.
        bundles: groups by the slots they write into.
        T: time steps per rollout, by group.

    Attributes:
        ahead: is told of slots that workers fill.
        overlaps: workers go on while the user has a batch, and take the newest weights by themselves.
        preempts: rollouts may end early.
    """

    overlaps: ClassVar[bool] = False
    preempts = False

    def __init__(self, pool: WorkerPool, bundles: Sequence[Bundle], T: Sequence[int]) -> None:
        self.pool, self.bundles, self.T = pool, list(bundles), list(T)
        self._usual_T = list(T)
        self.ahead: Ahead | None = None

    @abstractmethod
    def collect(self, wanted: CollectRequest, into: Slot | None = None) -> FilledSlot:
        """What the next batch is made of.

        Args:
            into: a slot to use again, even if it is lent (``return_same_td``).

        Raises:
            MusterError: what went wrong; the next call goes on where this one stopped.
        """

    @abstractmethod
    def layout(self, policy: str, version: int | str | None = None) -> Layout:
        """Of the slots for a policy, which is called once for it; ``collect`` goes on from that call."""

    @abstractmethod
    def abandon(self, reason: str) -> None:
        """Give up all that was not delivered."""

    @property
    def ahead_of_user(self) -> bool:
        """Rollouts were begun that were not delivered."""
        return False

    def rollouts_for(self, frames: int, rows: int | None) -> int | None:
        """How many rollouts have at least so many frames, of any groups; None: each batch has one of every group."""
        return None

    @property
    def sharing(self) -> int:
        """Environments that share the frames of a batch."""
        return sum(self.pool.counters[number].info.num_envs for number in self._batch_groups())

    def slots(self) -> dict[str, int]:
        """Number of slots by state."""
        return {state.value: sum(bundle.slots(state) for bundle in self.bundles) for state in SlotState}

    @property
    def in_flight(self) -> int:
        """Steps that were taken from workers, and are in no batch yet."""
        return sum(counts.in_flight for counts in self.pool.counters) - self.pool.untaken

    def waiting(self) -> list[dict[str, Any]]:
        """Rollouts that are complete and not delivered, oldest first, as plain data. Waits for workers at work."""
        return []

    def restore(self, waiting: Sequence[dict[str, Any]]) -> None:
        """Deliver these rollouts before any other."""
        assert not waiting, "see resume._check"

    def look_again(self) -> None:
        """Environments were restored, and may hold other objects inside than before, and write other columns."""
        for bundle in self.bundles:
            bundle.forget()

    def close(self, *, close_env: bool = True) -> None:
        """End the workers; what was not delivered is discarded."""
        try:
            self.pool.close(close_env=close_env)
        finally:
            self._discard("shutdown")

    def _resize(self, rows: int | None) -> bool:
        """Let rollouts have so many time steps; whether that is a change."""
        T = self._usual_T if rows is None else [rows] * len(self.T)
        if self.T == T:
            return False
        self.T = list(T)
        for bundle in self.bundles:
            bundle.laid_out = False
        return True

    def _batch_groups(self) -> Sequence[int]:
        """Of one batch."""
        return range(len(self.pool.counters))

    def _limit(self, limit: int | None, groups: Sequence[int]) -> int | None:
        """Valid steps in a batch of these groups; None is all of them."""
        cells = 0
        for number in groups:
            cells += self.T[number] * self.pool.counters[number].info.num_envs
        return limit if limit is not None and limit < cells else None

    def _discard(self, reason: str) -> None:
        for counts in self.pool.counters:
            counts.discard(reason, counts.in_flight)
            counts.partial = 0

    def _give_back(self, ring: SlotRing, slot: Slot) -> None:
        """A slot that will never be full."""
        if self.ahead is None or not self.ahead.drop(slot):
            ring.give_back(slot)

    def _lay_out(self, handle: Handle, policy: str, version: int | str | None) -> dict[int, Layout]:
        """What a worker's groups write when this policy acts; nothing if it is dropped."""
        start_dead(self.pool, absent=False)  # those of one node wait for one another, where its server acts for them
        rows = {number: self.T[number] for number in handle.groups}
        made = self.pool.ask(handle, LayOut(Columns(policy, rows, version)))
        return {number: layout for of_worker in made for number, layout in of_worker.items()}

    def _finish(self, slot: Slot, lane: int, result: RolloutResult) -> None:
        """A lane goes to the user."""
        counts = self.pool.counters[result.group]
        counts.delivered += result.frames
        counts.in_flight -= result.frames
        if result.dropped:
            blank(slot.lanes[lane], np.zeros((0, slot.lanes[lane].B), bool), repeat_flags=False)
        for key, array in result.objects.items():
            slot.lanes[lane].arrays[key][...] = array

    def _names(self, bundle: Bundle) -> list[str]:
        return [self.pool.counters[number].info.name for number in bundle.groups]


def _shape(layout: Layout) -> object:
    return layout.B, layout.lead, [(c.key, c.shape, c.dtype, c.carry) for c in layout.columns]
