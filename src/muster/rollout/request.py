"""What varies from one rollout to the next, and what comes of a rollout."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from muster.episodes.record import Episodes
from muster.episodes.rules import Rule
from muster.memory.slots import Lane
from muster.memory.specs import Array
from muster.rollout.marks import Final

Bootstrap = Literal["last", "truncations"]
Watch = Callable[[Lane, int], object]
Seal = Callable[[Any, str], Any]  # a value, and what it is called in errors


@dataclass  # not frozen, which would make each one ten times as expensive
class RolloutRequest:
    """A request for one rollout of one group into one lane: all that varies from one rollout to the
    next. It is never changed once it is sent.

    Attributes:
        number: number of the request; increases from request to request.
        group: number of the group.
        lane: index of the lane in the slot.
        policy: "policy" or "random".
        version: version of the weights, stamped into the rows that they act on; None: the worker
            sets it when it takes the weights.
        closes: the rollout ends a batch.
        limit: number of valid steps in the batch, over all groups that share it; None: all steps.
        sharing: index of the first environment among those of the same batch, and their number;
            None: those of the group's making.
        spans: record spans for the timeline.
        after: number of the group's previous request. If that failed, this request is returned as
            lost.
        rule: chooses the episodes to collect, and the rollout ends with the last of them; None: all
            episodes. The loop changes it: a worker gives it a copy.
        bootstrap: next observations whose values are part of the result; see
            ``muster.rollout.bootstrap``.
        grad: the policy acts with gradients enabled.
        pause: render the environments after every step, and wait so many seconds; None: do not.
        offset, nbytes: byte range of the slot in the arena, for a worker in a process or thread of
            its own.
        absent: environments that make no steps.
        open_rows: make so many rows, and leave the rollout open for the next request for the lane,
            which makes the next ones. What follows from rows is done after each request: data and
            records are those of rollouts of so many rows. ``Group.leave`` ends the rollout. 0: it
            fills the lane.
        seal: pickles what rows have of Python objects, which are sent to another process; raises
            ``BadOption`` for what cannot be pickled. None: they are not sent.
        is_random_start: random steps before the first batch. They are in no batch, no hook is
            called, and nothing is shown in the worker's progress.
    """

    number: int
    group: int
    lane: int
    policy: str
    version: int | str | None = None
    closes: bool = True
    limit: int | None = None
    sharing: tuple[int, int] | None = None
    spans: bool = False
    after: int | None = None
    rule: Rule | None = None
    bootstrap: Bootstrap | None = None
    grad: bool = False
    pause: float | None = None
    offset: int = 0
    nbytes: int = 0
    absent: Collection[int] = ()
    is_random_start: bool = False
    open_rows: int = 0
    seal: Seal | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without field names, in about half of the time."""
        return RolloutRequest, tuple(vars(self).values())


class RolloutOutcome(NamedTuple):
    """What came of a complete rollout.

    Attributes:
        frames: number of valid steps.
        rows: number of time steps with valid steps.
        episodes: the episodes that ended.
        finals: with ``compact_obs``, the observations that are missing from the rows.
        left_out: some environments made no steps in some rows.
        steps_before: number of steps in each environment's episode before the first row, ``[B]``;
            None: the rollout goes on where the one before it ended, or agents take turns.
    """

    frames: int
    rows: int
    episodes: Episodes
    finals: Sequence[Final] = ()
    left_out: bool = False
    steps_before: Array | None = None
