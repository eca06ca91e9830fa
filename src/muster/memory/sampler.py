"""Drawing cells of rings, with the same probability or in proportion to priorities."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from muster.errors import BadOption, NothingToSample
from muster.keys import Key, key_of
from muster.memory.gathering import WEIGHT, Gathering, tensordict_of
from muster.memory.priorities import Priorities
from muster.memory.ring import AddRow, Ring
from muster.memory.sample_arrays import SampleArrays
from muster.memory.specs import Array

if TYPE_CHECKING:
    from tensordict import TensorDict

Make = Callable[[Gathering, Array], "TensorDict"]
# draws of cells that have to fulfil a condition, before all cells are looked at
DRAWS = 8


class InSequence:
    """The condition that a sequence of so many transitions begins with a cell."""

    def __init__(self, length: int, across_episodes: bool) -> None:
        self.length = length
        self._across = across_episodes

    def holds(self, ring: Ring, cells: Array) -> Array:
        """Return which cells fulfil it."""
        if self.length > ring.hi - ring.lo:
            return np.zeros(len(cells), bool)
        fine = np.ones(len(cells), bool)
        for k in range(1, self.length):
            if not fine.any():
                break
            later = cells + k * ring.B
            if self._across:
                places = ring.places_of(later)
                fine &= later < ring.hi * ring.B
                fine &= ring.stored.is_transition(places)
                fine &= ~ring.stored.is_break(places)
            else:
                fine &= ring.continues(cells, later)
        return fine


class Drawn(NamedTuple):
    """Drawn cells.

    Attributes:
        numbers: numbers of their rings, ``[n]``; None: there is one ring.
        cells: the cells, ``[n]``.
        lo: the first readable rows of the rings when they were drawn.
    """

    numbers: Array | None
    cells: Array
    lo: Sequence[int]


class Sampler:
    """The rings of a memory, their priorities, and drawing from them. Callers hold the memory's lock,
    except for ``gathered``.

    Args:
        rings: one for each group of environments.
        keep: see ``Gathering``.
        alpha: see ``ReplayMemory``.
        rng: generator of draws.
        arrays: for samples.

    Attributes:
        priorities: those of each ring; empty: all cells have the same probability.
    """

    def __init__(
        self,
        rings: Sequence[Ring],
        keep: Sequence[Key],
        alpha: float | None,
        rng: np.random.Generator,
        arrays: SampleArrays,
    ) -> None:
        self.rings = list(rings)
        self._arrays = arrays
        self.priorities: list[Priorities] = []
        if alpha is not None:
            for ring in rings:
                cells = ring.places * ring.B
                self.priorities.append(Priorities(cells, alpha))
        self._rng = rng
        self._gatherings = []
        for number, ring in enumerate(rings):
            gathering = Gathering(ring, keep, number, len(rings))
            if alpha is not None:
                gathering.check_free("ReplayMemory(alpha=...)", WEIGHT)
            self._gatherings.append(gathering)
        self._only: Ring | None = None
        if len(rings) == 1:
            (self._only,) = rings

    def __len__(self) -> int:
        return sum([ring.transitions for ring in self.rings])

    # --- writing ----------------------------------------------------------------------------------

    def row_adder(self, number: int) -> AddRow:
        """Return ``Ring.add_row``, and what new rows have to get besides."""
        ring = self.rings[number]
        if not self.priorities:
            return ring.add_row

        def add_row(
            done: Array | None = None, finals: Mapping[Key, Any] | None = None
        ) -> None:
            lo = ring.lo
            ring.add_row(done, finals)
            self._prioritize(number, lo, ring.hi - 1)

        return add_row

    def write(
        self,
        number: int,
        rows: Mapping[Key, Any],
        last: Mapping[Key, Any],
        **ends: Any,
    ) -> None:
        """See ``Ring.write``."""
        ring = self.rings[number]
        lo = ring.lo
        hi = ring.hi
        ring.write(rows, last, **ends)
        if self.priorities:
            self._prioritize(number, lo, hi)

    def clear(self) -> None:
        """Drop all transitions."""
        for number, ring in enumerate(self.rings):
            if self.priorities:
                self.priorities[number].forget(self.places(number))
            ring.clear()

    def places(self, number: int) -> Array:
        """Return the places of the readable cells of a ring."""
        ring = self.rings[number]
        cells = np.arange(ring.lo * ring.B, ring.hi * ring.B)
        return ring.places_of(cells)

    def update_priority(self, index: Array, priorities: Array) -> None:
        """Set priorities of transitions by their ``index``; those that were dropped are ignored.

        Raises:
            BadOption: there never was a transition with such an index.
        """
        count = len(self.rings)
        ends = np.array([ring.hi * ring.B for ring in self.rings])
        is_known = (index >= 0) & (index // count < ends[index % count])
        if not is_known.all():
            wrong = index[~is_known][0]
            raise BadOption(
                f"update_priority: this memory has had no transition with the index {wrong} yet. Give"
                ' batch["index"] of a sample of it'
            )
        for number, ring in enumerate(self.rings):
            mine = index % count == number
            cells = index[mine] // count
            there = cells >= ring.lo * ring.B
            places = ring.places_of(cells[there])
            given = priorities[mine]
            self.priorities[number].update(places, given[there])

    def _prioritize(self, number: int, lo: int, hi: int) -> None:
        """Set the priorities of rows that were dropped since the rows from ``lo`` to ``hi`` were
        readable, and of those that were added: these get the largest one so far, of all rings.
        """
        ring = self.rings[number]
        priorities = self.priorities[number]
        B = ring.B
        dropped = np.arange(lo * B, ring.lo * B)
        priorities.forget(ring.places_of(dropped))
        first = max(hi, ring.lo)
        added = ring.places_of(np.arange(first * B, ring.hi * B))
        is_transition = ring.stored.is_transition(added)
        largest = max(each.largest for each in self.priorities)
        priorities.add(added[is_transition], largest)

    # --- drawing ----------------------------------------------------------------------------------

    def draw(self, n: int, condition: InSequence | None) -> Drawn:
        """Draw ``n`` cells with a transition that fulfils the condition: each has the same
        probability, or that of its priority.

        Raises:
            NothingToSample: there are none.
        """
        only = self._only
        if only is not None and condition is None and not only.num_masked:
            if only.lo == only.hi:
                raise nothing_yet()
            cells = self._proposed_of(0, n)
            return Drawn(None, cells, (only.lo,))
        if not len(self):
            raise nothing_yet()
        lo = [ring.lo for ring in self.rings]
        numbers, cells = self._draw(n, condition)
        if only is not None:
            return Drawn(None, cells, lo)
        return Drawn(numbers, cells, lo)

    def is_there(self, drawn: Drawn) -> bool:
        """Return whether all drawn cells are still readable: then nothing was overwritten while they
        were read, since only places of earlier rows are.
        """
        for number, ring in enumerate(self.rings):
            if ring.lo <= drawn.lo[number]:
                continue
            cells = drawn.cells
            if drawn.numbers is not None:
                cells = cells[drawn.numbers == number]
            if len(cells) and cells.min() < ring.lo * ring.B:
                return False
        return True

    def weights(self, drawn: Drawn, beta: float) -> torch.Tensor:
        """Return importance weights, at most 1 (Schaul et al., 2016)."""
        share = np.empty(len(drawn.cells))
        for number, mine, cells in self._by_ring(drawn):
            places = self.rings[number].places_of(cells)
            share[mine] = self.priorities[number].of(places)
        total = sum(priorities.total for priorities in self.priorities)
        share /= total
        weights = (len(self) * share) ** -beta
        weights /= weights.max()
        return torch.from_numpy(weights.astype(np.float32))

    def later_steps(self, drawn: Drawn) -> Array:
        """Draw how many steps later than a drawn one a transition of the same episode is."""
        steps = np.empty(len(drawn.cells), np.int64)
        for number, mine, cells in self._by_ring(drawn):
            ring = self.rings[number]
            last = ring.last_of_episode(cells)
            left = (last - cells) // ring.B
            drawn_steps = self._rng.random(len(cells)) * (left + 1)
            steps[mine] = drawn_steps.astype(np.int64)
        return steps

    def _draw(self, n: int, condition: InSequence | None) -> tuple[Array, Array]:
        """Draw cells that fulfil a condition; return numbers of rings, and cells."""
        if condition is None and not any(ring.num_masked for ring in self.rings):
            return self._proposed(n)
        numbers = np.empty(0, np.int64)
        cells = np.empty(0, np.int64)
        for _ in range(DRAWS):
            some, proposed = self._proposed(n)
            fine = np.zeros(n, bool)
            for number, ring in enumerate(self.rings):
                (mine,) = (some == number).nonzero()
                fine[mine] = fulfils(ring, proposed[mine], condition)
            numbers = np.concatenate([numbers, some[fine]])
            cells = np.concatenate([cells, proposed[fine]])
            if len(cells) >= n:
                return numbers[:n], cells[:n]
        missing = n - len(cells)
        more_numbers, more_cells = self._chosen_of_all(missing, condition)
        numbers = np.concatenate([numbers, more_numbers])
        cells = np.concatenate([cells, more_cells])
        return numbers, cells

    def _proposed(self, n: int) -> tuple[Array, Array]:
        """Draw readable cells; return numbers of rings, and cells."""
        if self._only is not None:
            cells = self._proposed_of(0, n)
            return np.zeros(n, np.int64), cells
        sizes = [float(ring.cells) for ring in self.rings]
        if self.priorities:
            sizes = [priorities.total for priorities in self.priorities]
        ends = np.cumsum(sizes)
        point = self._rng.random(n) * ends[-1]
        numbers = np.searchsorted(ends, point, side="right")
        cells = np.empty(n, np.int64)
        for number in range(len(self.rings)):
            (mine,) = (numbers == number).nonzero()
            if len(mine):
                cells[mine] = self._proposed_of(number, len(mine))
        return numbers, cells

    def _proposed_of(self, number: int, n: int) -> Array:
        """Draw readable cells of a ring."""
        ring = self.rings[number]
        if not self.priorities:
            scaled = self._rng.random(n) * ring.cells
            drawn: Array = scaled.astype(np.int64)
            drawn += ring.lo * ring.B
            return drawn
        places = self.priorities[number].draw(n, self._rng)
        first = ring.lo * ring.B
        after_first = (places - first) % (ring.places * ring.B)
        cells: Array = first + after_first
        return cells

    def _chosen_of_all(
        self,
        n: int,
        condition: InSequence | None,
    ) -> tuple[Array, Array]:
        """Draw from a list of all cells that fulfil a condition, which few do."""
        every = [all_cells(ring, condition) for ring in self.rings]
        sizes = [len(cells) for cells in every]
        if not sum(sizes):
            raise _no_sequence(condition, self.rings)
        numbers = np.repeat(np.arange(len(sizes)), sizes)
        cells = np.concatenate(every)
        share = None
        if self.priorities:
            powers = []
            for number, mine in enumerate(every):
                places = self.rings[number].places_of(mine)
                powers.append(self.priorities[number].of(places))
            share = np.concatenate(powers)
            share /= share.sum()
        chosen = self._rng.choice(len(cells), n, p=share)
        return numbers[chosen], cells[chosen]

    def _by_ring(self, drawn: Drawn) -> list[tuple[int, Any, Array]]:
        """Return the rings of drawn cells: their numbers, the indices of their cells, and these."""
        if drawn.numbers is None:
            return [(0, slice(None), drawn.cells)]
        found = []
        for number in range(len(self.rings)):
            (mine,) = (drawn.numbers == number).nonzero()
            if len(mine):
                found.append((number, mine, drawn.cells[mine]))
        return found

    # --- reading ----------------------------------------------------------------------------------

    def gathered(self, drawn: Drawn, make: Make) -> TensorDict:
        """Return what ``make`` returns for the cells of each ring, in the order of ``drawn``."""
        if drawn.numbers is None:
            return make(self._gatherings[0], drawn.cells)
        parts = []
        places = []
        for number, mine, cells in self._by_ring(drawn):
            parts.append(make(self._gatherings[number], cells))
            places.append(mine)
        if not parts:
            return make(self._gatherings[0], drawn.cells)
        return _in_places(parts, places, self._arrays)

    def later(self, drawn: Drawn, steps: Array) -> TensorDict:
        """Return the observations after the transitions so many steps later than drawn ones."""
        parts = []
        places = []
        for number, mine, cells in self._by_ring(drawn):
            parts.append(self._gatherings[number].later(cells, steps[mine]))
            if drawn.numbers is None:
                mine = np.arange(len(cells))
            places.append(mine)
        return _in_places(parts, places, self._arrays)

    def in_order(self, chosen: Array) -> Drawn:
        """Return the cells of transitions by their numbers in order of time."""
        ends = np.cumsum([ring.transitions for ring in self.rings])
        numbers = np.searchsorted(ends, chosen, side="right")
        cells = np.empty(len(chosen), np.int64)
        for number, ring in enumerate(self.rings):
            (mine,) = (numbers == number).nonzero()
            nth = chosen[mine] - (ends[number] - ring.transitions)
            if ring.num_masked:
                cells[mine] = all_cells(ring, None)[nth]
            else:
                cells[mine] = nth + ring.lo * ring.B
        lo = [ring.lo for ring in self.rings]
        return Drawn(numbers if self._only is None else None, cells, lo)

    def newest(self, n: int) -> Array:
        """Return the numbers of the newest transitions: those of the newest rows of each ring."""
        if self._only is not None:
            count = len(self)
            return np.arange(max(0, count - n), count)
        ages = []
        for ring in self.rings:
            rows = all_cells(ring, None) // ring.B
            ages.append(rows - ring.hi)
        age = np.concatenate(ages)
        numbers = np.arange(len(age))
        order = np.lexsort((numbers, age))
        return order[-n:]

    def transitions_between(self, number: int, first: int, end: int) -> TensorDict:
        """Return the transitions of a ring in the rows from ``first`` to ``end`` that are still
        readable.
        """
        ring = self.rings[number]
        first = max(first, ring.lo)
        cells = np.arange(first * ring.B, end * ring.B)
        is_transition = fulfils(ring, cells, None)
        return self._gatherings[number].transitions(cells[is_transition])


def fulfils(ring: Ring, cells: Array, condition: InSequence | None) -> Array:
    """Return which of the readable cells are transitions that fulfil a condition."""
    fine = ring.stored.is_transition(ring.places_of(cells))
    if condition is not None:
        fine &= condition.holds(ring, cells)
    return fine


def all_cells(ring: Ring, condition: InSequence | None) -> Array:
    """Return all readable cells of transitions that fulfil a condition."""
    cells = np.arange(ring.lo * ring.B, ring.hi * ring.B)
    return cells[fulfils(ring, cells, condition)]


def nothing_yet() -> NothingToSample:
    """Return the error of a sample from an empty memory."""
    return NothingToSample(
        "ReplayMemory.sample: there are no transitions yet. Collect some first: `for _"
        " in collector`, or `init_random_frames` with a first batch"
    )


def _no_sequence(
    condition: InSequence | None, rings: Sequence[Ring]
) -> NothingToSample | BadOption:
    length = 1 if condition is None else condition.length
    room = max(ring.capacity for ring in rings)
    if length > room:
        return BadOption(
            f"ReplayMemory.sample(sequence={length}): the memory keeps {room} transitions of each"
            " environment, so there will never be such a sequence. Make its capacity larger, or the"
            " sequences shorter"
        )
    return NothingToSample(
        f"ReplayMemory.sample(sequence={length}): no episode has so many consecutive transitions"
        " yet. Collect more, shorten the sequences, or allow them to continue in the next episode"
        " (across_episodes=True)"
    )


def _in_places(
    parts: Sequence[TensorDict],
    places: Sequence[Array],
    arrays: SampleArrays,
) -> TensorDict:
    """Return the joined parts in the order of their places."""
    first = parts[0]
    if len(parts) == 1:
        return first
    n = sum(map(len, places))
    entries: dict[Key, torch.Tensor] = {}
    for name in first.keys(True, True):
        rows = [part.get(name) for part in parts]
        entries[key_of(name)] = _column_in_places(rows, places, n, arrays)
    return tensordict_of(entries, [n, *first.batch_size[1:]])


def _column_in_places(
    parts: Sequence[torch.Tensor],
    places: Sequence[Array],
    n: int,
    arrays: SampleArrays,
) -> torch.Tensor:
    first = parts[0]
    shape = (n, *first.shape[1:])
    if first.device.type != "cpu":
        there = first.new_empty(shape)
        for rows, at in zip(parts, places, strict=True):
            there.index_copy_(0, torch.from_numpy(at).to(first.device), rows)
        return there
    joined = arrays.array(shape, first.numpy().dtype)
    for rows, at in zip(parts, places, strict=True):
        joined[at] = rows.numpy()
    return torch.from_numpy(joined)
