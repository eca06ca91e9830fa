"""The frame counters of each group: frames executed, delivered, discarded and in flight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field

import numpy as np

from muster.env_spec import EnvSpec
from muster.memory.specs import Array
from muster.rollout.tally import Timing
from muster.workers.messages import RolloutResult


@dataclass(frozen=True)
class NodeCounts:
    """The counts of a node for a group so far, as plain data; see ``FrameCounters``."""

    executed: int = 0
    discarded: Mapping[str, int] = field(default_factory=dict)
    timing: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)  # see ``Timing``
    clock: Array | None = None


@dataclass
class FrameCounters:
    """The frame counters of one group, over all workers that have run it."""

    info: EnvSpec
    env_ids: Array  # global numbers of the environments
    executed: int = 0
    in_flight: int = 0  # steps of lanes that are not delivered yet
    partial: int = 0  # steps in flight in the lane that is not complete
    delivered: int = 0  # frames in batches
    lag: int = 0  # see ``WorkerStats.policy_lag``
    discarded: Counter[str] = field(default_factory=Counter)
    timing: Timing = field(default_factory=Timing)
    # episode numbers and steps as of the last result, ``[2, B]``; None: no result yet
    clock: Array | None = None
    dropped: bool = False  # no worker runs the group any more
    late: bool = False  # the node of the group was absent for some time
    unseen: int = 0  # upper bound on the steps of lost nodes that were never reported

    def add(self, result: RolloutResult) -> None:
        """Add a result, unless it was added before."""
        if result.entered:
            return
        result.entered = True
        self.executed += result.executed
        kept = result.executed
        if result.discarded:
            self.discarded.update(result.discarded)
            kept -= sum(result.discarded.values())
        self.in_flight += kept
        self.partial = 0 if result.error is None and not result.lost else self.partial + kept
        timing = self.timing
        more = result.timing
        timing.env += more.env
        timing.policy += more.policy
        timing.copy += more.copy
        timing.total += more.total

    def counts(self) -> NodeCounts:
        """Return the counts so far.

        Safe in another thread: steps that it sees discarded it also sees executed.
        """
        discarded = dict(self.discarded)
        return NodeCounts(self.executed, discarded, astuple(self.timing), self.clock)

    def add_counts(self, now: NodeCounts, before: NodeCounts) -> None:
        """Add the counts of a node between two times.

        The steps count as partial until ``arrived`` is called.

        Steps that were already given up here are not discarded again.
        """
        executed = now.executed - before.executed
        self.executed += executed
        self.in_flight += executed
        self.partial += executed
        for reason, steps in now.discarded.items():
            gone = min(steps - before.discarded.get(reason, 0), self.partial)
            self.discard(reason, gone)
            self.partial -= gone
        added = (a - b for a, b in zip(now.timing, before.timing, strict=True))
        self.timing = Timing(
            *(have + more for have, more in zip(astuple(self.timing), added, strict=True))
        )
        self.clock = self.clock if now.clock is None else now.clock

    def arrived(self, frames: int) -> None:
        """Note that the lane of a rollout counted on a node has arrived here."""
        self.partial -= min(frames, self.partial)

    def cut_short(self, steps: int) -> None:
        """Add the unreported steps of an interrupted rollout: ``steps`` in its lane, minus
        ``partial``.
        """
        more = max(0, steps - self.partial)
        self.executed += more
        self.in_flight += more
        self.partial += more

    def next_episodes(self) -> Array:
        """Advance the clock to new episodes for a successor, and return the numbers of these
        episodes.
        """
        none_yet = np.zeros((2, len(self.env_ids)), np.int64)
        episode, steps = none_yet if self.clock is None else self.clock
        begin = episode + (steps > 0)
        self.clock = np.stack([begin, np.zeros_like(steps)])
        return begin

    def discard(self, reason: str, steps: int) -> None:
        """Count steps in flight as discarded."""
        if steps:
            self.discarded[reason] += steps
            self.in_flight -= steps

    def give_up(self, reason: str) -> None:
        """Discard the steps of the lane that is not complete."""
        self.discard(reason, self.partial)
        self.partial = 0
