"""The kinds of schedules between which collectors with workers choose.

A kind says how groups share batches, which options contradict it, and how its schedule is made.
Another kind is another class here, and a collector whose ``_schedule_kind`` returns it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, cast

from muster.collectors.multi_options import PoolOptions
from muster.errors import BadOption
from muster.memory.shared import Arena
from muster.weights.publish import PolicyWeights
from muster.workers.first_ready import LEAD, FirstReady
from muster.workers.schedule import Bundle, Schedule
from muster.workers.supervision import SupervisedPool
from muster.workers.sync import Sync
from muster.workers.turns import GlobalStreams


class ScheduleKind(ABC):
    """How groups share batches, and when they roll out.

    Attributes:
        shares_batch: all groups fill a batch together; False: each bundle fills its own.
        overlaps: workers roll out while the user has a batch.
    """

    shares_batch: ClassVar[bool]
    overlaps: ClassVar[bool]

    @abstractmethod
    def check(self, options: PoolOptions) -> None:
        """Raise ``BadOption`` for an option that contradicts this kind."""

    @abstractmethod
    def cat_dim(self, options: PoolOptions) -> int | None:
        """Return the dimension along which the rollouts of a batch are concatenated; None: none."""

    @abstractmethod
    def sharing(self, sizes: Sequence[int]) -> list[int]:
        """Return numbers of environments that share the frames of a batch, of groups of these
        sizes.
        """

    @abstractmethod
    def schedule(
        self,
        options: PoolOptions,
        pool: SupervisedPool,
        arena: Arena,
        weights: PolicyWeights,
    ) -> Schedule:
        """Return the schedule of a pool, whose slots are in ``arena``."""


class SyncKind(ScheduleKind):
    """A batch has a rollout of every group."""

    shares_batch = True
    overlaps = False

    def check(self, options: PoolOptions) -> None:
        if options.frames_of_workers:
            raise BadOption(
                f"frames_per_batch={list(options.frames_of_workers)}: all workers share a batch"
                " here. Give its number of frames, which they share in proportion to their"
                " environments"
            )
        if options.max_policy_lag is not None:
            raise BadOption(
                "max_policy_lag: here all have the newest weights; leave it out"
            )

    def cat_dim(self, options: PoolOptions) -> int | None:
        return options.cat_dim

    def sharing(self, sizes: Sequence[int]) -> list[int]:
        return [sum(sizes)]

    def schedule(
        self,
        options: PoolOptions,
        pool: SupervisedPool,
        arena: Arena,
        weights: PolicyWeights,
    ) -> Schedule:
        groups = len(pool.counters)
        parts = [[number] for number in range(groups)]
        if options.cat_dim is None:  # a batch is a view on one slot
            parts = [list(range(groups))]
        rows = options.rows_per_batch(pool.num_envs) if options.extend_buffer else 1
        return Sync(
            pool,
            _bundles(parts, options, arena),
            [rows] * groups,
            enough=options.enough(groups),
            streams=GlobalStreams() if options.in_threads else None,
        )


class FirstReadyKind(ScheduleKind):
    """A batch has the rollouts of one bundle of groups, whichever is complete first.

    Args:
        parts: the groups of each bundle; None: each group is one.
        lead: number of batches of a bundle that may be undelivered.
    """

    shares_batch = False
    overlaps = True

    def __init__(
        self, parts: Sequence[Sequence[int]] | None = None, lead: int = LEAD
    ) -> None:
        self._parts = parts
        self._lead = lead

    def check(self, options: PoolOptions) -> None:
        threshold = options.preemptive_threshold
        if options.cat_dim is not None:
            raise BadOption(
                "cat_results joins the rollouts of a batch, and here every batch is one rollout:"
                " leave it out"
            )
        if threshold is not None and threshold < 1:
            raise BadOption(
                "preemptive_threshold stops workers that are late, and this collector does not wait"
                " for them: leave it out"
            )
        if options.return_same_td:
            raise BadOption(
                "return_same_td yields the same memory every time, and workers go on while you read"
                " it: leave it out"
            )
        if not options.extend_buffer:
            raise BadOption(
                "extend_buffer=False adds single steps, and here every batch is a rollout of a"
                " worker: leave it out"
            )

    def cat_dim(self, options: PoolOptions) -> int | None:
        return None

    def sharing(self, sizes: Sequence[int]) -> list[int]:
        return [sum(sizes[number] for number in part) for part in self._of(len(sizes))]

    def schedule(
        self,
        options: PoolOptions,
        pool: SupervisedPool,
        arena: Arena,
        weights: PolicyWeights,
    ) -> Schedule:
        sizes = [counts.info.num_envs for counts in pool.counters]
        parts = self._of(len(sizes))
        T = [0] * len(sizes)
        for part, sharing in zip(parts, self.sharing(sizes), strict=True):
            rows = _rows_of(options, pool, part, sharing)
            for number in part:
                T[number] = rows
        return FirstReady(
            pool,
            _bundles(parts, options, arena),
            T,
            max_lag=options.max_policy_lag,
            publishes=lambda: weights.publishes,
            lead=self._lead,
        )

    def _of(self, groups: int) -> Sequence[Sequence[int]]:
        """Return the groups of each bundle."""
        if self._parts is None:
            return [[number] for number in range(groups)]
        return self._parts


def _rows_of(
    options: PoolOptions, pool: SupervisedPool, part: Sequence[int], sharing: int
) -> int:
    """Return the number of time steps of the batches of a bundle of groups."""
    if not options.frames_of_workers:
        return options.rows_per_batch(sharing)
    (worker,) = [
        worker.index for worker in pool.config.workers if part[0] in worker.groups
    ]
    frames = options.frames_of_workers[worker]
    if frames % sharing:
        raise BadOption(
            f"frames_per_batch: worker {worker} has {frames} frames for {sharing} environments:"
            f" expected a multiple of {sharing}"
        )
    return frames // sharing


def _bundles(
    parts: Sequence[Sequence[int]], options: PoolOptions, arena: Arena
) -> list[Bundle]:
    limit = cast(int, options.slot_memory_limit) // len(parts)
    return [Bundle(part, limit_bytes=limit, memory=arena) for part in parts]
