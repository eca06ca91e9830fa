"""The options for the contents and the destination of batches."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from muster.episodes.rules import StreamRule, check_stream_rule
from muster.memory.views import Order
from muster.recording.writer import Recorder
from muster.utils.checked import Checked, Details
from muster.utils.integers import integer

TrajFormat = Literal["cat", "pad"]
WriteMode = Literal["rollout", "trajectory"]


def _per_batch(name: str, value: Any) -> int:
    return integer("trajs_per_batch", value)


def _stream_rule(name: str, value: Any) -> Any:
    check_stream_rule(name, value)
    return value


@dataclass(frozen=True, repr=False)
class Trajectories(Details):
    """Selection of the complete episodes that ``trajs_per_batch`` yields.

    Attributes:
        per_batch: number of episodes in a batch.
        rule: order in which episodes are delivered. "first_begun": in the order of their first
            steps, so that long ones are not delayed. "per_env": the same number from each
            environment. "first_done": in the order of their ends, which is biased towards short
            episodes.
        on_policy_only: drop episodes in which several policy versions acted, and count them. The
            remaining episodes are biased towards short ones. Needs ``track_policy_version``.
    """

    per_batch: Annotated[int, _per_batch]
    rule: Annotated[StreamRule, _stream_rule] = "first_begun"
    on_policy_only: bool = False


@dataclass(frozen=True, kw_only=True)
class BatchOptions(Checked):
    """Options for the contents and the destination of batches.

    Attributes:
        postproc: function of a batch; its return value is yielded in place of the batch, unless it
            is None.
        split_trajs: yield one trajectory per row, ``[n, T_max]``, zero-padded, with
            ``collector/mask``; pad ids are -1.
        trajs_per_batch: yield this number of complete episodes at a time, joined over batches,
            instead of batches. ``muster.Trajectories(n, ...)`` also sets their order.
        traj_format: format of complete episodes. "cat": one after another, ``[sum of lengths]``.
            "pad": one per row, ``[n, T_max]``, with ``collector/mask``. None: "cat".
        replay_buffer: object with ``extend`` or ``add``; gets all batches, and iteration yields
            None. TorchRL's buffers get one item per frame (``[environments, T]`` for a storage with
            ``ndim=2``), others whole batches.
        replay_write_mode: what is written into ``replay_buffer``. "rollout": each batch.
            "trajectory": complete episodes, in the order of their ends, as soon as the batch with
            their last step was collected; unfinished ones are kept until they end, so the rows of
            an episode are never apart. Iteration yields None after each batch, also if no episode
            has ended. None: batches, or the episodes of ``trajs_per_batch``.
        extend_buffer: False: add every time step separately with ``add``, as soon as it is
            collected.
        pre_collect_hook: function without arguments, called before every batch is collected.
        post_collect_hook: function called with every batch, after it was collected.
        on_episode_done: function called with every complete episode, ``[L]``, in order of their
            ends. Where batches are whole episodes it may return new columns, a dict of arrays ``[L,
            ...]``.
        on_batch: function called with every batch right before it is yielded, returned or written.
            See docs/hooks.md.
        record: directory to which a ``muster.Recorder`` writes every batch after ``on_batch``,
            until ``shutdown``; or a recorder of yours, which you close. Read it with
            ``muster.load``.
        return_same_td: yield the same ``TensorDict`` every time, with its values overwritten.
        layout: order of dimensions: "batch_major" for ``[B, T]``, "time_major" for ``[T, B]``.
            Neither copies.
    """

    postproc: Callable[[Any], Any] | None = None
    split_trajs: bool | None = None
    trajs_per_batch: int | Trajectories | None = None
    traj_format: TrajFormat | None = None
    replay_buffer: Any = None
    replay_write_mode: WriteMode | None = None
    extend_buffer: bool = True
    pre_collect_hook: Callable[[], Any] | None = None
    post_collect_hook: Callable[[Any], Any] | None = None
    on_episode_done: Callable[[Any], Any] | None = None
    on_batch: Callable[[Any], Any] | None = None
    record: str | os.PathLike[str] | Recorder | None = None
    return_same_td: bool = False
    layout: Order = "batch_major"

    @property
    def trajectories(self) -> Trajectories | None:
        """Return ``trajs_per_batch`` as ``Trajectories``."""
        given = self.trajs_per_batch
        if given is None or isinstance(given, Trajectories):
            return given
        return Trajectories(given)

    @property
    def joins_episodes(self) -> str:
        """The option that joins episodes over batches; empty: none does."""
        if self.trajs_per_batch is not None:
            return "trajs_per_batch"
        return (
            "replay_write_mode='trajectory'"
            if self.replay_write_mode == "trajectory"
            else ""
        )


def joins_time(
    o: BatchOptions, cat_dim: int | None, batch_shape: Sequence[int]
) -> bool:
    """Return whether the rollouts of groups (``[*batch_shape, T]``) are concatenated along time."""
    ndim = len(batch_shape) + 1
    return cat_dim is not None and cat_dim % ndim == (
        0 if o.layout == "time_major" else ndim - 1
    )
