"""Values of next observations, where learners look for them: beside the next observations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from muster.errors import BadOption
from muster.keys import Key
from muster.workers.messages import RolloutResult
from muster.workers.pool import WorkerPool

if TYPE_CHECKING:
    from tensordict import TensorDict

NEXT_VALUE: Key = ("next", "state_value")


def add_next_values(batch: TensorDict, results: Sequence[RolloutResult], pool: WorkerPool) -> torch.Tensor:
    """Add ``("next", "state_value")``, what the policy says of next observations, to a rollout.

    It is ``[*batch, 1]``, and 0 where nothing was asked.

    Args:
        results: of the rollout, by group.

    Returns:
        the values after the last rows, ``[*lead, 1]``; 0 where an episode has terminated there.
    """
    groups = [(pool.counters[result.group].info.num_envs, result.group, result.values) for result in results]
    num_envs, time_dim = sum(B for B, *_ in groups), batch.names.index("time")
    T = batch.shape[time_dim]
    if batch.numel() != num_envs * T:
        raise BadOption("bootstrap: the batch is concatenated over time, and its last rows are not last: leave cat out")
    values, last = np.zeros((num_envs, T), np.float32), np.zeros(num_envs, np.float32)
    first = 0
    for B, number, made in groups:
        if made is not None:  # else its group was dropped
            if made.values is None and len(made.t):
                assert pool.server is not None
                made = pool.server.ask("value", number, made, group=number)
            found = made.values if len(made.t) else np.empty(0, np.float32)
            values[first + made.env, made.t] = found
            at_last = made.t == made.last[made.env]
            last[first + made.env[at_last]] = found[at_last]
        first += B
    lead = [size for dim, size in enumerate(batch.shape) if dim != time_dim]
    device = batch.device or "cpu"
    shown = torch.from_numpy(values).reshape(*lead, T).movedim(-1, time_dim)
    batch.set(NEXT_VALUE, shown.unsqueeze(-1).to(device))
    return torch.from_numpy(last).reshape(*lead, 1).to(device)
