"""What a collector can say about itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class WorkerStats:
    """A snapshot of a worker process or thread.

    Attributes:
        index: its number.
        pid: of its process; 0 while its node has not started it.
        state: "working", "dead" (it is started again by the next batch, or soon), "dropped", or "joining": with
            ``min_nodes``, its node is not there.
        phase: what it is doing: "idle", "construct", "reset", "step", "policy", "weights", "call" or "close"; or
            "join": its node is not there yet.
        env_ids: global numbers of its environments.
        frames: delivered.
        share: of all frames delivered.
        frames_per_s: while it made rollouts.
        busy_s: seconds in which it did.
        restarts: so far.
        policy_lag: publishes between the weights that acted in its last batch and that batch's delivery.
        node: number and host of its node; empty on this machine.
    """

    index: int
    pid: int
    state: str
    phase: str
    env_ids: tuple[int, ...]
    frames: int
    share: float
    frames_per_s: float
    busy_s: float
    restarts: int
    policy_lag: int
    node: str = ""


@dataclass(frozen=True)
class InferenceStats:
    """What an inference server has done.

    Attributes:
        calls: of the policy.
        rows: environments that were acted for, over all calls.
        busy_s: seconds that took.
    """

    calls: int = 0
    rows: int = 0
    busy_s: float = 0.0

    @property
    def batch_mean(self) -> float:
        """Environments per call."""
        return self.rows / self.calls if self.calls else 0.0

    def plus(self, rows: int, seconds: float) -> InferenceStats:
        """After one more call."""
        return InferenceStats(self.calls + 1, self.rows + rows, self.busy_s + seconds)


@dataclass(frozen=True)
class CollectorStats:
    """A snapshot. Frames are environment steps: ``executed = frames + sum(discarded) + in_flight``.

    Attributes:
        frames: delivered in batches.
        executed: stepped, whatever became of them.
        discarded: stepped and not delivered, by reason; a ``Counter``, 0 for all other reasons.
        in_flight: stepped and not delivered yet: rollouts that workers have made ahead, batches that wait (for the next
            call, after an error of a hook), the rows of a batch that an error cut short, and with ``trajs_per_batch``
            episodes that are not complete or wait for others.
        batches, episodes: delivered; episodes count with the batch in which they ended.
        return_mean, length_mean: over the last 100 episodes; None before the first.
        success_rate: over the last 100 episodes whose last ``info`` has ``is_success`` or ``success``; None before the
            first, and where the option ``info`` stores neither.
        frames_per_s: delivered frames per second of collecting. The user's own time does not count, except where
            workers go on meanwhile.
        env_s, policy_s, copy_s, rest_s: where the time of rollouts went, added up over workers; env and policy from
            every 16th step.
        wait_s: how long this process has waited for workers.
        policy_path: how actions are computed: "module", "torch executor", "numpy executor", "random", ...
        policy_version: number of publishes, or what counts instead.
        policy_lag: number of batches by how many publishes old their weights were when they were delivered.
        slots: blocks of memory in use, by state.
        restarts: of all workers.
        unseen: steps at most that were executed and are in no other number here, since nodes were lost that alone knew
            of them.
        cut_short: cells of batches that ``preemptive_threshold`` has left blank.
        workers: one by one; none for a collector in its own process.
        inference: of ``inference="server"``.
        ended_by: type and message of the error that ended the background thread of ``start()``; else empty.
    """

    frames: int
    executed: int
    discarded: Mapping[str, int]
    in_flight: int
    batches: int
    episodes: int
    return_mean: float | None
    length_mean: float | None
    frames_per_s: float
    env_s: float
    policy_s: float
    copy_s: float
    rest_s: float
    wait_s: float
    policy_path: str
    policy_version: int | str
    policy_lag: Mapping[int, int]
    slots: Mapping[str, int]
    restarts: int = 0
    unseen: int = 0
    cut_short: int = 0
    workers: tuple[WorkerStats, ...] = ()
    inference: InferenceStats | None = None
    ended_by: str = ""
    success_rate: float | None = None

    @property
    def nodes(self) -> int:
        """How many have a worker that is at work now; 0 where workers are on this machine alone."""
        return len({worker.node for worker in self.workers if worker.node and worker.state == "working"})
