"""``ReplayMemory``: the transitions that collectors write, and off-policy learners sample."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from muster.errors import BadCheckpoint, BadOption, NothingToSample
from muster.keys import FLAGS, IS_INIT, Key, dotted, nested, next_of
from muster.memory.priorities import Priorities
from muster.memory.replay_files import UNREADABLE, Loaded, MemoryFiles, Snapshot
from muster.memory.ring import Ring, is_stack
from muster.memory.specs import Array, Column
from muster.utils.integers import integer
from muster.utils.private_names import tensordict_maker

if TYPE_CHECKING:
    from tensordict import TensorDict

INDEX: Key = ("index",)
WEIGHT: Key = ("weight",)
GAMMA: Key = ("gamma",)
STEPS: Key = ("steps_to_next_obs",)
ITERATED = 1024  # transitions that an iterator reads at once
GATHERINGS = 3  # without the lock, before one with it
DRAWS = 8  # draws of cells that have to fulfil a condition, before all cells are looked at

Relabel = Callable[["TensorDict", "TensorDict"], "TensorDict | None"]


class ReplayMemory:
    """Memory of transitions, which a collector fills and a learner samples.

    ::

        memory = muster.ReplayMemory(100_000)
        collector = muster.Collector("CartPole-v1", policy, frames_per_batch=1, replay_buffer=memory)
        for _ in collector:
            batch = memory.sample(256)
            loss = learn(batch["observation"], batch["action"], batch["next", "reward"])

    An observation is stored once: the next one of a transition is that of the following row, except
    at the end of an episode, where it is kept aside. A transition that is being overwritten is never
    returned. Samples are copies, owned by the caller.

    Args:
        capacity: maximum number of transitions; the oldest are dropped. With several environments,
            each has the same share, rounded down.
        keep: further keys of samples, such as ``"action_log_prob"``, ``("collector", "traj_ids")``
            or a recurrent state. None of them is stored twice.
        device: where samples are; None: where the transitions are (in host memory, or on the
            device of the environments).
        pin_memory: copy samples to ``device`` through pinned memory, without blocking. Needs CUDA.
        stack: observations are stacks of so many frames, in their first dimension, as those of
            ``gymnasium.wrappers.FrameStackObservation``: store each frame once. A stack that does not
            continue the one before it, as at the beginning of an episode, is stored whole, so that
            samples are always what the environment returned.
        alpha: exponent of priorities (Schaul et al., 2016): the probability of a transition is
            proportional to ``priority ** alpha``. New transitions have the largest priority so far.
            None: all transitions have the same probability.
        seed: of the generator of ``sample``; None: it is unpredictable. No other generator is used.

    Raises:
        BadOption: an argument has an impossible value.
    """

    def __init__(
        self,
        capacity: int,
        *,
        keep: Sequence[str | tuple[str, ...]] = (),
        device: torch.device | str | int | None = None,
        pin_memory: bool = False,
        stack: int = 1,
        alpha: float | None = None,
        seed: int | None = None,
    ) -> None:
        if alpha is not None and not alpha >= 0:
            raise BadOption(f"alpha={alpha!r}: expected a number of at least 0")
        self.capacity = integer("capacity", capacity, of="ReplayMemory")
        self._stack = integer("stack", stack, of="ReplayMemory")
        self._keep = [key if isinstance(key, tuple) else (key,) for key in keep]
        self._device = None if device is None else torch.device(device)
        self._pins = pin_memory
        self._alpha = alpha
        self._rng = np.random.default_rng(seed)
        self._rings: list[Ring] = []
        self._priorities: list[Priorities] = []
        self._shown: list[Key] = []  # columns of samples
        self._returned: list[Key] = []  # those that a step returns, beside observations
        self._files = MemoryFiles()
        # Held while rows become readable, and while cells are drawn; never while an environment or
        # policy runs. Rows are read without it, and once more if they were dropped meanwhile: a
        # collector that waited for each sample would lose half of its speed.
        self.lock = threading.RLock()

    def __len__(self) -> int:
        return sum([ring.transitions for ring in self._rings])

    def __repr__(self) -> str:
        size = f"{self.nbytes / 1e6:,.1f} MB" if self._rings else "nothing written yet"
        return f"ReplayMemory({len(self):,} of {self.capacity:,} transitions, {size})"

    @property
    def nbytes(self) -> int:
        """Size of what was written, in bytes."""
        return sum(ring.nbytes for ring in self._rings)

    # --- writing ----------------------------------------------------------------------------------

    @property
    def rings(self) -> Sequence[Ring]:
        """The rings, which collectors write; none before ``open``."""
        return self._rings

    def open(
        self,
        columns: Sequence[Column],
        observed: Sequence[Key],
        sizes: Sequence[int],
        margin: int,
        device: torch.device | None = None,
    ) -> None:
        """Prepare for rows with these columns; a collector calls it. A memory that is open already
        goes on if the new rows fit.

        Args:
            columns: columns of the rows.
            observed: keys of the observations among them.
            sizes: number of environments of each ring.
            margin: number of rows that are written at once, at most.
            device: where the rows are; None: in host memory.

        Raises:
            BadOption: the memory is too small, has rows of another shape, or cannot store a column.
        """
        stored = self._checked(columns, observed)
        rows = self._rows_of(sizes)
        if self._rings:
            self._check_same(stored, sizes)
            return
        self._check_stacks(stored, observed)
        self._use(
            [Ring(stored, observed, size, rows, margin, device, self._stack) for size in sizes]
        )

    def _use(self, rings: Sequence[Ring]) -> None:
        """Take these rings for the memory's own."""
        columns = rings[0].columns
        self._rings = list(rings)
        if self._alpha is not None:
            self._priorities = [Priorities(ring.places * ring.B, self._alpha) for ring in rings]
        self._shown = [
            column.key
            for column in columns
            if column.key in rings[0].observed or column.key in self._keep or _is_action(column.key)
        ]
        self._returned = [
            column.key
            for column in columns
            if column.key[0] == "next" and column.key not in self._shown
        ]

    def add_row(
        self, number: int, done: Array | None = None, finals: Mapping[Key, Any] | None = None
    ) -> None:
        """Make the next row of a ring readable; see ``Ring.add_row``. A collector calls it."""
        with self.lock:
            ring = self._rings[number]
            lo = ring.lo
            ring.add_row(done, finals)
            if self._priorities:
                self._prioritize(number, lo, ring.hi - 1)

    def _prioritize(self, number: int, lo: int, hi: int) -> None:
        """Set the priorities of rows that were dropped since the rows from ``lo`` to ``hi`` were
        readable, and of those that were added.
        """
        ring = self._rings[number]
        priorities = self._priorities[number]
        priorities.forget(ring.places_of(np.arange(lo * ring.B, ring.lo * ring.B)))
        added = ring.places_of(np.arange(max(hi, ring.lo) * ring.B, ring.hi * ring.B))
        priorities.add(added[ring.is_transition(added)])

    def write(
        self, number: int, rows: Mapping[Key, Any], last: Mapping[Key, Any], **ends: Any
    ) -> None:
        """Write the next rows of a ring; see ``Ring.write``. A collector calls it."""
        with self.lock:
            ring = self._rings[number]
            lo = ring.lo
            hi = ring.hi
            ring.write(rows, last, **ends)
            if self._priorities:
                self._prioritize(number, lo, hi)

    def clear(self) -> None:
        """Drop all transitions. Collectors go on writing."""
        with self.lock:
            for number, ring in enumerate(self._rings):
                if self._priorities:
                    old = ring.places_of(np.arange(ring.lo * ring.B, ring.hi * ring.B))
                    self._priorities[number].forget(old)
                ring.clear()

    # --- saving -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return copies of everything as plain data: dicts, lists, numbers, texts and tensors in host
        memory. For a large memory, ``save`` takes less memory and time.

        Raises:
            NothingToSample: no collector has written to the memory yet.
        """
        with self.lock:
            now = self._snapshot()
            rows = [ring.rows(ring.kept, ring.hi) for ring in self._rings]
        return {
            "about": now.about,
            "rings": [
                {"lo": lo, "hi": hi, "rows": mine, "newest": newest}
                for (lo, hi), mine, newest in zip(now.spans, rows, now.newest, strict=True)
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict()``: what was in the memory is dropped. The next samples are those that
        would have come then, if the memory has the same capacity; with a smaller one, the oldest
        transitions are left out.

        Raises:
            BadCheckpoint: it is no such state, or of a memory for other environments or options.
        """
        try:
            rings = self._made_for(state["about"])
            spans = []
            for ring, saved in zip(rings, state["rings"], strict=True):
                span = saved["lo"], saved["hi"]
                ring.put_rows(max(0, span[0] - ring.reach), saved["rows"], *span)
                spans.append(span)
            newest = [saved["newest"] for saved in state["rings"]]
            loaded = Loaded(rings, state["about"], spans, newest, [lo for lo, _ in spans])
            self._restore(loaded)
        except UNREADABLE as error:
            if isinstance(error, BadCheckpoint):
                raise
            raise BadCheckpoint(f"this is no state of a ReplayMemory: {error!r}") from error
        self._files = MemoryFiles()

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Save everything in a directory, which is made if it is missing. Rows that it has already are
        not written again, so saving often costs little. Collectors may go on writing meanwhile.

        After a crash at any moment the directory has the complete old or new memory. Only one process
        may save in a directory at a time.

        Raises:
            NothingToSample: no collector has written to the memory yet.
            FileError: a file cannot be written. The directory has what it had.
        """
        self._files.save(Path(directory), self._rings, self.lock, self._snapshot)

    def load(self, directory: str | os.PathLike[str]) -> None:
        """Load what ``save`` has saved; see ``load_state_dict``.

        A collector that writes to the memory then continues its episodes if their newest observations
        are those of its environments; otherwise, its rows begin new episodes.

        Raises:
            BadCheckpoint: a file is missing or damaged, or the memory was for other environments or
                options. This memory is unchanged.
        """
        files = MemoryFiles()
        self._restore(files.load(Path(directory), self._made_for))
        self._files = files

    def _snapshot(self) -> Snapshot:
        if not self._rings:
            raise NothingToSample(
                "ReplayMemory: there is nothing to save before a collector has written to it"
            )
        newest = []
        for number, ring in enumerate(self._rings):
            mine = ring.newest()
            if self._priorities:
                places = ring.places_of(np.arange(ring.lo * ring.B, ring.hi * ring.B))
                mine["powers"] = torch.from_numpy(self._priorities[number].of(places).copy())
                largest = [self._priorities[number].largest]
                mine["largest"] = torch.tensor(largest, dtype=torch.float64)
            newest.append(mine)
        ring = self._rings[0]
        about = {
            "columns": [_described(column) for column in ring.columns],
            "observed": [list(key) for key in ring.observed],
            "sizes": [ring.B for ring in self._rings],
            "margin": ring.margin,
            "alpha": self._alpha,
            "stack": self._stack,
            "generator": json.dumps(self._rng.bit_generator.state),
        }
        return Snapshot(about, [(ring.lo, ring.hi) for ring in self._rings], newest)

    def _made_for(self, about: Mapping[str, Any]) -> list[Ring]:
        """Return empty rings for saved rows.

        Raises:
            BadCheckpoint: they are of a memory for other environments or options.
        """
        try:
            columns = [_column(described) for described in about["columns"]]
            observed = [tuple(key) for key in about["observed"]]
            if (about["alpha"] is None) != (self._alpha is None):
                raise BadOption(
                    f"it has alpha={about['alpha']}, and this one alpha={self._alpha}: make the memory"
                    " with priorities or without, as it was"
                )
            if about["stack"] != self._stack:
                raise BadOption(f"it has stack={about['stack']}, and this one stack={self._stack}")
            stored = self._checked(columns, observed)
            if len(stored) < len(columns):
                more = {dotted(column.key) for column in columns} - {
                    dotted(column.key) for column in stored
                }
                raise BadOption(f"it has {sorted(more)}, too: name them in keep")
            sizes = list(about["sizes"])
            device = None
            if self._rings:
                self._check_same(stored, sizes)
                device = self._rings[0].device
            rows = self._rows_of(sizes)
        except BadOption as error:
            raise BadCheckpoint(
                f"the saved ReplayMemory does not fit to this one: {error}"
            ) from error
        margin = about["margin"]
        return [Ring(stored, observed, size, rows, margin, device, self._stack) for size in sizes]

    def _restore(self, loaded: Loaded) -> None:
        """Replace the rings and all that belongs to them."""
        for ring, (lo, hi), newest in zip(loaded.rings, loaded.spans, loaded.newest, strict=True):
            ring.restore(lo, hi, newest)
        with self.lock:
            self._rng.bit_generator.state = json.loads(loaded.about["generator"])
            self._use(loaded.rings)
            for number, priorities in enumerate(self._priorities):
                ring = loaded.rings[number]
                newest = loaded.newest[number]
                first = ring.lo - loaded.powers_from[number]
                powers = newest["powers"].numpy()[first * ring.B :]
                places = ring.places_of(np.arange(ring.lo * ring.B, ring.hi * ring.B))
                priorities.restore(float(newest["largest"][0]), places, powers)

    # --- reading ----------------------------------------------------------------------------------

    def sample(
        self,
        n: int,
        *,
        n_step: int = 1,
        gamma: float = 0.99,
        sequence: int | None = None,
        across_episodes: bool = False,
        beta: float = 0.4,
        relabel: Relabel | None = None,
    ) -> TensorDict:
        """Draw transitions, with replacement.

        Args:
            n: number of transitions, or of sequences.
            n_step: the reward is the sum of so many, discounted by ``gamma``, and the next
                observation and flags are those of the last of these steps. Fewer steps where the
                episode ends, or is not further yet. ``gamma`` of the sample is the factor of the
                value of the next observation, and ``steps_to_next_obs`` the number of steps.
            gamma: discount factor for ``n_step``.
            sequence: draw sequences of so many consecutive transitions of one environment instead,
                ``[n, sequence]``. For burn-in, make them longer, and use the first steps for the
                state only; a recurrent state named in ``keep`` is that of when they were collected.
            across_episodes: a sequence may contain the beginning of another episode; ``is_init``
                marks it. False: it is from one episode.
            beta: exponent of the weights that correct for priorities; see ``alpha``.
            relabel: called with the sample and a later transition of each one's episode
                (hindsight: Andrychowicz et al., 2017), and returns the sample, changed or not. The
                second TensorDict has the observations after that transition under the keys of
                observations, and ``steps``: how many steps later it is.

        Returns:
            ``[n]``: the observations, ``action``, what ``keep`` names, ``("next", ...)`` of the
            observations, ``reward``, ``done``, ``terminated`` and ``truncated``, and ``index``, for
            ``update_priority``. With priorities, also ``weight``. Rewards and flags have shape
            ``[n, 1]``. To bootstrap, multiply the value of the next observation by ``~terminated``.

        Raises:
            NothingToSample: there is no transition or sequence yet.
            BadOption: an argument has an impossible value.
        """
        self._check_sample(n, n_step, sequence, relabel)
        condition = None
        make = partial(self._transitions, n_step=n_step, gamma=gamma)
        if sequence is not None:
            condition = _InSequence(sequence, across_episodes)
            make = partial(self._sequences, length=sequence)
        drawn, made = self._sampled(
            lambda: self._drawn(n, condition, beta),
            lambda drawn: self._made(drawn, make, later=relabel is not None),
        )
        batch = made.batch
        if made.later is not None and relabel is not None:
            relabelled = relabel(batch, made.later)
            batch = batch if relabelled is None else relabelled
        if drawn.weights is not None:
            weights = drawn.weights.to(batch["index"].device)
            if sequence is not None:
                weights = weights.unsqueeze(-1).repeat(1, sequence)
            batch.set(WEIGHT, weights)
        return self._placed(batch)

    def newest(self, n: int) -> TensorDict:
        """Return the newest transitions, as ``sample`` does, in order of time; fewer if there are
        not so many.

        With several environments, those of a row follow each other.
        """
        n = integer("n", n, of="newest")
        with self.lock:
            if not len(self):
                raise NothingToSample("ReplayMemory.newest: there are no transitions yet")
            return self[max(0, len(self) - n) :] if len(self._rings) == 1 else self._newest(n)

    def __getitem__(self, index: int | slice | Sequence[int] | Array | torch.Tensor) -> TensorDict:
        """Return transitions by their place in order of time, from 0 to ``len(memory) - 1``: one,
        or several, as ``sample`` does.

        With several rings, those of one follow those of another.

        Raises:
            IndexError: there is no such transition.
        """
        with self.lock:
            chosen = _numbers(index, len(self))
            if not self._rings:
                raise IndexError("ReplayMemory: there are no transitions yet")
            batch = self._placed(self._in_order(chosen))
        is_one = not isinstance(index, slice) and _host(index).ndim == 0
        return batch[0] if is_one else batch

    def __iter__(self) -> Iterator[TensorDict]:
        """Return an iterator over all transitions that are there now, oldest first, one by one.

        Those that are overwritten before the iterator comes to them are left out.
        """
        with self.lock:
            every = [(number, ring.lo, ring.hi) for number, ring in enumerate(self._rings)]
        for number, lo, hi in every:
            ring = self._rings[number]
            step = max(1, ITERATED // ring.B)
            for first in range(lo, hi, step):
                with self.lock:
                    begin = max(first, ring.lo) * ring.B
                    cells = np.arange(begin, min(first + step, hi) * ring.B)
                    cells = cells[_fulfils(ring, cells, None)]
                    batch = self._placed(self._transitions(ring, cells))
                yield from batch.unbind(0)

    # --- priorities -------------------------------------------------------------------------------

    def update_priority(self, index: torch.Tensor | Array | Sequence[int], priority: Any) -> None:
        """Set priorities of sampled transitions; those that were dropped since are ignored.

        Args:
            index: ``batch["index"]``, ``[n]`` or ``[n, sequence]``.
            priority: one for each, or one for all; finite and at least 0. Temporal-difference
                errors, usually: their absolute values.

        Raises:
            BadOption: the memory has no ``alpha``, or a priority is negative or not finite.
        """
        if self._alpha is None:
            raise BadOption(
                "update_priority: this memory samples uniformly. Make it with priorities:"
                " ReplayMemory(..., alpha=0.6)"
            )
        numbers = _host(index).reshape(-1).astype(np.int64)
        values = _host(priority).reshape(-1).astype(np.float64)
        if len(values) not in (1, len(numbers)):
            raise BadOption(
                f"update_priority: {len(numbers)} transitions and {len(values)} priorities; give one"
                " for each, or one for all"
            )
        values = np.broadcast_to(values, numbers.shape)
        if not np.isfinite(values).all() or (values < 0).any():
            raise BadOption(
                "update_priority: priorities have to be finite and at least 0; these are between"
                f" {values.min()} and {values.max()}"
            )
        with self.lock:
            count = len(self._rings)
            for number, ring in enumerate(self._rings):
                mine = numbers % count == number
                cells = numbers[mine] // count
                there = (cells >= ring.lo * ring.B) & (cells < ring.hi * ring.B)
                self._priorities[number].update(ring.places_of(cells[there]), values[mine][there])

    # --- parts of ``sample`` ----------------------------------------------------------------------

    def _check_sample(
        self, n: int, n_step: int, sequence: int | None, relabel: Relabel | None
    ) -> None:
        integer("n", n, of="sample")
        integer("n_step", n_step, of="sample")
        if sequence is not None:
            integer("sequence", sequence, of="sample")
        if sequence is not None and n_step > 1:
            raise BadOption(
                f"sample(sequence={sequence}, n_step={n_step}): the steps of a sequence are there"
                " one by one; leave n_step out"
            )
        if sequence is not None and relabel is not None:
            raise BadOption("sample: relabel is for single transitions; leave sequence out")

    def _drawn(self, n: int, condition: _InSequence | None, beta: float) -> _Drawn:
        """Draw ``n`` cells, with the lock.

        Raises:
            NothingToSample: there are none.
        """
        if not len(self):
            raise NothingToSample(
                "ReplayMemory.sample: there are no transitions yet. Collect some first: `for _"
                " in collector`, or `init_random_frames` with a first batch"
            )
        numbers, cells = self._draw(n, condition)
        weights = None
        if self._priorities:
            weights = self._weights(numbers, cells, beta)
        return _Drawn(numbers, cells, weights, self._rings, [ring.lo for ring in self._rings])

    def _sampled(
        self, draw: Callable[[], _Drawn], make: Callable[[_Drawn], _Sample]
    ) -> tuple[_Drawn, _Sample]:
        """Draw cells with the lock, and read them without; again if some were dropped meanwhile."""
        for _ in range(GATHERINGS):
            with self.lock:
                drawn = draw()
            made = make(drawn)
            with self.lock:
                if self._is_there(drawn):
                    return drawn, made
        with self.lock:
            drawn = draw()
            return drawn, make(drawn)

    def _made(
        self, drawn: _Drawn, make: Callable[[Ring, Array], TensorDict], *, later: bool
    ) -> _Sample:
        """Return the sample of drawn cells. Without the lock: see ``_is_there``."""
        batch = self._gathered(drawn.numbers, drawn.cells, make)
        if not later:
            return _Sample(batch, None)
        return _Sample(batch, self._gathered(drawn.numbers, drawn.cells, self._later))

    def _is_there(self, drawn: _Drawn) -> bool:
        """Return whether all drawn cells are still readable, with the lock: then nothing was
        overwritten while they were read, since only places of earlier rows are.
        """
        if drawn.rings is not self._rings:
            return False
        for number, (ring, lo) in enumerate(zip(drawn.rings, drawn.lo, strict=True)):
            if ring.lo > lo:
                mine = drawn.cells[drawn.numbers == number]
                if len(mine) and mine.min() < ring.lo * ring.B:
                    return False
        return True

    def _draw(self, n: int, condition: _InSequence | None) -> tuple[Array, Array]:
        """Draw ``n`` cells with a transition that fulfils the condition: each has the same
        probability, or that of its priority.

        Returns:
            numbers of rings, and cells.
        """
        if condition is None and not any(ring.num_masked for ring in self._rings):
            return self._proposed(n)
        numbers = np.empty(0, np.int64)
        cells = np.empty(0, np.int64)
        for _ in range(DRAWS):
            some, proposed = self._proposed(n)
            fine = self._fulfils(some, proposed, condition)
            numbers = np.concatenate([numbers, some[fine]])
            cells = np.concatenate([cells, proposed[fine]])
            if len(cells) >= n:
                return numbers[:n], cells[:n]
        rest, others = self._chosen_of_all(n - len(cells), condition)
        return np.concatenate([numbers, rest]), np.concatenate([cells, others])

    def _proposed(self, n: int) -> tuple[Array, Array]:
        """Draw ``n`` readable cells."""
        if len(self._rings) == 1:
            return np.zeros(n, np.int64), self._proposed_of(0, n)
        sizes = [float(ring.cells) for ring in self._rings]
        if self._priorities:
            sizes = [priorities.total for priorities in self._priorities]
        ends = np.cumsum(sizes)
        numbers = np.searchsorted(ends, self._rng.random(n) * ends[-1], side="right")
        cells = np.empty(n, np.int64)
        for number in range(len(self._rings)):
            mine = np.flatnonzero(numbers == number)
            if len(mine):
                cells[mine] = self._proposed_of(number, len(mine))
        return numbers, cells

    def _proposed_of(self, number: int, n: int) -> Array:
        """Draw ``n`` readable cells of a ring."""
        ring = self._rings[number]
        if not self._priorities:
            drawn: Array = (self._rng.random(n) * ring.cells).astype(np.int64)
            drawn += ring.lo * ring.B
            return drawn
        places = self._priorities[number].draw(n, self._rng)
        first = ring.lo * ring.B
        cells: Array = first + (places - first) % (ring.places * ring.B)
        return cells

    def _fulfils(self, numbers: Array, cells: Array, condition: _InSequence | None) -> Array:
        """Return which cells are transitions that fulfil the condition."""
        if len(self._rings) == 1:
            return _fulfils(self._rings[0], cells, condition)
        fine = np.zeros(len(cells), bool)
        for number, ring in enumerate(self._rings):
            mine = np.flatnonzero(numbers == number)
            fine[mine] = _fulfils(ring, cells[mine], condition)
        return fine

    def _chosen_of_all(self, n: int, condition: _InSequence | None) -> tuple[Array, Array]:
        """Draw from a list of all cells that fulfil a condition, which few do."""
        every = [_all_cells(ring, condition) for ring in self._rings]
        sizes = [len(cells) for cells in every]
        if not sum(sizes):
            raise _no_sequence(condition)
        numbers = np.repeat(np.arange(len(sizes)), sizes)
        cells = np.concatenate(every)
        share = None
        if self._priorities:
            powers = [
                priorities.of(ring.places_of(mine))
                for priorities, ring, mine in zip(self._priorities, self._rings, every, strict=True)
            ]
            share = np.concatenate(powers)
            share /= share.sum()
        chosen = self._rng.choice(len(cells), n, p=share)
        return numbers[chosen], cells[chosen]

    def _gathered(
        self, numbers: Array, cells: Array, make: Callable[[Ring, Array], TensorDict]
    ) -> TensorDict:
        """Return what ``make`` returns for the cells of each ring, in the order of ``cells``."""
        if len(self._rings) == 1:
            return make(self._rings[0], cells)
        parts = []
        places = []
        for number, ring in enumerate(self._rings):
            mine = np.flatnonzero(numbers == number)
            if len(mine):
                parts.append(make(ring, cells[mine]))
                places.append(mine)
        if not parts:
            return make(self._rings[0], cells)
        if len(parts) == 1:
            return parts[0]
        joined: TensorDict = torch.cat(parts)
        order = torch.from_numpy(np.argsort(np.concatenate(places)))
        return joined[order.to(joined["index"].device)]

    def _transitions(
        self, ring: Ring, cells: Array, n_step: int = 1, gamma: float = 1.0
    ) -> TensorDict:
        places = ring.places_of(cells)
        index = _on(ring, places)
        entries = self._entries(ring, cells, index)
        if n_step == 1:
            self._add_next(entries, ring, places, index)
            return _tensordict(entries, [len(cells)])
        last = cells.copy()
        rewards = {key: ring.of(key, index) for key in ring.tensors if _is_reward(key)}
        steps = np.ones(len(cells), np.int64)
        goes_on = np.ones(len(cells), bool)
        for k in range(1, n_step):
            later = cells + k * ring.B
            goes_on &= ring.continues(cells, later)
            if not goes_on.any():
                break
            last[goes_on] = later[goes_on]
            steps += goes_on
            there = _on(ring, ring.places_of(np.where(goes_on, later, cells)))
            factors = _on(ring, goes_on * gamma**k)
            for key, reward in rewards.items():
                more = ring.of(key, there) * factors.reshape(-1, *[1] * (reward.ndim - 1))
                rewards[key] = reward + more.to(reward.dtype)
        end = ring.places_of(last)
        self._add_next(entries, ring, end, _on(ring, end))
        for key, reward in rewards.items():
            entries[key] = reward
        entries[STEPS] = _on(ring, steps).unsqueeze(-1)
        entries[GAMMA] = (gamma ** entries[STEPS].double()).to(torch.float32)
        return _tensordict(entries, [len(cells)])

    def _sequences(self, ring: Ring, cells: Array, length: int) -> TensorDict:
        every = (cells[:, None] + np.arange(length) * ring.B).reshape(-1)
        places = ring.places_of(every)
        index = _on(ring, places)
        entries = self._entries(ring, every, index)
        self._add_next(entries, ring, places, index)
        begins = ring.begins.reshape(-1)[places]
        entries[IS_INIT] = _on(ring, begins).unsqueeze(-1)
        shaped = {
            key: rows.reshape(len(cells), length, *rows.shape[1:]) for key, rows in entries.items()
        }
        return _tensordict(shaped, [len(cells), length])

    def _entries(self, ring: Ring, cells: Array, index: torch.Tensor) -> dict[Key, torch.Tensor]:
        """Return the columns of transitions, without next observations."""
        entries: dict[Key, torch.Tensor] = {}
        for key in self._shown:
            entries[key] = ring.of(key, index)
        entries[INDEX] = self._index_of(ring, cells)
        return entries

    def _index_of(self, ring: Ring, cells: Array) -> torch.Tensor:
        number = self._rings.index(ring) if len(self._rings) > 1 else 0
        return _on(ring, cells * len(self._rings) + number)

    def _add_next(
        self, entries: dict[Key, torch.Tensor], ring: Ring, places: Array, index: torch.Tensor
    ) -> None:
        """Add the columns of the ends of transitions at ``places``: next observations, rewards and
        flags.
        """
        for key, rows in ring.next_observations(places, index).items():
            entries[next_of(key)] = rows
        for key in self._returned:
            entries[key] = ring.of(key, index)

    def _later(self, ring: Ring, cells: Array) -> TensorDict:
        """Return the observations after a later transition of each one's episode."""
        left = (ring.last_of_episode(cells) - cells) // ring.B
        steps = (self._rng.random(len(cells)) * (left + 1)).astype(np.int64)
        places = ring.places_of(cells + steps * ring.B)
        later: dict[Key, torch.Tensor] = dict(ring.next_observations(places, _on(ring, places)))
        later[("steps",)] = _on(ring, steps).unsqueeze(-1)
        later[INDEX] = self._index_of(ring, cells + steps * ring.B)
        return _tensordict(later, [len(cells)])

    def _weights(self, numbers: Array, cells: Array, beta: float) -> torch.Tensor:
        """Return importance weights, at most 1 (Schaul et al., 2016)."""
        share = np.empty(len(cells))
        for number, priorities in enumerate(self._priorities):
            mine = np.flatnonzero(numbers == number)
            share[mine] = priorities.of(self._rings[number].places_of(cells[mine]))
        share /= sum(priorities.total for priorities in self._priorities)
        weights = (len(self) * share) ** -beta
        weights /= weights.max()
        return torch.from_numpy(weights.astype(np.float32))

    def _in_order(self, chosen: Array) -> TensorDict:
        """Return the transitions of these numbers in order of time."""
        ends = np.cumsum([ring.transitions for ring in self._rings])
        numbers = np.searchsorted(ends, chosen, side="right")
        cells = np.empty(len(chosen), np.int64)
        for number, ring in enumerate(self._rings):
            mine = np.flatnonzero(numbers == number)
            nth = chosen[mine] - (ends[number] - ring.transitions)
            if ring.num_masked:
                cells[mine] = _all_cells(ring, None)[nth]
            else:
                cells[mine] = nth + ring.lo * ring.B
        return self._gathered(numbers, cells, self._transitions)

    def _newest(self, n: int) -> TensorDict:
        """Return the newest transitions of several rings: those of the newest rows of each."""
        every = []
        first = 0
        for ring in self._rings:
            rows = (_all_cells(ring, None) // ring.B) - ring.hi
            every.append(np.stack([rows, np.arange(first, first + len(rows))]))
            first += len(rows)
        ages = np.concatenate(every, axis=1)
        order = np.lexsort((ages[1], ages[0]))[-n:]
        return self._placed(self._in_order(ages[1][order]))

    def _placed(self, batch: TensorDict) -> TensorDict:
        if self._device is None or batch["index"].device == self._device:
            return batch
        if self._pins:
            batch = batch.pin_memory()
        return batch.to(self._device, non_blocking=self._pins)

    # --- columns ----------------------------------------------------------------------------------

    def _checked(self, columns: Sequence[Column], observed: Sequence[Key]) -> list[Column]:
        """Return the columns that are stored.

        Raises:
            BadOption: a column cannot be stored, or ``keep`` names none.
        """
        known = {column.key: column for column in columns}
        needed = {*observed, *self._keep}
        for key in self._keep:
            if key not in known:
                raise BadOption(
                    f"ReplayMemory(keep=): there is no {dotted(key)}. There are"
                    f" {sorted(dotted(key) for key in known if key[0] != 'next')}"
                )
        for column in columns:
            if not column.is_tensor and column.key in needed:
                raise BadOption(
                    f"ReplayMemory stores tensors, and {dotted(column.key)} are Python objects."
                    " Use TorchRL's ReplayBuffer(storage=ListStorage(n)), or make arrays of them"
                    " in the environment"
                )
        return [column for column in columns if column.is_tensor and _is_stored(column, needed)]

    def _check_stacks(self, columns: Sequence[Column], observed: Sequence[Key]) -> None:
        """Raise ``BadOption`` if no observation is a stack of frames, and the option says so."""
        shapes = {dotted(c.key): list(c.shape) for c in columns if c.key in observed}
        if self._stack > 1 and not any(is_stack(shape, self._stack) for shape in shapes.values()):
            raise BadOption(
                f"ReplayMemory(stack={self._stack}): no observation is a stack of {self._stack} frames"
                f" in its first dimension; the shapes are {shapes}. Leave stack out"
            )

    def _rows_of(self, sizes: Sequence[int]) -> int:
        """Return the number of rows of each ring."""
        total = sum(sizes)
        if self.capacity < total:
            raise BadOption(
                f"ReplayMemory(capacity={self.capacity}) is smaller than one row of"
                f" {total} environments: a capacity of at least {total} is necessary, and of some"
                " thousand rows is usual"
            )
        return self.capacity // total

    def _check_same(self, columns: Sequence[Column], sizes: Sequence[int]) -> None:
        """Raise ``BadOption`` if rows with these columns do not fit to those that are stored."""
        ring = self._rings[0]
        have = {column.key: (column.shape, column.dtype) for column in ring.columns}
        given = {column.key: (column.shape, column.dtype) for column in columns}
        here = [ring.B for ring in self._rings]
        if have == given and here == list(sizes):
            return
        differing = sorted(
            dotted(key) for key in {*have, *given} if have.get(key) != given.get(key)
        )
        raise BadOption(
            f"this ReplayMemory has transitions of {here} environments, and the collector has"
            f" {list(sizes)}; columns that differ: {differing}. Use a memory of its own"
        )


def _described(column: Column) -> list[Any]:
    """Return a column as JSON has it."""
    shape = list(column.shape)
    return [list(column.key), shape, column.dtype.str, column.carry, column.trailing, column.hidden]


def _column(described: Sequence[Any]) -> Column:
    key, shape, dtype, carry, trailing, hidden = described
    return Column(
        tuple(key),
        tuple(shape),
        np.dtype(dtype),
        carry=carry,
        trailing=trailing,
        hidden=hidden,
    )


class _Drawn(NamedTuple):
    """Drawn cells.

    Attributes:
        numbers: numbers of their rings, ``[n]``.
        cells: the cells, ``[n]``.
        weights: importance weights, ``[n]``; None: there are no priorities.
        rings, lo: the rings, and their first readable rows, when they were drawn.
    """

    numbers: Array
    cells: Array
    weights: torch.Tensor | None
    rings: Sequence[Ring]
    lo: Sequence[int]


class _Sample(NamedTuple):
    """A sample, and the later transitions for ``relabel``; None: they are not needed."""

    batch: TensorDict
    later: TensorDict | None


class _InSequence:
    """The condition that a sequence begins with a cell."""

    def __init__(self, length: int, across_episodes: bool) -> None:
        self.length = length
        self._across = across_episodes

    def holds(self, ring: Ring, cells: Array) -> Array:
        fine = np.ones(len(cells), bool)
        for k in range(1, self.length):
            later = cells + k * ring.B
            if self._across:
                fine &= later < ring.hi * ring.B
                fine &= ring.is_transition(ring.places_of(later))
            else:
                fine &= ring.continues(cells, later)
        return fine


def _fulfils(ring: Ring, cells: Array, condition: _InSequence | None) -> Array:
    """Return which of the readable cells are transitions that fulfil a condition."""
    fine = ring.is_transition(ring.places_of(cells))
    if condition is not None:
        fine &= condition.holds(ring, cells)
    return fine


def _all_cells(ring: Ring, condition: _InSequence | None) -> Array:
    """Return all readable cells of transitions that fulfil a condition."""
    cells = np.arange(ring.lo * ring.B, ring.hi * ring.B)
    return cells[_fulfils(ring, cells, condition)]


def _no_sequence(condition: _InSequence | None) -> NothingToSample:
    length = 1 if condition is None else condition.length
    return NothingToSample(
        f"ReplayMemory.sample(sequence={length}): no episode has so many consecutive transitions"
        " yet. Collect more, shorten the sequences, or allow them to continue in the next episode"
        " (across_episodes=True)"
    )


def _numbers(index: Any, size: int) -> Array:
    """Return the numbers, from 0 on, of what ``index`` means in a sequence of this size."""
    if isinstance(index, slice):
        return np.arange(*index.indices(size))
    chosen = np.atleast_1d(_host(index))
    if chosen.dtype == bool:
        if len(chosen) != size:
            raise IndexError(
                f"a mask of {len(chosen)} entries, and ReplayMemory has {size} transitions"
            )
        return np.flatnonzero(chosen)
    if not len(chosen):
        return np.empty(0, np.int64)
    if chosen.dtype.kind not in "iu":
        raise IndexError(f"ReplayMemory[{index}]: expected integers, a slice or a mask")
    if not (-size <= chosen.min() and chosen.max() < size):
        raise IndexError(f"ReplayMemory has {size} transitions, and no number {index}")
    return chosen.astype(np.int64) % size


def _is_reward(key: Key) -> bool:
    return key[0] == "next" and key[-1] == "reward"


def _is_action(key: Key) -> bool:
    return key[-1] == "action" and key[0] not in ("next", "collector")


def _is_stored(column: Column, needed: Collection[Key]) -> bool:
    """Return whether samples have a column: ``needed``, actions, and what a step returns."""
    if column.key in needed or _is_action(column.key):
        return True
    is_flag = column.key in map(next_of, FLAGS)
    return column.key[0] == "next" and (is_flag or not column.hidden)


def _on(ring: Ring, values: Array) -> torch.Tensor:
    tensor = torch.from_numpy(values)
    return tensor if ring.device is None else tensor.to(ring.device)


def _host(values: Any) -> Array:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().numpy()
    return np.asarray(values)


def _tensordict(entries: Mapping[Key, torch.Tensor], shape: Sequence[int]) -> TensorDict:
    """Return a TensorDict of leaves with nested keys."""
    return _made(nested(entries), tensordict_maker(), torch.Size(shape))


def _made(entries: Mapping[str, Any], make: Any, size: torch.Size) -> TensorDict:
    leaves = {
        name: _made(value, make, size) if isinstance(value, dict) else value
        for name, value in entries.items()
    }
    made: TensorDict = make(leaves, batch_size=size, names=None, device=None)
    return made
