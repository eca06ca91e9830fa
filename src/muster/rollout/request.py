"""What varies from one rollout to the next, and what comes of a rollout."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Literal, NamedTuple

from muster.episodes.record import Episodes
from muster.episodes.rules import Rule
from muster.memory.slots import Lane
from muster.rollout.marks import Final
from muster.rollout.resets import ResetListener

Bootstrap = Literal["last", "truncations"]
Watch = Callable[[Lane, int], object]


class RolloutPlan(NamedTuple):
    """Everything that varies from one rollout of a group to the next.

    Attributes:
        version: version of the policy, stamped into all rows that it acts on.
        closes: the rollout ends a batch; False: others of the same batch follow.
        limit: number of valid steps in the batch, over all groups that share it; None: all steps.
        sharing: index of the first environment among those of the same batch, and their number;
            None: those of the group's making.
        rule: chooses the episodes to collect, and the rollout ends with the last of them; it is
            changed. None: all episodes.
        grad: the policy acts with gradients enabled.
        pause: render the environments after every step, and wait so many seconds; None: do not.
        listener: is told of resets, too.
        watch: called after every step with the lane and its row, which is complete.
        absent: environments that make no steps.
        is_random_start: random steps before the first batch. They are in no batch, no hook is
            called, and nothing is shown in the worker's progress.
    """

    version: int | str = 0
    closes: bool = True
    limit: int | None = None
    sharing: tuple[int, int] | None = None
    rule: Rule | None = None
    grad: bool = False
    pause: float | None = None
    listener: ResetListener | None = None
    watch: Watch | None = None
    absent: Collection[int] = ()
    is_random_start: bool = False


class RolloutOutcome(NamedTuple):
    """What came of a complete rollout.

    Attributes:
        frames: number of valid steps.
        rows: number of time steps with valid steps.
        episodes: the episodes that ended.
        finals: with ``compact_obs``, the observations that are missing from the rows.
        left_out: some environments made no steps in some rows.
    """

    frames: int
    rows: int
    episodes: Episodes
    finals: Sequence[Final] = ()
    left_out: bool = False
