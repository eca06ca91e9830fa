"""The additional options of collectors with workers, and what excludes each other among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from muster.collectors.batch_options import joins_time
from muster.collectors.options import PER_WORKER, CollectorOptions
from muster.env_spec import EnvSpec
from muster.errors import BadOption
from muster.utils.checked import Details, Number, PositiveNumber
from muster.utils.containers import is_several
from muster.workers.options import SupervisionOptions

Backend = Literal["processes", "threads"]
NEEDS_ENVS = (
    "needs the rows of each environment for itself, and cat_results along time puts those of one"
    " after those of another: leave cat_results out, or, with num_envs, give the dimension of the"
    " environments"
)


def _at_least_one(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BadOption(f"{name}={value!r}: expected a number, at least 1, or None")
    return value


def _seconds(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
        raise BadOption(f"{name}={value!r}: expected a number, at least 0, or None")
    return value


def _share(name: str, value: Any) -> float:
    if not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise BadOption(
            f"{name}={value!r}: expected a share of the workers, from 0 to 1"
        )
    return value


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
    max_batch: Annotated[int, _at_least_one] | None = None
    max_wait_s: Annotated[float, _seconds] | None = None


@dataclass(frozen=True, kw_only=True)
class PoolOptions(SupervisionOptions, CollectorOptions):
    """The options of collectors with a worker pool, on this machine or on nodes, checked.

    Extends ``CollectorOptions`` and ``SupervisionOptions``.

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
        num_threads: number of torch's threads in this process, until ``shutdown``. None: your
            setting.
        timeouts: seconds without progress after which a worker counts as hanging, by phase:
            "construct", "call" (default 300), "reset", "step", "policy", "weights" (60), "close"
            (5). None: no limit. With nodes also "join" (600) and "heartbeat" (15). A coroutine
            (docs/coroutines.md) has the deadline of its phase for each call.
        max_policy_lag: maximum age of the weights that acted in a yielded batch, as a number of
            publications, if weights are published once per batch. Workers wait if necessary. None:
            no limit.
        inference: "worker": each worker acts with a copy of the policy. "server": workers only step
            environments, and a thread of this process calls the policy once for all ready workers.
            Worker processes do not import torch then. For policies that cost more than the
            environments, or run on a GPU (``policy_device``). ``muster.CentralInference(...)`` sets
            its details.
    """

    SHOWN_ORDER: ClassVar[tuple[str, ...]] = (
        *CollectorOptions.SHOWN_ORDER,
        "cat_results",
        "update_at_each_batch",
        "preemptive_threshold",
        "num_sub_threads",
        "on_failure",
        "max_policy_lag",
        "crash_dir",
        "start_method",
        "cpu_affinity",
        "inference",
    )
    has_workers: ClassVar[bool] = True

    cat_results: Literal["stack", "cat"] | int = "stack"
    update_at_each_batch: bool = False
    preemptive_threshold: Annotated[float, _share] | None = 1.0
    num_threads: PositiveNumber | None = None
    max_policy_lag: Number | None = None
    inference: Literal["worker", "server"] | CentralInference = "worker"

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

    num_workers: PositiveNumber | Literal["auto"] | None = None
    backend: Backend = "processes"

    @property
    def in_threads(self) -> bool:
        return self.backend == "threads"


# --- options of single workers --------------------------------------------------------------------

# what the policy of an inference server, which is one for all workers, cannot have several of
OF_POLICY = frozenset(
    (
        *("policy_factory", "device", "policy_device"),
        *("compile_policy", "cudagraph_policy", "exploration_type"),
    )
)


def of_workers(
    options: PoolOptions, count: int, others: Sequence[Mapping[str, Any]] = ()
) -> list[PoolOptions]:
    """Return the options of each worker, with its entries of lists.

    Args:
        count: number of workers.
        others: further options of each worker, by name; empty: none.

    Raises:
        BadOption: a list has another number of entries, or the policy of an inference server would
            differ.
    """
    own: list[dict[str, Any]] = [dict(given) for given in others] or [
        {} for _ in range(count)
    ]
    for name in PER_WORKER:
        given = getattr(options, name)
        if not is_several(given):
            continue
        if len(given) != count:
            raise BadOption(
                f"{name} has {len(given)} entries for {count} workers: expected one for all, or one"
                " for each"
            )
        for worker, value in enumerate(given):
            own[worker][name] = value
    if not any(own):
        return [options] * count
    differing = sorted(OF_POLICY.intersection(name for given in own for name in given))
    if options.server is not None and differing:
        raise BadOption(
            f"inference='server' calls one policy for all workers, and {', '.join(differing)}"
            " differs: give one value, or leave inference out"
        )
    return [replace(options, **given) for given in own]


# --- options that exclude each other --------------------------------------------------------------


def check_pool(o: PoolOptions) -> None:
    """Raise ``BadOption`` for the first contradiction between options of a pool."""
    if o.cat_dim is not None and o.return_same_td:
        raise BadOption(
            "return_same_td yields the same memory, and cat_results copies: give one of them"
        )
    if (
        o.on_failure == "drop"
        and o.trajectories is not None
        and o.trajectories.rule == "per_env"
    ):
        raise BadOption(
            "rule='per_env' needs episodes of every environment, and on_failure='drop' can lose"
            " some: give one"
        )
    if o.in_threads and o.start_method is not None:
        raise BadOption(
            "start_method is about processes, and backend='threads' has none: leave it out"
        )
    if o.server is not None and isinstance(
        getattr(o.track_policy_version, "version", None), str
    ):
        raise BadOption(
            "versions that are text cannot be stamped on single rows, as inference='server' does:"
            " count with integers"
        )


def check_cat(o: PoolOptions, infos: Sequence[EnvSpec]) -> None:
    """Raise ``BadOption`` if the rollouts of these groups cannot be concatenated as ``cat_results``
    says.
    """
    if o.cat_dim is None:
        return
    first = infos[0]
    dim = o.cat_dim
    ndim, over_time = (
        len(first.batch_shape) + 1,
        joins_time(o, o.cat_dim, first.batch_shape),
    )
    along = None if over_time else dim % ndim - (o.layout == "time_major")

    def kind(info: EnvSpec) -> object:
        sizes = [size for place, size in enumerate(info.batch_shape) if place != along]
        return sizes, info.observations, info.actions

    waits = o.joins_episodes or ("on_episode_done" if o.on_episode_done else "")
    if not -ndim <= dim < ndim:
        raise BadOption(
            f"cat_results={dim}: the rollouts to concatenate have {ndim} dimensions. Give one from"
            f" {-ndim} to {ndim - 1}, or 'stack'"
        )
    if any(
        len(info.batch_shape) + 1 != ndim or kind(info) != kind(first) for info in infos
    ):
        raise BadOption(
            f"cat_results={o.cat_results!r}: the groups of create_env_fn differ in number of"
            " environments or in spaces, so their rollouts cannot be concatenated: use a collector"
            " for each kind"
        )
    if over_time and waits:
        raise BadOption(f"{waits} {NEEDS_ENVS}")
