"""Rows and cells of a lane that are no transitions: after an episode that is not followed by another, after a stop."""

from __future__ import annotations

import numpy as np
import torch

from muster.keys import FLAGS, TERMINATED, TRAJ_IDS, TRUNCATED, VALID, Key, next_of
from muster.memory.slots import Lane
from muster.memory.specs import Array


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


def repeat_end(lane: Lane, late: Array) -> None:
    """Blank the cells ``late`` (``[n, B]``), but for the flags, which go on as the episode ended."""
    rows = slice(0, len(late))
    blank(lane, rows, late)
    for flag in FLAGS:
        last = np.logical_or.accumulate(lane.arrays[next_of(flag)][rows], axis=0)
        for key in (flag, next_of(flag)):
            lane.arrays[key][rows][late] = last[late]


def blank(lane: Lane, rows: slice, cells: Array) -> None:
    """Zeros (None for objects) in the ``cells`` (``[rows, B]``) of all columns; no id, not valid."""
    on_device = torch.from_numpy(cells)
    for column in lane.layout.columns:
        part = (lane.arrays if column.host else lane.data)[column.key][rows]
        value = {TRAJ_IDS: -1, VALID: False}.get(column.key, 0 if column.is_tensor else None)
        part[cells if isinstance(part, np.ndarray) else on_device.to(part.device)] = value
