"""The ledger of a collector: what became of every frame.

``executed = delivered + discarded (by reason) + in flight`` holds after every call. A frame

1. is executed by a group, and in flight in the schedule, until its rollout is collected;
2. is in flight in the call for the next batch, while the batch of its slot cannot be made;
3. is *collected*, and in flight with a holder (the pipeline, a batch added step by step, a call);
4. is delivered to the user, or discarded with a reason, by its group, a holder or the collector.

``FrameCounters`` of each group have the terms of the groups; the ledger adds those of holders.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, Protocol

from muster.workers.schedule import Schedule


class FrameHolder(Protocol):
    """Holds collected frames that are not delivered yet."""

    @property
    def frames_held(self) -> int:
        """Number of these frames."""

    @property
    def frames_ready(self) -> int:
        """Number of those that belong to complete batches."""

    @property
    def dropped(self) -> Mapping[str, int]:
        """Number of frames that it will never deliver, by reason."""

    def retire(self, envs: Sequence[int]) -> None:
        """Stop waiting for environments that have no further rows."""


class UnmadeBatch(Protocol):
    """Holds full slots whose batch could not be made yet."""

    @property
    def frames(self) -> int:
        """Number of frames in these slots, which are not collected yet."""


@dataclass(frozen=True)
class FrameTerms:
    """The terms of the ledger: ``executed = delivered + sum of discarded + in_flight``.

    Attributes:
        executed: steps of all environments.
        delivered: frames in batches that the user or a buffer has.
        discarded: steps that no batch contains, by reason.
        in_flight: steps that can still be delivered.
    """

    executed: int
    delivered: int
    discarded: Counter[str]
    in_flight: int


class Ledger:
    """The frames of a collector.

    Args:
        source: schedule, whose pool counts the frames of each group.
        unmade: the call for the next batch.

    Attributes:
        frames: number of collected frames that were not discarded afterwards.
        batches: number of collected batches.
        counted: number of frames in batches that count towards ``total_frames``.
        rollouts: number of collected rollouts, each of one group or of all.
        extra: number of delivered frames of extra batches, which no buffer gets.
        cut_short: number of cells of batches that have no step, because a rollout was stopped.
    """

    def __init__(self, source: Schedule, unmade: UnmadeBatch) -> None:
        self._source = source
        self._unmade = unmade
        self._holders: list[FrameHolder] = []
        self._retired: set[int] = set()  # dropped groups
        self._is_closed = False
        self.frames = 0
        self.batches = 0
        self.counted = 0
        self.rollouts = 0
        self.extra = 0
        self.cut_short = 0

    def hold(self, holder: FrameHolder) -> None:
        """Count the frames of this object as not delivered yet."""
        self._holders.append(holder)

    def collected(
        self, frames: int, *, closes: bool, counts: bool, cut_short: int = 0
    ) -> None:
        """Count a collected rollout.

        Args:
            closes: it ends a batch.
            counts: its frames count towards ``total_frames``.
        """
        self.frames += frames
        if counts:
            self.counted += frames
        self.batches += closes
        self.rollouts += 1
        self.cut_short += cut_short

    def end_batch(self) -> None:
        """Count a batch of several rollouts whose number was not known before."""
        self.batches += 1

    def delivered_extra(self, frames: int) -> None:
        """Note that collected frames are those of an extra batch."""
        self.extra += frames

    def discard(self, reason: str, frames: int) -> None:
        """Count collected frames that will not be delivered."""
        self.discard_uncollected(reason, frames)
        self.frames -= frames

    def discard_uncollected(self, reason: str, frames: int) -> None:
        """Count executed frames that no rollout will deliver."""
        self._source.pool.counters[0].discarded[reason] += frames

    def retire_dropped(self) -> None:
        """Stop waiting for episodes of dropped groups."""
        for number, counts in enumerate(self._source.pool.counters):
            if counts.dropped and number not in self._retired:
                self._retired.add(number)
                for holder in self._holders:
                    holder.retire(counts.env_ids.tolist())

    def close(self) -> None:
        """Nothing can be delivered any more: what is in flight is discarded."""
        self._is_closed = True

    # --- terms ------------------------------------------------------------------------------------

    def terms(self) -> FrameTerms:
        """Return the terms of the equation."""
        pool = self._source.pool
        held = sum(holder.frames_held for holder in self._holders)
        discarded = self._discarded()
        in_flight = self._source.in_flight + held + self._unmade.frames
        if self._is_closed:
            discarded["shutdown"] += in_flight
            in_flight = 0
        return FrameTerms(
            executed=sum(counts.executed for counts in pool.counters) - pool.untaken,
            delivered=self.frames - held - sum(self._dropped().values()),
            discarded=+discarded,
            in_flight=in_flight,
        )

    @property
    def discarded_steps(self) -> int:
        """Number of steps that no batch contains."""
        return sum(self._discarded().values())

    @property
    def frames_ready(self) -> int:
        """Number of collected frames in complete batches that are not delivered yet."""
        return sum(holder.frames_ready for holder in self._holders)

    def _discarded(self) -> Counter[str]:
        """Return the number of steps that no batch contains, by reason."""
        counted = self._dropped()
        for counts in self._source.pool.counters:
            counted.update(counts.discarded)
        return counted

    def _dropped(self) -> Counter[str]:
        """Return those of ``_discarded()`` that were collected."""
        dropped = Counter[str]()
        for holder in self._holders:
            dropped.update(holder.dropped)
        return dropped

    # --- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers of frames and batches as plain data."""
        return {
            "frames": self.frames,
            "batches": self.batches,
            "counted": self.counted,
            "extra": self.extra,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict()``."""
        self.frames = index(state["frames"])
        self.batches = index(state["batches"])
        self.counted = index(state["counted"])
        self.extra = index(state.get("extra", 0))  # earlier states have none
