"""Rows and cells of a lane that are no transitions: after an episode that is not followed by another, after a stop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from muster.keys import FLAGS, TERMINATED, TRAJ_IDS, TRUNCATED, VALID, Key, next_of
from muster.memory.slots import Lane
from muster.memory.specs import Array


@dataclass
class Final:
    """Observations after row ``t`` of the environments ``envs``, where the next row does not show them."""

    t: int
    envs: Sequence[int]
    leaves: dict[Key, Array]


def cut_after_end(lane: Lane, done: Array, reward_key: Key) -> Array:
    """Forget what happened after the end of each environment's first episode (``reset_when_done=False``).

    Environments had to be stepped there as long as others were going on.

    Args:
        done: ``[n, B]``, of the rows that were stepped; changed too.

    Returns:
        where that is, ``[n, B]``.
    """
    late = np.zeros_like(done)
    np.logical_or.accumulate(done[:-1], axis=0, out=late[1:])
    done[late] = False
    for key in (reward_key, next_of(TERMINATED), next_of(TRUNCATED)):
        lane.arrays[key][: len(done)][late] = 0
    return late


def blank(lane: Lane, valid: Array, *, repeat_flags: bool) -> None:
    """Zeros (None for objects) in all cells but the ``valid`` ones (``[n, B]``, the first rows); no id, not valid.

    Args:
        repeat_flags: where an episode has ended, its flags go on to the end of the lane.
    """
    cells = np.ones((lane.T, lane.B), bool)
    cells[: len(valid)] = ~valid
    on_device = torch.from_numpy(cells)
    for column in lane.layout.columns:
        data = (lane.arrays if column.host else lane.data)[column.key][: lane.T]
        value = {TRAJ_IDS: -1, VALID: False}.get(column.key, 0 if column.is_tensor else None)
        data[cells if isinstance(data, np.ndarray) else on_device.to(data.device)] = value
    for flag in FLAGS if repeat_flags else ():
        ended = np.logical_or.accumulate(lane.arrays[next_of(flag)], axis=0)
        for key in (flag, next_of(flag)):
            lane.arrays[key][cells] = ended[cells]
