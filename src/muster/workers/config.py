"""Everything that a worker is told when it starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from muster.memory.specs import Array, Column
from muster.restore.pickling import loads
from muster.weights.transport import Ticket


@dataclass(frozen=True)
class Columns:
    """What the rollouts to come are like.

    Attributes:
        policy: who acts: "policy" or "random".
        T: time steps, by group of the worker.
        version: of the weights, if the worker does not find that out by itself.
        served: columns that an inference server writes.
    """

    policy: str
    T: Sequence[int]
    version: int | str | None = None
    served: Sequence[Column] = ()


@dataclass(frozen=True)
class WorkerPlace:
    """The place of a worker's groups among all, known when all workers have made theirs; and what changes later.

    Attributes:
        firsts: global number of each group's first environment.
        total: environments over all groups.
        marks_valid: see ``RolloutOptions``.
        seed: of all environments and draws.
        static: environments have the same seed.
        episodes: number of the episode that each environment begins with, by group; None: 0.
        grad: the policy acts with gradients enabled.
        columns: of rollouts; None: nobody has asked for any.
    """

    firsts: Sequence[int]
    total: int
    marks_valid: bool
    seed: int | None
    static: bool = False
    episodes: Sequence[Array] | None = None
    grad: bool = False
    columns: Columns | None = None


@dataclass(frozen=True)
class WorkerConfig:
    """What a worker is made of; pickled for a process, as it is for a thread.

    A worker that is started again gets the config that its predecessor would have now: another ``generation``, and the
    present ``place``.

    Attributes:
        index: of the worker.
        groups: numbers of its groups, among all.
        makers: of the environments, one for each group; for processes pickled by ``pickling.dumps``.
        kwargs: a list of keywords for them; pickled likewise.
        policy: pickled: what acts, or what makes it.
        is_factory: the latter.
        options: ``WorkerOptions``; pickled likewise.
        policy_turns: ``Turns`` of threads with the policy, whose group's random streams are the global ones meanwhile;
            None: there are none, because these are processes, or because the user's thread does not wait for them.
        served_by: a server acts, with lines to so many workers; None: this worker does.
        threads: of torch; None leaves them as they are.
        stoppable: the cell ``STOP`` is to be looked at after every step.
        in_thread: of the parent's process.
        generation: how often the worker was started before.
        place: None until the groups of all workers are known.
        ticket: to the weights, whose descriptors go along; None: the worker takes none.
    """

    index: int
    groups: Sequence[int]
    makers: Sequence[Any]
    kwargs: Any
    policy: bytes
    is_factory: bool
    options: Any
    policy_turns: Any = None
    served_by: int | None = None
    threads: int | None = None
    stoppable: bool = False
    in_thread: bool = False
    generation: int = 0
    place: WorkerPlace | None = None
    ticket: Ticket | None = None


def made_policy(policy: bytes, *, is_factory: bool) -> Any:
    """The policy that a worker or server acts with, unpickled or made by what was pickled."""
    made = loads(policy, "policy_factory" if is_factory else "policy")
    return made() if is_factory else made
