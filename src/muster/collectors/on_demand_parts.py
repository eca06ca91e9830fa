"""What a call of ``collect`` is put together from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from muster.collectors.pipeline import Stage
from muster.episodes.record import Episodes
from muster.episodes.segment import time_last
from muster.memory.specs import Array
from muster.workers.messages import RolloutResult

if TYPE_CHECKING:
    from tensordict import TensorDict


class CollectedRollout(NamedTuple):
    """What ``Engine.collect`` has made, and what the engine says of it."""

    batch: TensorDict
    hidden: list[Any]
    frames: int
    episodes: Episodes
    env_ids: Array
    results: list[RolloutResult]


class Part(NamedTuple):
    """A rollout of a call."""

    batch: TensorDict
    episodes: Episodes
    last: torch.Tensor | None
    first: list[Stage]


class Made(NamedTuple):
    """What a call has collected; what its statistics say besides, and what is done first with it."""

    batch: TensorDict
    episodes: Episodes
    frames: int
    native: dict[str, Any]
    first: list[Stage]


def joined(parts: Sequence[Part]) -> TensorDict:
    """Rollouts side by side; one after another if their shapes differ."""
    batches = [part.batch for part in parts]
    first = batches[0]
    if len(batches) == 1:
        return first
    whole: TensorDict
    if len({batch.shape for batch in batches}) == 1 and first.ndim > 1:
        whole = torch.cat(batches, next(dim for dim, name in enumerate(first.names) if name != "time"))
        whole.names = first.names
    else:
        whole = torch.cat([time_last(batch).reshape(-1) for batch in batches])
        whole.names = ["time"]
    return whole
