"""From filled slots to a ``ReplayMemory``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from muster.errors import BadOption
from muster.keys import AGENT, NEXT_OBS_VALID, TERMINATED, TRAJ_IDS, VALID, Key, next_of
from muster.memory.replay import ReplayMemory
from muster.memory.ring import Ring
from muster.memory.slots import Lane, Layout, as_tensor
from muster.memory.specs import Array
from muster.rollout.marks import Final
from muster.workers.messages import RolloutResult
from muster.workers.pool import Pool
from muster.workers.schedule import FilledSlot

MARGIN = 256  # rows of a ring beyond its capacity, for long rollouts
DONE = next_of(("done",))


class MemoryWriter:
    """Writes the rollouts of a collector into a ``ReplayMemory``: each group into a ring of its own.

    Args:
        memory: the user's.
        pool: knows the groups.
        storing: device of the transitions; None: that of the environments.
    """

    def __init__(
        self, memory: ReplayMemory, pool: Pool, storing: torch.device | None = None
    ) -> None:
        self._memory = memory
        self._pool = pool
        self._storing = storing
        self._observed: list[Key] = []
        self._layout: Layout | None = None
        self._known: dict[int, _Known] = {}  # by group
        self._under_way: FilledSlot | None = None
        self._written = 0  # number of its rollouts that are written

    @property
    def is_open(self) -> bool:
        """Whether the memory is prepared for the rollouts."""
        return bool(self._observed)

    def open(self, layout: Layout) -> None:
        """Prepare the memory for rollouts with this layout.

        Raises:
            BadOption: the memory is smaller than a rollout, or cannot store one.
        """
        counters = self._pool.counters
        for counts in counters:
            if counts.info.agents or AGENT in counts.info.observation_specs:
                raise BadOption(
                    f"ReplayMemory: the agents of {counts.info.name} take turns, and the next"
                    " observation of one is not in the next row. Use TorchRL's ReplayBuffer"
                )
        sizes = [counts.info.num_envs for counts in counters]
        rows = self._memory.capacity // sum(sizes)
        if max(rows, 1) < layout.T:
            raise BadOption(
                f"ReplayMemory(capacity={self._memory.capacity}) is smaller than a rollout:"
                f" {layout.T} steps of {sum(sizes)} environments are"
                f" {layout.T * sum(sizes)} transitions. Give it a larger capacity, or the"
                " collector a smaller frames_per_batch"
            )
        info = counters[0].info
        observed = list(info.carried_specs)
        following = {next_of(key) for key in observed}
        columns = [column for column in layout.columns if column.key not in following]
        margin = max(layout.T, min(MARGIN, rows))
        device = self._storing or info.device
        if device is not None and device.type == "cpu":
            device = None
        self._memory.open(columns, observed, sizes, margin, device)
        self._observed = observed
        self._layout = layout

    def forget(self) -> None:
        """The next rollouts may not continue those that were written."""
        self._known.clear()

    def write(self, filled: FilledSlot) -> None:
        """Write the rollouts of filled slots.

        After an error, the same slots go on with the rollout that failed.
        """
        if self._under_way is not filled:
            self._under_way = filled
            self._written = 0
        lanes = [lane for _, slot in filled.slots for lane in slot.lanes]
        for lane, result in list(zip(lanes, filled.results, strict=True))[self._written :]:
            if not result.dropped and result.rows:
                self._write_lane(lane, result)
            self._written += 1
        self._under_way = None

    def _write_lane(self, lane: Lane, result: RolloutResult) -> None:
        ring = self._memory.rings[result.group]
        if lane.layout is not self._layout:
            self.open(lane.layout)  # the columns may have changed
        known = self._known.get(result.group)
        if known is None or not known.is_newest(ring):
            if ring.hi:
                first = {key: lane.data[key][0] for key in self._observed}
                ring.break_off(np.flatnonzero(~ring.going_on(first)))
            known = _Known(ring, lane.arrays[TRAJ_IDS][0].copy())
            self._known[result.group] = known
        valid = _valid(lane, result)
        if result.rows == 1 and lane.T == 1 and valid is None and not ring.on_device:
            self._write_row(lane, result, known)
        else:
            self._write_rows(lane, result, known, valid)
        known.hi = ring.hi

    def _write_rows(
        self, lane: Lane, result: RolloutResult, known: _Known, valid: Array | None
    ) -> None:
        ring = known.ring
        rows = result.rows
        ids = lane.arrays[TRAJ_IDS]
        others = np.flatnonzero(known.ids != ids[0])
        if len(others):
            ring.break_off(others)
        source = lane.tensors if lane.mirrored or ring.on_device else lane.data
        done = lane.arrays[DONE][:rows]
        if valid is not None:
            done = done & valid
        has_ends = done.any()
        begin = 0
        while begin < rows:
            end = min(rows, begin + ring.room)
            part = None
            finals = None
            if has_ends:
                part = done[begin:end]
                finals = self._finals(lane, result.finals, part, begin)
            self._memory.write(
                result.group,
                {c.key: _at(ring, source[c.key][begin:end]) for c in ring.columns},
                {c.key: _at(ring, source[c.key][end]) for c in ring.columns if c.carry},
                done=part,
                finals=finals,
                valid=None if valid is None else valid[begin:end],
            )
            begin = end
        known.ids[...] = ids[rows - 1]

    def _write_row(self, lane: Lane, result: RolloutResult, known: _Known) -> None:
        """Write a rollout of one row, in host memory: the usual case off-policy."""
        ring = known.ring
        copies: _Copies | None = lane.cache.get(self)
        if copies is None or copies.ring is not ring:
            copies = lane.cache[self] = _Copies(ring, lane)
        place = ring.hi % ring.places
        # what follows the newest row is there already, except at the beginning of the memory
        is_there = place > 0
        if (known.ids != copies.ids).any():
            ring.break_off(np.flatnonzero(known.ids != copies.ids))
            is_there = False
        for there, row in copies.simple:
            there[place] = row
        for there, row, after in copies.carried:
            if not is_there:
                there[place] = row
            there[place + 1] = after
        if copies.done.any():
            done = copies.done
            finals = self._finals(lane, result.finals, done[None], 0)
            self._memory.add_row(result.group, done, finals)
        else:
            self._memory.add_row(result.group)
        known.ids[...] = copies.ids

    def _finals(
        self, lane: Lane, kept: Sequence[Final], done: Array, begin: int
    ) -> Mapping[Key, Any]:
        """Return the observations after the ends of episodes, ``done`` in rows from ``begin`` on."""
        t, env = np.nonzero(done)
        t += begin
        if next_of(self._observed[0]) in lane.data:
            return {key: lane.data[next_of(key)][t, env] for key in self._observed}
        places = {
            (final.t, i): (final, place) for final in kept for place, i in enumerate(final.envs)
        }
        found = [places[cell] for cell in zip(t.tolist(), env.tolist(), strict=True)]
        leaves = {}
        for key in self._observed:
            rows = [final.leaves[key][place] for final, place in found]
            leaves[key] = np.stack(rows) if rows else lane.arrays[key][0, :0]
        return leaves


class _Known:
    """What was written last of a group.

    Attributes:
        ids: the trajectories of its last row, ``[B]``.
        hi: number of rows of the ring then.
    """

    def __init__(self, ring: Ring, ids: Array) -> None:
        self.ring = ring
        self.ids = ids
        self.hi = ring.hi

    def is_newest(self, ring: Ring) -> bool:
        """Whether it is the newest row of this ring."""
        return ring is self.ring and ring.hi == self.hi


class _Copies:
    """The parts of a lane of one row, and where they go in a ring; made once per lane.

    Attributes:
        simple: columns of the ring, and the row.
        carried: columns of the ring with ``carry``, the row, and the one after it.
        done, ids: flags and trajectories of the row, ``[B]``.
    """

    def __init__(self, ring: Ring, lane: Lane) -> None:
        simple, carried = ring.destinations()
        self.ring = ring
        self.simple = [(there, lane.data[key][0]) for key, there in simple]
        self.carried = [(there, lane.data[key][0], lane.data[key][1]) for key, there in carried]
        self.done = lane.arrays[DONE][0]
        self.ids = lane.arrays[TRAJ_IDS][0]


def _valid(lane: Lane, result: RolloutResult) -> Array | None:
    """Return which cells are transitions with a known next observation, ``[rows, B]``; None: all."""
    rows = result.rows
    valid: Array | None = None
    if result.frames < rows * lane.B:
        valid = lane.arrays[TRAJ_IDS][:rows] >= 0  # the others are blank
        if VALID in lane.arrays:
            valid &= lane.arrays[VALID][:rows]
        elif valid.sum() > result.frames:  # those beyond the limit of the batch come last
            valid &= np.cumsum(valid).reshape(valid.shape) <= result.frames
    if NEXT_OBS_VALID in lane.data:
        known = as_tensor(lane.data[NEXT_OBS_VALID][:rows]).cpu().numpy()
        known = known | lane.arrays[next_of(TERMINATED)][:rows]
        valid = known if valid is None else valid & known
    return valid


def _at(ring: Ring, rows: Any) -> Any:
    """Return rows as the ring takes them: tensors for a ring on a device, else arrays."""
    if ring.on_device or not isinstance(rows, torch.Tensor):
        return rows
    return rows.cpu().numpy()
