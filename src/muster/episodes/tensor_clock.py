"""The current episode of each environment of a group whose rows are on a device, and the records of
those that end.

The same as ``TrajectoryClock``, bit for bit, in tensor operations only: all shapes are known, no
value of the device is looked at, and all results go into memory that was there before. So the host
never waits, and the operations can be recorded in a CUDA graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from muster.episodes.clock import TrajectoryClock
from muster.episodes.record import Episodes
from muster.memory.specs import Array

if TYPE_CHECKING:
    import torch
else:
    from muster.utils import lazy_torch as torch

CELLS = 1 << 22
# places in the header of ``EndedRows``
COUNT = 0
BAD_CELL = 1
BAD_VALUE = 2
NO_CELL = -1


class ClockRows(NamedTuple):
    """The columns of a lane that a clock reads, and those that it writes, ``[T, B]`` each.

    Attributes:
        reward, terminated, truncated: are read.
        done, ids: are written.
        counts, next_counts: steps before and after each row, which are written; None: the lane does
            not have them.
    """

    reward: torch.Tensor
    terminated: torch.Tensor
    truncated: torch.Tensor
    done: torch.Tensor
    ids: torch.Tensor
    counts: torch.Tensor | None
    next_counts: torch.Tensor | None


class EndedRows:
    """Memory for the records of all episodes that can end in a lane: 24 bytes per cell, and 8 more
    for the first ``most_cells``. Its addresses do not change.

    Args:
        most_cells: cells whose ends are looked for at once: a bound on memory, since some 80 bytes
            per cell are used meanwhile.

    Attributes:
        cells: number of cells of the lane.
        most: number of rows that are looked at at once.
        sums: returns of the episodes of each environment that go on in these rows.
        records: ``[3, T * B]`` int64: ids, bits of the returns, and lengths with flags. Records of
            ended episodes come first, in the order of their ends; other values follow.
        header: number of records, number of the first cell with a bad reward (or -1), and bits of
            that reward.
        known: the header in memory of the host, into which ``send`` copies it.
    """

    def __init__(
        self,
        T: int,
        B: int,
        device: torch.device,
        most_cells: int = CELLS,
    ) -> None:
        cells = T * B
        self.cells = cells
        self.most = min(T, max(1, most_cells // B))
        self.sums = torch.zeros(
            (self.most + 1, B),
            dtype=torch.float64,
            device=device,
        )
        self.records = torch.zeros(
            (3, cells),
            dtype=torch.int64,
            device=device,
        )
        self.header = torch.zeros(3, dtype=torch.int64, device=device)
        self.known = host_zeros(3, device)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The memory on the device, by name."""
        return {"sums": self.sums, "records": self.records, "header": self.header}

    def clear(self) -> None:
        """Forget all records."""
        self.header.zero_()
        self.header[BAD_CELL].fill_(NO_CELL)

    def send(self) -> None:
        """Copy the header to the host, without waiting for it."""
        self.known.copy_(self.header, non_blocking=True)

    def take(self, count: int) -> list[torch.Tensor]:
        """Return copies of the first ``count`` records, which are on their way to the host."""
        taken = []
        for column in self.records:
            there = host_zeros(count, column.device)
            there.copy_(column[:count], non_blocking=True)
            taken.append(there)
        return taken


def host_zeros(size: int, device: torch.device) -> torch.Tensor:
    """Return zeros in memory of the host that ``device`` can copy to while the host goes on."""
    return torch.zeros(
        size,
        dtype=torch.int64,
        device="cpu",
        pin_memory=device.type == "cuda",
    )


def episodes_of(records: list[Array], total_envs: int) -> Episodes:
    """Return the records of ``EndedRows.take``."""
    ids, returns, packed = records
    return Episodes(
        traj_id=ids.copy(),
        env_id=ids % total_envs,
        episode_return=returns.view(np.float64).copy(),
        length=packed >> 2,
        terminated=(packed & 1).astype(bool),
        truncated=(packed & 2).astype(bool),
    )


class TensorClock:
    """Tracks the current episode of each environment on a device.

    The state is there, or in ``clock``: each rollout takes it from where it is. ``on_host`` copies
    it to the host, and waits for the device.

    Args:
        clock: the clock for rollouts that need the host.
        device: device of the rows.
    """

    def __init__(self, clock: TrajectoryClock, device: torch.device) -> None:
        self._clock = clock
        self._is_here = False  # on the device
        B = len(clock.env_ids)
        self._total_envs = clock.total_envs
        with torch.inference_mode(False):
            self._ids = torch.zeros(B, dtype=torch.int64, device=device)
            # steps of current episodes, negative
            self._left = torch.zeros_like(self._ids)
            self._returns = torch.zeros(B, dtype=torch.float64, device=device)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The state on the device, by name."""
        return {"ids": self._ids, "left": self._left, "returns": self._returns}

    def on_host(self) -> TrajectoryClock:
        """Return the clock of the host, with the present state; it is the owner from now on."""
        if self._is_here:
            self._is_here = False
            ids = self._ids.cpu().numpy()
            steps = -self._left.cpu().numpy()
            returns = self._returns.cpu().numpy()
            self._clock.set(ids, steps, returns)
        return self._clock

    def on_device(self) -> Array | None:
        """Copy the state to the device, unless it is there.

        Returns:
            number of steps in the current episode of each environment; None: only the device knows.
        """
        if self._is_here:
            return None
        clock = self._clock
        self._ids.copy_(torch.from_numpy(clock.ids))
        self._left.copy_(torch.from_numpy(-clock.steps))
        self._returns.copy_(torch.from_numpy(clock.returns))
        self._is_here = True
        steps: Array = clock.steps.copy()
        return steps

    def advance(
        self,
        rows: ClockRows,
        ended: EndedRows,
        *,
        checked: bool,
    ) -> None:
        """Write the columns of the rows, and the records of the episodes that ended in them.

        The state must be on the device.

        Args:
            checked: look for rewards that are not finite.
        """
        T, B = rows.reward.shape
        most = ended.most
        with torch.inference_mode(False), torch.no_grad():
            ended.clear()
            for begin in range(0, T, most):
                part = rows
                if most < T:
                    part = _part(rows, slice(begin, begin + most))
                self._advance(part, ended, begin * B)
                if checked:
                    _note_bad(part.reward, ended.header, begin * B)
            ended.send()

    def _advance(
        self,
        rows: ClockRows,
        ended: EndedRows,
        first: int,
    ) -> None:
        """Advance over some rows; the number of their first cell is ``first``."""
        torch.logical_or(rows.terminated, rows.truncated, out=rows.done)
        ends = rows.done.cumsum(0)
        rows.ids[0].copy_(self._ids)
        torch.add(
            self._ids,
            ends[:-1],
            alpha=self._total_envs,
            out=rows.ids[1:],
        )
        sums = ended.sums[: len(ends) + 1]
        returns = self._add(rows, ends, sums)
        self._ids.add_(ends[-1], alpha=self._total_envs)
        lengths = self._count(rows)
        _keep(rows, returns, lengths, ended, first)

    def _add(
        self,
        rows: ClockRows,
        ends: torch.Tensor,
        sums: torch.Tensor,
    ) -> torch.Tensor:
        """Return the returns of the episodes of all cells, up to the last of these rows.

        Rewards are added one after another, row by row. In a row each environment has a place of
        its own, so the order of additions is always the same.

        Args:
            ends: numbers of ends before and in each cell.
            sums: memory for the returns of all episodes.
        """
        n, B = ends.shape
        sums.zero_()
        sums[0].copy_(self._returns)
        # cells of one episode have the same place
        places = torch.arange(B, device=ends.device).repeat(n, 1)
        places[1:].add_(ends[:-1], alpha=B)
        flat = sums.view(-1)
        rewards = rows.reward.to(torch.float64)
        for place, reward in zip(places.unbind(), rewards.unbind(), strict=True):
            flat.index_add_(0, place, reward)
        torch.gather(sums, 0, ends[-1:], out=self._returns[None])
        return flat[places]

    def _count(self, rows: ClockRows) -> torch.Tensor:
        """Write the columns of step counts; return the steps of episodes after each row."""
        n = len(rows.done)
        after = torch.arange(1, n + 1, device=rows.done.device)[:, None]
        # the row after the last end, for each row
        begins = torch.where(rows.done, after, self._left).cummax(0).values
        lengths = torch.empty_like(begins)
        torch.sub(after[0], self._left, out=lengths[0])
        torch.sub(after[1:], begins[:-1], out=lengths[1:])
        self._left.copy_(begins[-1])
        self._left.sub_(n)
        if rows.counts is not None and rows.next_counts is not None:
            rows.next_counts.copy_(lengths)
            torch.sub(lengths, 1, out=rows.counts)
        return lengths


def _part(rows: ClockRows, which: slice) -> ClockRows:
    """Return the rows ``which`` of all columns."""
    counts = rows.counts
    next_counts = rows.next_counts
    return ClockRows(
        rows.reward[which],
        rows.terminated[which],
        rows.truncated[which],
        rows.done[which],
        rows.ids[which],
        None if counts is None else counts[which],
        None if next_counts is None else next_counts[which],
    )


def _keep(
    rows: ClockRows,
    returns: torch.Tensor,
    lengths: torch.Tensor,
    ended: EndedRows,
    first: int,
) -> None:
    """Write a record for each cell: those of ends behind the earlier ones, and the others from the
    last place on backwards, so that no two are written to the same place.
    """
    done = rows.done.reshape(-1)
    count = ended.header[COUNT]
    places = done.cumsum(0)
    last = places[-1].clone()
    free = ended.cells - first
    backwards = torch.arange(free, free - len(done), -1, device=done.device)
    places.add_(backwards.masked_fill_(done, 0))
    places.add_(count).sub_(1)
    count.add_(last)
    packed = lengths.mul_(4)
    packed.add_(rows.terminated).add_(rows.truncated, alpha=2)
    columns = (rows.ids, returns.view(torch.int64), packed)
    for column, values in zip(ended.records, columns, strict=True):
        column.scatter_(0, places, values.reshape(-1))


def _note_bad(reward: torch.Tensor, header: torch.Tensor, first: int) -> None:
    """Write the first cell with a bad reward into the header, unless it has one."""
    bad = (reward - reward).ne(0).reshape(-1)  # NaN if it is not finite
    cell = bad.byte().argmax(0, keepdim=True)
    value = reward.reshape(-1)[cell].double()
    entry = torch.cat((cell + first, value.view(torch.int64)))
    is_new = bad.any() & (header[BAD_CELL] < 0)
    header[BAD_CELL:] = torch.where(is_new, entry, header[BAD_CELL:])
