"""Rows of a ring as they are saved: plain tensors in host memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from muster.keys import Key
from muster.memory.asides import Asides
from muster.memory.native import Rows
from muster.memory.ring import Ring
from muster.memory.slots import as_tensor
from muster.memory.specs import Array

Tensors = dict[str, torch.Tensor]
# beginnings of the names of what is kept of some rows only
ASIDE = ("aside", "whole")


class SavedRows:
    """Takes rows from a ring, and puts them into another one.

    1. ``rows`` returns copies of rows, which do not change any more once they are in a ring.
       ``newest`` returns copies of what the next row continues, and changes with each row.
    2. In an empty ring, ``put`` writes rows to their places, any number of times.
    3. ``restore`` makes them readable, and the next row continues from ``newest``.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._stored = ring.stored

    @property
    def kept(self) -> int:
        """The first row that is there: readable, or necessary for a readable one."""
        first = self._ring.lo - self._ring.reach
        return max(0, first)

    def rows(self, first: int, end: int) -> Tensors:
        """Return copies of the rows from ``first`` to ``end``: of all columns, and of what is kept
        aside.
        """
        stored = self._stored
        found: Tensors = {}
        for i, column in enumerate(stored.columns):
            there = stored.data[column.key]
            found[f"column.{i}"] = self._copied(there, first, end)
        found["episodes"] = self._copied(stored.episodes, first, end)
        found["begins"] = self._copied(stored.begins, first, end)
        if stored.masked is not None:
            found["masked"] = self._copied(stored.masked, first, end)
        if stored.breaks is not None:
            found["breaks"] = self._copied(stored.breaks, first, end)
        B = self._ring.B
        places = self._ring.places_of(np.arange(first * B, end * B))
        found |= _kept(stored.asides, places, "aside", stored.observed)
        if stored.frames is not None:
            found["depth"] = self._copied(stored.frames.depth, first, end)
            found |= _kept(stored.frames.wholes, places, "whole", stored.stacked)
        return found

    def newest(self) -> Tensors:
        """Return copies of what the next row continues."""
        ring = self._ring
        stored = self._stored
        place = ring.next_place
        cells = place * ring.B + np.arange(ring.B)
        found: Tensors = {}
        for i, column in enumerate(stored.columns):
            if column.carry:
                last = as_tensor(stored.of(column.key, cells))
                found[f"last.{i}"] = last.cpu()
        if stored.frames is not None:
            depth = stored.frames.depth[place]
            found["depth"] = torch.from_numpy(depth.copy())
        found["episode"] = torch.from_numpy(ring.episode.copy())
        found["fresh"] = torch.from_numpy(ring.fresh.copy())
        found["ids"] = torch.from_numpy(ring.ids.copy())
        found["began"] = torch.from_numpy(ring.began.copy())
        found["next_begins"] = torch.from_numpy(ring.newest_ended.copy())
        found["next_breaks"] = torch.from_numpy(ring.next_breaks.copy())
        return found

    def put(
        self,
        first: int,
        rows: Mapping[str, torch.Tensor],
        lo: int,
        hi: int,
    ) -> None:
        """Put rows from ``rows()`` where they belong in a ring in which the rows from ``lo`` to
        ``hi`` will be readable; those that it has no room for are left out.

        Raises:
            ValueError: they do not fit.
        """
        ring = self._ring
        stored = self._stored
        n = len(rows["episodes"])
        for name, values in rows.items():
            if not name.startswith(ASIDE) and len(values) != n:
                raise ValueError(f"it has {len(values)} rows of {name}, expected {n}")
        lo = max(lo, hi - ring.capacity)
        needed = lo - ring.reach - first
        skipped = min(n, max(0, needed))
        for i, column in enumerate(stored.columns):
            there = stored.data[column.key]
            self._put(there, first, rows[f"column.{i}"], skipped)
        self._put(stored.episodes, first, rows["episodes"], skipped)
        self._put(stored.begins, first, rows["begins"], skipped)
        if "masked" in rows:
            masked = stored.make_maskable()
            self._put(masked, first, rows["masked"], skipped)
        if "breaks" in rows:
            breaks = stored.make_breakable()
            self._put(breaks, first, rows["breaks"], skipped)
        index = rows["aside"].numpy()
        if len(index) and (index.min() < 0 or index.max() >= n * ring.B):
            raise ValueError("what is kept aside is of no row")
        self._keep(stored.asides, first, lo - first, rows, "aside", stored.observed)
        if stored.frames is not None:
            self._put(stored.frames.depth, first, rows["depth"], skipped)
            self._keep(
                stored.frames.wholes, first, skipped, rows, "whole", stored.stacked
            )

    def restore(
        self,
        lo: int,
        hi: int,
        newest: Mapping[str, torch.Tensor],
    ) -> None:
        """Make the rows from ``lo`` to ``hi`` readable, which were put, and continue from
        ``newest()``.
        """
        ring = self._ring
        stored = self._stored
        lo = max(lo, hi - ring.capacity)
        episode = newest["episode"].numpy()
        fresh = newest["fresh"].numpy()
        ring.continue_from(lo, hi, episode, fresh)
        if "ids" in newest:  # earlier files have none
            ring.ids[...] = newest["ids"].numpy()
            ring.began[...] = newest["began"].numpy()
            next_begins = newest["next_begins"].numpy()
            next_breaks = newest["next_breaks"].numpy()
            ring.expect(next_begins, next_breaks)
        place = ring.next_place
        seam = hi // ring.places * ring.places  # the newest row at place 0
        # what follows the row before the seam is in the extra place
        has_seam = lo - ring.reach < seam < hi
        stacks: dict[Key, torch.Tensor] = {}
        for i, column in enumerate(stored.columns):
            if not column.carry:
                continue
            last = newest[f"last.{i}"]
            if column.key in stored.stacked:
                stacks[column.key] = last
                last = last[:, -1]
            there = as_tensor(stored.data[column.key])
            there[place] = last.to(there.device)
            if has_seam:
                there[ring.places] = there[0]
        if stored.frames is not None:
            stored.frames.restore(place, newest["depth"].numpy(), stacks)
            if has_seam:
                stored.frames.copy_to_end()

    def _copied(
        self,
        rows: Rows,
        first: int,
        end: int,
    ) -> torch.Tensor:
        parts = []
        for places in self._stored.parts(first, end):
            parts.append(as_tensor(rows[places]).cpu())
        return torch.cat(parts)

    def _keep(
        self,
        asides: Asides,
        first: int,
        least: int,
        rows: Mapping[str, torch.Tensor],
        name: str,
        keys: Sequence[Key],
    ) -> None:
        """Put what ``_kept`` has returned for rows that begin with row ``first``, from the ``least``
        of them on.
        """
        ring = self._ring
        index = rows[name].numpy()
        chosen = np.flatnonzero(index >= least * ring.B)
        places = ring.places_of(first * ring.B + index[chosen])
        leaves = {}
        for i, key in enumerate(keys):
            leaves[key] = rows[f"{name}.{i}"][chosen]
        asides.keep(places, leaves)

    def _put(
        self,
        there: Rows | Array,
        first: int,
        rows: torch.Tensor,
        skipped: int,
    ) -> None:
        into = as_tensor(there)
        if rows.shape[1:] != into.shape[1:] or rows.dtype != into.dtype:
            raise ValueError(
                f"rows of shape {list(rows.shape[1:])} and {rows.dtype}, and the memory has"
                f" {list(into.shape[1:])} and {into.dtype}"
            )
        begin = skipped
        parts = self._stored.parts(first + skipped, first + len(rows))
        for part in parts:
            end = begin + part.stop - part.start
            into[part] = rows[begin:end].to(into.device)
            begin = end


def _kept(
    asides: Asides,
    places: Array,
    name: str,
    keys: Sequence[Key],
) -> Tensors:
    """Return copies of what is kept aside for cells at ``places``, and the indices of these cells."""
    index, leaves = asides.of_cells(places)
    found = {name: torch.from_numpy(index)}
    for i, key in enumerate(keys):
        found[f"{name}.{i}"] = as_tensor(leaves[key]).cpu()
    return found
