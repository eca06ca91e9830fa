"""``ReplayMemory``: the transitions that collectors write, and off-policy learners sample."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import torch

from muster.errors import BadCheckpoint, BadOption, NothingToSample
from muster.keys import Key, dotted
from muster.memory.gathering import WEIGHT, Gathering
from muster.memory.replay_files import UNREADABLE, Loaded, MemoryFiles, Snapshot
from muster.memory.ring import AddRow, Ring
from muster.memory.sample_arrays import SampleArrays
from muster.memory.sampler import Drawn, InSequence, Make, Sampler, nothing_yet
from muster.memory.saved_rows import SavedRows
from muster.memory.specs import Array, Column
from muster.memory.stored_columns import StoredColumns, check_same, column_of, described
from muster.utils.devices import device_of
from muster.utils.integers import finite, integer

if TYPE_CHECKING:
    from tensordict import TensorDict

ITERATED = 1024  # transitions that an iterator reads at once
# Drawn cells, before they are read: what has drawn them, the cells, their importance weights (None:
# there are no priorities), and how many steps later the later transitions are (None: they were not
# requested). No class, since one is made for every sample.
_Draft: TypeAlias = "tuple[Sampler, Drawn, torch.Tensor | None, Array | None]"
# likewise: the transitions, their weights, and the later transitions
_Sample: TypeAlias = "tuple[TensorDict, torch.Tensor | None, TensorDict | None]"
GATHERINGS = 3  # without the lock, before one with it

Relabel = Callable[["TensorDict", "TensorDict"], "TensorDict | None"]


class LateRows(Protocol):
    """Rows that a collector has made, and that are written before the memory is read."""

    def write(self) -> None:
        """Write those that are complete, with the memory's lock, in any thread."""


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
            or a recurrent state; a key of a nested TensorDict stands for all below it. None of them
            is stored twice.
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
        if alpha is not None:
            alpha = finite("alpha", alpha, 0.0, of="ReplayMemory")
        self.capacity = integer("capacity", capacity, of="ReplayMemory")
        frames = integer("stack", stack, of="ReplayMemory")
        self._arrays = SampleArrays()
        self._stored = StoredColumns(self.capacity, _keys(keep), frames, self._arrays)
        self._device = None
        if device is not None:
            self._device = device_of("ReplayMemory: device", device)
            if self._device.type == "meta":
                raise BadOption(
                    'ReplayMemory(device="meta"): tensors there have no values'
                )
        if pin_memory and (self._device is None or self._device.type != "cuda"):
            raise BadOption(
                f"ReplayMemory(pin_memory={pin_memory!r}, device={device!r}): samples are copied"
                " through pinned memory to a CUDA device only; name one as device, or leave"
                " pin_memory out"
            )
        self._pins = pin_memory
        self._alpha = alpha
        if seed is not None:
            seed = integer("seed", seed, 0, of="ReplayMemory")
        self._rng = np.random.default_rng(seed)
        self._sampler: Sampler | None = None
        # rows of one collector that may not be written yet; all methods write them first
        self.owed: LateRows | None = None
        self._files = MemoryFiles()
        # Held while rows become readable, and while cells are drawn; never while an environment or
        # policy runs. Rows are read without it, and once more if they were dropped meanwhile: a
        # collector that waited for each sample would lose half of its speed.
        self.lock = threading.RLock()
        # held while the memory is saved, and while it is replaced: a save is of one memory
        self._saving = threading.Lock()

    def __len__(self) -> int:
        with self.lock:  # rows are written in several steps
            self.catch_up()
            return 0 if self._sampler is None else len(self._sampler)

    def __repr__(self) -> str:
        size = "nothing written yet"
        if self._sampler is not None:
            size = f"{self.nbytes / 1e6:,.1f} MB"
        return f"ReplayMemory({len(self):,} of {self.capacity:,} transitions, {size})"

    def __reduce__(self) -> Any:
        """Raise ``BadOption``: a copy would not get what collectors write."""
        raise BadOption(
            "a ReplayMemory can be neither pickled nor deep-copied: collectors write to this one."
            " For a copy of what is in it, use save and load, or state_dict and load_state_dict"
        )

    @property
    def nbytes(self) -> int:
        """Size of what was written, in bytes."""
        self.catch_up()
        return sum(ring.nbytes for ring in self.rings)

    # --- writing ----------------------------------------------------------------------------------

    @property
    def rings(self) -> Sequence[Ring]:
        """The rings, which collectors write; none before ``open``."""
        return [] if self._sampler is None else self._sampler.rings

    def open(
        self,
        columns: Sequence[Column],
        sizes: Sequence[int],
        margin: int,
        device: torch.device | None = None,
    ) -> None:
        """Prepare for rows with these columns; a collector calls it. A memory that is open already
        goes on if the new rows fit.

        Args:
            columns: columns of the rows, with their roles.
            sizes: number of environments of each ring.
            margin: number of rows that are written at once, at most.
            device: where the rows are; None: in host memory.

        Raises:
            BadOption: the memory is too small, has rows of another shape, or cannot store a column.
        """
        stored = self._stored.of(columns)
        self._stored.rows_of(sizes)
        if self._sampler is not None:
            check_same(self._sampler.rings, stored, sizes)
            return
        self._stored.check_stacks(stored)
        self._sampler = self._sampler_of(
            self._stored.rings(stored, sizes, margin, device)
        )

    def owe(self, rows: LateRows) -> None:
        """Write further rows late: before the memory is read, and before anything else is written. A
        collector calls it; ``owed`` are these rows until then.
        """
        with self.lock:
            if self.owed is not rows:
                self.catch_up()
            self.owed = rows

    def catch_up(self) -> None:
        """Write the rows that are late, before others are read or written."""
        if self.owed is None:
            return
        with self.lock:
            rows = self.owed
            if rows is None:
                return
            rows.write()
            self.owed = None
            # those that another thread has added meanwhile; further ones are owed again
            rows.write()

    def row_adder(self, number: int) -> AddRow:
        """Return what makes the next row of a ring readable; see ``Ring.add_row``. A collector calls
        it with the lock, as long as ``rings`` are the same.
        """
        assert self._sampler is not None
        return self._sampler.row_adder(number)

    def write(
        self, number: int, rows: Mapping[Key, Any], last: Mapping[Key, Any], **ends: Any
    ) -> None:
        """Write the next rows of a ring; see ``Ring.write``. A collector calls it."""
        assert self._sampler is not None
        with self.lock:
            self._sampler.write(number, rows, last, **ends)

    def clear(self) -> None:
        """Drop all transitions. Collectors go on writing."""
        with self.lock:
            self.catch_up()
            self._arrays.forget()
            if self._sampler is not None:
                self._sampler.clear()

    def _sampler_of(self, rings: Sequence[Ring]) -> Sampler:
        return Sampler(rings, self._stored.keep, self._alpha, self._rng, self._arrays)

    # --- saving -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return copies of everything as plain data: dicts, lists, numbers, texts and tensors in host
        memory. For a large memory, ``save`` takes less memory and time.

        Raises:
            NothingToSample: no collector has written to the memory yet.
        """
        with self.lock:
            self.catch_up()
            now = self._snapshot()
            saving = [SavedRows(ring) for ring in self.rings]
            rows = [
                each.rows(each.kept, hi)
                for each, (_, hi) in zip(saving, now.spans, strict=True)
            ]
        return {
            "about": now.about,
            "rings": [
                {"lo": lo, "hi": hi, "rows": mine, "newest": newest}
                for (lo, hi), mine, newest in zip(
                    now.spans, rows, now.newest, strict=True
                )
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict()``: what was in the memory is dropped. The next samples are those that
        would have come then, if the memory has the same capacity and ``alpha``; with a smaller
        capacity, the oldest transitions are left out.

        Raises:
            BadCheckpoint: it is no such state, or of a memory for other environments or options.
        """
        try:
            rings = self._made_for(state["about"])
            spans = []
            for ring, saved in zip(rings, state["rings"], strict=True):
                span = saved["lo"], saved["hi"]
                first = max(0, span[0] - ring.reach)
                found = len(saved["rows"]["episodes"])
                if span[1] - first != found:
                    raise ValueError(
                        f"rows {first} to {span[1]}, and {found} are there"
                    )
                SavedRows(ring).put(first, saved["rows"], *span)
                spans.append(span)
            newest = [saved["newest"] for saved in state["rings"]]
            loaded = Loaded(
                rings, state["about"], spans, newest, [lo for lo, _ in spans]
            )
            with self._saving:
                self._restore(loaded)
                self._files = MemoryFiles()
        except UNREADABLE as error:
            if isinstance(error, BadCheckpoint):
                raise
            raise BadCheckpoint(
                f"this is no state of a ReplayMemory: {error!r}"
            ) from error

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Save everything in a directory, which is made if it is missing. Rows that it has already are
        not written again, so saving often costs little. Collectors may go on writing meanwhile.

        After a crash at any moment the directory has the complete old or new memory. Only one process
        may save in a directory at a time.

        Raises:
            NothingToSample: no collector has written to the memory yet.
            FileError: a file cannot be written. The directory has what it had.
        """
        with self._saving:
            self.catch_up()
            self._files.save(Path(directory), self.rings, self.lock, self._snapshot)

    def load(self, directory: str | os.PathLike[str]) -> None:
        """Load what ``save`` has saved; see ``load_state_dict``.

        A collector that writes to the memory then continues its trajectories if its environments are
        where they were: by their ``traj_ids``, number of steps and observations.

        Raises:
            BadCheckpoint: a file is missing or damaged, or the memory was for other environments or
                options. This memory is unchanged.
        """
        files = MemoryFiles()
        with self._saving:
            loaded = files.load(Path(directory), self._made_for)
            try:
                self._restore(loaded)
            except UNREADABLE as error:
                raise BadCheckpoint(
                    f"the ReplayMemory saved in {directory} cannot be restored: {error}"
                ) from error
            self._files = files

    def _snapshot(self) -> Snapshot:
        sampler = self._sampler
        if sampler is None:
            raise NothingToSample(
                "ReplayMemory: there is nothing to save before a collector has written to it"
            )
        newest = []
        for number, ring in enumerate(sampler.rings):
            mine = SavedRows(ring).newest()
            if sampler.priorities:
                priorities = sampler.priorities[number]
                mine["powers"] = torch.from_numpy(
                    priorities.of(sampler.places(number)).copy()
                )
                mine["largest"] = torch.tensor(
                    [priorities.largest], dtype=torch.float64
                )
            newest.append(mine)
        ring = sampler.rings[0]
        about = {
            "columns": [described(column) for column in ring.stored.columns],
            "sizes": [ring.B for ring in sampler.rings],
            "margin": ring.margin,
            "alpha": self._alpha,
            "stack": self._stored.stack,
            "generator": json.dumps(self._rng.bit_generator.state),
        }
        return Snapshot(about, [(ring.lo, ring.hi) for ring in sampler.rings], newest)

    def _made_for(self, about: Mapping[str, Any]) -> list[Ring]:
        """Return empty rings for saved rows.

        Raises:
            BadCheckpoint: they are of a memory for other environments or options.
        """
        try:
            columns = [column_of(column) for column in about["columns"]]
            stack = self._stored.stack
            if (about["alpha"] is None) != (self._alpha is None):
                raise BadOption(
                    f"it has alpha={about['alpha']}, and this one alpha={self._alpha}: make the memory"
                    " with priorities or without, as it was"
                )
            if about["stack"] != stack:
                raise BadOption(
                    f"it has stack={about['stack']}, and this one stack={stack}"
                )
            stored = self._stored.of(columns)
            if len(stored) < len(columns):
                kept = {column.key for column in stored}
                more = sorted(dotted(c.key) for c in columns if c.key not in kept)
                raise BadOption(f"it has {more}, too: name them in keep")
            sizes = list(about["sizes"])
            device = None
            if self._sampler is not None:
                check_same(self._sampler.rings, stored, sizes)
                device = self._sampler.rings[0].stored.device
            margin = integer("margin", about["margin"], of="ReplayMemory")
            return self._stored.rings(stored, sizes, margin, device)
        except BadOption as error:
            raise BadCheckpoint(
                f"the saved ReplayMemory does not fit to this one: {error}"
            ) from error

    def _restore(self, loaded: Loaded) -> None:
        """Replace the rings and all that belongs to them."""
        for ring, (lo, hi), newest in zip(
            loaded.rings, loaded.spans, loaded.newest, strict=True
        ):
            SavedRows(ring).restore(lo, hi, newest)
        sampler = self._sampler_of(loaded.rings)
        for number, priorities in enumerate(sampler.priorities):
            ring = loaded.rings[number]
            newest = loaded.newest[number]
            first = ring.lo - loaded.powers_from[number]
            powers = newest["powers"].numpy()[first * ring.B :]
            largest = float(newest["largest"][0])
            places = sampler.places(number)
            priorities.restore(largest, places, powers, loaded.about["alpha"])
        generator = json.loads(loaded.about["generator"])
        with self.lock:
            self.catch_up()
            # last, since it fails for what is no such state
            self._rng.bit_generator.state = generator
            self._sampler = sampler

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
                value of the next observation, and ``steps_to_next_obs`` the number of steps. Groups
                of agents that end one by one have both of their own.
            gamma: discount factor for ``n_step``, from 0 to 1.
            sequence: draw sequences of so many consecutive transitions of one environment instead,
                ``[n, sequence]``. For burn-in, make them longer, and use the first steps for the
                state only; a recurrent state named in ``keep`` is that of when they were collected.
            across_episodes: a sequence may contain the beginning of another episode; ``is_init``
                marks it. False: it is from one episode. ``is_init`` is True at the first step of an
                episode of the environment only, whatever was dropped from the memory.
            beta: exponent of the weights that correct for priorities, at least 0; see ``alpha``.
            relabel: called with the sample and a later transition of each one's episode
                (hindsight: Andrychowicz et al., 2017), and returns the sample, changed or not. The
                second TensorDict has the observations after that transition under the keys of
                observations, and ``steps``: how many steps later it is. Not with ``n_step`` or
                ``sequence``.

        Returns:
            ``[n]``: the observations, ``action``, what ``keep`` names, ``("next", ...)`` of the
            observations, ``reward``, ``done``, ``terminated`` and ``truncated``, and ``index``, for
            ``update_priority``. With priorities, also ``weight``. Rewards and flags have shape
            ``[n, 1]``. To bootstrap, multiply the value of the next observation by ``~terminated``.

        Raises:
            NothingToSample: there is no transition or sequence yet.
            BadOption: an argument has an impossible value, also a sequence that is longer than what
                the memory keeps.
        """
        make: Make = Gathering.transitions
        condition: InSequence | None = None
        if type(gamma) is not float or not 0.0 <= gamma <= 1.0:
            gamma = _discount(gamma)
        if type(n_step) is not int or n_step != 1 or sequence is not None:
            make, condition = _as_asked(n_step, gamma, sequence, across_episodes)
        if across_episodes and sequence is None:
            raise BadOption(
                f"sample(across_episodes={across_episodes!r}): it is for sequences; name their length"
                " with sequence, or leave it out"
            )
        if type(n) is not int or n < 1:
            n = integer("n", n, of="sample")
        if sequence is not None and relabel is not None:
            raise BadOption(
                "sample: relabel is for single transitions; leave sequence out"
            )
        if n_step > 1 and relabel is not None:
            raise BadOption(
                "sample: relabel is for transitions of one step, since their rewards can be computed"
                f" again, and n_step={n_step} has sums only; leave n_step out, or sample a sequence"
                " and compute the rewards of its steps"
            )
        if relabel is not None and not callable(relabel):
            raise BadOption(
                f"sample(relabel={relabel!r}): expected a function, or None"
            )
        if type(beta) is not float or not 0.0 <= beta < math.inf:
            beta = finite("beta", beta, 0.0, of="sample")
        made = self._sampled(n, make, condition, beta, with_later=relabel is not None)
        batch, weights, later = made
        if relabel is not None and later is not None:
            batch = _relabelled(relabel, batch, later)
        if weights is not None:
            if sequence is not None:
                weights = weights.unsqueeze(-1).repeat(1, sequence)
            batch.set(WEIGHT, weights)
        if self._device is None:
            return batch
        return self._placed(batch, from_user=relabel is not None)

    def newest(self, n: int) -> TensorDict:
        """Return the newest transitions, as ``sample`` does, in order of time; fewer if there are
        not so many.

        With several environments, those of a row follow each other.
        """
        n = integer("n", n, of="newest")
        with self.lock:
            self.catch_up()
            if self._sampler is None or not len(self):
                raise NothingToSample(
                    "ReplayMemory.newest: there are no transitions yet"
                )
            return self._in_order(self._sampler, self._sampler.newest(n))

    def __getitem__(
        self, index: int | slice | Sequence[int] | Array | torch.Tensor
    ) -> TensorDict:
        """Return transitions by their place in order of time, from 0 to ``len(memory) - 1``: one,
        or several, as ``sample`` does.

        With several rings, those of one follow those of another.

        Raises:
            IndexError: there is no such transition.
            NothingToSample: no collector has written to the memory yet, so its keys are not known.
        """
        with self.lock:
            chosen = _numbers(index, len(self))
            if self._sampler is None:
                raise NothingToSample(
                    "ReplayMemory[...]: no collector has written to it yet"
                )
            batch = self._in_order(self._sampler, chosen)
        is_one = not isinstance(index, slice) and _host(index).ndim == 0
        return batch[0] if is_one else batch

    def __iter__(self) -> Iterator[TensorDict]:
        """Return an iterator over all transitions that are there now, oldest first, one by one.

        Those that are overwritten before the iterator comes to them are left out.
        """
        self.catch_up()
        sampler = self._sampler
        if sampler is None:
            return
        with self.lock:
            every = [
                (number, ring.lo, ring.hi) for number, ring in enumerate(sampler.rings)
            ]
        for number, lo, hi in every:
            step = max(1, ITERATED // sampler.rings[number].B)
            for first in range(lo, hi, step):
                with self.lock:
                    end = min(first + step, hi)
                    batch = self._placed(
                        sampler.transitions_between(number, first, end)
                    )
                yield from batch.unbind(0)

    # --- priorities -------------------------------------------------------------------------------

    def update_priority(
        self, index: torch.Tensor | Array | Sequence[int], priority: Any
    ) -> None:
        """Set priorities of sampled transitions; those that were dropped since are ignored.

        Args:
            index: ``batch["index"]``, ``[n]`` or ``[n, sequence]``.
            priority: one for each, or one for all; finite and at least 0. Temporal-difference
                errors, usually: their absolute values.

        Raises:
            BadOption: the memory has no ``alpha``, a priority is negative or not finite, or no
                transition has had such an index yet. Nothing was set.
        """
        if self._alpha is None:
            raise BadOption(
                "update_priority: this memory samples uniformly. Make it with priorities:"
                " ReplayMemory(..., alpha=0.6)"
            )
        numbers = _of_priority("index", index, np.int64)
        values = _of_priority("priority", priority, np.float64)
        if not _pair(numbers, values):
            raise BadOption(
                f"update_priority: transitions of shape {list(numbers.shape)} and priorities of shape"
                f" {list(values.shape)}; give one for each, or one for all"
            )
        numbers = numbers.reshape(-1)
        values = np.broadcast_to(values.reshape(-1), numbers.shape)
        with np.errstate(over="ignore"):
            most = np.abs(values) ** self._alpha * len(self)  # at most the sum of all
        is_finite = np.isfinite(values).all() and np.isfinite(most).all()
        if not is_finite or (values < 0).any():
            raise BadOption(
                "update_priority: priorities, and the sum of their powers priority ** alpha, have to"
                f" be finite, and at least 0; these are between {values.min()} and {values.max()}"
            )
        with self.lock:
            self.catch_up()
            if self._sampler is not None:
                self._sampler.update_priority(numbers, values)

    # --- parts of ``sample`` ----------------------------------------------------------------------

    def _sampled(
        self,
        n: int,
        make: Make,
        condition: InSequence | None,
        beta: float,
        *,
        with_later: bool,
    ) -> _Sample:
        """Draw cells with the lock, and read them without; again if some were dropped meanwhile."""
        if self.owed is not None:
            self.catch_up()
        lock = self.lock
        for _ in range(GATHERINGS):
            with lock:
                draft = self._draw(n, condition, beta, with_later=with_later)
            sample = _read(draft, make)
            sampler, drawn, _, _ = draft
            with lock:
                if sampler is self._sampler and sampler.is_there(drawn):
                    return sample
        with lock:
            draft = self._draw(n, condition, beta, with_later=with_later)
            return _read(draft, make)

    def _draw(
        self, n: int, condition: InSequence | None, beta: float, *, with_later: bool
    ) -> _Draft:
        """Draw cells, and all that has to be drawn or known with them. With the lock.

        Raises:
            NothingToSample: there are none.
        """
        sampler = self._sampler
        if sampler is None:
            raise nothing_yet()
        drawn = sampler.draw(n, condition)
        weights = None
        later = None
        if sampler.priorities:
            weights = sampler.weights(drawn, beta)
        if with_later:
            later = sampler.later_steps(drawn)
        return sampler, drawn, weights, later

    def _in_order(self, sampler: Sampler, chosen: Array) -> TensorDict:
        """Return the transitions of these numbers in order of time. With the lock."""
        return self._placed(
            sampler.gathered(sampler.in_order(chosen), Gathering.transitions)
        )

    def _placed(self, batch: TensorDict, *, from_user: bool = False) -> TensorDict:
        if self._device is None:
            return batch
        # ``relabel`` may put some elsewhere, and leave out others
        leaves = batch.values(True, True) if from_user else [batch["index"]]
        devices = {leaf.device for leaf in leaves}
        if devices == {self._device}:
            return batch
        pins = self._pins and {device.type for device in devices} == {"cpu"}
        if pins:
            batch = batch.pin_memory()
        return batch.to(self._device, non_blocking=pins)


def _read(draft: _Draft, make: Make) -> _Sample:
    """Read drawn cells. Without the lock, what is read may have been overwritten meanwhile: see
    ``Sampler.is_there``.
    """
    sampler, drawn, weights, steps = draft
    batch = sampler.gathered(drawn, make)
    if weights is not None:
        weights = weights.to(batch["index"].device)
    later = None
    if steps is not None:
        later = sampler.later(drawn, steps)
    return batch, weights, later


def _discount(gamma: Any) -> float:
    """Return ``gamma`` as a number from 0 to 1."""
    found = finite("gamma", gamma, 0.0, of="sample")
    if found > 1:
        raise BadOption(f"sample(gamma={gamma!r}): expected a number from 0 to 1")
    return found


def _as_asked(
    n_step: int, gamma: float, sequence: int | None, across_episodes: bool
) -> tuple[Make, InSequence | None]:
    """Return what makes a sample of cells, and the condition for them."""
    n_step = integer("n_step", n_step, of="sample")
    if sequence is None:
        return partial(Gathering.n_step, n_step=n_step, gamma=gamma), None
    length = integer("sequence", sequence, of="sample")
    if n_step > 1:
        raise BadOption(
            f"sample(sequence={sequence}, n_step={n_step}): the steps of a sequence are there"
            " one by one; leave n_step out"
        )
    return partial(Gathering.sequences, length=length), InSequence(
        length, across_episodes
    )


def _relabelled(relabel: Relabel, batch: TensorDict, later: TensorDict) -> TensorDict:
    """Return what the user's function has made of a sample."""
    size = batch.batch_size
    given = relabel(batch, later)
    if given is None:
        return batch
    found = getattr(given, "batch_size", None)
    if found != size:
        raise BadOption(
            f"sample(relabel=...): the function returned a {type(given).__name__}"
            f"{'' if found is None else f' of {list(found)}'}; expected the TensorDict that it got,"
            f" of {list(size)}, changed or not, or None"
        )
    if given is later:
        raise BadOption(
            "sample(relabel=...): the function returned its second argument, the later transitions;"
            " expected the first one, the sample, changed or not, or None"
        )
    return given.clone(recurse=False) if given.is_locked else given


def _numbers(index: Any, size: int) -> Array:
    """Return the numbers, from 0 on, of what ``index`` means in a sequence of this size."""
    if isinstance(index, slice):
        return np.arange(*index.indices(size))
    chosen = np.atleast_1d(_host(index))
    if chosen.size != len(chosen):
        raise IndexError(
            f"ReplayMemory[...]: the index has shape {chosen.shape}; expected one dimension"
        )
    chosen = chosen.reshape(-1)
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


def _host(values: Any) -> Array:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        if values.dtype == torch.bfloat16:  # which NumPy lacks
            values = values.float()
        values = values.numpy()
    return np.asarray(values)


def _keys(keep: Any) -> list[Key]:
    """Return the keys in an argument ``keep``."""
    found: list[Key] = []
    is_list = isinstance(keep, Iterable) and not isinstance(keep, (str, bytes))
    for key in keep if is_list else [None]:
        parts = key if isinstance(key, tuple) else (key,)
        if not parts or not all(isinstance(part, str) for part in parts):
            raise BadOption(
                f"ReplayMemory(keep={keep!r}): expected a list of keys, each a text or a tuple of"
                " texts"
            )
        found.append(parts)
    return found


def _pair(numbers: Array, values: Array) -> bool:
    """Return whether there is a value for each number, or one for all."""
    if values.size == 1:
        return True
    # without dimensions of size 1: [n, 1] is usual for a column of errors
    shapes = [[n for n in each.shape if n != 1] for each in (numbers, values)]
    is_flat = min(map(len, shapes)) <= 1
    return numbers.size == values.size and (is_flat or shapes[0] == shapes[1])


def _of_priority(what: str, values: Any, dtype: Any) -> Array:
    """Return an argument of ``update_priority`` as an array."""
    try:
        found = _host(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadOption(f"update_priority: {what}={values!r}: {error}") from error
    kinds = "iu"
    expected = 'integers, as batch["index"] has'
    if dtype is np.float64:
        kinds = "iufb"
        expected = "numbers"
    if found.size and found.dtype.kind not in kinds:
        raise BadOption(
            f"update_priority: {what} has dtype {found.dtype}; expected {expected}"
        )
    return found.astype(dtype)
