"""The configuration of a worker and of a worker pool."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from muster.errors import BadOption
from muster.memory.specs import Array
from muster.restore.pickling import loads
from muster.weights.transport import Ticket

if TYPE_CHECKING:
    from muster.workers.inference import ServerConfig
    from muster.workers.requests import LayOut

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


def check_timeouts(timeouts: Any) -> None:
    """Raise ``BadOption`` unless these are seconds by phase."""
    if not isinstance(timeouts, Mapping):
        raise BadOption(f"timeouts={timeouts!r}: expected a dict of seconds by phase")
    for phase, seconds in timeouts.items():
        if phase not in TIMEOUTS:
            raise BadOption(f"timeouts: there is no phase {phase!r}; expected some of {', '.join(TIMEOUTS)}")
        if seconds is not None and not (isinstance(seconds, (int, float)) and 0 < seconds < math.inf):
            raise BadOption(f"timeouts[{phase!r}]={seconds!r}: expected seconds, more than 0, or None for no limit")


def timeout_of(timeouts: Mapping[str, float | None], phase: str) -> float | None:
    """Return the deadline of a phase in seconds (None: none), from the user's ``timeouts`` or the defaults."""
    seconds = {**TIMEOUTS, **timeouts}
    return seconds.get(phase, seconds["step"])


@dataclass(frozen=True)
class WorkerPlace:
    """The place of a worker's groups among all groups, known once all are made; and settings that change later.

    Attributes:
        firsts: global number of the first environment, by group.
        total: number of environments over all groups.
        marks_valid: see ``RolloutOptions``.
        seed: seed of all environments and random streams; None: no seed.
        static: all environments have the same seed.
        episodes: number of each environment's first episode, by group; None: 0.
        grad: the policy acts with gradients enabled.
        columns: columns of the current rollouts; None: not laid out yet.
    """

    firsts: Mapping[int, int]
    total: int
    marks_valid: bool
    seed: int | None
    static: bool = False
    episodes: Mapping[int, Array] | None = None
    grad: bool = False
    columns: LayOut | None = None

    def part(self, groups: Sequence[int]) -> WorkerPlace:
        """Return the place of these groups only."""
        episodes = self.episodes
        own = None if episodes is None else {number: episodes[number] for number in groups}
        return replace(self, firsts={number: self.firsts[number] for number in groups}, episodes=own)


@dataclass(frozen=True)
class WorkerConfig:
    """The configuration of a worker: pickled for a process, passed as it is to a thread.

    A restarted worker gets the config that its predecessor would have now: with the next ``generation`` and the present
    ``place``.

    Attributes:
        index: number of the worker.
        groups: numbers of the worker's groups.
        factories: environment factories, one for each group; pickled by ``pickling.dumps`` for processes.
        kwargs: list of keyword arguments for the factories; pickled likewise.
        policy: pickled policy or policy factory.
        is_factory: ``policy`` is a factory.
        options: ``WorkerOptions``; pickled likewise.
        policy_turns: ``Turns`` by which threads call the policy, one at a time, with their group's random streams as
            global ones. None: workers are processes, or the user's thread does not wait for the threads.
        served_by: number of workers in the mailbox of the inference server; None: the worker runs the policy.
        threads: number of torch threads; None: unchanged.
        cpus: numbers of the CPUs on which the worker runs; empty: as its parent.
        stoppable: check the cell ``STOP`` after every step.
        in_thread: the worker is a thread of the parent's process.
        generation: number of earlier starts of the worker.
        place: place among all workers; None until all workers have made their groups.
        node: number and host of the worker's node, for messages; empty on this machine.
        ticket: ticket for the weights, whose descriptors are sent with it; None: the worker does not subscribe.
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
    cpus: Sequence[int] = ()
    stoppable: bool = False
    in_thread: bool = False
    generation: int = 0
    place: WorkerPlace | None = None
    node: str = ""
    ticket: Ticket | None = None


@dataclass(frozen=True)
class PoolConfig:
    """The configuration of a worker pool. The config of a node's pool can be pickled.

    Attributes:
        workers: configs of the workers, without the policy.
        policy: pickled policy or policy factory.
        count: number of workers of the collector, over all nodes.
        server: config of the inference server; None: the workers run the policy.
        origins: ``EnvFactory`` of each group, for crash reports; each is pickled for a node.
        max_frames_per_traj, crash_dir, on_failure, timeouts, max_restarts, start_method, cpu_affinity: see
            ``MultiOptions``.
        node: number and host of the node, for messages; empty on this machine.
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
    cpu_affinity: Literal["auto"] | Sequence[Sequence[int]] | None = None
    node: str = ""

    @property
    def groups(self) -> list[int]:
        """The numbers of the groups of all workers."""
        return [number for worker in self.workers for number in worker.groups]

    @property
    def in_threads(self) -> bool:
        """Whether the workers are threads of this process."""
        return self.workers[0].in_thread

    def timeout(self, phase: str) -> float | None:
        """Return the deadline of a phase in seconds; of a step if the phase has none. None: no deadline."""
        return timeout_of(self.timeouts, phase)


def made_policy(policy: bytes, *, is_factory: bool) -> Any:
    """Unpickle the policy of a worker or server, or unpickle its factory and call it."""
    made = loads(policy, "policy_factory" if is_factory else "policy")
    return made() if is_factory else made
