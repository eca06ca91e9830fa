"""Options that exclude each other: a table of conditions and error messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from muster.errors import BadOption

if TYPE_CHECKING:
    from muster.collectors.multi_options import PoolOptions
    from muster.collectors.options import CollectorOptions
    from muster.workers.messages import GroupInfo


NEEDS_ENVS = (
    "needs the rows of each environment for itself, and cat_results along time puts those of one after those of "
    "another: leave cat_results out, or, with num_envs, give the dimension of the environments"
)
Check = tuple[object, str]  # whether there is an error, and its message


def check_contradictions(o: CollectorOptions) -> None:
    """Raise ``BadOption`` for the first contradiction."""
    for wrong, message in (*_of_batches(o), *_of_objects(o)):
        if wrong:
            raise BadOption(message)


def check_multi(o: PoolOptions, *, alone: bool) -> None:
    """The same for collectors with workers. ``alone``: every group fills batches of its own."""
    cat, threshold = o.cat_dim is not None, o.preemptive_threshold
    for wrong, message in (
        (alone and cat, "cat_results joins the rollouts of a batch, and here every batch is one rollout: leave it out"),
        (
            alone and threshold is not None and threshold < 1,
            "preemptive_threshold stops workers that are late, and this collector does not wait for them: leave it out",
        ),
        (
            not alone and o.max_policy_lag is not None,
            "max_policy_lag: here all have the newest weights; leave it out",
        ),
        (
            alone and o.return_same_td,
            "return_same_td yields the same memory every time, and workers go on while you read it: leave it out",
        ),
        (
            cat and o.return_same_td,
            "return_same_td yields the same memory, and cat_results copies: give one of them",
        ),
        (
            alone and not o.extend_buffer,
            "extend_buffer=False adds single steps, and here every batch is a rollout of a worker: leave it out",
        ),
        (
            o.on_failure == "drop" and o.trajectories is not None and o.trajectories.rule == "per_env",
            "rule='per_env' needs episodes of every environment, and on_failure='drop' can lose some: give one",
        ),
        (
            o.in_threads and o.start_method is not None,
            "start_method is about processes, and backend='threads' has none: leave it out",
        ),
        (
            o.server is not None and isinstance(getattr(o.track_policy_version, "version", None), str),
            "versions that are text cannot be stamped on single rows, as inference='server' does: count with integers",
        ),
    ):
        if wrong:
            raise BadOption(message)


def joins_time(o: CollectorOptions, cat_dim: int | None, batch_shape: Sequence[int]) -> bool:
    """Return whether the rollouts of groups (``[*batch_shape, T]``) are concatenated along time."""
    ndim = len(batch_shape) + 1
    return cat_dim is not None and cat_dim % ndim == (0 if o.layout == "time_major" else ndim - 1)


def check_cat(o: PoolOptions, infos: Sequence[GroupInfo]) -> None:
    """Raise ``BadOption`` if the rollouts of these groups cannot be concatenated as ``cat_results`` says."""
    if o.cat_dim is None:
        return
    first, dim = infos[0], o.cat_dim
    ndim, over_time = len(first.batch_shape) + 1, joins_time(o, o.cat_dim, first.batch_shape)
    along = None if over_time else dim % ndim - (o.layout == "time_major")

    def kind(info: GroupInfo) -> object:
        sizes = [size for place, size in enumerate(info.batch_shape) if place != along]
        return sizes, info.observations, info.actions

    waits = [name for name in ("trajs_per_batch", "on_episode_done") if getattr(o, name)]
    for wrong, message in (
        (
            not -ndim <= dim < ndim,
            f"cat_results={dim}: the rollouts to concatenate have {ndim} dimensions. Give one from {-ndim} to "
            f"{ndim - 1}, or 'stack'",
        ),
        (
            any(len(info.batch_shape) + 1 != ndim or kind(info) != kind(first) for info in infos),
            f"cat_results={o.cat_results!r}: the groups of create_env_fn differ in number of environments or in "
            f"spaces, so their rollouts cannot be concatenated: use a collector for each kind",
        ),
        (over_time and waits, f"{waits and waits[0]} {NEEDS_ENVS}"),
    ):
        if wrong:
            raise BadOption(message)


def _of_batches(o: CollectorOptions) -> tuple[Check, ...]:
    """Checks of the contents and destination of batches."""
    buffer = o.replay_buffer is not None
    per_step = not o.extend_buffer
    waits = "trajs_per_batch" if o.trajs_per_batch else "on_episode_done"
    return (
        (per_step and not buffer, "extend_buffer=False needs a replay_buffer"),
        (
            per_step
            and any(
                (
                    *(o.postproc, o.split_trajs, o.trajs_per_batch, o.set_truncated, o.compact_obs),
                    *(o.post_collect_hook, o.on_episode_done, o.on_batch, o.record),
                )
            ),
            "postproc, split_trajs, trajs_per_batch, set_truncated, compact_obs, post_collect_hook, on_episode_done, "
            "on_batch and record need whole batches: use extend_buffer=True",
        ),
        (
            per_step and (not o.reset_when_done or o.interruptor is not None),
            "extend_buffer=False adds single steps, "
            "so a batch cannot end early: leave out reset_when_done=False and interruptor, or use extend_buffer=True",
        ),
        (o.return_same_td and buffer, "return_same_td yields batches, which replay_buffer takes: give one of them"),
        (
            o.return_same_td and any((o.split_trajs, o.trajs_per_batch)),
            "split_trajs and trajs_per_batch make a new TensorDict every time: leave return_same_td out",
        ),
        (
            o.split_trajs and o.trajs_per_batch,
            "split_trajs and trajs_per_batch: give one; traj_format='pad' pads too",
        ),
        (
            o.trajectories is not None and o.trajectories.on_policy_only and not o.track_policy_version,
            "on_policy_only looks at the versions of whole episodes: it needs track_policy_version",
        ),
        (
            o.max_decorrelation_steps and o.reset_at_each_iter,
            "max_decorrelation_steps moves environments away from the beginning of their episodes, and "
            "reset_at_each_iter takes them back before the first batch: give one of them",
        ),
        (
            o.set_truncated and (o.trajs_per_batch or o.on_episode_done),
            f"set_truncated marks ends that are none, and {waits} waits for real ones: give one of them",
        ),
    )


def _of_objects(o: CollectorOptions) -> tuple[Check, ...]:
    """Checks of the user's objects, and of the devices of this machine."""
    return (
        (
            o.weight_sync_schemes is not None and not hasattr(o, "num_workers"),
            "weight_sync_schemes send weights to sub-collectors, and a Collector has none; weight_recv_schemes "
            "receive them from a parent",
        ),
        (
            o.interruptor is not None and not callable(getattr(o.interruptor, "collection_stopped", None)),
            f"interruptor={o.interruptor!r}: expected an object with a method collection_stopped()",
        ),
        (
            o.cudagraph_policy not in (None, False) and not torch.cuda.is_available(),
            "cudagraph_policy needs a CUDA device, and this machine or this build of torch has none",
        ),
        (
            o.compile_policy not in (None, False)
            and o.cudagraph_policy not in (None, False)
            and isinstance(o.compile_policy, dict)
            and o.compile_policy.get("mode") == "reduce-overhead",
            "compile_policy with mode='reduce-overhead' makes CUDA graphs itself: leave cudagraph_policy out",
        ),
        (
            not isinstance(o.track_policy_version, bool) and not hasattr(o.track_policy_version, "increment_version"),
            f"track_policy_version={o.track_policy_version!r}: expected True, False or a PolicyVersion",
        ),
    )
