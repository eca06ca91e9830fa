"""The base class of schedules: slots for groups, and the delivery of filled slots."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import numpy as np

from muster.episodes.rules import Rule
from muster.errors import BadOption
from muster.memory.slots import Layout, Slot, SlotRing, SlotState
from muster.rollout.marks import blank
from muster.rollout.request import Bootstrap
from muster.workers.messages import RolloutResult
from muster.workers.pool import Handle, Pool
from muster.workers.requests import LayOut

if TYPE_CHECKING:
    from muster.memory.slots import Memory


class FilledSlot(NamedTuple):
    """The slots and results of one batch.

    Attributes:
        slots: complete slots with their rings. If there are several, the batch is their
            concatenation.
        results: results of the rollouts in the lanes, in order.
    """

    slots: list[tuple[SlotRing, Slot]]
    results: list[RolloutResult]

    @property
    def layout(self) -> Layout:
        return self.slots[0][0].layout

    @property
    def frames(self) -> int:
        """The number of valid steps."""
        return sum(result.frames for result in self.results)


@dataclass
class CollectRequest:
    """A request to a schedule for the next batch, and for those that it requests in advance.

    Attributes:
        policy: maps n to the policy of the n-th batch from now on, "policy" or "random".
        version: version of the weights; None: workers take the newest.
        limit: number of valid steps; None: all.
        closes: the rollouts end a batch; False: they are a part of it, and others follow.
        spans: record spans for the timeline.
        batches: maximum of undelivered batches, this one included; None: no maximum.
        rows: time steps per rollout; None: the usual number.
        rule: maps a group to the rule for its episodes, see ``Group.rule``; None: all episodes.
        bootstrap, grad, pause: see ``RolloutRequest``.
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
    grad: bool = False
    pause: float | None = None


RINGS = 4  # rings of different layouts that a bundle keeps, for rollouts of an earlier length


class Bundle:
    """Groups whose lanes lie in one slot.

    Args:
        groups: numbers of the groups.
        limit_bytes, memory: see ``SlotRing``.

    Attributes:
        laid_out: the current ring has the current layout of the groups.
    """

    def __init__(
        self, groups: Sequence[int], *, limit_bytes: int, memory: Memory
    ) -> None:
        self.groups = list(groups)
        self._limit_bytes = limit_bytes
        self._memory = memory
        self._ring: SlotRing | None = None
        self._rings: list[
            SlotRing
        ] = []  # the last used ones, with the current one at the end
        self.laid_out = False

    @property
    def ring(self) -> SlotRing:
        assert self._ring is not None, "no policy has been chosen"
        return self._ring

    def lay_out(self, layouts: Sequence[Layout], names: Sequence[str]) -> None:
        """Use slots with a lane of these layouts for each group.

        Raises:
            BadOption: the layouts differ, so the lanes cannot share a slot.
        """
        first = layouts[0]
        if any(_shape(layout) != _shape(first) for layout in layouts):
            named = zip(names, layouts, strict=True)
            sizes = [f"{name}: {layout.B} environments" for name, layout in named]
            raise BadOption(
                "the groups of create_env_fn differ in number of environments, spaces or policy"
                f" outputs, so they cannot share a batch: {'; '.join(sizes)}"
            )
        self.laid_out = True
        self._ring = self.ring_of(replace(first, lanes=len(layouts)))

    def ring_of(self, layout: Layout) -> SlotRing:
        """Return the ring of this layout; make it if necessary."""
        ring = next((ring for ring in self._rings if ring.layout == layout), None)
        if ring is None:
            ring = SlotRing(layout, limit_bytes=self._limit_bytes, memory=self._memory)
        others = [other for other in self._rings if other is not ring]
        self._rings = [*others[1 - RINGS :], ring]
        return ring

    def lay_out_again(self) -> None:
        """Invalidate the layout: rollouts have another length from now on."""
        self.laid_out = False

    def slots(self, state: SlotState) -> int:
        return sum(ring.count(state) for ring in self._rings)

    def close(self) -> None:
        """No rollout will be made any more; batches stay valid."""
        for ring in self._rings:
            ring.close()

    def forget(self) -> None:
        """Invalidate the layout, and the views of lanes that policies and environments keep."""
        for ring in self._rings:
            ring.forget_views()
        self.laid_out = False


class Ahead(Protocol):
    """Prepares the batch of a slot while workers fill it."""

    def prepare(self, ring: SlotRing, slot: Slot) -> None:
        """Prepare the batch of a slot that is being filled."""

    def drop(self, slot: Slot) -> None:
        """Drop what was prepared for a slot that will not be filled."""


class Schedule(ABC):
    """Decides when each group makes a rollout, and which rollouts become a batch.

    Args:
        pool: worker pool that makes the rollouts.
        bundles: the groups, bundled by the slots in which their lanes lie.
        T: time steps per rollout, by group.

    Attributes:
        ahead: prepares batches of slots that are being filled; None: nothing is prepared.
        overlaps: workers run while the user has a batch, and take the newest weights by themselves.
        preempts: rollouts may end early.
    """

    overlaps: ClassVar[bool] = False
    preempts = False

    def __init__(self, pool: Pool, bundles: Sequence[Bundle], T: Sequence[int]) -> None:
        self.pool = pool
        self.bundles = list(bundles)
        self.T = list(T)
        self._usual_T = list(T)
        self.ahead: Ahead | None = None

    def prepare_ahead(self, ahead: Ahead) -> None:
        """Prepare batches of slots that are being filled from now on."""
        self.ahead = ahead

    @abstractmethod
    def collect(self, wanted: CollectRequest, into: Slot | None = None) -> FilledSlot:
        """Return the filled slots of the next batch.

        Args:
            into: a slot to reuse, even if it is lent (``return_same_td``).

        Raises:
            MusterError: a rollout failed; the next call continues where this one stopped.
        """

    @abstractmethod
    def layout(self, policy: str, version: int | str | None = None) -> Layout:
        """Return the layout of slots for a policy.

        The policy may be called for it; ``collect`` uses that call.
        """

    @abstractmethod
    def abandon(self, reason: str) -> None:
        """Discard all rollouts that were not delivered."""

    def settle(self) -> None:  # noqa: B027 (nothing is requested ahead by default)
        """Wait for the rollouts that were requested ahead. They are kept, and delivered later as
        usual.

        Raises:
            MusterError: a rollout failed meanwhile.
        """

    @property
    def ahead_of_user(self) -> bool:
        """Whether there are requested rollouts that were not delivered."""
        return False

    @property
    def has_begun(self) -> bool:
        """Whether an error has left a batch under way."""
        return False

    def rollouts_for(self, frames: int, rows: int | None) -> int | None:
        """Return the number of rollouts, of any groups, with at least these frames; None if a batch
        has all groups.
        """
        return None

    @property
    def sharing(self) -> int:
        """The number of environments that share the frames of a batch."""
        return sum(
            self.pool.counters[number].info.num_envs for number in self._batch_groups()
        )

    def slots(self) -> dict[str, int]:
        """Return the number of slots by state."""
        return {
            state.value: sum(bundle.slots(state) for bundle in self.bundles)
            for state in SlotState
        }

    @property
    def in_flight(self) -> int:
        """The number of steps in taken results that are in no batch yet."""
        return (
            sum(counts.in_flight for counts in self.pool.counters) - self.pool.untaken
        )

    @abstractmethod
    def state_dict(self, version: int | str | None) -> dict[str, Any]:
        """Wait for the rollouts that were requested, and return all undelivered ones as plain data.

        The rollouts are kept, and delivered later as usual. The state has "rollouts", a list of
        results of ``group_state.to_plain`` with the "groups" of each. Rollouts that an error has
        cut short are not in it.

        Args:
            version: version of the weights, as in ``CollectRequest``.

        Raises:
            MusterError: a rollout failed meanwhile. Another call returns the state without it.
        """

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Deliver the rollouts of a ``state_dict`` before any other; none is under way."""

    @abstractmethod
    def can_load(self, state: Mapping[str, Any]) -> bool:
        """Return whether this schedule can deliver the rollouts of a ``state_dict``."""

    def look_again(self) -> None:
        """Invalidate layouts and views, because restored environments may have other inner objects
        and columns.
        """
        for bundle in self.bundles:
            bundle.forget()

    def close(self, *, close_env: bool = True) -> None:
        """Close the workers, and discard all rollouts that were not delivered."""
        try:
            self.pool.close(close_env=close_env)
        finally:
            self._discard("shutdown")
            for bundle in self.bundles:
                bundle.close()

    def _resize(self, rows: int | None) -> None:
        """Set the number of time steps per rollout (None: the usual one)."""
        if self._has_length(rows):
            return
        self.T = list(self._usual_T) if rows is None else [rows] * len(self.T)
        for bundle in self.bundles:
            bundle.lay_out_again()

    def _has_length(self, rows: int | None) -> bool:
        """Return whether rollouts have this number of time steps."""
        if rows is None:
            return self._usual_T == self.T
        return all(length == rows for length in self.T)

    def _batch_groups(self) -> Sequence[int]:
        return range(len(self.pool.counters))

    def _limit(self, limit: int | None, groups: Sequence[int]) -> int | None:
        """Return the number of valid steps in a batch of these groups; None if all of them are
        valid.
        """
        cells = 0
        for number in groups:
            cells += self.T[number] * self.pool.counters[number].info.num_envs
        return limit if limit is not None and limit < cells else None

    def _discard(self, reason: str) -> None:
        for counts in self.pool.counters:
            counts.abandon(reason)

    def _give_back(self, ring: SlotRing, slot: Slot) -> None:
        """Return a slot to its ring without delivering it."""
        if self.ahead is not None:
            self.ahead.drop(slot)
        ring.give_back(slot)

    def _handles(self, bundles: Sequence[Bundle]) -> list[Handle]:
        counters = self.pool.counters
        groups = [group for bundle in bundles for group in bundle.groups]
        return list(
            dict.fromkeys(
                self.pool.handle(group)
                for group in groups
                if not counters[group].dropped
            )
        )

    def _is_prepared(self, bundles: Sequence[Bundle], policy: str) -> bool:
        """Return whether these bundles are laid out for the policy and the environments of their
        workers.
        """
        if not all(bundle.laid_out for bundle in bundles):
            return False
        if self.pool.local is not None:
            return self.pool.local.prepared(policy)
        return all(handle.prepared(policy) for handle in self._handles(bundles))

    def _lay_out(
        self,
        bundles: Sequence[Bundle],
        policy: str,
        version: int | str | None,
        *,
        grad: bool,
    ) -> None:
        """Lay out all groups of the workers of these bundles."""
        layouts: dict[int, Layout] = {}
        for handle in self._handles(bundles):
            # all of them: with a server, the workers of a node wait for each other
            self.pool.start_dead(absent=False)
            rows = {number: self.T[number] for number in handle.groups}
            request = LayOut(policy, rows, version, grad=grad)
            for of_worker in self.pool.ask(handle, request):
                layouts |= of_worker
        if not layouts:
            return
        for bundle in self.bundles:
            if bundle in bundles or not layouts.keys().isdisjoint(bundle.groups):
                names = [self.pool.counters[group].info.name for group in bundle.groups]
                own = [self._layout_of(group, layouts) for group in bundle.groups]
                bundle.lay_out(own, names)

    def _layout_of(self, group: int, layouts: Mapping[int, Layout]) -> Layout:
        """Return the layout of a group, or of one like it if it is dropped: it has no worker to
        ask.
        """
        if group in layouts:
            return layouts[group]
        info = self.pool.counters[group].info
        like = next(iter(layouts.values()))
        return replace(
            like, T=self.T[group], B=info.num_envs, batch_shape=info.batch_shape
        )

    def _sharing(self, groups: Sequence[int], group: int) -> tuple[int, int]:
        """Return ``RolloutRequest.sharing`` of a group among these, without those that are dropped."""
        counters = [self.pool.counters[number] for number in groups]
        sizes = [0 if counts.dropped else counts.info.num_envs for counts in counters]
        return sum(sizes[: groups.index(group)]), sum(sizes)

    def _finish(self, slot: Slot, lane: int, result: RolloutResult) -> None:
        """Complete a lane for delivery, and count its frames as delivered."""
        self.pool.counters[result.group].deliver(result.frames)
        delivered = slot.lanes[lane]
        if result.dropped:
            no_rows = np.zeros((0, delivered.B), bool)
            blank(delivered, no_rows, repeat_flags=False)
        for key, array in result.objects.items():
            delivered.arrays[key][...] = array


def _shape(layout: Layout) -> object:
    columns = [(c.key, c.shape, c.dtype, c.carry) for c in layout.columns]
    return layout.B, layout.lead, columns
