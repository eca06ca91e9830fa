"""A ring of rows: the transitions of some environments, in order of time.

Row ``r``, counted from the first one ever written, is at place ``r % places``. Its next observation
is that of the following place, or kept aside (``Asides``) if the following row has another episode.
There is one place more than ``places``, for the observation after the last one.

1. ``write`` fills the rows after the newest with those of a rollout, where nothing can be read, makes
   them readable, and drops the oldest ones beyond the capacity.
2. ``break_off``: the rows that follow do not continue the episodes of some environments.

A *cell* is a row of one environment: cell ``r * B + b`` of all cells ever written. Its place is
``cell % (places * B)``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from muster.keys import Key
from muster.memory.asides import Asides, gathered
from muster.memory.frames import Frames
from muster.memory.slots import as_tensor, torch_dtype
from muster.memory.specs import Array, Column


def is_stack(shape: Sequence[int], stack: int) -> bool:
    """Return whether an observation of this shape is a stack of so many frames."""
    return stack > 1 and len(shape) > 1 and shape[0] == stack


class Ring:
    """See the module.

    Args:
        columns: columns of the rows. Those with ``carry`` have one row more than there are
            transitions: the observations, and the recurrent states of policies.
        observed: keys of the observations.
        num_envs: number of environments, B.
        capacity: maximum number of readable rows.
        margin: maximum number of rows that are written at once.
        device: where the rows are; None: in host memory.
        stack: number of frames of stacked observations, which are stored once; 0: there are none.

    Attributes:
        lo, hi: readable are the rows from ``lo`` to ``hi``.
        tensors: rows of each column by place, ``[places + 1, B, *shape]``; of stacks, the newest
            frames.
        episodes: number of the episode of each cell in its environment, by place, ``[places, B]``.
        begins: whether the episode begins with the cell, by place, ``[places, B]``.
        masked: cells that are no transition, by place; None: there are none.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        observed: Sequence[Key],
        num_envs: int,
        capacity: int,
        margin: int,
        device: torch.device | None = None,
        stack: int = 0,
    ) -> None:
        self.columns = tuple(columns)
        self.observed = list(observed)
        by_key = {column.key: column for column in columns}
        self.B = num_envs
        self.capacity = capacity
        self.margin = margin
        self.device = device
        self._stacked = [key for key in self.observed if is_stack(by_key[key].shape, stack)]
        self.reach = stack - 1 if self._stacked else 0
        self.places = capacity + margin + 1 + self.reach
        self.lo = 0
        self.hi = 0
        self.tensors: dict[Key, torch.Tensor] = {}
        self._data: dict[Key, Any] = {}  # the same as arrays, if they are in host memory
        for column in columns:
            stored = column.shape[1:] if column.key in self._stacked else column.shape
            shape = (self.places + 1, num_envs, *stored)
            if device is None:
                self._data[column.key] = np.zeros(shape, column.dtype)  # pages come when written
                self.tensors[column.key] = as_tensor(self._data[column.key])
            else:
                dtype = torch_dtype(column.dtype)
                self.tensors[column.key] = torch.zeros(shape, dtype=dtype, device=device)
                self._data[column.key] = self.tensors[column.key]
        # the same with all cells in one dimension, and the last dimension of flags and rewards
        self._cells = {
            c.key: there.reshape(-1, *there.shape[2:], *[1] * c.trailing)
            for c, there in ((c, self.tensors[c.key]) for c in columns)
        }
        self._frames: Frames | None = None
        if self._stacked:
            self._frames = Frames(stack, {key: self.tensors[key] for key in self._stacked})
        self.episodes = np.zeros((self.places, num_envs), np.int64)
        self.begins = np.zeros((self.places, num_envs), bool)
        self.masked: Array | None = None
        self.num_masked = 0  # of the readable cells
        self._episode = np.zeros(num_envs, np.int64)  # of the next row
        self._fresh = np.ones(num_envs, bool)  # the next row is the first one of its episode
        self._asides = Asides(
            self.places * num_envs,
            {key: self.tensors[key].new_zeros(by_key[key].shape) for key in self.observed},
        )

    @property
    def on_device(self) -> bool:
        """Whether the rows are not in host memory."""
        return self.device is not None

    @property
    def takes_rows(self) -> bool:
        """Whether ``destinations`` take rows of a lane in host memory as they are."""
        return self.device is None and self._frames is None

    @property
    def cells(self) -> int:
        """Number of readable cells, without transitions or with."""
        return (self.hi - self.lo) * self.B

    @property
    def transitions(self) -> int:
        """Number of readable transitions."""
        return self.cells - self.num_masked

    @property
    def nbytes(self) -> int:
        """Size of all rows that were written, and of what is kept aside."""
        rows = min(self.hi + 1, self.places + 1)
        size = self._asides.nbytes + sum(t[:rows].nbytes for t in self.tensors.values())
        return size if self._frames is None else size + self._frames.wholes.nbytes

    @property
    def _next_place(self) -> int:
        """Where that is which follows the newest row."""
        return (self.hi - 1) % self.places + 1 if self.hi else 0

    # --- writing ----------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """Maximum number of rows that can be written now."""
        return min(self.margin, self.places - self.hi % self.places)

    def write(
        self,
        rows: Mapping[Key, Any],
        last: Mapping[Key, Any],
        done: Array | None = None,
        finals: Mapping[Key, Any] | None = None,
        valid: Array | None = None,
    ) -> None:
        """Write the rows after the newest, at most ``room``.

        Args:
            rows: ``[n, B, *shape]`` each: arrays, or tensors on the device of the ring.
            last: rows after the last one of the columns with ``carry``, ``[B, *shape]`` each.
            done: whether the episode ends after each cell, ``[n, B]``; None: none does.
            finals: observations after the valid cells with ``done``, ``[ends, *shape]`` each, by row,
                then environment.
            valid: which cells are transitions, ``[n, B]``; None: all.
        """
        first = self.hi % self.places
        n = 0
        if self._frames is not None:
            self._frames.write(first, rows, last, self._fresh)
        for key, given in rows.items():
            n = len(given)
            part = given[:, :, -1] if key in self._stacked else given
            self._data[key][first : first + n] = part
        for key, given in last.items():
            self._data[key][first + n] = given[:, -1] if key in self._stacked else given
        episodes = self.episodes[first : first + n]
        episodes[...] = self._episode
        begins = self.begins[first : first + n]
        begins[0] = self._fresh
        if done is None:
            begins[1:] = False
            self._fresh[...] = False
        else:
            begins[1:] = done[:-1]
            self._fresh[...] = done[-1]
            ended = np.cumsum(done, axis=0)
            episodes[1:] += ended[:-1]
            self._episode += ended[-1]
            t, env = np.nonzero(done if valid is None else done & valid)
            self._asides.keep((first + t) * self.B + env, finals or {})
        if self.masked is not None:
            self.masked[first : first + n] = False
        if valid is not None and not valid.all():
            # what follows a gap does not continue what was before it
            gaps = np.cumsum(~valid, axis=0)
            episodes += gaps
            self._episode += gaps[-1]
            self._mask(first, ~valid)
        self._advance(n)

    def add_row(self, done: Array | None = None, finals: Mapping[Key, Any] | None = None) -> None:
        """Make the row after the newest readable, which was copied into ``row``; see ``write``.

        Args:
            done: whether the episode ends after each cell, ``[B]``; None: none does.
        """
        place = self.hi % self.places
        self.episodes[place] = self._episode
        self.begins[place] = self._fresh
        if done is None:
            self._fresh.fill(False)
        else:
            self._fresh[...] = done
            self._episode += done
            self._asides.keep(place * self.B + np.flatnonzero(done), finals or {})
        if self.masked is not None:
            self.masked[place] = False
        self._advance(1)

    def destinations(self) -> tuple[list[tuple[Key, Any]], list[tuple[Key, Any]]]:
        """Return the memory of all columns without ``carry``, and of those with, by place; for
        ``add_row``: row ``hi`` is at ``hi % places``, and what follows it at the next place.
        """
        simple = [(c.key, self._data[c.key]) for c in self.columns if not c.carry]
        carried = [(c.key, self._data[c.key]) for c in self.columns if c.carry]
        return simple, carried

    def break_off(self, envs: Sequence[int] | Array) -> None:
        """The next rows of ``envs`` do not continue their episodes: keep the observations after the
        newest row, before others are written in their place.
        """
        given = np.asarray(envs, np.int64)
        index = given[~self._fresh[given]]
        if not len(index) or not self.hi:
            return
        following = self._next_place * self.B + index
        self._asides.keep(following - self.B, self._observations(following))
        self._episode[index] += 1
        self._fresh[index] = True

    def going_on(self, obs: Mapping[Key, Any]) -> Array:
        """Return in which environments ``obs`` (``[B, *shape]`` each) are the observations after
        the newest row, ``[B]``.
        """
        same = ~self._fresh
        newest = self._observations(self._next_place * self.B + np.arange(self.B))
        for key, here in newest.items():
            given = torch.as_tensor(obs[key], device=here.device).reshape(here.shape)
            equal = (here == given) | ((here != here) & (given != given))  # NaN is equal to NaN
            same &= equal.reshape(self.B, -1).all(1).cpu().numpy()
        found: Array = same
        return found

    def clear(self) -> None:
        """Drop all rows; later ones begin new episodes."""
        self._drop(self.hi)
        self._episode[~self._fresh] += 1
        self._fresh[...] = True

    def _mask(self, first: int, masked: Array) -> None:
        """Note which cells of newly written rows are no transitions."""
        if self.masked is None:
            self.masked = np.zeros((self.places, self.B), bool)
        self.masked[first : first + len(masked)] = masked
        self.num_masked += int(masked.sum())

    def _advance(self, n: int) -> None:
        """Make the rows that were written readable, and drop those beyond the capacity."""
        self.hi += n
        if self.hi - self.capacity > self.lo:
            self._drop(self.hi - self.capacity)

    def _drop(self, lo: int) -> None:
        """Drop the rows before ``lo``."""
        for part in self._parts(self.lo, lo):
            self._asides.drop(part.start * self.B, part.stop * self.B)
            if self.masked is not None:
                self.num_masked -= int(self.masked[part].sum())
                self.masked[part] = False
        self.lo = lo

    # --- saving -----------------------------------------------------------------------------------

    @property
    def kept(self) -> int:
        """The first row that is there: readable, or necessary for a readable one."""
        return max(0, self.lo - self.reach)

    @property
    def row_bytes(self) -> int:
        """Size of a row."""
        return sum([t[0].nbytes for t in self.tensors.values()]) + 10 * self.B

    def rows(self, first: int, end: int) -> dict[str, torch.Tensor]:
        """Return copies of the rows from ``first`` to ``end``, in host memory: of all columns, and of
        what is kept aside.
        """
        found: dict[str, torch.Tensor] = {}
        for i, column in enumerate(self.columns):
            found[f"column.{i}"] = self._copied(self.tensors[column.key], first, end)
        found["episodes"] = self._copied(torch.from_numpy(self.episodes), first, end)
        found["begins"] = self._copied(torch.from_numpy(self.begins), first, end)
        if self.masked is not None:
            found["masked"] = self._copied(torch.from_numpy(self.masked), first, end)
        cells = np.arange(first * self.B, end * self.B)
        index, leaves = self._asides.of_cells(self.places_of(cells))
        found["aside"] = torch.from_numpy(index)
        for i, key in enumerate(self.observed):
            found[f"aside.{i}"] = leaves[key].cpu()
        if self._frames is not None:
            found["depth"] = self._copied(torch.from_numpy(self._frames.depth), first, end)
            index, leaves = self._frames.wholes.of_cells(self.places_of(cells))
            found["whole"] = torch.from_numpy(index)
            for i, key in enumerate(self._stacked):
                found[f"whole.{i}"] = leaves[key].cpu()
        return found

    def put_rows(self, first: int, rows: Mapping[str, torch.Tensor], lo: int, hi: int) -> None:
        """Put rows from ``rows()`` where they belong in a ring in which the rows from ``lo`` to
        ``hi`` will be readable; those that it has no room for are left out.

        Raises:
            ValueError: they do not fit.
        """
        n = len(rows["episodes"])
        lo = max(lo, hi - self.capacity)
        skipped = min(n, max(0, lo - self.reach - first))
        for i, column in enumerate(self.columns):
            self._put(self.tensors[column.key], first, rows[f"column.{i}"], skipped)
        self._put(torch.from_numpy(self.episodes), first, rows["episodes"], skipped)
        self._put(torch.from_numpy(self.begins), first, rows["begins"], skipped)
        if "masked" in rows:
            if self.masked is None:
                self.masked = np.zeros((self.places, self.B), bool)
            self._put(torch.from_numpy(self.masked), first, rows["masked"], skipped)
        index = rows["aside"].numpy()
        chosen = np.flatnonzero(index >= (lo - first) * self.B)
        if len(index) and not 0 <= index.min() <= index.max() < n * self.B:
            raise ValueError("what is kept aside is of no row")
        self._asides.keep(
            self.places_of(first * self.B + index[chosen]),
            {key: rows[f"aside.{i}"][chosen] for i, key in enumerate(self.observed)},
        )
        if self._frames is not None:
            self._put(torch.from_numpy(self._frames.depth), first, rows["depth"], skipped)
            index = rows["whole"].numpy()
            chosen = np.flatnonzero(index >= skipped * self.B)
            self._frames.wholes.keep(
                self.places_of(first * self.B + index[chosen]),
                {key: rows[f"whole.{i}"][chosen] for i, key in enumerate(self._stacked)},
            )

    def newest(self) -> dict[str, torch.Tensor]:
        """Return copies of what the next row continues, in host memory."""
        place = self._next_place
        cells = place * self.B + np.arange(self.B)
        found = {
            f"last.{i}": self._at(column.key, cells).cpu()
            for i, column in enumerate(self.columns)
            if column.carry
        }
        if self._frames is not None:
            found["depth"] = torch.from_numpy(self._frames.depth[place].copy())
        found["episode"] = torch.from_numpy(self._episode.copy())
        found["fresh"] = torch.from_numpy(self._fresh.copy())
        return found

    def restore(self, lo: int, hi: int, newest: Mapping[str, torch.Tensor]) -> None:
        """Make the rows from ``lo`` to ``hi`` readable, which ``put_rows`` has put, and continue from
        ``newest()``.
        """
        self.lo = max(lo, hi - self.capacity)
        self.hi = hi
        place = self._next_place
        seam = hi // self.places * self.places  # the newest row at place 0
        for i, column in enumerate(self.columns):
            if not column.carry:
                continue
            there = self.tensors[column.key]
            last = newest[f"last.{i}"].to(there.device)
            there[place] = last[:, -1] if column.key in self._stacked else last
            if self.lo - self.reach < seam < hi:  # what follows the row before it
                there[self.places] = there[0]
        if self._frames is not None:
            stacks = {
                column.key: newest[f"last.{i}"]
                for i, column in enumerate(self.columns)
                if column.key in self._stacked
            }
            self._frames.restore(place, newest["depth"].numpy(), stacks)
            if self.lo - self.reach < seam < hi:
                self._frames.copy_to_end()
        self._episode[...] = newest["episode"].numpy()
        self._fresh[...] = newest["fresh"].numpy()
        self.num_masked = 0
        if self.masked is not None:
            cells = self.places_of(np.arange(self.lo * self.B, self.hi * self.B))
            self.num_masked = int(self.masked.reshape(-1)[cells].sum())

    def _parts(self, first: int, end: int) -> list[slice]:
        """Return the places of rows: one part, or two around the seam."""
        if end <= first:
            return [slice(0, 0)]
        begin = first % self.places
        stop = begin + end - first
        if stop <= self.places:
            return [slice(begin, stop)]
        return [slice(begin, self.places), slice(0, stop - self.places)]

    def _copied(self, rows: torch.Tensor, first: int, end: int) -> torch.Tensor:
        return torch.cat([rows[part].cpu() for part in self._parts(first, end)])

    def _put(self, there: torch.Tensor, first: int, rows: torch.Tensor, skipped: int) -> None:
        if rows.shape[1:] != there.shape[1:] or rows.dtype != there.dtype:
            raise ValueError(
                f"rows of shape {list(rows.shape[1:])} and {rows.dtype}, and the memory has"
                f" {list(there.shape[1:])} and {there.dtype}"
            )
        begin = skipped
        for part in self._parts(first + skipped, first + len(rows)):
            end = begin + part.stop - part.start
            there[part] = rows[begin:end].to(there.device)
            begin = end

    # --- reading ----------------------------------------------------------------------------------

    def places_of(self, cells: Array) -> Array:
        """Return the places of cells."""
        found: Array = cells % (self.places * self.B)
        return found

    def is_transition(self, places: Array) -> Array:
        """Return which of the readable cells at ``places`` are transitions."""
        if self.masked is None:
            return np.ones(places.shape, bool)
        found: Array = ~self.masked.reshape(-1)[places]
        return found

    def of(self, key: Key, places: torch.Tensor) -> torch.Tensor:
        """Return the rows of a column at places (int64, on the device of the ring), ``[n,
        *shape]``, flags and rewards ``[n, 1]``: a copy.
        """
        if key in self._stacked and self._frames is not None:
            return self._frames.of(key, places.cpu().numpy())
        return gathered(self._cells[key], places)

    def _at(self, key: Key, cells: Array) -> torch.Tensor:
        """Return the rows of a column at places of cells."""
        return self.of(key, torch.from_numpy(cells).to(self.tensors[key].device))

    def _observations(self, cells: Array) -> dict[Key, torch.Tensor]:
        """Return the observations at places of cells."""
        return {key: self._at(key, cells) for key in self.observed}

    def next_observations(self, places: Array, index: torch.Tensor) -> dict[Key, torch.Tensor]:
        """Return the observations after the cells at ``places``; ``index`` are the same, on the
        device of the ring.
        """
        following = index + self.B
        found = {key: self.of(key, following) for key in self.observed}
        self._asides.put_into(found, places)
        return found

    def continues(self, cells: Array, later: Array) -> Array:
        """Return whether cells of the same environments belong to the same episode, and the later
        ones are transitions.
        """
        inside = later < self.hi * self.B
        places = self.places_of(later)
        episodes = self.episodes.reshape(-1)
        same = episodes[self.places_of(cells)] == episodes[places]
        found: Array = inside & same & self.is_transition(places)
        return found

    def last_of_episode(self, cells: Array) -> Array:
        """Return the newest cells of the episodes of ``cells``."""
        found: Array = cells.copy()
        rows_left = self.hi - 1 - cells // self.B
        step = 1
        most = int(rows_left.max(initial=0))
        while step <= most:
            step *= 2
        while step:  # episodes are contiguous: the later cells of an episode are a prefix
            later = found + step * self.B
            goes_on = self.continues(cells, later)
            found[goes_on] = later[goes_on]
            step //= 2
        return found
