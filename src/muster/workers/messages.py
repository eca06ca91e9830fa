"""What goes back and forth between a schedule and the workers: small records; the data itself stays in the slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from muster.episodes.record import Episodes
from muster.episodes.rules import Rule
from muster.keys import Key, dotted
from muster.memory.specs import Array, Specs
from muster.protocols import carried_specs
from muster.rollout.bootstrap import Bootstrap
from muster.rollout.marks import Final
from muster.rollout.progress import Timing


@dataclass(frozen=True)
class GroupInfo:
    """What everybody may know about a group that a worker has made.

    Attributes:
        name: of its environments.
        num_envs: B.
        batch_shape: B as policy and user see it.
        device: of its rows; None is the host.
        observation_specs, action_specs, info_specs, bookkeeping, reward_key: see ``EnvBatch``.
        replays_alone: each environment can be replayed without the others.
    """

    name: str
    num_envs: int
    batch_shape: tuple[int, ...]
    device: Any
    observation_specs: Specs
    action_specs: Specs
    info_specs: Specs
    bookkeeping: frozenset[Key]
    reward_key: Key
    replays_alone: bool

    @property
    def observations(self) -> dict[str, str]:
        """Specs by key, as text; those of infos, too."""
        return {dotted(key): str(spec) for key, spec in carried_specs(self).items()}

    @property
    def actions(self) -> dict[str, str]:
        """Likewise."""
        return {dotted(key): str(spec) for key, spec in self.action_specs.items()}


@dataclass  # not frozen, which would make each one ten times as expensive
class RolloutRequest:
    """One rollout of one group into one lane.

    Attributes:
        number: grows from request to request.
        group: its number among all groups.
        lane: of the slot.
        policy: who acts: "policy" or "random".
        version: of the weights, if the worker does not find that out by itself.
        closes: the rollout ends a batch.
        limit: valid steps of the batch, over all groups that share it; None is all.
        sharing: place of the group's first environment among those that share it, and their number; None: all do.
        spans: record what happens when.
        after: number of the request that it goes on from; while that is not complete, it is not followed.
        rule: see ``Group``; the worker's own from here on.
        bootstrap: values of which next observations to report; see ``muster.rollout.bootstrap``.
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


@dataclass
class RolloutResult:
    """What came of a request. Counts are of this request alone.

    Attributes:
        frames, rows: valid steps, and time steps that hold any; 0 unless it is complete.
        executed: environment steps.
        discarded: those that no batch will show.
        finals: see ``Group.finals``.
        clock: the group's episode numbers and steps since their beginnings, ``[2, B]``.
        objects: columns of Python objects, from another process.
        values: of next observations, if they were asked for.
        error: why it is not complete; the same request continues it. An exception, or on its way a ``SentError``.
        phase: what the error interrupted.
        lost: it is to be requested again, since its worker is gone.
        dropped: its group is gone for good.
        entered: its steps are in the counters of its group.
        warnings: texts of those that came up since the last result, for the user's process.
    """

    number: int
    group: int
    frames: int = 0
    rows: int = 0
    done_steps: int = 0
    executed: int = 0
    discarded: Mapping[str, int] = field(default_factory=dict)
    version: int | str = 0
    timing: Timing = field(default_factory=Timing)
    episodes: Episodes | None = None
    finals: Sequence[Final] = ()
    clock: Array | None = None
    objects: dict[Key, Array] = field(default_factory=dict)
    values: Any = None
    spans: Sequence[Any] = ()
    anchors: Any = None
    path: str = ""
    error: Any = None
    phase: str = ""
    lost: bool = False
    dropped: bool = False
    entered: bool = False
    warnings: Sequence[str] = ()
