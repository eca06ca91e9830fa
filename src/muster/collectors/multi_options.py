"""The options that only collectors with workers have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from muster.collectors.options import CollectorOptions, Details, check_bool, check_choice
from muster.errors import BadOption
from muster.utils.integers import integer
from muster.workers.config import TIMEOUTS, OnFailure

Backend = Literal["processes", "threads"]
StartMethod = Literal["forkserver", "spawn"]


@dataclass(frozen=True, repr=False)
class Restart(Details):
    """``on_failure``: start a worker again at once.

    Attributes:
        max_restarts: of one worker within a minute; with more, or three without a batch, its error is raised. None: any
            number.
    """

    max_restarts: int | None = 10

    def __post_init__(self) -> None:
        if self.max_restarts is not None:
            object.__setattr__(self, "max_restarts", integer("max_restarts", self.max_restarts, 0))


@dataclass(frozen=True, repr=False, kw_only=True)
class CentralInference(Details):
    """``inference``: a thread of the collector's process acts for all workers.

    Attributes:
        alternating: half of the workers step while the other half is acted for.
        max_batch: environments of one call of the policy, at most. None: no bound.
        max_wait_s: seconds that the first worker to ask waits for others. None: in ``MultiSyncCollector`` until all
            that are at work ask, else not at all.
    """

    alternating: bool = False
    max_batch: int | None = None
    max_wait_s: float | None = None

    def __post_init__(self) -> None:
        check_bool("alternating", self.alternating)
        for name, least in (("max_batch", 1), ("max_wait_s", 0)):
            value = getattr(self, name)
            number = int if name == "max_batch" else (int, float)
            if value is not None and (isinstance(value, bool) or not isinstance(value, number) or value < least):
                raise BadOption(f"{name}={value!r}: expected a number, at least {least}, or None")


@dataclass(frozen=True, kw_only=True)
class PoolOptions(CollectorOptions):
    """Checked options of collectors with a worker pool, here or on nodes; ``CollectorOptions`` has the others.

    Attributes:
        create_env_fn: an id, a function that makes an environment, or a list of these: one group each. No environment
            objects: those live in this process.
        policy: see ``Collector``; it has to be picklable (lambdas and notebook classes are), or made by
            ``policy_factory``.
        cat_results: how the rollouts of a batch are joined: "stack" gives them a dimension of their own and copies
            nothing, "cat" or a dimension of the batch (-1 is time) concatenates, which copies.
        update_at_each_batch: publish the policy's weights before every batch.
        preemptive_threshold: when this share of the groups is done, the others end after their current step. What they
            lack is blank, with ``collector/valid`` False; it is left out where time is concatenated. None or 1: all.
        num_sub_threads: torch's threads in each worker process. None: torch's own choice.
        num_threads: torch's threads in this process, until ``shutdown``. None: your setting.
        on_failure: when a worker dies or hangs, or its environment raises: "raise" the error, and start it again with
            the next batch; "restart" it at once (``muster.Restart(...)`` says how often); "drop" it and go on with the
            others, its part of batches blank.
        timeouts: seconds after which a worker that does not get on is taken to hang, by phase: "construct", "reset",
            "step", "policy", "weights", "call" or "close"; None is for ever.
        max_policy_lag: weights that act in a batch are at most so many publishes old when it is yielded, if weights are
            published once per batch. Workers wait for that where they have to. None: no bound.
        crash_dir: folder for files with which ``muster replay`` repeats a failure. None: a temporary one.
        start_method: of processes: "forkserver" (in milliseconds) or "spawn". None: as the system allows.
        inference: "worker": each worker acts with a copy of the policy. "server": workers only step environments, and
            a thread of this process acts for all that are ready, in one call of the policy: for policies that cost more
            than the environments, or compute on a GPU (``policy_device``). Worker processes then do not import torch.
            ``muster.CentralInference(...)`` is the same with details.
    """

    cat_results: Literal["stack", "cat"] | int = "stack"
    update_at_each_batch: bool = False
    preemptive_threshold: float | None = 1.0
    num_sub_threads: int | None = 1
    num_threads: int | None = None
    on_failure: OnFailure | Restart = "raise"
    timeouts: Mapping[str, float | None] = field(default_factory=dict)
    max_policy_lag: int | None = None
    crash_dir: Any = None
    start_method: StartMethod | None = None
    inference: Literal["worker", "server"] | CentralInference = "worker"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.inference, CentralInference):
            check_choice("inference", self.inference, ("worker", "server"))
        if not isinstance(self.on_failure, Restart):
            check_choice("on_failure", self.on_failure, ("raise", "restart", "drop"))
        if self.start_method is not None:
            check_choice("start_method", self.start_method, ("forkserver", "spawn"))
        if isinstance(self.cat_results, bool) or not isinstance(self.cat_results, int):
            check_choice("cat_results", self.cat_results, ("stack", "cat"))
        threshold = self.preemptive_threshold
        if threshold is not None and not (isinstance(threshold, (int, float)) and 0 <= threshold <= 1):
            raise BadOption(f"preemptive_threshold={threshold!r}: expected a share of the workers, from 0 to 1")
        if not isinstance(self.timeouts, Mapping):
            raise BadOption(f"timeouts={self.timeouts!r}: expected a dict of seconds by phase")
        for phase, seconds in self.timeouts.items():
            if phase not in TIMEOUTS:
                raise BadOption(f"timeouts: there is no phase {phase!r}; expected some of {', '.join(TIMEOUTS)}")
            if seconds is not None and not (isinstance(seconds, (int, float)) and 0 < seconds < math.inf):
                raise BadOption(f"timeouts[{phase!r}]={seconds!r}: expected seconds, more than 0, or None for ever")

    def enough(self, groups: int) -> int | None:
        """How many groups need to be done before the others are stopped; None is all of them."""
        if self.preemptive_threshold is None or self.preemptive_threshold >= 1:
            return None
        return max(1, int(groups * self.preemptive_threshold))

    @property
    def cat_dim(self) -> int | None:
        """The dimension along which rollouts are concatenated; None: they are stacked."""
        if isinstance(self.cat_results, int):
            return self.cat_results
        return 0 if self.cat_results == "cat" else None

    @property
    def server(self) -> CentralInference | None:
        """Of ``inference``; None where the workers act."""
        if isinstance(self.inference, CentralInference):
            return self.inference
        return CentralInference() if self.inference == "server" else None

    @property
    def restart(self) -> Restart | None:
        """Of ``on_failure``."""
        if isinstance(self.on_failure, Restart):
            return self.on_failure
        return Restart() if self.on_failure == "restart" else None

    @property
    def in_threads(self) -> bool:
        """Workers are threads of this process."""
        return False

    @property
    def num_workers(self) -> int | Literal["auto"] | None:
        """On this machine; None: as many as groups."""
        return None


@dataclass(frozen=True, kw_only=True)
class MultiOptions(PoolOptions):
    """Checked options of a collector with workers on this machine; ``PoolOptions`` has the others.

    Attributes:
        num_workers: processes or threads for the groups of ``create_env_fn``, at most one for each. Of a
            ``create_env_fn`` that is no list, so many groups are made. None: one for each entry. "auto": as many as
            keep the cores busy, measured for a second on an environment made for that purpose (docs/tuning.md).
        backend: "processes", or "threads" for environments that mostly wait (for a simulator or a network): hundreds of
            them at once. In threads, environments that draw from the global generators of NumPy, ``random`` or torch
            do not give the same data each time, and move your generators; ``MultiSyncCollector`` warns of that.
    """

    num_workers: int | Literal["auto"] | None = None
    backend: Backend = "processes"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("backend", self.backend, ("processes", "threads"))

    @property
    def in_threads(self) -> bool:
        return self.backend == "threads"
