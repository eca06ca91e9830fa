"""The additional options of collectors with workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from muster.collectors.options import CollectorOptions, Details, check_bool, check_choice
from muster.errors import BadOption
from muster.utils.integers import integer
from muster.workers.config import OnFailure

Backend = Literal["processes", "threads"]
StartMethod = Literal["forkserver", "spawn"]


@dataclass(frozen=True, repr=False)
class Restart(Details):
    """``on_failure``: restart failed workers at once.

    Attributes:
        max_restarts: maximum number of restarts of a worker within a minute. Beyond it, or after
            three restarts without a batch, the worker's error is raised. None: no limit of either
            kind.
    """

    max_restarts: int | None = 10

    def __post_init__(self) -> None:
        if self.max_restarts is not None:
            object.__setattr__(self, "max_restarts", integer("max_restarts", self.max_restarts, 0))


@dataclass(frozen=True, repr=False, kw_only=True)
class CentralInference(Details):
    """``inference``: a thread of the collector's process calls the policy for all workers.

    Attributes:
        alternating: half of the workers step while the policy is called for the other half.
        max_batch: maximum number of environments in one call of the policy. None: no limit.
        max_wait_s: maximum time in seconds that the first ready worker waits for others. None: in
            ``MultiSyncCollector`` until all workers with an unfinished rollout are ready, else no
            wait.
    """

    alternating: bool = False
    max_batch: int | None = None
    max_wait_s: float | None = None

    def __post_init__(self) -> None:
        check_bool("alternating", self.alternating)
        for name, least in (("max_batch", 1), ("max_wait_s", 0)):
            value = getattr(self, name)
            number = int if name == "max_batch" else (int, float)
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, number) or value < least
            ):
                raise BadOption(f"{name}={value!r}: expected a number, at least {least}, or None")


@dataclass(frozen=True, kw_only=True)
class PoolOptions(CollectorOptions):
    """The options of collectors with a worker pool, on this machine or on nodes, checked.

    Extends ``CollectorOptions``.

    Attributes:
        create_env_fn: an env id, a function that makes an environment, or a list of these, one per
            group. Environment objects are refused: they live in this process.
        policy: see ``Collector``. It must be picklable (lambdas and classes of a notebook are), or
            be made by ``policy_factory``.
        cat_results: how the rollouts of a batch are joined. "stack": along a new first dimension,
            without a copy. "cat": along their first dimension, with a copy. An integer: along this
            dimension, with a copy.
        update_at_each_batch: publish the policy's weights before every batch.
        preemptive_threshold: share of the groups, from 0 to 1; when it is complete, the others end
            after their current step. Missing rows are blank, with ``collector/valid`` False, or
            left out if time is concatenated. None: 1.
        num_sub_threads: number of torch's threads in each worker process. None: torch's own choice.
        num_threads: number of torch's threads in this process, until ``shutdown``. None: your
            setting.
        on_failure: reaction to a worker that dies or hangs, or whose environment raises. "raise":
            raise the error, restart the worker with the next batch. "restart": restart it at once
            (``muster.Restart(...)`` sets how often). "drop": continue without the worker; its part
            of batches is blank.
        timeouts: seconds without progress after which a worker counts as hanging, by phase:
            "construct", "call" (default 300), "reset", "step", "policy", "weights" (60), "close"
            (5). None: no limit. With nodes also "join" (600) and "heartbeat" (15). A coroutine
            (docs/coroutines.md) has the deadline of its phase for each call.
        max_policy_lag: maximum age of the weights that acted in a yielded batch, as a number of
            publications, if weights are published once per batch. Workers wait if necessary. None:
            no limit.
        crash_dir: folder for crash reports, with which ``muster replay`` repeats a failure. None: a
            temporary folder.
        start_method: how worker processes start: "forkserver" (in milliseconds) or "spawn". None:
            as the system allows.
        cpu_affinity: CPUs of the workers, on Linux. "auto": the CPUs that this process may use are
            divided among the workers of a machine. Or a list of CPU numbers for each worker. None:
            the system chooses.
        inference: "worker": each worker acts with a copy of the policy. "server": workers only step
            environments, and a thread of this process calls the policy once for all ready workers.
            Worker processes do not import torch then. For policies that cost more than the
            environments, or run on a GPU (``policy_device``). ``muster.CentralInference(...)`` sets
            its details.
    """

    cat_results: Literal["stack", "cat"] | int = "stack"
    update_at_each_batch: bool = False
    preemptive_threshold: float | None = 1.0
    num_sub_threads: int | None = 1
    num_threads: int | None = None
    on_failure: OnFailure | Restart = "raise"
    max_policy_lag: int | None = None
    crash_dir: Any = None
    start_method: StartMethod | None = None
    cpu_affinity: Literal["auto"] | Sequence[Sequence[int]] | None = None
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
        if threshold is not None and not (
            isinstance(threshold, (int, float)) and 0 <= threshold <= 1
        ):
            raise BadOption(
                f"preemptive_threshold={threshold!r}: expected a share of the workers, from 0 to 1"
            )
        if self.cpu_affinity not in (None, "auto") and not _is_list_of_cpus(self.cpu_affinity):
            raise BadOption(
                f"cpu_affinity={self.cpu_affinity!r}: expected 'auto', or a list of CPU numbers per"
                " worker"
            )

    def enough(self, groups: int) -> int | None:
        """Return the number of complete groups at which the others are stopped; None: all groups."""
        if self.preemptive_threshold is None or self.preemptive_threshold >= 1:
            return None
        return max(1, int(groups * self.preemptive_threshold))

    @property
    def cat_dim(self) -> int | None:
        """Return the dimension along which rollouts are concatenated; None: they are stacked."""
        if isinstance(self.cat_results, int):
            return self.cat_results
        return 0 if self.cat_results == "cat" else None

    @property
    def server(self) -> CentralInference | None:
        """Return the details of ``inference="server"``; None: the workers act."""
        if isinstance(self.inference, CentralInference):
            return self.inference
        return CentralInference() if self.inference == "server" else None

    @property
    def restart(self) -> Restart | None:
        """Return the details of ``on_failure="restart"``; None: another reaction."""
        if isinstance(self.on_failure, Restart):
            return self.on_failure
        return Restart() if self.on_failure == "restart" else None

    @property
    def in_threads(self) -> bool:
        """Whether workers are threads of this process."""
        return False

    @property
    def num_workers(self) -> int | Literal["auto"] | None:
        """Return the number of workers on this machine; None: one for each group."""
        return None


@dataclass(frozen=True, kw_only=True)
class MultiOptions(PoolOptions):
    """The options of a collector with workers on this machine, checked. Extends ``PoolOptions``.

    Attributes:
        num_workers: number of worker processes or threads, at most one per group. If
            ``create_env_fn`` is not a list, this many groups are made. None: one worker per group.
            "auto": as many as keep the cores busy, measured for a second on an environment made for
            it (docs/tuning.md).
        backend: "processes", or "threads" for environments that mostly wait (for a simulator or a
            network), even hundreds. In threads, environments that draw from the global generators
            of NumPy, ``random`` or torch are not reproducible, and change your generators;
            ``MultiSyncCollector`` warns about it.
    """

    num_workers: int | Literal["auto"] | None = None
    backend: Backend = "processes"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("backend", self.backend, ("processes", "threads"))

    @property
    def in_threads(self) -> bool:
        return self.backend == "threads"


def _is_list_of_cpus(given: Any) -> bool:
    if isinstance(given, str) or not isinstance(given, Sequence):
        return False
    parts = [cpus if isinstance(cpus, Sequence) else () for cpus in given]
    return all(len(cpus) and all(type(cpu) is int and cpu >= 0 for cpu in cpus) for cpus in parts)
