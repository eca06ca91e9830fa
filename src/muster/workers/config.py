"""The configuration of a worker, of an inference server and of a worker pool: records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from muster.memory.specs import Array
from muster.restore.registered import SentIds
from muster.weights.transport import Ticket
from muster.workers.options import SupervisionOptions, timeout_of
from muster.workers.requests import LayOut


@dataclass(frozen=True)
class WorkerPlace:
    """The place of a worker's groups among all groups, known once all are made; and settings that
    change later.
    """

    firsts: Mapping[int, int]  # global number of the first environment, by group
    total: int  # number of environments over all groups
    marks_valid: bool  # batches have ``collector/valid``
    # seed of all environments and random streams, or a list of one for each environment; None: no
    # seed
    seed: int | Sequence[int] | None
    static: bool = False  # all environments have the same seed
    # number of each environment's first episode, by group; None: 0
    episodes: Mapping[int, Array] | None = None
    marks_resumed: bool = False  # rollouts have the column of resumed episodes
    columns: LayOut | None = (
        None  # columns of the current rollouts; None: not laid out yet
    )

    def part(self, groups: Sequence[int]) -> WorkerPlace:
        """Return the place of these groups only."""
        episodes = self.episodes
        own = (
            None
            if episodes is None
            else {number: episodes[number] for number in groups}
        )
        return replace(
            self,
            firsts={number: self.firsts[number] for number in groups},
            episodes=own,
        )


@dataclass(frozen=True)
class WorkerConfig:
    """The configuration of a worker: pickled for a process, passed as it is to a thread.

    A restarted worker gets the config that its predecessor would have now: with the next
    ``generation`` and the present ``place``.
    """

    index: int  # number of the worker
    groups: Sequence[int]  # numbers of the worker's groups
    # environment factories, one for each group; pickled by ``pickling.dumps`` for processes
    factories: Sequence[Any]
    kwargs: Any  # list of keyword arguments for the factories; pickled likewise
    policy: bytes  # pickled policy, or a tuple of policy factories
    is_factory: bool  # ``policy`` has factories
    setting: Any  # ``WorkerSetting``; pickled likewise
    # ``Turns`` by which threads call the policy, one at a time, with their group's random streams
    # as global ones. None: workers are processes, or the user's thread does not wait for the
    # threads
    policy_turns: Any = None
    # number of workers in the mailbox of the inference server; None: the worker runs the policy
    served_by: int | None = None
    threads: int | None = None  # number of torch threads; None: unchanged
    cpus: Sequence[
        int
    ] = ()  # numbers of the CPUs on which the worker runs; empty: as its parent
    stoppable: bool = False  # check the cell ``STOP`` after every step
    in_thread: bool = False  # the worker is a thread of the parent's process
    generation: int = 0  # number of earlier starts of the worker
    # place among all workers; None until all workers have made their groups
    place: WorkerPlace | None = None
    factory: int = 0  # which of the factories makes the worker's policy
    node: str = (
        ""  # number and host of the worker's node, for messages; empty on this machine
    )
    # ids of the program's registry; None: the worker is in a process that has them
    registered: SentIds | None = None
    # ticket for the weights, whose descriptors are sent with it; None: the worker does not
    # subscribe
    ticket: Ticket | None = None


@dataclass(frozen=True)
class ServerConfig:
    """The configuration of an inference server, beside that of its pool; see ``MultiOptions``.

    Can be pickled.
    """

    setting: Any  # ``WorkerSetting``; pickled by ``pickling.dumps`` for a node
    alternating: (
        bool  # half of the workers step while the server acts for the other half
    )
    max_batch: (
        int | None
    )  # maximum number of environments in one call; None: no maximum
    # maximum wait of the first worker that asks for others at work; None: until all of them ask
    max_wait_s: float | None
    threads: int | None  # number of torch threads; None: unchanged
    exclusive: bool = True  # the user's thread waits during calls; see ``Actor``
    keeps_streams: bool = True  # see ``Actor``


@dataclass(frozen=True)
class PoolConfig:
    """The configuration of a worker pool; see also ``MultiOptions``.

    The config of a node's pool can be pickled.
    """

    workers: Sequence[WorkerConfig]  # configs of the workers, without the policy
    policy: bytes  # pickled policy, or a tuple of policy factories
    count: int  # number of workers of the collector, over all nodes
    server: (
        ServerConfig | None
    )  # config of the inference server; None: the workers run the policy
    # ``EnvFactory`` of each group, for crash reports; each is pickled for a node
    origins: Sequence[Any]
    max_frames_per_traj: int | None
    timeouts: Mapping[str, float | None]
    supervision: SupervisionOptions
    # ids of the program's registry; None: all workers are threads of the program
    registered: SentIds | None = None
    node: str = ""  # number and host of the node, for messages; empty on this machine
    episode_seeds: Sequence[int] | None = None  # the option

    @property
    def groups(self) -> list[int]:
        """The numbers of the groups of all workers."""
        return [number for worker in self.workers for number in worker.groups]

    @property
    def in_threads(self) -> bool:
        """Whether the workers are threads of this process."""
        return self.workers[0].in_thread

    def timeout(self, phase: str) -> float | None:
        """Return the deadline of a phase in seconds; of a step if the phase has none.

        None: no deadline.
        """
        return timeout_of(self.timeouts, phase)
