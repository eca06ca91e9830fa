"""Everything that a worker is told when it starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from muster.memory.specs import Array, Column
from muster.restore.pickling import loads
from muster.weights.transport import Ticket

if TYPE_CHECKING:
    from muster.workers.inference import ServerConfig

OnFailure = Literal["raise", "restart", "drop"]

TIMEOUTS: dict[str, float | None] = {  # seconds
    "construct": 300.0,
    "reset": 60.0,
    "step": 60.0,
    "policy": 60.0,
    "weights": 60.0,
    "call": 300.0,
    "close": 5.0,
    "join": 600.0,
    "heartbeat": 15.0,
}


def timeout_of(timeouts: Mapping[str, float | None], phase: str) -> float | None:
    """Seconds that a phase may take, by the ``timeouts`` of a user."""
    seconds = {**TIMEOUTS, **timeouts}
    return seconds.get(phase, seconds["step"])


@dataclass(frozen=True)
class Columns:
    """What the rollouts to come are like.

    Attributes:
        policy: who acts: "policy" or "random".
        T: time steps, by group.
        version: of the weights, if the worker does not find that out by itself.
        served: columns that an inference server writes.
    """

    policy: str
    T: Mapping[int, int]
    version: int | str | None = None
    served: Sequence[Column] = ()


@dataclass(frozen=True)
class WorkerPlace:
    """The place of a worker's groups among all, known when all workers have made theirs; and what changes later.

    Attributes:
        firsts: global number of the first environment, by group.
        total: environments over all groups.
        marks_valid: see ``RolloutOptions``.
        seed: of all environments and draws.
        static: environments have the same seed.
        episodes: number of the episode that each environment begins with, by group; None: 0.
        grad: the policy acts with gradients enabled.
        columns: of rollouts; None: there were none yet.
    """

    firsts: Mapping[int, int]
    total: int
    marks_valid: bool
    seed: int | None
    static: bool = False
    episodes: Mapping[int, Array] | None = None
    grad: bool = False
    columns: Columns | None = None

    def prepared(self, policy: str) -> bool:
        """Rollouts of this policy have been laid out."""
        return self.columns is not None and self.columns.policy == policy

    def part(self, groups: Sequence[int]) -> WorkerPlace:
        """Of these groups."""
        episodes = self.episodes
        own = None if episodes is None else {number: episodes[number] for number in groups}
        return replace(self, firsts={number: self.firsts[number] for number in groups}, episodes=own)


@dataclass(frozen=True)
class WorkerConfig:
    """What a worker is made of; pickled for a process, as it is for a thread.

    A worker that is started again gets the config that its predecessor would have now: another ``generation``, and the
    present ``place``.

    Attributes:
        index: of the worker.
        groups: numbers of its groups, among all.
        factories: of the environments, one for each group; for processes pickled by ``pickling.dumps``.
        kwargs: a list of keywords for them; pickled likewise.
        policy: pickled: what acts, or what makes it.
        is_factory: the latter.
        options: ``WorkerOptions``; pickled likewise.
        policy_turns: ``Turns`` of threads with the policy, whose group's random streams are the global ones meanwhile;
            None: there are none, because these are processes, or because the user's thread does not wait for them.
        served_by: a server acts, whose mailbox is for so many workers; None: this worker does.
        threads: of torch; None leaves them as they are.
        stoppable: the cell ``STOP`` is to be looked at after every step.
        in_thread: of the parent's process.
        generation: how often the worker was started before.
        place: None until the groups of all workers are known.
        node: number and host of its node, for people; empty on this machine.
        ticket: to the weights, whose descriptors go along; None: the worker takes none.
    """

    index: int
    groups: Sequence[int]
    factories: Sequence[Any]
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
    node: str = ""
    ticket: Ticket | None = None


@dataclass(frozen=True)
class PoolConfig:
    """What a worker pool is made of. That of a node can be pickled.

    Attributes:
        workers: their configs, without the policy.
        policy: pickled: what acts, or what makes it.
        count: workers of the collector, over all nodes.
        server: how an inference server acts for the workers; None: they act by themselves.
        origins: of the environments of each group (``EnvFactory``), for crash reports; for a node pickled one by one.
        max_frames_per_traj, crash_dir, on_failure, timeouts, max_restarts, start_method: see ``MultiOptions``.
        node: number and host of the node, for people; empty on this machine.
    """

    workers: Sequence[WorkerConfig]
    policy: bytes
    count: int
    server: ServerConfig | None
    origins: Sequence[Any]
    max_frames_per_traj: Any
    crash_dir: Any
    on_failure: OnFailure
    timeouts: Mapping[str, float | None]
    max_restarts: int | None
    start_method: str | None
    node: str = ""

    @property
    def groups(self) -> list[int]:
        """Numbers of the groups of all workers."""
        return [number for worker in self.workers for number in worker.groups]

    @property
    def in_threads(self) -> bool:
        """Workers are threads of this process."""
        return self.workers[0].in_thread

    def timeout(self, phase: str) -> float | None:
        """Seconds that a phase may take, those of a step where it has none; None is for ever."""
        return timeout_of(self.timeouts, phase)


def made_policy(policy: bytes, *, is_factory: bool) -> Any:
    """The policy that a worker or server acts with, unpickled or made by what was pickled."""
    made = loads(policy, "policy_factory" if is_factory else "policy")
    return made() if is_factory else made
