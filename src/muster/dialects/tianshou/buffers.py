"""Many steps into a Tianshou buffer at once, as if they had been added one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tianshou.data import PrioritizedReplayBuffer, ReplayBuffer, ReplayBufferManager
from tianshou.data.batch import alloc_by_keys_diff, create_value

from muster.dialects.tianshou.envs import batch_of
from muster.dialects.tianshou.episodes import Going, Taken
from muster.memory.specs import Array
from muster.private_names import usable

ADDS = ReplayBuffer.add, ReplayBufferManager.add, PrioritizedReplayBuffer.add
ADVANCE = getattr(ReplayBuffer, "_update_state_pre_add", None)
OF_BUFFERS = ("_meta", "_save_only_last_obs", "_save_obs_next")
OF_RINGS = ("_ep_return", "_ep_len", "_ep_start_idx", "_insertion_idx", "_size")


def adds_in_bulk(buffer: Any) -> bool:
    """Whether it adds steps as those of Tianshou's own do that keep one ring per environment, and nothing more."""
    rings = _rings(buffer)
    if ADVANCE is None or not usable("tianshou", (buffer, OF_BUFFERS), *((ring, OF_RINGS) for ring in rings)):
        return False
    kinds: set[Any] = set(map(type, rings))
    return type(buffer).add in ADDS and {kind._update_state_pre_add for kind in kinds} == {ADVANCE}


def add_one_by_one(buffer: Any, taken: Taken) -> None:
    """Add steps, one row after another."""
    for begin, end in taken.pieces():
        buffer.add(taken.batch[begin:end], buffer_ids=taken.env[begin:end])


def add_in_bulk(buffer: Any, taken: Taken, before: Going, after: Going) -> None:
    """Add steps, all at once; the buffer is then as after ``add_one_by_one``.

    Args:
        before, after: the episodes that go on before and after these steps.
    """
    rings = _rings(buffer)[: len(before.steps)]
    held = Going.of([ring._ep_return for ring in rings], [ring._ep_len for ring in rings])
    if not held.same(before):  # it was reset in between, or is used by somebody else, too
        after, _ = held.after(taken)
    index, kept = _advance(buffer, rings, taken, after)
    batch = _as_stored(buffer, taken.batch)
    stored = batch if kept is None else batch[kept]
    where = index if kept is None else index[kept]
    try:
        if not buffer._meta.get_keys():
            _make(buffer, batch[: np.searchsorted(taken.t, 1)])
        buffer._meta[where] = stored
    except ValueError:  # there is something new in infos or policy
        alloc_by_keys_diff(buffer._meta, batch, buffer.maxsize, False)
        _share(buffer)
        buffer._meta[where] = stored
    if isinstance(buffer, PrioritizedReplayBuffer):
        buffer.init_weight(index)


def _rings(buffer: Any) -> Sequence[Any]:
    return buffer.buffers.tolist() if isinstance(buffer, ReplayBufferManager) else [buffer]


def _advance(buffer: Any, rings: Sequence[Any], taken: Taken, after: Going) -> tuple[Array, Array | None]:
    """Move the rings' ends on; returns the place of each step, and which no later one overwrites (None: all)."""
    env, (nth, counts) = taken.env, _order(taken, len(rings))
    begins, sizes = np.array([(ring._insertion_idx, ring.maxsize) for ring in rings]).T
    places = (begins[env] + nth) % sizes[env]
    for ring, count, steps, total in zip(rings, counts.tolist(), after.steps.tolist(), after.totals, strict=True):
        if count:
            end, size = ring._insertion_idx + count, ring.maxsize
            ring.last_index[0] = (end - 1) % size
            ring.__dict__.update(  # past a slow ``__setattr__``
                _insertion_idx=end % size,
                _size=min(ring._size + count, size),
                _ep_return=total.copy() if steps else 0.0,
                _ep_len=steps,
            )
    for at in np.flatnonzero(taken.batch.done).tolist():  # the last one stays
        ring = rings[env[at]]
        ring._ep_start_idx = int(places[at] + 1) % ring.maxsize
    kept = None if taken.rows <= sizes.min() else nth >= (counts - sizes)[env]  # torch lets any of two writers win
    if isinstance(buffer, ReplayBufferManager):
        offsets = buffer._offset[: len(rings)]
        buffer._lengths[: len(rings)] = [ring._size for ring in rings]
        places += offsets[env]
        lasts = nth == counts[env] - 1
        buffer.last_index[env[lasts]] = places[lasts]
    return places, kept


def _order(taken: Taken, num_envs: int) -> tuple[Array, Array]:
    """The number of each step among those of its environment, and how many these are."""
    if len(taken.env) == taken.rows * num_envs:
        return taken.t, np.full(num_envs, taken.rows)
    made = np.zeros((taken.rows, num_envs), int)
    made[taken.t, taken.env] = 1
    return (np.cumsum(made, axis=0) - 1)[taken.t, taken.env], made.sum(axis=0)


def _as_stored(buffer: Any, batch: Any) -> Any:
    """A batch without what the buffer leaves out."""
    stored = batch_of(**batch.__dict__)
    if buffer._save_only_last_obs:
        stored.obs, stored.obs_next = stored.obs[:, -1], stored.obs_next[:, -1]
    if not buffer._save_obs_next:
        stored.pop("obs_next")
    return stored


def _make(buffer: Any, batch: Any) -> None:
    """Make the memory for what the first row has."""
    batch.rew = batch.rew.astype(float)
    buffer._meta = create_value(batch, buffer.maxsize, stack=False)
    _share(buffer)


def _share(buffer: Any) -> None:
    if isinstance(buffer, ReplayBufferManager):
        buffer._set_batch_for_children()
