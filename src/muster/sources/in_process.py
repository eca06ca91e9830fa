"""The source that runs its groups right here, one after another."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from muster.columns import lane_columns
from muster.errors import BadOption
from muster.group import Group
from muster.memory.slots import Layout, Memory, Slot, SlotRing, SlotState
from muster.memory.specs import Column
from muster.protocols import Policy
from muster.rollout import rollout
from muster.trajectories import Episodes, join_episodes


@dataclass(frozen=True)
class Filled:
    """A slot whose lanes are complete, the ring it belongs to, and what is in it.

    Attributes:
        frames: valid steps.
        rows: time steps that hold any.
        episodes: those that ended in it.
    """

    slot: Slot
    ring: SlotRing
    episodes: Episodes
    frames: int
    rows: int


class InProcess:
    """Fills one slot at a time: lane i by group i.

    Args:
        groups: owned by the source.
        T: time steps per rollout.
        limit_bytes: see ``SlotRing``.
        memory: of the slots.
    """

    def __init__(self, groups: Sequence[Group], *, T: int, limit_bytes: int, memory: Memory) -> None:
        self.groups = list(groups)
        self.T = T
        self._limit_bytes, self._memory = limit_bytes, memory
        self._ring: SlotRing | None = None
        self._policy: Policy | None = None
        self._filling: Slot | None = None  # a slot that an error left incomplete
        self._complete = 0  # its lanes that are complete

    def collect(self, policy: Policy, into: Slot | None = None) -> Filled:
        """T steps of every group.

        Args:
            policy: a change of policy brings a new layout, since its columns may differ.
            into: a slot to use again, whoever looks at it (``return_same_td``).

        Raises:
            MusterError: what ``rollout`` raises. The next call goes on where this one stopped.
        """
        self._prepare(policy)
        assert self._ring is not None
        if self._filling is None:
            self._filling = self._ring.take() if into is None or into.layout != self._ring.layout else _again(into)
        slot = self._filling
        for group, lane in list(zip(self.groups, slot.lanes, strict=True))[self._complete :]:
            rollout(group, policy, lane)
            self._complete += 1
        self._filling, self._complete = None, 0
        groups = self.groups
        return Filled(
            slot,
            self._ring,
            join_episodes([group.episodes for group in groups]),
            frames=sum(group.delivered for group in groups),
            rows=max(group.rows for group in groups),
        )

    @property
    def in_flight(self) -> int:
        """Steps in a slot that is not complete."""
        return sum(self._in_flight())

    def slots(self) -> dict[str, int]:
        """Number of slots by state."""
        return {state.value: self._ring.count(state) if self._ring else 0 for state in SlotState}

    def close(self, *, close_env: bool = True) -> None:
        """Give up an incomplete slot and close the environments."""
        self.abandon("shutdown")
        with ExitStack() as closing:  # all of them, whatever one of them raises
            for group in self.groups if close_env else ():
                closing.callback(group.env.close)

    def layout(self, policy: Policy) -> Layout:
        """Of the slots for ``policy``, which is called once for it; ``collect`` goes on from that call."""
        self._prepare(policy)
        assert self._ring is not None
        return self._ring.layout

    @property
    def policy(self) -> Policy | None:
        """That acted last, or has been called for its layout since."""
        return self._policy

    def adopt(self, policy: Policy | None) -> None:
        """Be as after a batch with ``policy`` (which may be called for its layout), or as before any."""
        if policy is not None:
            self._prepare(policy)
        self._policy = policy

    def look_again(self) -> None:
        """Environments were restored, and may hold other objects inside than before."""
        for group in self.groups:
            group.env.look_again()
        if self._ring is not None:
            self._ring.forget_views()

    def _prepare(self, policy: Policy) -> None:
        resumes = any(group.resumed for group in self.groups)
        if policy is self._policy and not resumes:
            return
        if policy is not self._policy:
            self.abandon("policy_changed")
            for group in self.groups:
                group.prime(policy)
        count = len(self.groups)
        layouts = [
            Layout(self.T, group.B, _columns(group, policy), count, batch_shape=group.batch_shape)
            for group in self.groups
        ]
        if any(_shape(layout) != _shape(layouts[0]) for layout in layouts):
            raise BadOption(
                "the groups of create_env_fn differ in number of environments, spaces or policy outputs, so they "
                "cannot share a batch: " + "; ".join(f"{g.env.name}: {g.B} environments" for g in self.groups)
            )
        if self._ring is None or self._ring.layout != layouts[0]:
            self._ring = SlotRing(layouts[0], limit_bytes=self._limit_bytes, memory=self._memory)
        self._policy = policy

    def _in_flight(self) -> list[int]:
        """By group; what of a complete lane is no transition is discarded already."""
        if self._filling is None:
            return []
        lanes = enumerate(zip(self.groups, self._filling.lanes, strict=True))
        return [group.delivered if i < self._complete else lane.done_steps * lane.B for i, (group, lane) in lanes]

    def abandon(self, reason: str) -> None:
        """Give up a slot that is not complete; its environments begin anew."""
        if self._filling is None:
            return
        for group, steps in zip(self.groups, self._in_flight(), strict=True):
            group.discard(reason, steps)
            group.reset()  # what it would go on from is lost with the lane
        self._filling, self._complete = None, 0


def _columns(group: Group, policy: Policy) -> tuple[Column, ...]:
    """What a lane for this group and policy stores; the policy has been called."""
    return lane_columns(group.env, policy.columns(), group.options, resumed=group.resumed is not None)


def _again(slot: Slot) -> Slot:
    for lane in slot.lanes:
        lane.done_steps, lane.stopped = 0, False
    return slot


def _shape(layout: Layout) -> object:
    return layout.B, layout.lead, [(c.key, c.shape, c.dtype, c.carry) for c in layout.columns]
