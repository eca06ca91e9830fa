"""The frame counters of each group: frames executed, delivered, discarded and in flight."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from muster.env_spec import EnvSpec
from muster.memory.specs import Array
from muster.rollout.tally import Tally, Timing
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
    # episode numbers and steps as of the last result, ``[2, B]``, or ``[2, B * agents]`` where
    # agents take turns; None: no result yet
    clock: Array | None = None
    dropped: bool = False  # no worker runs the group any more
    late: bool = False  # the node of the group was absent for some time
    unseen: int = 0  # upper bound on the steps of lost nodes that were never reported
    # steps in ``executed`` and ``in_flight`` that a node has counted, and whose result has not arrived
    without_result: int = 0
    # the last result that was added; weak, since its error refers to frames, and these to slots
    _spent: list[float] = field(default_factory=lambda: [0.0] * 4)  # see ``timing``
    _newest: weakref.ref[RolloutResult] | None = None

    @property
    def timing(self) -> Timing:
        """The time spent so far, by kind of work."""
        return Timing(*self._spent)

    def add(self, result: RolloutResult) -> None:
        """Add a result. The same one a second time in a row changes nothing: what is done with a
        result can be interrupted, and is then repeated.
        """
        if self._newest is not None and self._newest() is result:
            return
        discarded = sum(result.discarded.values()) if result.discarded else 0
        is_complete = result.error is None and not result.lost
        kept = result.executed - discarded
        self._newest = weakref.ref(result)
        self.executed += result.executed
        self.in_flight += kept
        self.partial = 0 if is_complete else self.partial + kept
        for reason, steps in result.discarded.items() if discarded else ():
            self.discarded[reason] += steps
        more = result.timing
        spent = self._spent
        spent[0] += more.env
        spent[1] += more.policy
        spent[2] += more.copy
        spent[3] += more.total

    def add_row(self, tally: Tally) -> None:
        """Add a row of which all steps are delivered."""
        self.executed += tally.executed
        self.delivered += tally.executed
        self.partial = 0
        spent = self._spent
        spent[0] += tally.env_ns
        spent[1] += tally.policy_ns
        spent[2] += tally.copy_ns
        spent[3] += tally.total_ns

    def add_lost(self, result: RolloutResult, reason: str) -> None:
        """Add a complete rollout that was lost afterwards: all steps in its lane are discarded."""
        if self._newest is not None and self._newest() is result:
            return
        in_lane = self.partial + result.executed - sum(result.discarded.values())
        self.add(result)
        self.discard(reason, in_lane)

    def deliver(self, frames: int) -> None:
        """Count frames in flight as delivered."""
        self.delivered += frames
        self.in_flight -= frames

    def restore(self, frames: int) -> None:
        """Count the frames of a restored rollout, which was not delivered, as in flight."""
        self.in_flight += frames

    def note_clock(self, clock: Array) -> None:
        """Note the clock of the group after a result."""
        self.clock = clock

    def begin_at(self, episodes: Array) -> None:
        """Note the numbers of the first episodes of environments that have made no step."""
        self.clock = np.stack([episodes, np.zeros_like(episodes)])

    def drop(self) -> None:
        """Note that no worker runs the group any more."""
        self.dropped = True

    def is_absent(self) -> None:
        """Note that the node of the group is absent."""
        self.late = True

    def describe(self, info: EnvSpec) -> None:
        """Note the description of the group by a node that has joined late."""
        self.info = info

    def acted_with_lag(self, lag: int) -> None:
        """Set the age of the weights that acted last, in publications."""
        self.lag = lag

    def continue_from(
        self, executed: int, discarded: Counter[str], clock: Array | None
    ) -> None:
        """Continue from the counts of a saved state."""
        self.executed = executed
        self.discarded = discarded
        self.clock = clock

    def counts(self) -> NodeCounts:
        """Return the counts so far.

        Safe in another thread: steps that it sees discarded it also sees executed.
        """
        discarded = dict(self.discarded)
        return NodeCounts(self.executed, discarded, tuple(self._spent), self.clock)

    def add_counts(self, now: NodeCounts, before: NodeCounts) -> None:
        """Add the counts of a node between two times.

        The steps count as partial until ``arrived`` is called, and are without a result until then
        or until ``failed`` is called.

        Steps that were already given up here are not discarded again.
        """
        executed = now.executed - before.executed
        self.executed += executed
        self.in_flight += executed
        self.partial += executed
        self.without_result += executed
        for reason, steps in now.discarded.items():
            gone = min(steps - before.discarded.get(reason, 0), self.partial)
            self.discard(reason, gone)
            self.partial -= gone
            self.without_result -= min(gone, self.without_result)
        for kind, spent in enumerate(now.timing):
            self._spent[kind] += spent - before.timing[kind]
        self.clock = self.clock if now.clock is None else now.clock

    def arrived(self, frames: int) -> None:
        """Note that the lane of a rollout counted on a node has arrived here, with ``frames`` valid
        steps.
        """
        self.partial -= min(frames, self.partial)
        # all that is left in the counts of the node is of the next lane
        self.without_result = min(self.without_result, self.partial)

    def failed(self) -> None:
        """Note that the error of a rollout counted on a node has arrived here.

        Its lane is the last one in which the node has made steps.
        """
        self.without_result = 0

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
        episodes, ``[B]``, or ``[B * agents]`` where agents take turns.
        """
        if self.clock is None:
            agents = max(1, len(self.info.agents))
            self.clock = np.zeros((2, len(self.env_ids) * agents), np.int64)
        episode, steps = self.clock
        begin: Array = episode + (steps > 0)
        self.clock = np.stack([begin, np.zeros_like(steps)])
        return begin

    def discard(self, reason: str, steps: int) -> None:
        """Count steps in flight as discarded."""
        if steps:
            self.discarded[reason] += steps
            self.in_flight -= steps

    def lose_node(self, steps: int) -> None:
        """Give up ``steps`` that a lost node was to make, of which it has reported some."""
        self.unseen += max(0, steps - self.partial)
        self.give_up("worker_died")

    def abandon(self, reason: str) -> None:
        """Discard all steps in flight."""
        self.discard(reason, self.in_flight)
        self.partial = 0
        self.without_result = 0

    def give_up(self, reason: str) -> None:
        """Discard the steps of the lane that is not complete."""
        self.discard(reason, self.partial)
        self.partial = 0
        self.without_result = 0
