"""A ring of rows: the transitions of some environments, in order of time.

Row ``r``, counted from the first one ever written, is at place ``r % places`` of ``StoredRows``. Its
next observation is that of the following place, or kept aside (``Asides``) if the following row has
another episode.

1. ``write`` fills the rows after the newest with those of a rollout, where nothing can be read, makes
   them readable, and drops the oldest ones beyond the capacity. ``add_row`` does the same for one row
   that was copied to its place.
2. ``break_off``: the rows that follow do not continue the episodes of some environments. ``follow``:
   the same, from what is known of the trajectories, and which of them begin.

A *cell* is a row of one environment: cell ``r * B + b`` of all cells ever written. Its place is
``cell % (places * B)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from muster.keys import Key
from muster.memory.sample_arrays import SampleArrays
from muster.memory.specs import Array, Column
from muster.memory.stored_rows import StoredRows, is_stack

AddRow = Callable[..., None]  # ``Ring.add_row``


class Ring:
    """See the module.

    Args:
        columns: columns of the rows. Those with ``carry`` have one row more than there are
            transitions: the observations, and the recurrent states of policies.
        num_envs: number of environments, B.
        capacity: maximum number of readable rows.
        margin: maximum number of rows that are written at once.
        device: where the rows are; None: in host memory.
        stack: number of frames of stacked observations, which are stored once; 1: there are none.
        arrays: for samples.

    Attributes:
        stored: what is at its places.
        reach: number of rows before a readable one that it needs.
        lo, hi: readable are the rows from ``lo`` to ``hi``.
        num_masked: number of readable cells that are no transitions.
        episode: number of the episode of the next row in each environment, ``[B]``.
        fresh: in which environments the next row has another episode than the newest one, ``[B]``.
        ids: trajectories of the newest row, ``[B]``; -1: unknown.
        began: the row with which each of them began, or would have, ``[B]``.
        next_begins: in which environments an episode begins with the next row, ``[B]``; None: where
            it is ``fresh``.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        num_envs: int,
        capacity: int,
        margin: int,
        device: torch.device | None,
        stack: int,
        arrays: SampleArrays,
    ) -> None:
        self.B = num_envs
        self.capacity = capacity
        self.margin = margin
        has_stacks = any(
            is_stack(column.shape, stack)
            for column in columns
            if column.role == "observation"
        )
        self.reach = stack - 1 if has_stacks else 0
        self.places = capacity + margin + 1 + self.reach
        self.stored = StoredRows(columns, num_envs, self.places, device, stack, arrays)
        self.lo = 0
        self.hi = 0
        self.num_masked = 0
        self.episode = np.zeros(num_envs, np.int64)
        self.fresh = np.ones(num_envs, bool)
        self.ids = np.full(num_envs, -1, np.int64)
        self.began = np.zeros(num_envs, np.int64)
        self.next_begins: Array | None = None
        self._breaks: Array | None = None  # ``next_breaks``; None: nowhere

    @property
    def takes_rows(self) -> bool:
        """Whether ``destinations`` take rows of a lane in host memory as they are."""
        return self.stored.device is None and self.stored.frames is None

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
        return self.stored.nbytes(self.hi + 1)

    @property
    def next_place(self) -> int:
        """Where that is which follows the newest row."""
        if not self.hi:
            return 0
        newest = (self.hi - 1) % self.places
        return newest + 1

    # --- writing ----------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """Maximum number of rows that can be written now."""
        next_place = self.hi % self.places
        return min(self.margin, self.places - next_place)

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
        stored = self.stored
        first = self.hi % self.places
        n = stored.put(first, rows, last, self.fresh)
        episodes = stored.episodes[first : first + n]
        episodes[...] = self.episode
        begins = stored.begins[first : first + n]
        self._mark_begins(first, n)
        if done is None:
            begins[1:] = False
            self.fresh[...] = False
        else:
            begins[1:] = done[:-1]
            self.fresh[...] = done[-1]
            ended = np.cumsum(done, axis=0)
            episodes[1:] += ended[:-1]
            self.episode += ended[-1]
            ends = done
            if valid is not None:
                ends = done & valid
            t, env = np.nonzero(ends)
            stored.asides.keep((first + t) * self.B + env, finals or {})
        if stored.masked is not None:
            stored.masked[first : first + n] = False
        if valid is not None and not valid.all():
            # what follows a gap does not continue what was before it
            invalid = ~valid
            gaps = np.cumsum(invalid, axis=0)
            episodes += gaps
            self.episode += gaps[-1]
            masked = stored.make_maskable()
            masked[first : first + n] = invalid
            self.num_masked += int(invalid.sum())
        self._advance(n)

    def add_row(
        self,
        done: Array | None = None,
        finals: Mapping[Key, Any] | None = None,
    ) -> None:
        """Make the row after the newest readable, which was copied to its place; see ``write``.

        Args:
            done: whether the episode ends after each cell, ``[B]``; None: none does.
        """
        stored = self.stored
        place = self.hi % self.places
        stored.episodes[place] = self.episode
        if self.next_begins is None and stored.breaks is None:
            stored.begins[place] = self.fresh
        else:
            self._mark_begins(place, 1)
        if done is None:
            self.fresh.fill(False)
        else:
            self.fresh[...] = done
            self.episode += done
            (env,) = done.nonzero()
            stored.asides.keep(place * self.B + env, finals or {})
        if stored.masked is not None:
            stored.masked[place] = False
        self._advance(1)

    def destinations(self) -> tuple[list[tuple[Key, Any]], list[tuple[Key, Any]]]:
        """Return the memory of all columns without ``carry``, and of those with, by place; for
        ``add_row``: row ``hi`` is at ``hi % places``, and what follows it at the next place.
        """
        simple = []
        carried = []
        for column in self.stored.columns:
            entry = (column.key, self.stored.data[column.key])
            if column.carry:
                carried.append(entry)
            else:
                simple.append(entry)
        return simple, carried

    def break_off(self, envs: Sequence[int] | Array) -> None:
        """The next rows of ``envs`` do not continue their episodes: keep the observations after the
        newest row, before others are written in their place.
        """
        given = np.asarray(envs, np.int64)
        index = given[~self.fresh[given]]
        if not len(index) or not self.hi:
            return
        if self.hi > self.lo:  # else no transition needs it, and nothing would drop it
            following = self.next_place * self.B + index
            observations = self.stored.observations(following)
            self.stored.asides.keep(following - self.B, observations)
        self.episode[index] += 1
        self.fresh[index] = True

    @property
    def steps_so_far(self) -> Array:
        """Number of steps in each trajectory up to the newest row, ``[B]``."""
        found: Array = self.hi - self.began
        return found

    @property
    def newest_ended(self) -> Array:
        """Whether the newest row has ended an episode in each environment, ``[B]``."""
        return self.fresh if self.next_begins is None else self.next_begins

    @property
    def next_breaks(self) -> Array:
        """Where the next row neither begins an episode nor follows the newest row, ``[B]``."""
        if self._breaks is None:
            return np.zeros(self.B, bool)
        return self._breaks

    def expect(self, begins: Array, breaks: Array) -> None:
        """Restore ``newest_ended`` and ``next_breaks``."""
        self.next_begins = np.empty(self.B, bool)
        self.next_begins[...] = begins
        self._breaks = None
        if breaks.any():
            self._breaks = np.empty(self.B, bool)
            self._breaks[...] = breaks

    def follow(self, ids: Array, steps: Array | None, follows: Array) -> None:
        """Say what the next row is: the next step of the newest row's trajectories, or not.

        Args:
            ids: its trajectories, ``[B]``.
            steps: number of steps in each trajectory before it, ``[B]``; None: where it does not
                follow, a trajectory begins.
            follows: where it is the next step, ``[B]``.
        """
        begins = ~follows if steps is None else steps == 0
        # an episode within a trajectory: a life was lost
        self.next_begins = begins | (follows & self.newest_ended)
        breaks = ~(begins | follows)
        if self._breaks is not None:
            breaks |= self._breaks & follows
        self._breaks = breaks if breaks.any() else None
        others = np.flatnonzero(~follows)
        self.break_off(others)
        self.ids[...] = ids
        self.began[others] = self.hi if steps is None else self.hi - steps[others]

    def note_ids(self, ids: Array) -> None:
        """Note the trajectories of rows that will be written next, ``[n, B]``; for the first of
        them, ``follow`` was called, or they are those of the newest row.
        """
        changes = ids[1:] != ids[:-1]
        if not changes.any():
            return
        (envs,) = changes.any(axis=0).nonzero()
        last = len(changes) - changes[::-1, envs].argmax(axis=0)
        self.ids[...] = ids[-1]
        self.began[envs] = self.hi + last

    def going_on(self, obs: Mapping[Key, Any]) -> Array:
        """Return in which environments ``obs`` (``[B, *shape]`` each) are the observations after
        the newest row, ``[B]``.
        """
        same = ~self.fresh
        following = self.next_place * self.B + np.arange(self.B)
        newest = self.stored.observations(following)
        for key, rows in newest.items():
            here = self.stored.to_tensor(rows)
            given = torch.as_tensor(obs[key], device=here.device)
            given = given.reshape(here.shape)
            both_nan = (here != here) & (given != given)
            equal = (here == given) | both_nan
            in_env = equal.reshape(self.B, -1).all(1)
            same &= in_env.cpu().numpy()
        found: Array = same
        return found

    def clear(self) -> None:
        """Drop all rows; later ones do not continue them."""
        self._drop(self.hi)
        self.next_begins = self.newest_ended.copy()
        self.episode[~self.fresh] += 1
        self.fresh[...] = True

    def continue_from(
        self,
        lo: int,
        hi: int,
        episode: Array,
        fresh: Array,
    ) -> None:
        """Make the rows from ``lo`` to ``hi`` readable, which were put in their places."""
        self.lo = lo
        self.hi = hi
        self.episode[...] = episode
        self.fresh[...] = fresh
        self.next_begins = None
        self._breaks = None
        self.num_masked = 0
        if self.stored.masked is not None:
            cells = self.places_of(np.arange(lo * self.B, hi * self.B))
            masked = self.stored.masked.reshape(-1)
            self.num_masked = int(masked[cells].sum())

    def _mark_begins(self, first: int, n: int) -> None:
        """Mark the row at place ``first`` as ``follow`` has said, the first one of ``n``."""
        stored = self.stored
        stored.begins[first] = self.newest_ended
        if stored.breaks is not None:
            stored.breaks[first : first + n] = False
        if self._breaks is not None:
            stored.make_breakable()[first] = self._breaks
        self.next_begins = None
        self._breaks = None

    def _advance(self, n: int) -> None:
        """Make the rows that were written readable, and drop those beyond the capacity."""
        self.hi += n
        if self.hi - self.capacity > self.lo:
            self._drop(self.hi - self.capacity)

    def _drop(self, lo: int) -> None:
        """Drop the rows before ``lo``."""
        masked = self.stored.masked
        for part in self.stored.parts(self.lo, lo):
            self.stored.asides.drop(part.start * self.B, part.stop * self.B)
            if masked is not None:
                self.num_masked -= int(masked[part].sum())
                masked[part] = False
        self.lo = lo

    # --- reading ----------------------------------------------------------------------------------

    def places_of(self, cells: Array) -> Array:
        """Return the places of cells."""
        found: Array = cells % (self.places * self.B)
        return found

    def places_of_readable(self, cells: Array) -> Array:
        """Return the places of readable cells; ``cells`` themselves until the ring is full once."""
        if self.hi <= self.places:
            return cells
        return self.places_of(cells)

    def continues(self, cells: Array, later: Array) -> Array:
        """Return whether cells of the same environments belong to the same episode, and the later
        ones are transitions.
        """
        inside = later < self.hi * self.B
        places = self.places_of(later)
        episodes = self.stored.episodes.reshape(-1)
        same = episodes[self.places_of(cells)] == episodes[places]
        is_transition = self.stored.is_transition(places)
        found: Array = inside & same & is_transition
        return found

    def last_of_episode(self, cells: Array) -> Array:
        """Return the newest cells of the episodes of ``cells``."""
        found: Array = cells.copy()
        rows_left = self.hi - 1 - cells // self.B
        step = 1
        most = int(rows_left.max(initial=0))
        while step <= most:
            step *= 2
        # episodes are contiguous: the later cells of an episode are a prefix
        while step:
            later = found + step * self.B
            goes_on = self.continues(cells, later)
            found[goes_on] = later[goes_on]
            step //= 2
        return found
