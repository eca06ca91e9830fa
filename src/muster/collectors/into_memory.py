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
from muster.memory.slots import Lane, Layout
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
        # of each group: its ring, and the trajectories of the last row that was written
        self._last: dict[int, tuple[Ring, Array]] = {}
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

    def forget(self) -> None:
        """The next rollouts may not continue those that were written."""
        self._last.clear()

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
        rows = result.rows
        if rows == 1 and lane.T == 1 and ring.device is None and not lane.mirrored:
            known = self._last.get(result.group)
            if known is not None and known[0] is ring and _valid(lane, 1) is None:
                self._write_row(lane, result, ring, known[1])
                return
        arrays = lane.arrays
        ids = arrays[TRAJ_IDS]
        known = self._last.get(result.group)
        if known is None or known[0] is not ring:
            if ring.hi:
                first = {key: lane.data[key][0] for key in self._observed}
                ring.break_off(np.flatnonzero(~ring.going_on(first)))
        elif (known[1] != ids[0]).any():
            ring.break_off(np.flatnonzero(known[1] != ids[0]))
        source = lane.tensors if lane.mirrored or ring.device is not None else lane.data
        done = arrays[DONE][:rows]
        ends = done if done.any() else None
        valid = _valid(lane, rows)
        begin = 0
        while begin < rows:
            end = min(rows, begin + ring.room)
            finals = None
            part = None
            if ends is not None:
                part = ends[begin:end]
                finals = self._finals(lane, result.finals, ends, begin, end)
            self._memory.write(
                result.group,
                {c.key: _at(ring, source[c.key][begin:end]) for c in ring.columns},
                {c.key: _at(ring, source[c.key][end]) for c in ring.columns if c.carry},
                done=part,
                finals=finals,
                valid=None if valid is None else valid[begin:end],
            )
            begin = end
        self._last[result.group] = ring, ids[rows - 1].copy()

    def _write_row(self, lane: Lane, result: RolloutResult, ring: Ring, known: Array) -> None:
        """Write a rollout of one row that follows another one: the usual case off-policy."""
        pairs = lane.cache.get(self)
        if pairs is None or pairs[0] is not ring:
            data = lane.data
            simple, carried = ring.destinations()
            pairs = lane.cache[self] = (
                ring,
                [(there, data[key][0]) for key, there in simple],
                [(there, data[key][0], data[key][1]) for key, there in carried],
                lane.arrays[DONE][0],
                lane.arrays[TRAJ_IDS][0],
            )
        _, simple, carried, done, ids = pairs
        place = ring.hi % ring.places
        # what follows the newest row is there already, except at the beginning of the memory
        is_there = place > 0
        if (known != ids).any():
            ring.break_off(np.flatnonzero(known != ids))
            is_there = False
        for there, row in simple:
            there[place] = row
        for there, row, after in carried:
            if not is_there:
                there[place] = row
            there[place + 1] = after
        if done.any():
            finals = self._finals(lane, result.finals, lane.arrays[DONE], 0, 1)
            self._memory.add_row(result.group, done, finals)
        else:
            self._memory.add_row(result.group)
        known[...] = ids

    def _finals(
        self, lane: Lane, kept: Sequence[Final], done: Array, begin: int, end: int
    ) -> Mapping[Key, Any]:
        """Return the observations after the ends of episodes in rows ``begin`` to ``end``."""
        t, env = np.nonzero(done[begin:end])
        t += begin
        if next_of(self._observed[0]) in lane.data:
            return {key: lane.data[next_of(key)][t, env] for key in self._observed}
        places = {
            (final.t, i): (final, place) for final in kept for place, i in enumerate(final.envs)
        }
        found = [places[cell] for cell in zip(t.tolist(), env.tolist(), strict=True)]
        return {
            key: np.stack([final.leaves[key][place] for final, place in found])
            if found
            else lane.arrays[key][:0, 0]
            for key in self._observed
        }


def _valid(lane: Lane, rows: int) -> Array | None:
    """Return which cells are transitions with a known next observation, ``[rows, B]``; None: all."""
    arrays = lane.arrays
    valid = arrays[VALID][:rows] if VALID in arrays else None
    if NEXT_OBS_VALID in lane.data:
        known = np.asarray(lane.data[NEXT_OBS_VALID][:rows]) | arrays[next_of(TERMINATED)][:rows]
        valid = known if valid is None else valid & known
    return valid


def _at(ring: Ring, rows: Any) -> Any:
    """Return rows as the ring takes them: tensors for a ring on a device, else arrays."""
    if ring.device is not None or not isinstance(rows, torch.Tensor):
        return rows
    return rows.cpu().numpy()
