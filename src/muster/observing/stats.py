"""Statistics of collectors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from muster.observing.tables import html_of_columns, html_of_rows
from muster.utils.texts import clock, counted, short

OF_WORKERS = (
    "worker",
    "state",
    "phase",
    "frames",
    "share",
    "frames/s",
    "restarts",
    "policy lag",
)


@dataclass(frozen=True)
class WorkerStats:
    """A snapshot of a worker process or thread.

    Attributes:
        index: number of the worker.
        pid: pid of its process; 0 if its node has not started it yet.
        state: "working"; "dead": it will be restarted, at the latest with the next batch;
            "dropped"; or "joining": its node has not joined yet (with ``min_nodes``).
        phase: current activity: "idle", "construct", "reset", "step", "policy", "weights", "call"
            or "close"; "wait": for another thread's policy call; "join": its node has not joined
            yet. If it has ended, ``state``.
        env_ids: global numbers of its environments.
        frames: number of its delivered frames.
        share: its share of all delivered frames.
        frames_per_s: frames per second of its rollouts.
        busy_s: duration of its rollouts in seconds.
        restarts: number of its restarts.
        policy_lag: number of publications between the weights that acted in its last batch and that
            batch's delivery.
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
    """Statistics of an inference server.

    Attributes:
        calls: number of calls of the policy.
        rows: number of environments in all calls together.
        busy_s: duration of all calls in seconds.
    """

    calls: int = 0
    rows: int = 0
    busy_s: float = 0.0

    @property
    def batch_mean(self) -> float:
        """Average number of environments per call."""
        return self.rows / self.calls if self.calls else 0.0

    def plus(self, rows: int, seconds: float) -> InferenceStats:
        """Return the statistics after another call."""
        return InferenceStats(self.calls + 1, self.rows + rows, self.busy_s + seconds)


@dataclass(frozen=True)
class CaptureStats:
    """Statistics of ``capture``, over all groups of environments.

    Attributes:
        state: "waiting": no rollout has been recorded yet. "replaying": rollouts are replays of
            graphs. "refused": all rollouts of a group run row by row.
        reason: why they do; "" if they do not.
        graphs: number of graphs that are kept, at most 8 for each group.
        replays: number of rollouts that were replays.
        nbytes: memory of the graphs' intermediate results in bytes; 0 if it is unknown.
    """

    state: Literal["waiting", "replaying", "refused"] = "waiting"
    reason: str = ""
    graphs: int = 0
    replays: int = 0
    nbytes: int = 0

    @property
    def text(self) -> str:
        """The state, and the reason if there is one."""
        return f"{self.state}: {self.reason}" if self.reason else self.state

    @staticmethod
    def of_all(parts: Sequence[CaptureStats]) -> CaptureStats | None:
        """Return those of all groups; None if there are none."""
        if not parts:
            return None
        states = {part.state for part in parts}
        state: Literal["waiting", "replaying", "refused"] = "replaying"
        if "waiting" in states:
            state = "waiting"
        if "refused" in states:
            state = "refused"
        return CaptureStats(
            state,
            next((part.reason for part in parts if part.reason), ""),
            sum(part.graphs for part in parts),
            sum(part.replays for part in parts),
            sum(part.nbytes for part in parts),
        )


@dataclass(frozen=True, repr=False)
class CollectorStats:
    """A snapshot of a collector, which notebooks show as a table.

    Frames are environment steps: ``executed = frames + sum(discarded) + in_flight``.

    Attributes:
        frames: number of frames delivered in batches.
        executed: number of all executed steps.
        discarded: number of steps that will not be delivered, by reason; a ``Counter``, 0 for all
            other reasons.
        in_flight: number of steps not delivered yet: rollouts that workers have made ahead, batches
            that wait (for the next call, after an error of a hook), the rows of a batch that an
            error interrupted, and with ``trajs_per_batch`` and ``collect(n_episode=)`` episodes
            that are incomplete or wait for others. 0 after ``shutdown()``, which discards them all.
        completed: number of frames of all episodes that have ended in collected batches.
        written: number of frames that the replay buffer has got, before ``postproc``: without those
            of ``rollout()``, and in a ``ReplayMemory`` with those of surplus rollouts of
            ``collect``. 0 without a buffer.
        batches, episodes: numbers of delivered batches, and of episodes that ended in them.
        return_mean, length_mean: averages over the last 100 episodes; None before the first.
        success_rate: average over the last 100 episodes whose last ``info`` has ``is_success`` or
            ``success``; None before the first, and where the option ``info`` stores neither.
        frames_per_s: delivered frames per second of collecting. The user's own time does not count,
            except where workers continue meanwhile.
        env_s, policy_s, copy_s, rest_s: time of rollouts by part in seconds, summed over workers.
            ``env_s`` and ``policy_s`` are estimated from every 16th step; those of replays
            (``capture``) are in ``rest_s``.
        wait_s: time in seconds that this process has waited for workers.
        policy_path: how actions are computed: "module", "torch executor", "numpy executor",
            "random", ...
        policy_version: number of weight publications, or the version of the user's own counter.
        policy_lag: number of batches by the age of their weights at delivery, as a number of
            publications.
        slots: number of memory slots, by state.
        restarts: number of restarts of all workers.
        unseen: upper bound on the executed steps that only lost nodes knew of; they are in no other
            number here.
        cut_short: number of cells that ``preemptive_threshold`` has left blank.
        workers: statistics of each worker; empty for a collector in its own process.
        inference: statistics of the server of ``inference="server"``.
        ended_by: type and message of the error that ended the background thread of ``start()``;
            else empty.
        engine: what carries rollouts and weights between this process and its nodes: "ray",
            "torch_distributed", "direct"; empty without nodes.
        capture: statistics of ``capture``; None without it.
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
    engine: str = ""
    completed: int = 0
    written: int = 0
    capture: CaptureStats | None = None

    def __repr__(self) -> str:
        parts = [
            f"{counted(self.frames, 'frame')} in {counted(self.batches, 'batch')}",
            counted(self.episodes, "episode"),
        ]
        if self.return_mean is not None:
            parts.append(f"return {self.return_mean:,.1f}")
        parts.append(f"{short(self.frames_per_s)} frames/s")
        if self.workers:
            parts.append(counted(len(self.workers), "worker"))
        if self.restarts:
            parts.append(counted(self.restarts, "restart"))
        return f"CollectorStats({', '.join(parts)})"

    def _repr_html_(self) -> str:
        shown = html_of_rows(_rows(self))
        if not self.workers:
            return shown
        nodes = any(worker.node for worker in self.workers)
        names = (*OF_WORKERS, "node") if nodes else OF_WORKERS
        cells = [_cells(worker)[: len(names)] for worker in self.workers]
        return shown + html_of_columns(names, cells)

    @property
    def nodes(self) -> int:
        """Number of nodes with a running worker; 0 if all workers are on this machine."""
        return len(
            {
                worker.node
                for worker in self.workers
                if worker.node and worker.state == "working"
            }
        )


# --- as a table -----------------------------------------------------------------------------------


def _rows(stats: CollectorStats) -> Iterator[tuple[str, str]]:
    discarded = {reason: number for reason, number in stats.discarded.items() if number}
    reasons = ", ".join(f"{number:,} {reason}" for reason, number in discarded.items())
    yield (
        "frames",
        f"{stats.executed:,} executed = {stats.frames:,} delivered"
        f" + {sum(discarded.values()):,} discarded{f' ({reasons})' if reasons else ''}"
        f" + {stats.in_flight:,} in flight",
    )
    yield "batches", f"{stats.batches:,}"
    yield "episodes", f"{stats.episodes:,}"
    if stats.return_mean is not None:
        yield "mean return", f"{stats.return_mean:,.1f}"
    if stats.length_mean is not None:
        yield "mean length", f"{stats.length_mean:,.1f}"
    if stats.success_rate is not None:
        yield "success rate", f"{stats.success_rate:.0%}"
    yield "speed", f"{stats.frames_per_s:,.0f} frames/s"
    yield "time", _shares(stats)
    if stats.workers:
        yield "waited for workers", clock(stats.wait_s)
    yield "policy", f"{stats.policy_path}, version {stats.policy_version}"
    lags = (
        f"{lag}: {counted(number, 'batch')}" for lag, number in stats.policy_lag.items()
    )
    yield "policy lag", ", ".join(lags)
    yield "batches that you hold", f"{stats.slots.get('lent', 0)}"
    if stats.engine:
        yield "engine", stats.engine
    if stats.capture is not None:
        yield "capture", stats.capture.text
    if stats.ended_by:
        yield "ended by", stats.ended_by


def _shares(stats: CollectorStats) -> str:
    parts = {
        "environments": stats.env_s,
        "policy": stats.policy_s,
        "copies": stats.copy_s,
        "rest": stats.rest_s,
    }
    total = sum(parts.values()) or 1.0
    return ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in parts.items())


def _cells(worker: WorkerStats) -> tuple[str, ...]:
    return (
        f"{worker.index}",
        worker.state,
        worker.phase,
        f"{worker.frames:,}",
        f"{worker.share:.0%}",
        short(worker.frames_per_s),
        f"{worker.restarts}",
        f"{worker.policy_lag}",
        worker.node,
    )
