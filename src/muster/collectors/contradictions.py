"""Options that exclude each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from muster.episodes.stored import leading_dims
from muster.errors import BadOption

if TYPE_CHECKING:
    from muster.collectors.multi_options import PoolOptions
    from muster.collectors.options import CollectorOptions
    from muster.env_spec import EnvSpec


NEEDS_ENVS = (
    "needs the rows of each environment for itself, and cat_results along time puts those of one"
    " after those of another: leave cat_results out, or, with num_envs, give the dimension of the"
    " environments"
)


def check_contradictions(o: CollectorOptions) -> None:
    """Raise ``BadOption`` for the first contradiction."""
    _check_batches(o)
    _check_objects(o)


def check_multi(o: PoolOptions, *, alone: bool) -> None:
    """The same for collectors with workers. ``alone``: every group fills batches of its own."""
    cat = o.cat_dim is not None
    threshold = o.preemptive_threshold
    if alone and cat:
        raise BadOption(
            "cat_results joins the rollouts of a batch, and here every batch is one rollout: leave"
            " it out"
        )
    if alone and threshold is not None and threshold < 1:
        raise BadOption(
            "preemptive_threshold stops workers that are late, and this collector does not wait for"
            " them: leave it out"
        )
    if not alone and o.max_policy_lag is not None:
        raise BadOption("max_policy_lag: here all have the newest weights; leave it out")
    if alone and o.return_same_td:
        raise BadOption(
            "return_same_td yields the same memory every time, and workers go on while you read it:"
            " leave it out"
        )
    if cat and o.return_same_td:
        raise BadOption(
            "return_same_td yields the same memory, and cat_results copies: give one of them"
        )
    if alone and not o.extend_buffer:
        raise BadOption(
            "extend_buffer=False adds single steps, and here every batch is a rollout of a worker:"
            " leave it out"
        )
    if o.on_failure == "drop" and o.trajectories is not None and o.trajectories.rule == "per_env":
        raise BadOption(
            "rule='per_env' needs episodes of every environment, and on_failure='drop' can lose"
            " some: give one"
        )
    if o.in_threads and o.start_method is not None:
        raise BadOption(
            "start_method is about processes, and backend='threads' has none: leave it out"
        )
    if o.server is not None and isinstance(getattr(o.track_policy_version, "version", None), str):
        raise BadOption(
            "versions that are text cannot be stamped on single rows, as inference='server' does:"
            " count with integers"
        )


def joins_time(o: CollectorOptions, cat_dim: int | None, batch_shape: Sequence[int]) -> bool:
    """Return whether the rollouts of groups (``[*batch_shape, T]``) are concatenated along time."""
    ndim = len(batch_shape) + 1
    return cat_dim is not None and cat_dim % ndim == (0 if o.layout == "time_major" else ndim - 1)


def check_cat(o: PoolOptions, infos: Sequence[EnvSpec]) -> None:
    """Raise ``BadOption`` if the rollouts of these groups cannot be concatenated as ``cat_results``
    says.
    """
    if o.cat_dim is None:
        return
    first = infos[0]
    dim = o.cat_dim
    ndim, over_time = len(first.batch_shape) + 1, joins_time(o, o.cat_dim, first.batch_shape)
    along = None if over_time else dim % ndim - (o.layout == "time_major")

    def kind(info: EnvSpec) -> object:
        sizes = [size for place, size in enumerate(info.batch_shape) if place != along]
        return sizes, info.observations, info.actions

    waits = [name for name in ("trajs_per_batch", "on_episode_done") if getattr(o, name)]
    if not -ndim <= dim < ndim:
        raise BadOption(
            f"cat_results={dim}: the rollouts to concatenate have {ndim} dimensions. Give one from"
            f" {-ndim} to {ndim - 1}, or 'stack'"
        )
    if any(len(info.batch_shape) + 1 != ndim or kind(info) != kind(first) for info in infos):
        raise BadOption(
            f"cat_results={o.cat_results!r}: the groups of create_env_fn differ in number of"
            " environments or in spaces, so their rollouts cannot be concatenated: use a collector"
            " for each kind"
        )
    if over_time and waits:
        raise BadOption(f"{waits[0]} {NEEDS_ENVS}")


def _check_batches(o: CollectorOptions) -> None:
    """Checks of the contents and destination of batches."""
    buffer = o.replay_buffer is not None
    per_step = not o.extend_buffer
    waits = "trajs_per_batch" if o.trajs_per_batch else "on_episode_done"
    if per_step and not buffer:
        raise BadOption("extend_buffer=False needs a replay_buffer")
    whole = o.postproc, o.split_trajs, o.trajs_per_batch, o.set_truncated, o.compact_obs
    if per_step and any((*whole, o.post_collect_hook, o.on_episode_done, o.on_batch, o.record)):
        raise BadOption(
            "postproc, split_trajs, trajs_per_batch, set_truncated, compact_obs, post_collect_hook,"
            " on_episode_done, on_batch and record need whole batches: use extend_buffer=True"
        )
    if per_step and (not o.reset_when_done or o.interruptor is not None):
        raise BadOption(
            "extend_buffer=False adds single steps, so a batch cannot end early: leave out"
            " reset_when_done=False and interruptor, or use extend_buffer=True"
        )
    if buffer:
        _check_stored_shape(o)
    if o.return_same_td and buffer:
        raise BadOption(
            "return_same_td yields batches, which replay_buffer takes: give one of them"
        )
    if o.return_same_td and any((o.split_trajs, o.trajs_per_batch)):
        raise BadOption(
            "split_trajs and trajs_per_batch make a new TensorDict every time: leave"
            " return_same_td out"
        )
    if o.split_trajs and o.trajs_per_batch:
        raise BadOption("split_trajs and trajs_per_batch: give one; traj_format='pad' pads too")
    if o.trajectories is not None and o.trajectories.on_policy_only and not o.track_policy_version:
        raise BadOption(
            "on_policy_only looks at the versions of whole episodes: it needs track_policy_version"
        )
    if o.max_decorrelation_steps and o.reset_at_each_iter:
        raise BadOption(
            "max_decorrelation_steps moves environments away from the beginning of their episodes,"
            " and reset_at_each_iter takes them back before the first batch: give one of them"
        )
    if o.set_truncated and (o.trajs_per_batch or o.on_episode_done):
        raise BadOption(
            f"set_truncated marks ends that are none, and {waits} waits for real ones: give one of"
            " them"
        )


def _check_stored_shape(o: CollectorOptions) -> None:
    """Raise ``BadOption`` if a TorchRL buffer is for batches of more dimensions than these options
    give.
    """
    dims = leading_dims(o.replay_buffer)
    if dims < 2 or o.postproc is not None:
        return
    found = 0
    batches = ""
    remedy = "use ndim=1, with an item per frame"
    if o.trajectories is not None and o.traj_format in (None, "cat"):
        found = 1
        batches = "the episodes of trajs_per_batch follow one another in one"
    elif o.trajectories is not None or o.split_trajs:
        found = 2
        batches = "padded trajectories have two"
        remedy = "use ndim=1, with an item per trajectory"
    elif isinstance(o.create_env_fn, str) and o.num_envs is None and not hasattr(o, "num_workers"):
        found = 1
        batches = "the batches of one environment have one"
        remedy = "pass num_envs=1 (or more), or use ndim=1"
    if 0 < found < dims:
        raise BadOption(
            f"replay_buffer stores batches of {dims} dimensions (ndim={dims} of its storage, or its"
            f" dim_extend), and {batches}: {remedy}"
        )


def _check_objects(o: CollectorOptions) -> None:
    """Checks of the user's objects, and of the devices of this machine."""
    if o.weight_sync_schemes is not None and not hasattr(o, "num_workers"):
        raise BadOption(
            "weight_sync_schemes send weights to sub-collectors, and a Collector has none;"
            " weight_recv_schemes receive them from a parent"
        )
    if o.interruptor is not None and not callable(
        getattr(o.interruptor, "collection_stopped", None)
    ):
        raise BadOption(
            f"interruptor={o.interruptor!r}: expected an object with a method collection_stopped()"
        )
    if o.cudagraph_policy not in (None, False) and not torch.cuda.is_available():
        raise BadOption(
            "cudagraph_policy needs a CUDA device, and this machine or this build of torch has none"
        )
    mode = o.compile_policy.get("mode") if isinstance(o.compile_policy, dict) else None
    if mode == "reduce-overhead" and o.cudagraph_policy not in (None, False):
        raise BadOption(
            "compile_policy with mode='reduce-overhead' makes CUDA graphs itself: leave"
            " cudagraph_policy out"
        )
    if not isinstance(o.track_policy_version, bool) and not hasattr(
        o.track_policy_version, "increment_version"
    ):
        raise BadOption(
            f"track_policy_version={o.track_policy_version!r}: expected True, False or a"
            " PolicyVersion"
        )
