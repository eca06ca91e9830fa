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
from muster.memory.specs import Array, Column
from muster.rollout.marks import Final
from muster.utils.interrupts import postponed
from muster.workers.messages import RolloutResult
from muster.workers.pool import Pool
from muster.workers.schedule import FilledSlot

MARGIN = 256  # rows of a ring beyond its capacity, for long rollouts
UNKNOWN = 1 << 40  # steps before a row: more than any episode has
DONE = next_of(("done",))
FEW = 4  # rows, up to which they are written one by one


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
        self._columns: Sequence[Column] = ()
        self._margin = 0
        self._known: dict[int, _Known] = {}  # by group
        self._frames_before = 0  # the rest of ``frames``
        self._under_way: FilledSlot | None = None
        self._written = 0  # number of its rollouts that are written

    @property
    def frames(self) -> int:
        """Number of frames that were written."""
        self.catch_up()
        return self._frames_before + sum(known.frames for known in self._known.values())

    def count_from(self, frames: int) -> None:
        """Continue the number of frames that were written from that of a saved state."""
        self._frames_before += frames - self.frames

    @property
    def is_open(self) -> bool:
        """Whether the memory is prepared for the rollouts."""
        return bool(self._observed)

    def open(self, layout: Layout, T: int) -> None:
        """Prepare the memory for rollouts with this layout.

        Args:
            layout: of the first rollout, which may be longer than those of batches: of a longer
                one, the memory has the newest rows.
            T: number of time steps of a batch.

        Raises:
            BadOption: the memory is smaller than a batch, or cannot store a rollout.
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
        if max(rows, 1) < T:
            raise BadOption(
                f"ReplayMemory(capacity={self._memory.capacity}) is smaller than a rollout:"
                f" {T} steps of {sum(sizes)} environments are"
                f" {T * sum(sizes)} transitions. Give it a larger capacity, or the"
                " collector a smaller frames_per_batch"
            )
        self._margin = max(T, min(MARGIN, rows))
        self._prepare(layout.columns)

    def _prepare(self, given: Sequence[Column]) -> None:
        """Prepare the memory for rows with these columns; another policy may have others."""
        counters = self._pool.counters
        info = counters[0].info
        observed = [column.key for column in given if column.role == "observation"]
        following = {next_of(key) for key in observed}
        columns = [column for column in given if column.key not in following]
        device = self._storing or info.device
        if device is not None and device.type == "cpu":
            device = None
        sizes = [counts.info.num_envs for counts in counters]
        self._memory.open(columns, sizes, self._margin, device)
        self._observed = observed
        self._columns = given

    def forget(self) -> None:
        """The next rollouts may not continue those that were written."""
        self._memory.catch_up()
        for known in self._known.values():
            known.forget()

    def write(self, filled: FilledSlot) -> None:
        """Write the rollouts of filled slots.

        After an error, the same slots go on with the rollout that failed.
        """
        if self._under_way is not filled:
            self._under_way = filled
            self._written = 0
        lanes = [lane for _, slot in filled.slots for lane in slot.lanes]
        for lane, result in list(zip(lanes, filled.results, strict=True))[
            self._written :
        ]:
            if not result.dropped and result.rows:
                self.write_lane(lane, 0, result)
            self._written += 1
        self._under_way = None

    def write_lane(
        self, lane: Lane, first: int, result: RolloutResult, *, goes_on: bool = False
    ) -> None:
        """Write the rows of a result, which begin with row ``first`` of its lane.

        Rows on a device are looked at on the host, which waits for them.

        Args:
            goes_on: the rollout stays open for further rows.
        """
        if lane.mirrored:
            lane.bring_to_host()
        with self._memory.lock:  # nothing is sampled between breaking off and writing
            self._memory.catch_up()
            self._write_lane(lane, first, result, goes_on=goes_on)

    def _write_lane(
        self, lane: Lane, first: int, result: RolloutResult, *, goes_on: bool
    ) -> None:
        """Write the rows of a result, which are on the host, with the memory's lock and after those
        that were late.
        """
        ring = self._memory.rings[result.group]
        known = self._known_of(ring, lane, first, result)
        valid = _valid(lane, first, result)
        is_one = result.rows == 1 and (goes_on or lane.T == 1)
        if is_one and valid is None and not lane.mirrored and ring.takes_rows:
            self._write_row(ring, lane, first, result, known)
        else:
            self._write_rows(ring, lane, first, result, known, valid, goes_on=goes_on)

    def _known_of(
        self, ring: Ring, lane: Lane, t: int, result: RolloutResult
    ) -> _Known:
        """Return what was written last of a group, before row ``t`` of a lane is written.

        The ring knows then in which environments that row follows its newest one, and in which an
        episode begins.
        """
        if lane.layout.columns is not self._columns:
            self._prepare(lane.layout.columns)
        ids = lane.arrays[TRAJ_IDS][t]
        steps = result.steps_before
        known = self._known.get(result.group)
        if known is None:
            known = self._known[result.group] = _Known(ring.B)
        if known.is_newest(ring):
            # the usual case; comparing bytes takes a third of the time of ``any``
            if steps is None and ring.ids.tobytes() == ids.tobytes():
                return known
            follows = ring.ids == ids
            if steps is not None:
                follows &= ring.steps_so_far == steps
        else:
            known.break_off()
            if steps is None:
                steps = known.steps_of(ids)
            follows = np.zeros(ring.B, bool)
            if ring.hi and known.ring is not ring:
                # else another collector has written rows since
                row = {key: lane.data[key][t] for key in self._observed}
                follows = (ring.ids == ids) & (ring.steps_so_far == steps)
                follows &= ring.going_on(row)
        if not follows.all():
            known.follow(ring, ids, steps, follows)
        return known

    def _write_rows(
        self,
        ring: Ring,
        lane: Lane,
        first: int,
        result: RolloutResult,
        known: _Known,
        valid: Array | None,
        *,
        goes_on: bool,
    ) -> None:
        """Write the rows of a rollout, which begin with row ``first`` of its lane."""
        rows = first + result.rows
        ring.note_ids(lane.arrays[TRAJ_IDS][first:rows])
        known.note(ring)
        source = (
            lane.tensors
            if lane.mirrored or ring.stored.device is not None
            else lane.data
        )
        done = lane.arrays[DONE][first:rows]
        ends = done if valid is None else done & valid
        has_ends = done.any()
        begin = first
        while begin < rows:
            end = min(rows, begin + ring.room)
            part = None
            finals = None
            if has_ends:
                part = done[begin - first : end - first]
                known_ends = ends[begin - first : end - first]
                finals = self._finals(lane, result.finals, known_ends, begin)
            last = {c.key: source[c.key][end] for c in ring.stored.columns if c.carry}
            if end == rows < lane.T and not goes_on:
                last |= self._after_stop(lane, source, end, result.finals)
            self._memory.write(
                result.group,
                {
                    c.key: _at(ring, source[c.key][begin:end])
                    for c in ring.stored.columns
                },
                {key: _at(ring, row) for key, row in last.items()},
                done=part,
                finals=finals,
                valid=None if valid is None else valid[begin - first : end - first],
            )
            begin = end
        known.wrote(ring, result.frames)

    def catch_up(self) -> None:
        """Write the rows that are late; see ``LaneRows``."""
        self._memory.catch_up()

    def rows_after(self, lane: Lane, t: int, group: int) -> LaneRows:
        """Return what takes the rows of a lane from ``t`` on, one after another: those of a rollout
        that stays open, which ``write_lane`` has written until there.
        """
        return LaneRows(self, self._memory, lane, t, group)

    def write_rows(self, lane: Lane, begin: int, end: int, group: int) -> None:
        """Write rows of a rollout that stays open, each of which follows the one before it, with the
        memory's lock.
        """
        if lane.mirrored:
            lane.bring_to_host()
        n = end - begin
        if n > FEW:
            self._write_part(lane, begin, n, group)
            return
        for t in range(begin, end):
            copier: RowCopier | None = lane.cache.get(self)
            if copier is None or not copier.write(t):
                self._write_part(lane, t, 1, group)

    def _write_part(self, lane: Lane, begin: int, n: int, group: int) -> None:
        result = RolloutResult(0, group, frames=n * lane.B, rows=n)
        self._write_lane(lane, begin, result, goes_on=True)

    def _write_row(
        self, ring: Ring, lane: Lane, t: int, result: RolloutResult, known: _Known
    ) -> None:
        """Write row ``t`` of a lane in host memory: the usual case off-policy."""
        copier: RowCopier | None = lane.cache.get(self)
        if copier is None or not copier.is_current(known):
            copier = RowCopier(self._memory, ring, result.group, known, lane)
            lane.cache[self] = copier
        done = lane.arrays[DONE][t]
        if 1 in done.tobytes():
            finals = self._finals(lane, result.finals, done[None], t)
            copier.write_next(t, done, finals)
        else:
            copier.write_next(t, None, None)

    def _after_stop(
        self, lane: Lane, source: Mapping[Key, Any], end: int, kept: Sequence[Final]
    ) -> dict[Key, Any]:
        """Return the observations after the last row of a lane that was stopped there: row ``end``
        itself is blank.
        """
        if next_of(self._observed[0]) in lane.data:
            return {key: source[next_of(key)][end - 1] for key in self._observed}
        after = {}
        for key in self._observed:
            row = as_tensor(source[key][end]).clone()
            for final in kept:
                if final.t == end - 1:
                    row[final.envs] = torch.as_tensor(
                        final.leaves[key], device=row.device
                    )
            after[key] = row if isinstance(source[key], torch.Tensor) else row.numpy()
        return after

    def _finals(
        self, lane: Lane, kept: Sequence[Final], done: Array, begin: int
    ) -> Mapping[Key, Any]:
        """Return the observations after the ends of episodes, ``done`` in rows from ``begin`` on; 0
        where they are unknown.
        """
        t, env = np.nonzero(done)
        t += begin
        leaves: dict[Key, Any] = {}
        if next_of(self._observed[0]) in lane.data:
            leaves = {key: lane.data[next_of(key)][t, env] for key in self._observed}
        else:
            places = {
                (final.t, i): (final, place)
                for final in kept
                for place, i in enumerate(final.envs)
            }
            found = [
                places[cell] for cell in zip(t.tolist(), env.tolist(), strict=True)
            ]
            for key in self._observed:
                rows = [final.leaves[key][place] for final, place in found]
                leaves[key] = np.stack(rows) if rows else lane.arrays[key][0, :0]
        if NEXT_OBS_VALID in lane.data:
            known = as_tensor(lane.data[NEXT_OBS_VALID])[t, env].cpu()
            for rows in leaves.values():  # TorchRL has NaN there
                as_tensor(rows)[~known] = 0
        return leaves


class LaneRows:
    """Rows of a rollout that stays open, on their way to the memory.

    A row is written when the memory is read, with those that follow it: rows that are copied
    together take a fraction of the time. If the memory was read since the row before, a row is written
    at once. Implements ``LateRows``.

    The collecting thread adds rows. Any thread that reads the memory writes those until then, with
    its lock: they do not change any more.

    Args:
        begin: the first row.

    Attributes:
        end: the row that is added next.
    """

    def __init__(
        self,
        writer: MemoryWriter,
        memory: ReplayMemory,
        lane: Lane,
        begin: int,
        group: int,
    ) -> None:
        self._writer = writer
        self._memory = memory
        self._lane = lane
        self._group = group
        self._begin = begin  # those before it are written
        self.end = begin

    def add(self, rows: int) -> None:
        """Take the next rows, which are complete."""
        # first: see ``ReplayMemory.catch_up``
        self.end += rows
        memory = self._memory
        if memory.owed is not self:
            with memory.lock:
                memory.owe(self)
                self._write()

    def write(self) -> None:
        if self._begin != self.end:
            with postponed():  # the user's thread may be the one that reads
                self._write()

    def _write(self) -> None:
        end = self.end
        self._writer.write_rows(self._lane, self._begin, end, self._group)
        self._begin = end


class _Known:
    """What was written last of a group.

    Attributes:
        ring: has the rows; None: the next row may be of any time.
        is_followed: the observations after its last row are the newest ones in the ring.
        frames: number of frames that were written.
    """

    def __init__(self, num_envs: int) -> None:
        self.frames = 0
        self.ring: Ring | None = None
        self.is_followed = False
        self._hi = 0  # number of rows of the ring then
        self._ids = np.full(num_envs, -1, np.int64)  # trajectories of its last row
        self._began = np.zeros(num_envs, np.int64)  # the rows with which they began

    def note(self, ring: Ring) -> None:
        """Note the trajectories of the row that is written next, or was written last."""
        self._ids[...] = ring.ids
        self._began[...] = ring.began

    def follow(
        self, ring: Ring, ids: Array, steps: Array | None, follows: Array
    ) -> None:
        """Say what the next row is, where it is not the next step; see ``Ring.follow``."""
        self.break_off()
        ring.follow(ids, steps, follows)
        self.note(ring)

    def break_off(self) -> None:
        """The observations of the next row are written, also where they are there already."""
        self.is_followed = False

    def wrote(self, ring: Ring, frames: int) -> None:
        """Note that its last row is the newest one of this ring, after so many further frames."""
        self.frames += frames
        self.ring = ring
        self._hi = ring.hi
        self.is_followed = True

    def is_newest(self, ring: Ring) -> bool:
        """Whether its last row is the newest one of this ring."""
        return ring is self.ring and ring.hi == self._hi

    def steps_of(self, ids: Array) -> Array:
        """Return the number of steps before a row of trajectories ``ids`` that follows the last
        one.
        """
        found: Array = np.where(self._ids == ids, self._hi - self._began, 0)
        return found

    def forget(self) -> None:
        """The next row may be of any time."""
        self.ring = None
        self._hi = UNKNOWN


# Memory in the ring, rows of the lane, bytes of a row, and how many bytes further they go there.
_Copy = tuple[Any, list[Any], int, int]


class RowCopier:
    """Copies rows of a lane in host memory into a ring; made once per lane.

    Args:
        ring: of the memory, with the number ``group``.
        known: what was written last.
    """

    def __init__(
        self, memory: ReplayMemory, ring: Ring, group: int, known: _Known, lane: Lane
    ) -> None:
        self._memory = memory
        self._rings = memory.rings
        self._known = known
        self._ring = ring
        self._add = memory.row_adder(group)
        self._done = list(lane.arrays[DONE])
        self._ids = list(lane.arrays[TRAJ_IDS])
        # the observations after each row; None: those after ends of episodes are kept elsewhere
        self._after: dict[Key, Any] | None = None
        observed = ring.stored.observed
        if next_of(observed[0]) in lane.data:
            self._after = {key: lane.data[next_of(key)] for key in observed}
        self._copies: list[_Copy] = []
        # of observations: the row itself, which is there already if it follows the newest
        self._before: list[_Copy] = []
        simple, carried = ring.destinations()
        for key, there in simple:
            self._copies.append(_copy_of(there, lane.data[key]))
        for key, there in carried:
            at_place = _copy_of(there, lane.data[key])
            if key in observed:
                self._before.append(at_place)
            else:
                # a policy may write its state in the row in which an episode begins
                self._copies.append(at_place)
            memory_there, rows, size, _ = at_place
            self._copies.append((memory_there, rows[1:], size, size))

    def is_current(self, known: _Known) -> bool:
        """Whether it copies after what was written last."""
        return known is self._known and self._memory.rings is self._rings

    def write(self, t: int) -> bool:
        """Write row ``t``, which follows the row that was made before it, with the memory's lock, and
        return True; False if something else was written since, or if the observations after the
        ends of episodes are not in the lane.
        """
        known = self._known
        ring = self._ring
        done: Array | None = None
        finals: dict[Key, Any] | None = None
        if not known.is_newest(ring) or self._memory.rings is not self._rings:
            return False
        if 1 in self._done[t].tobytes():
            if self._after is None:
                return False
            done = self._done[t]
            finals = {key: rows[t][done] for key, rows in self._after.items()}
        ids = self._ids[t]
        if ring.ids.tobytes() != ids.tobytes():
            known.follow(ring, ids, None, ring.ids == ids)
        self.write_next(t, done, finals)
        return True

    def write_next(
        self, t: int, done: Array | None, finals: Mapping[Key, Any] | None
    ) -> None:
        """Write row ``t``; what it follows is known already (``Ring.follow``).

        Args:
            done, finals: see ``Ring.write``.
        """
        ring = self._ring
        known = self._known
        place = ring.hi % ring.places
        # what follows the last place is not at the first one
        if not (place and known.is_followed):
            self._copy(self._before, place, t)
        self._copy(self._copies, place, t)
        self._add(done, finals)
        known.wrote(ring, ring.B)

    @staticmethod
    def _copy(copies: list[_Copy], place: int, t: int) -> None:
        for there, rows, size, ahead in copies:
            at = place * size + ahead
            there[at : at + size] = rows[t]


def _copy_of(there: Array, rows: Array) -> _Copy:
    """Return a column of a ring and the rows of a lane as bytes, and the size of a row: slices of
    memoryviews are copied in half of the time of arrays.
    """
    size = rows[0].nbytes
    flat = _bytes(rows)
    parts = [flat[at : at + size] for at in range(0, len(flat), size)] if size else []
    return _bytes(there), parts or [flat] * len(rows), size, 0


def _bytes(array: Array) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]


def _valid(lane: Lane, first: int, result: RolloutResult) -> Array | None:
    """Return which cells of rows from ``first`` on are transitions with a known next observation,
    ``[rows, B]``; None: all.
    """
    rows = slice(first, first + result.rows)
    valid: Array | None = None
    if result.frames < result.rows * lane.B:
        valid = lane.arrays[TRAJ_IDS][rows] >= 0  # the others are blank
        if VALID in lane.arrays:
            valid &= lane.arrays[VALID][rows]
        elif (
            valid.sum() > result.frames
        ):  # those beyond the limit of the batch come last
            valid &= np.cumsum(valid).reshape(valid.shape) <= result.frames
    if NEXT_OBS_VALID in lane.data:
        known = as_tensor(lane.data[NEXT_OBS_VALID][rows]).cpu().numpy()
        known = known | lane.arrays[next_of(TERMINATED)][rows]
        valid = known if valid is None else valid & known
    return valid


def _at(ring: Ring, rows: Any) -> Any:
    """Return rows as the ring takes them: tensors for a ring on a device, else arrays."""
    if ring.stored.device is not None or not isinstance(rows, torch.Tensor):
        return rows
    return rows.cpu().numpy()
