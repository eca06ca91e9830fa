"""``ReplayMemory`` by itself, against a list of all rows that were written to it."""

from __future__ import annotations

import copy
import itertools
import pickle
import sys
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from muster import ReplayMemory
from muster.errors import BadCheckpoint, BadOption, FileError, NothingToSample
from muster.memory import native, replay_files, sample_arrays
from muster.memory.specs import OBJECT, Column
from tests.tools import files_limited_to

OBS = ("observation",)
PLACE = ("pixels", "place")
STATE = ("recurrent_state",)
EXTRA = ("extra",)
REWARD = ("next", "reward")
FLAGS = ("done", "terminated", "truncated")
F32 = np.dtype(np.float32)
COLUMNS = [
    Column(OBS, (2,), F32, carry=True, role="observation"),
    Column(PLACE, (), np.dtype(np.int64), carry=True, role="observation"),
    Column(STATE, (3,), F32, carry=True),
    Column(("action",), (), np.dtype(np.int64), role="action"),
    Column(EXTRA, (2,), F32),
    Column(REWARD, (), F32, trailing=True, role="reward"),
    *(Column(("next", flag), (), np.dtype(bool), trailing=True) for flag in FLAGS),
    *(Column((flag,), (), np.dtype(bool), trailing=True) for flag in FLAGS),
    Column(("collector", "traj_ids"), (), np.dtype(np.int64)),
]


@dataclass
class Cell:
    """One transition, with numbers for the observations."""

    obs: int
    after: int
    reward: float
    terminated: bool
    truncated: bool
    valid: bool
    chain: int  # the same in what can be one sequence
    begins: bool
    breaks: bool

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated


class Written:
    """Writes a memory as collectors do, and remembers everything.

    Every observation has a number of its own, so that no wrong pairing is equal to a right one.
    """

    columns = COLUMNS

    def __init__(
        self, memory: ReplayMemory, sizes: list[int], margin: int, seed: int
    ) -> None:
        self.memory = memory
        self.sizes = sizes
        self.rng = np.random.default_rng(seed)
        self.cells: list[list[list[Cell]]] = [
            [] for _ in sizes
        ]  # by ring, row, environment
        self.first = [0] * len(sizes)  # rows before it are cleared
        self.count = 0
        self.now = [[self.new() for _ in range(size)] for size in sizes]
        self.chain = [[self.new() for _ in range(size)] for size in sizes]
        self.fresh = [[True] * size for size in sizes]
        self.breaks = [[False] * size for size in sizes]
        memory.open(self.columns, sizes, margin)

    def new(self, before: int | None = None) -> int:
        """Return the number of another observation, which may follow one."""
        self.count += 1
        return self.count

    def see(self, numbers: Any) -> Any:
        """Return the observations with these numbers."""
        return pair(numbers)

    def observed(self, numbers: Any) -> dict[Any, Any]:
        return {OBS: self.see(numbers), PLACE: numbers}

    def carried(self, numbers: Any) -> dict[Any, Any]:
        return {**self.observed(numbers), STATE: state(numbers)}

    def write(
        self, ring: int, rows: int, *, ends: float = 0.2, gaps: float = 0.0
    ) -> None:
        while rows > 0:
            n = min(rows, self.memory.rings[ring].room)
            self._write(ring, n, ends, gaps)
            rows -= n

    def _write(self, ring: int, n: int, ends: float, gaps: float) -> None:
        B = self.sizes[ring]
        made = [
            [self._cell(ring, env, ends, gaps) for env in range(B)] for _ in range(n)
        ]
        self.cells[ring] += made
        finals = [
            cell.after for row in made for cell in row if cell.done and cell.valid
        ]
        done = each(made, "done", bool)
        valid = each(made, "valid", bool)
        obs = each(made, "obs", np.int64)
        rows = {
            **self.carried(obs),
            ("action",): obs * 7,
            EXTRA: pair(obs),
            REWARD: each(made, "reward"),
        }
        rows = {**rows, ("next", "done"): done}
        for flag in FLAGS[1:]:
            rows[("next", flag)] = each(made, flag, bool)
        stored = {column.key for column in self.memory.rings[ring].stored.columns}
        last = self.carried(np.array(self.now[ring]))
        self.memory.write(
            ring,
            {key: values for key, values in rows.items() if key in stored},
            {key: values for key, values in last.items() if key in stored},
            done=done if done.any() else None,
            finals=self.observed(np.array(finals, np.int64)) if finals else None,
            valid=None if valid.all() else valid,
        )

    def _cell(self, ring: int, env: int, ends: float, gaps: float) -> Cell:
        over = self.rng.random() < ends
        kind = int(self.rng.integers(3))
        cell = Cell(
            obs=self.now[ring][env],
            after=self.new(self.now[ring][env]),
            reward=float(self.rng.integers(1, 100)),
            terminated=over and kind != 1,
            truncated=over and kind != 0,
            valid=self.rng.random() >= gaps,
            chain=self.chain[ring][env],
            begins=self.fresh[ring][env],
            breaks=self.breaks[ring][env],
        )
        self.now[ring][env] = self.new() if over else cell.after
        self.fresh[ring][env] = over
        self.breaks[ring][env] = False
        if over or not cell.valid:
            self.chain[ring][env] = self.new()
        return cell

    def jump(self, ring: int, envs: list[int]) -> None:
        """Other observations follow: of the first step of an episode, or of a later one."""
        there = self.memory.rings[ring]
        steps = np.full(there.B, 9)
        follows = np.ones(there.B, bool)
        for env in envs:
            steps[env] = self.rng.choice([0, 7])
            follows[env] = False
            self.now[ring][env] = self.new()
            self.chain[ring][env] = self.new()
            self.fresh[ring][env] = steps[env] == 0
            self.breaks[ring][env] = steps[env] > 0
        there.follow(there.ids.copy(), steps, follows)

    def clear(self) -> None:
        self.memory.clear()
        for ring, B in enumerate(self.sizes):
            self.first[ring] = len(self.cells[ring])
            self.chain[ring] = [self.new() for _ in range(B)]

    def readable(self, ring: int) -> range:
        rows = self.memory.capacity // sum(self.sizes)
        hi = len(self.cells[ring])
        return range(max(self.first[ring], hi - rows), hi)

    def expected(self) -> list[tuple[int, int, int]]:
        """Ring, row and environment of every transition, in the order of ``memory[i]``."""
        return [
            (ring, row, env)
            for ring, B in enumerate(self.sizes)
            for row in self.readable(ring)
            for env in range(B)
            if self.cells[ring][row][env].valid
        ]

    def index_of(self, place: tuple[int, int, int]) -> int:
        ring, row, env = place
        return (row * self.sizes[ring] + env) * len(self.sizes) + ring

    def places_of(self, index: torch.Tensor) -> list[tuple[int, int, int]]:
        found = []
        for number in index.reshape(-1).tolist():
            cell, ring = divmod(number, len(self.sizes))
            found.append((ring, *divmod(cell, self.sizes[ring])))
        return found

    def at(self, place: tuple[int, int, int]) -> Cell:
        ring, row, env = place
        return self.cells[ring][row][env]

    def run(self, place: tuple[int, int, int], most: int) -> list[Cell]:
        """The transition and those that follow it in its episode."""
        ring, row, env = place
        found = [self.at(place)]
        while len(found) < most and row + len(found) < len(self.cells[ring]):
            later = self.at((ring, row + len(found), env))
            if later.chain != found[0].chain or not later.valid:
                break
            found.append(later)
        return found

    def check(self, batch: Any) -> list[Cell]:
        """Every transition of the batch is one that is in the memory now, with all its values."""
        places = self.places_of(batch["index"])
        there = set(self.expected())
        assert set(places) <= there
        cells = [self.at(place) for place in places]
        check_rows(self, batch.reshape(-1), cells)
        return cells


def each(made: list[list[Cell]], name: str, dtype: Any = np.float32) -> Any:
    return np.array([[getattr(cell, name) for cell in row] for row in made], dtype)


def pair(numbers: Any) -> Any:
    return np.stack([numbers, -numbers], -1).astype(np.float32)


def state(numbers: Any) -> Any:
    return np.stack([numbers, numbers + 1, numbers + 2], -1).astype(np.float32)


def check_rows(written: Written, batch: Any, cells: list[Cell]) -> None:
    obs = np.array([cell.obs for cell in cells], np.int64)
    np.testing.assert_array_equal(batch["observation"], written.see(obs))
    np.testing.assert_array_equal(batch["pixels", "place"], obs)
    np.testing.assert_array_equal(batch["action"], obs * 7)
    for name, rows in {"recurrent_state": state(obs), "extra": pair(obs)}.items():
        if name in batch:
            np.testing.assert_array_equal(batch[name], rows)
    check_ends(written, batch, cells)
    reward = np.array([[cell.reward] for cell in cells], np.float32).reshape(-1, 1)
    np.testing.assert_array_equal(batch["next", "reward"], reward)


def check_ends(written: Written, batch: Any, cells: list[Cell]) -> None:
    """Next observations and flags."""
    after = np.array([cell.after for cell in cells], np.int64)
    np.testing.assert_array_equal(batch["next", "observation"], written.see(after))
    np.testing.assert_array_equal(batch["next", "pixels", "place"], after)
    for flag in FLAGS:
        given = np.array([[getattr(cell, flag)] for cell in cells], bool).reshape(-1, 1)
        np.testing.assert_array_equal(batch["next", flag], given)


def check_all(written: Written) -> None:
    memory = written.memory
    expected = written.expected()
    assert len(memory) == len(expected)
    check_nothing_is_left(memory)
    if not expected:
        with pytest.raises(NothingToSample):
            memory.sample(1)
        return
    every = memory[:]
    assert every["index"].tolist() == [written.index_of(place) for place in expected]
    check_rows(written, every, [written.at(place) for place in expected])
    written.check(memory.sample(7))
    check_n_step(written)
    check_sequences(written)
    check_newest(written)
    check_relabel(written)


def check_nothing_is_left(memory: ReplayMemory) -> None:
    """Only what is of readable rows is kept aside, and no stack but where one begins."""
    for ring in memory.rings:
        there = ring.places_of(np.arange(ring.lo * ring.B, ring.hi * ring.B))
        assert len(ring.stored.asides) == ring.stored.asides.has(there).sum()
        if ring.stored.frames is not None:
            assert (
                len(ring.stored.frames.wholes) == (ring.stored.frames.depth == 0).sum()
            )


def check_n_step(written: Written, n_step: int = 3, gamma: float = 0.5) -> None:
    batch = written.memory.sample(9, n_step=n_step, gamma=gamma)
    places = written.places_of(batch["index"])
    assert set(places) <= set(written.expected())
    runs = [written.run(place, n_step) for place in places]
    np.testing.assert_array_equal(
        batch["observation"], written.see(np.array([run[0].obs for run in runs]))
    )
    check_ends(written, batch, [run[-1] for run in runs])
    steps = [[len(run)] for run in runs]
    assert batch["steps_to_next_obs"].tolist() == steps
    np.testing.assert_allclose(
        batch["gamma"], np.array(gamma) ** np.array(steps), rtol=1e-6
    )
    returns = [
        [sum(gamma**k * cell.reward for k, cell in enumerate(run))] for run in runs
    ]
    np.testing.assert_allclose(batch["next", "reward"], returns, rtol=1e-6)


def check_sequences(written: Written, length: int = 3) -> None:
    for across in (False, True):
        beginnings = [
            place
            for place in written.expected()
            if can_begin(written, place, length, across)
        ]
        if not beginnings:
            room = max(ring.capacity for ring in written.memory.rings)
            error = NothingToSample if length <= room else BadOption
            with pytest.raises(error):
                written.memory.sample(5, sequence=length, across_episodes=across)
            continue
        batch = written.memory.sample(5, sequence=length, across_episodes=across)
        assert batch.shape == (5, length)
        written.check(batch)
        assert set(written.places_of(batch["index"][:, 0])) <= set(beginnings)
        for line in batch["index"]:
            ring, row, env = written.places_of(line)[0]
            assert written.places_of(line) == [
                (ring, row + k, env) for k in range(length)
            ]
        cells = [written.at(place) for place in written.places_of(batch["index"])]
        assert batch["is_init"].reshape(-1).tolist() == [cell.begins for cell in cells]


def can_begin(
    written: Written, place: tuple[int, int, int], length: int, across: bool
) -> bool:
    if not across:
        return len(written.run(place, length)) == length
    ring, row, env = place
    end = len(written.cells[ring])
    return all(
        row + k < end
        and written.at((ring, row + k, env)).valid
        and not (k and written.at((ring, row + k, env)).breaks)
        for k in range(length)
    )


def check_newest(written: Written) -> None:
    expected = written.expected()
    hi = [len(rows) for rows in written.cells]
    ages = sorted(
        expected, key=lambda place: (place[1] - hi[place[0]], place[0], place[2])
    )
    for n in (1, 4, len(expected) + 3):
        batch = written.memory.newest(n)
        assert written.places_of(batch["index"]) == ages[-n:]
        written.check(batch)


def check_relabel(written: Written) -> None:
    seen = []

    def relabel(batch: Any, later: Any) -> Any:
        places = written.places_of(batch["index"])
        for place, number, steps in zip(
            places,
            later["pixels", "place"].tolist(),
            later["steps"].tolist(),
            strict=True,
        ):
            run = written.run(place, 10**6)
            assert steps[0] < len(run)
            assert run[steps[0]].after == number
            seen.append(steps[0])
        return batch.set("goal", later["observation"])

    batch = written.memory.sample(6, relabel=relabel)
    assert batch["goal"].shape == batch["observation"].shape
    assert len(seen) == 6


class Stacked(Written):
    """Observations are stacks of three frames. Most follow the one before them; others are padded in
    several ways, or are of other frames, also within an episode.
    """

    columns = [Column(OBS, (3, 2), F32, carry=True, role="observation"), *COLUMNS[1:]]  # noqa: RUF012 (never changed)

    def new(self, before: int | None = None) -> int:
        number = super().new()
        frame = pair(np.array(number))
        if number == 1:
            self.stacks: dict[int, Any] = {}
        kind = self.rng.integers(10)
        if before is not None and kind:
            whole = [*self.stacks[before][1:], frame]
        elif kind < 4:
            whole = [frame, frame, frame]
        elif kind < 7:
            whole = [0 * frame, 0 * frame, frame]
        else:
            whole = [frame + 0.25, frame + 0.5, frame]
        self.stacks[number] = np.stack(whole)
        return number

    def see(self, numbers: Any) -> Any:
        numbers = np.asarray(numbers)
        found = np.zeros((*numbers.shape, 3, 2), np.float32)
        for place in np.ndindex(numbers.shape):
            found[place] = self.stacks[int(numbers[place])]
        return found


operations = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(0, 1), st.integers(1, 9)),
        st.tuples(
            st.just("jump"), st.integers(0, 1), st.lists(st.integers(0, 2), max_size=3)
        ),
        st.tuples(st.just("clear"), st.just(0), st.just(0)),
        st.tuples(st.just("check"), st.just(0), st.just(0)),
    ),
    max_size=25,
)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.sampled_from([[1], [3], [2, 3], [1, 1]]),
    extra=st.integers(0, 40),
    margin=st.integers(1, 9),
    gaps=st.sampled_from([0.0, 0.3]),
    ends=st.sampled_from([0.0, 0.2, 0.7]),
    alpha=st.sampled_from([None, 0.7]),
    kind=st.sampled_from([Written, Stacked]),
    large=st.booleans(),
    seed=st.integers(0, 1000),
    todo=operations,
)
@example([1], 4, 1, 0.0, 0.2, None, Written, False, 0, [("write", 0, 1)] * 25)
@example(
    [1], 4, 1, 0.0, 0.1, None, Stacked, True, 0, [("write", 0, 1), ("check", 0, 0)] * 25
)
@example([3], 8, 4, 0.3, 0.2, None, Written, True, 0, [("write", 0, 9)] * 9)
@example(
    [2, 3],
    17,
    3,
    0.0,
    0.7,
    0.7,
    Stacked,
    False,
    0,
    [("write", 0, 5), ("write", 1, 4)] * 8,
)
def test_what_is_returned_is_what_was_written(
    sizes, extra, margin, gaps, ends, alpha, kind, large, seed, todo
):
    with pytest.MonkeyPatch.context() as patch:
        if large:
            treat_as_large(patch)
        written = made(kind, sum(sizes) + extra, sizes, margin, seed, alpha)
        follow(written, sizes, gaps, ends, todo)


def treat_as_large(patch: Any) -> None:
    """All samples are gathered into memory that is used again."""
    patch.setattr(native, "SMALL_ROW", 0)
    patch.setattr(sample_arrays, "LEAST", 1)


def follow(written: Written, sizes: Any, gaps: float, ends: float, todo: Any) -> None:
    """Do what is asked for, and compare."""
    memory = written.memory
    check_all(written)
    for name, ring, how in todo:
        ring = min(ring, len(sizes) - 1)
        if name == "write":
            written.write(ring, how, ends=ends, gaps=gaps)
        elif name == "jump":
            written.jump(ring, sorted({env for env in how if env < sizes[ring]}))
        elif name == "clear":
            written.clear()
        else:
            check_all(written)
        assert len(memory) == len(written.expected())
    check_all(written)


# what a step returns may be named, too, which changes nothing
KEPT = [STATE, EXTRA, REWARD, ("next", "terminated")]


def made(
    kind: type[Written],
    capacity: int,
    sizes: Any,
    margin: int,
    seed: int,
    alpha: float | None,
) -> Written:
    stack = 3 if kind is Stacked else 1
    memory = ReplayMemory(capacity, alpha=alpha, keep=KEPT, seed=seed, stack=stack)
    return kind(memory, sizes, margin, seed)


def filled(
    capacity: int = 60, sizes: Any = (2,), rows: int = 70, **options: Any
) -> Written:
    """A memory that has wrapped."""
    how = {name: options.pop(name) for name in ("ends", "gaps") if name in options}
    memory = ReplayMemory(capacity, **{"seed": 0, **options})
    written = Written(memory, list(sizes), 8, 1)
    for ring in range(len(sizes)):
        written.write(ring, rows, **how)
    return written


# --- distributions --------------------------------------------------------------------------------


def fits(counts: Any, probabilities: Any) -> bool:
    """Pearson's test with a limit that chance passes once in a million times (Wilson, Hilferty)."""
    expected = np.asarray(probabilities) * np.sum(counts)
    assert expected.min() > 5
    statistic = float((((counts - expected) ** 2) / expected).sum())
    degrees = len(expected) - 1
    z = ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / np.sqrt(
        2 / (9 * degrees)
    )
    return bool(abs(z) < 4.9)


def counted(written: Written, chosen: list[tuple[int, int, int]], index: Any) -> Any:
    places = written.places_of(index)
    number = {place: i for i, place in enumerate(chosen)}
    return np.bincount([number[place] for place in places], minlength=len(chosen))


@pytest.mark.parametrize("gaps", [0.0, 0.4], ids=["whole", "gaps"])
@pytest.mark.parametrize("sizes", [(1,), (3,), (2, 1)], ids=str)
def test_every_transition_is_drawn_with_the_same_probability(sizes, gaps):
    written = filled(sizes=sizes, gaps=gaps)
    chosen = written.expected()
    counts = counted(written, chosen, written.memory.sample(20_000)["index"])
    assert fits(counts, np.full(len(chosen), 1 / len(chosen)))


@pytest.mark.parametrize("across", [False, True], ids=["within", "across"])
@pytest.mark.parametrize("sizes", [(2,), (2, 1)], ids=str)
def test_every_sequence_is_drawn_with_the_same_probability(sizes, across):
    written = filled(sizes=sizes, gaps=0.1)
    chosen = [p for p in written.expected() if can_begin(written, p, 4, across)]
    batch = written.memory.sample(8_000, sequence=4, across_episodes=across)
    counts = counted(written, chosen, batch["index"][:, 0])
    assert fits(counts, np.full(len(chosen), 1 / len(chosen)))


def test_one_sequence_among_many_transitions_is_found():
    written = filled(ends=1.0)
    written.write(0, 5, ends=0.0)
    batch = written.memory.sample(50, sequence=5)
    firsts = set(written.places_of(batch["index"][:, 0]))
    assert firsts == {(0, 70, 0), (0, 70, 1)}


@pytest.mark.parametrize("sizes", [(2,), (2, 1)], ids=str)
def test_sequences_in_one_ring_only_are_found_in_all(sizes):
    written = filled(sizes=sizes, ends=1.0, alpha=0.5 if len(sizes) > 1 else None)
    written.write(0, 6, ends=0.0)
    batch = written.memory.sample(40, sequence=6)
    written.check(batch)
    assert {place[0] for place in written.places_of(batch["index"])} == {0}


@pytest.mark.parametrize("gaps", [0.0, 0.3], ids=["whole", "gaps"])
@pytest.mark.parametrize("sizes", [(2,), (2, 1)], ids=str)
def test_priorities_are_probabilities(sizes, gaps):
    written = filled(sizes=sizes, gaps=gaps, alpha=0.6)
    memory = written.memory
    chosen = written.expected()
    priorities = np.random.default_rng(0).random(len(chosen)) * 5 + 0.2
    memory.update_priority(memory[:]["index"], priorities)
    powers = priorities**0.6
    batch = memory.sample(20_000, beta=0.7)
    counts = counted(written, chosen, batch["index"])
    share = powers / powers.sum()
    assert fits(counts, share)
    number = {place: i for i, place in enumerate(chosen)}
    drawn = [number[place] for place in written.places_of(batch["index"])]
    weights = (len(chosen) * share[drawn]) ** -0.7
    np.testing.assert_allclose(batch["weight"], weights / weights.max(), rtol=1e-5)


def test_sequences_with_priorities_have_one_weight_each():
    written = filled(alpha=0.6, ends=0.05)
    memory = written.memory
    chosen = [p for p in written.expected() if can_begin(written, p, 3, False)]
    priorities = np.random.default_rng(0).random(len(memory)) * 5 + 0.2
    memory.update_priority(memory[:]["index"], priorities)
    power = {
        place: p**0.6
        for place, p in zip(written.expected(), priorities.tolist(), strict=True)
    }
    batch = memory.sample(10_000, sequence=3)
    assert batch["weight"].shape == (10_000, 3)
    assert (batch["weight"] == batch["weight"][:, :1]).all()
    share = np.array([power[place] for place in chosen])
    counts = counted(written, chosen, batch["index"][:, 0])
    assert fits(counts, share / share.sum())


def test_new_transitions_have_the_largest_priority_so_far_and_old_ones_none():
    written = filled(alpha=1.0, capacity=20, rows=10)
    memory = written.memory
    old = memory[:]["index"]
    memory.update_priority(old, 1e-3)
    memory.update_priority(old[:1], 8.0)
    written.write(0, 1)
    share = 8.0 / (2 * 8.0 + 18 * 1e-3)
    batch = memory.sample(2000)
    newest = {(0, 10, 0), (0, 10, 1)}
    drawn = written.places_of(batch["index"])
    assert abs(sum(place in newest for place in drawn) / 2000 - 2 * share) < 0.01
    memory.update_priority(old, 1e9)  # rows 0 are gone: the rest is alike
    counts = counted(written, written.expected(), memory.sample(3000)["index"])
    assert counts[-2:].sum() == 0
    written.clear()
    memory.update_priority(batch["index"], 1e12)
    written.write(0, 3)
    written.check(memory.sample(50))
    assert fits(
        counted(written, written.expected(), memory.sample(3000)["index"]),
        np.full(6, 1 / 6),
    )


@pytest.mark.parametrize("ring", [0, 1])
def test_the_largest_priority_so_far_is_that_of_all_groups(ring):
    written = made(Written, 400, [2, 2], 50, 0, 1.0)
    memory = written.memory
    for number in (0, 1):
        written.write(number, 20, ends=0.0)
    every = memory[:]["index"]
    mine = every % 2 == ring
    memory.update_priority(every[mine], torch.full((int(mine.sum()),), 100.0))
    memory.update_priority(every[~mine], torch.full((int((~mine).sum()),), 0.01))
    for number in (0, 1):
        written.write(number, 10, ends=0.0)
    drawn = memory.sample(20_000)["index"]
    new = ~torch.isin(drawn, every)
    share = [(drawn[new] % 2 == number).float().mean() for number in (0, 1)]
    assert share[0] == pytest.approx(0.5, abs=0.02)
    assert new.float().mean() == pytest.approx(40 / 80, abs=0.02)


def test_a_priority_of_zero_is_not_drawn_beside_others_and_can_be_raised():
    written = filled(alpha=0.5, capacity=10, sizes=(1,), rows=10)
    memory = written.memory
    index = memory[:]["index"]
    memory.update_priority(index[:9], 0.0)
    assert set(memory.sample(100)["index"].tolist()) == {int(index[9])}
    memory.update_priority(index, 2.0)
    assert set(memory.sample(300)["index"].tolist()) == set(index.tolist())


# --- reading --------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(2,), (2, 1)], ids=str)
@pytest.mark.parametrize("gaps", [0.0, 0.3], ids=["whole", "gaps"])
def test_transitions_by_number(sizes, gaps):
    written = filled(sizes=sizes, gaps=gaps)
    memory = written.memory
    expected = written.expected()
    size = len(expected)
    for index in (0, -1, 5, np.int64(3), torch.tensor(4)):
        one = memory[index]
        assert one.shape == ()
        assert written.places_of(one["index"]) == [expected[int(index)]]
    for index in (slice(2, 9, 3), slice(None, None, -1), slice(5, 5)):
        assert written.places_of(memory[index]["index"]) == expected[index]
    some = [3, 0, size - 1, 3, -2]
    for index in (some, np.array(some), torch.tensor(some)):
        assert written.places_of(memory[index]["index"]) == [expected[i] for i in some]
    mask = torch.arange(size) % 3 == 0
    assert written.places_of(memory[mask]["index"]) == expected[::3]
    assert memory[[]].shape == (0,)
    for index in (size, -size - 1, [0, size], mask[:-1], [0.5]):
        with pytest.raises(IndexError):
            memory[index]
    assert [written.places_of(one["index"])[0] for one in memory] == expected


def test_an_iterator_skips_what_is_overwritten_meanwhile():
    written = filled(capacity=4000, sizes=(2,), rows=2000)
    every = iter(written.memory)
    assert written.places_of(next(every)["index"]) == [(0, 0, 0)]
    written.write(0, 1500)
    there = set(written.expected())
    left = [written.places_of(one["index"])[0] for one in every]
    known = [place for place in left if place in there]
    assert known == [(0, row, env) for row in range(1500, 2000) for env in range(2)]
    assert all(place[1] < 2000 for place in left)


def test_an_unused_memory_is_empty():
    memory = ReplayMemory(10)
    assert len(memory) == 0
    assert list(memory) == []
    assert memory.nbytes == 0
    assert "nothing written yet" in repr(memory)
    with pytest.raises(NothingToSample, match="Collect some first"):
        memory.sample(3)
    with pytest.raises(NothingToSample):
        memory.newest(3)
    with pytest.raises(IndexError):
        memory[0]
    memory.clear()


def test_samples_are_copies():
    written = filled()
    batch = written.memory.sample(20)
    for leaf in batch.values(True, True):
        leaf.zero_()
    for leaf in written.memory[:].values(True, True):
        leaf.zero_()
    check_all(written)


HELD: dict[str, Any] = {
    "the sample": lambda batch: batch,
    "a column": lambda batch: batch["observation"],
    "a part of it": lambda batch: batch["observation"][3:5, 1],
    "a row": lambda batch: batch[4],
    "an array": lambda batch: batch["observation"].numpy(),
    "a part of an array": lambda batch: batch["observation"].numpy()[3:, ::2][1:],
    "bytes": lambda batch: memoryview(batch["observation"].numpy()),
    "another library": lambda batch: np.from_dlpack(batch["observation"]),
    "another shape": lambda batch: batch["observation"].view(-1)[5:],
    "storage": lambda batch: batch["observation"].untyped_storage(),
    "a gradient": lambda batch: (
        (batch["observation"].float() * torch.ones(2, requires_grad=True)).grad_fn
    ),
    "the next observations": lambda batch: batch["next"].select("observation"),
}


def contents(held: Any) -> Any:
    if hasattr(held, "_saved_self"):
        return held._saved_self.tolist()
    if hasattr(held, "keys"):
        return {key: held[key].tolist() for key in held.keys(True, True)}
    if hasattr(held, "tolist"):
        return held.tolist()
    return bytes(held)


@pytest.mark.parametrize("kind", [Written, Stacked])
@pytest.mark.parametrize("how", HELD)
def test_nothing_is_written_to_memory_of_a_sample_that_is_in_use(
    kind, how, monkeypatch
):
    treat_as_large(monkeypatch)
    written = made(kind, 60, [2], 8, 1, None)
    written.write(0, 70)
    held = [HELD[how](written.memory.sample(20)) for _ in range(3)]
    before = [contents(each) for each in held]
    for _ in range(20):
        written.memory.sample(20)["observation"].zero_()
    assert [contents(each) for each in held] == before
    assert before[0] != before[1]


@pytest.mark.parametrize("kind", [Written, Stacked])
def test_memory_of_large_samples_is_used_again(kind, monkeypatch):
    treat_as_large(monkeypatch)
    written = made(kind, 60, [2], 8, 1, None)
    written.write(0, 70)
    sample = written.memory.sample

    def places(n: int) -> set[int]:
        batch = sample(n)
        leaves = batch["observation"], batch["next", "observation"]
        return {leaf.data_ptr() for leaf in leaves}

    first = places(20)
    assert all(places(20) == first for _ in range(5))
    batch = sample(20)
    others = places(20)
    assert not first & others
    assert places(20) == others
    del batch
    assert places(20) <= first | others
    assert len(places(7)) == 2  # of another size


@pytest.mark.parametrize("sizes", [[2], [1, 2]])
def test_memory_of_samples_is_bounded(sizes, monkeypatch):
    treat_as_large(monkeypatch)
    monkeypatch.setattr(sample_arrays, "MOST_BYTES", 5000)
    written = made(Stacked, 60, sizes, 8, 1, None)
    for ring in range(len(sizes)):
        written.write(ring, 70)
    memory = written.memory
    arrays = memory._arrays
    held = [memory.sample(20) for _ in range(20)]
    assert 3000 < arrays.nbytes <= 5000
    del held
    for n in (20, 30, 5, 20, 30):
        memory.sample(n)
        assert arrays.nbytes <= 5000
    memory.clear()
    assert arrays.nbytes == 0


def test_samples_of_any_size_use_the_same_memory(monkeypatch):
    """Of several rings, the parts have other sizes in each sample."""
    treat_as_large(monkeypatch)
    monkeypatch.setattr(sample_arrays, "MOST_ARRAYS", 1000)
    written = made(Written, 60, [2, 1, 1], 8, 1, None)
    for ring in range(3):
        written.write(ring, 70)
    memory = written.memory

    def kept() -> set[int]:
        return {each.ctypes.data for each in memory._arrays._loans.all()}

    for n in (20, 7) * 30:
        memory.sample(n)
    before = kept()
    for n in (20, 7) * 20:
        memory.sample(n)
    assert len(kept() - before) < len(before) / 5, "rare sizes"


def test_no_code_runs_when_a_sample_goes_away(monkeypatch):
    """A Ctrl-C that comes in the call that drops it, such as a backward pass, would be lost there."""
    treat_as_large(monkeypatch)
    written = made(Stacked, 60, [2], 8, 1, None)
    written.write(0, 70)
    column = [written.memory.sample(20)["observation"]]
    calls = []
    sys.setprofile(lambda frame, event, arg: calls.append((event, frame, arg)))
    column.clear()
    sys.setprofile(None)
    python = [frame for event, frame, _ in calls if event in {"call", "return"}]
    assert not python
    assert len(calls) == 3  # clear, its end, and ``setprofile``


def test_memory_of_samples_in_several_threads(monkeypatch):
    treat_as_large(monkeypatch)
    written = made(Stacked, 60, [2], 8, 1, None)
    written.write(0, 70)
    wrong = []

    def learn() -> None:
        for _ in range(60):
            batch = written.memory.sample(20)
            known = batch.clone()
            written.memory.sample(20)
            wrong.extend(
                key
                for key in known.keys(True, True)
                if (batch[key] != known[key]).any()
            )

    threads = [threading.Thread(target=learn) for _ in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong


def test_samples_depend_on_the_seed_and_on_no_other_generator():
    index = []
    for state in (1, 2):
        torch.manual_seed(state)
        np.random.seed(state)
        before = torch.get_rng_state()
        index.append(filled(seed=5).memory.sample(30)["index"].tolist())
        assert torch.equal(before, torch.get_rng_state())
    assert index[0] == index[1]
    assert filled(seed=6).memory.sample(30)["index"].tolist() != index[0]


@pytest.mark.parametrize("kind", [Written, Stacked])
def test_rows_on_a_device_are_tensors(kind):
    """With the CPU as that device."""
    stack = 3 if kind is Stacked else 1
    memory, twin = (
        ReplayMemory(30, seed=0, keep=["extra"], stack=stack) for _ in range(2)
    )
    memory.open(kind.columns, [2], 4, torch.device("cpu"))
    other = kind(twin, [2], 4, 3)
    write = other.memory.write

    def both(number: int, rows: Any, last: Any, **ends: Any) -> None:
        write(number, rows, last, **ends)
        given = [
            {k: torch.as_tensor(v) for k, v in part.items()} for part in (rows, last)
        ]
        finals = {k: torch.as_tensor(v) for k, v in (ends.pop("finals") or {}).items()}
        memory.write(number, *given, finals=finals, **ends)

    other.memory.write = both  # type: ignore[method-assign]
    other.write(0, 3)
    other.write(0, 60)
    assert memory.rings[0].going_on(
        other.observed(np.array(other.now[0]))
    ).tolist() == [not fresh for fresh in other.fresh[0]]
    a = other.memory.sample(40, n_step=2)
    b = memory.sample(40, n_step=2)
    for key in a.keys(True, True):
        assert torch.equal(a[key], b[key]), key


def test_what_goes_on_is_known_by_its_observation():
    written = filled(sizes=(3,), ends=0.0)
    ring = written.memory.rings[0]
    now = np.array(written.now[0])
    assert ring.going_on(written.observed(now)).tolist() == [True, True, True]
    assert ring.going_on(written.observed(now + np.array([0, 1, 0]))).tolist() == [
        True,
        False,
        True,
    ]
    written.jump(0, [2])
    assert ring.going_on(written.observed(now)).tolist() == [True, True, False]
    written.clear()
    assert ring.going_on(written.observed(now)).tolist() == [False, False, False]


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, pickle.dumps])
def test_a_memory_is_not_copied(copied):
    with pytest.raises(BadOption, match="use save and load"):
        copied(ReplayMemory(5))


def test_what_an_index_means_before_anything_is_written():
    memory = ReplayMemory(5)
    for index in (slice(None), []):
        with pytest.raises(NothingToSample, match="no collector has written"):
            memory[index]
    with pytest.raises(IndexError, match="0 transitions"):
        memory[0]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"capacity": 0}, "capacity=0"),
        ({"capacity": True}, "capacity=True"),
        ({"capacity": 2.5}, "capacity=2.5"),
        ({"capacity": 5, "alpha": -1}, "alpha=-1"),
        ({"capacity": 5, "alpha": float("nan")}, "alpha=nan"),
        ({"capacity": 5, "alpha": float("inf")}, "alpha=inf"),
        ({"capacity": 5, "alpha": "x"}, "alpha='x'"),
        ({"capacity": 5, "seed": -1}, "seed=-1"),
        ({"capacity": 5, "seed": 1.5}, "seed=1.5"),
        ({"capacity": 5, "device": "foo"}, "device='foo'"),
        ({"capacity": 5, "device": 3.5}, "device=3.5"),
        ({"capacity": 5, "keep": None}, "keep=None"),
        ({"capacity": 5, "keep": "extra"}, "keep='extra'"),
        ({"capacity": 5, "keep": [1]}, r"keep=\[1\]"),
        ({"capacity": 5, "keep": [["a", "b"]]}, "keep="),
        ({"capacity": 5, "keep": [()]}, "keep="),
        ({"capacity": 5, "device": "cuda:99"}, "device='cuda:99'"),
        ({"capacity": 5, "device": "xla"}, "device='xla'"),
        ({"capacity": 5, "device": "meta"}, "have no values"),
        ({"capacity": 5, "pin_memory": True}, "to a CUDA device only"),
        ({"capacity": 5, "pin_memory": True, "device": "cpu"}, "to a CUDA device only"),
    ],
)
def test_impossible_options(options, match):
    with pytest.raises(BadOption, match=match):
        ReplayMemory(**options)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"n": 0}, "n=0"),
        ({"n": 2.0}, r"n=2\.0"),
        ({"n": 2, "n_step": 0}, "n_step=0"),
        ({"n": 2, "sequence": 0}, "sequence=0"),
        ({"n": 2, "sequence": -1}, "sequence=-1"),
        ({"n": 2, "sequence": 2, "n_step": 2}, "leave n_step out"),
        ({"n": 2, "sequence": 2, "relabel": lambda a, b: a}, "leave sequence out"),
        ({"n": 2, "n_step": 2, "relabel": lambda a, b: a}, "leave n_step out"),
        ({"n": 2, "relabel": 3}, "relabel=3"),
        ({"n": 2, "beta": float("nan")}, "beta=nan"),
        ({"n": 2, "beta": None}, "beta=None"),
        ({"n": 2, "n_step": 3, "gamma": float("nan")}, "gamma=nan"),
        ({"n": 2, "n_step": 3, "gamma": "x"}, "gamma='x'"),
        ({"n": 2, "n_step": 3, "gamma": [0.9, 0.8]}, "gamma="),
        ({"n": 2, "n_step": 3, "gamma": 99}, "gamma=99"),
        ({"n": 2, "n_step": 3, "gamma": -0.1}, r"gamma=-0\.1"),
        ({"n": 2, "gamma": "x"}, "gamma='x'"),
        ({"n": 2, "sequence": 2, "gamma": float("nan")}, "gamma=nan"),
        ({"n": 2, "beta": -1.0}, r"beta=-1\.0"),
        ({"n": 2, "across_episodes": True}, "across_episodes=True"),
        ({"n": 2, "n_step": 3, "across_episodes": True}, "across_episodes=True"),
    ],
)
def test_impossible_samples(options, match):
    with pytest.raises(BadOption, match=match):
        filled().memory.sample(**options)


def test_priorities_that_are_none():
    written = filled(alpha=0.5)
    index = written.memory.sample(3)["index"]
    for bad in (-1.0, float("nan"), float("inf"), [1.0, 2.0, -3.0]):
        with pytest.raises(BadOption, match="finite, and at least 0"):
            written.memory.update_priority(index, bad)
    for bad in ("x", None, {}):
        with pytest.raises(BadOption, match="update_priority: priority"):
            written.memory.update_priority(index, bad)
    for bad in ("x", None, [0.5, 1.5, 2.5]):
        with pytest.raises(BadOption, match="update_priority: index"):
            written.memory.update_priority(bad, 1.0)
    with pytest.raises(BadOption, match=r"shape \[3\] and priorities of shape \[2\]"):
        written.memory.update_priority(index, [1.0, 2.0])
    with pytest.raises(BadOption, match="alpha"):
        filled().memory.update_priority(index, 1.0)


@pytest.mark.parametrize("sizes", [(2,), (1, 3)])
def test_an_index_that_no_transition_has_had_is_refused(sizes):
    memory = filled(alpha=1.0, sizes=sizes).memory
    newest = int(memory[:]["index"].max())
    expected = powers_of(memory)
    for wrong in (-1, newest + 2 * sum(sizes), 10**6):
        with pytest.raises(BadOption, match=f"no transition with the index {wrong} "):
            memory.update_priority([newest, wrong], 100.0)
    assert powers_of(memory) == expected
    memory.update_priority([0, newest], 100.0)  # the first one was dropped
    assert max(powers_of(memory)) == 100


def powers_of(memory: ReplayMemory) -> list[float]:
    """Return ``priority ** alpha`` of all transitions."""
    newest = [ring["newest"] for ring in memory.state_dict()["rings"]]
    return [power for ring in newest for power in ring["powers"].tolist()]


def test_priorities_belong_to_transitions_by_their_place():
    memory = filled(alpha=1.0).memory
    index = memory[:6]["index"].reshape(3, 2)
    values = torch.arange(1.0, 7).reshape(3, 2)
    with pytest.raises(
        BadOption, match=r"shape \[3, 2\] and priorities of shape \[2, 3\]"
    ):
        memory.update_priority(index, values.T)
    for shaped in (values, values.reshape(-1), values[..., None]):
        memory.update_priority(index, 0.0)
        memory.update_priority(index, shaped)
        assert powers_of(memory)[:6] == [1, 2, 3, 4, 5, 6]


def test_with_alpha_0_priorities_have_to_be_numbers_too():
    memory = filled(alpha=0.0).memory
    for bad in (float("nan"), float("inf")):
        with pytest.raises(BadOption, match="finite, and at least 0"):
            memory.update_priority(memory[:1]["index"], bad)


@pytest.mark.parametrize("way", ["state_dict", "save"])
@pytest.mark.parametrize(("alpha", "wanted"), [(0.5, 1.0), (1.0, 0.25), (0.7, 0.0)])
def test_priorities_are_restored_for_another_alpha(tmp_path, way, alpha, wanted):
    memory = filled(alpha=alpha, gaps=0.3).memory
    index = memory[:]["index"]
    priorities = np.linspace(0.5, 30.0, len(index))
    memory.update_priority(index, priorities)
    memory.update_priority(index[:1], 0.0)
    other = like(filled(alpha=wanted, gaps=0.3))
    restore(other, memory, way, tmp_path)
    before = np.array(powers_of(memory))
    found = np.array(powers_of(other))
    assert (before == 0).any()  # where no transition is
    assert ((found == 0) == (before == 0)).all()
    powers = found[found > 0]
    np.testing.assert_allclose(powers[1:], priorities[1:] ** wanted, rtol=1e-12)
    largest = other.state_dict()["rings"][0]["newest"]["largest"]
    assert largest.tolist() == [30.0]


def restore(into: ReplayMemory, memory: ReplayMemory, way: str, directory: Any) -> None:
    if way == "save":
        memory.save(directory)
        into.load(directory)
    else:
        into.load_state_dict(memory.state_dict())


@pytest.mark.parametrize("way", ["state_dict", "save"])
def test_priorities_that_alpha_0_does_not_tell_are_refused(tmp_path, way):
    memory = filled(alpha=0.0).memory
    other = filled(alpha=0.5).memory
    before = other.state_dict()
    with pytest.raises(BadCheckpoint, match="alpha=0"):
        restore(other, memory, way, tmp_path)
    assert_equal_states(other.state_dict(), before)


def assert_equal_states(a: Any, b: Any) -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_equal_states(a[key], b[key])
    elif isinstance(a, list):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_equal_states(one, other)
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    else:
        assert a == b


SPOILED = {
    "few rows of a column": lambda ring: cut(ring["rows"], "column.0"),
    "few rows of the flags": lambda ring: cut(ring["rows"], "begins"),
    "few rows": lambda ring: [cut(ring["rows"], name) for name in list(ring["rows"])],
    "a span that is too long": lambda ring: ring.update(hi=ring["hi"] + 1),
    "few priorities": lambda ring: cut(ring["newest"], "powers"),
    "no priorities": lambda ring: ring["newest"].pop("powers"),
    "no largest priority": lambda ring: ring["newest"].pop("largest"),
    "a priority that is NaN": lambda ring: ring["newest"]["powers"].fill_(torch.nan),
    "a negative priority": lambda ring: ring["newest"]["powers"][3:4].fill_(-1.0),
    "the largest priority NaN": lambda ring: ring["newest"]["largest"].fill_(torch.nan),
}


def cut(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name] = tensors[name][:-1]


@pytest.mark.parametrize("how", SPOILED)
def test_a_spoiled_state_is_refused_and_changes_nothing(how):
    memory = filled(alpha=0.5).memory
    state = filled(alpha=0.5, rows=50).memory.state_dict()
    SPOILED[how](state["rings"][0])
    before = memory.state_dict()
    with pytest.raises(BadCheckpoint):
        memory.load_state_dict(state)
    assert_equal_states(memory.state_dict(), before)


def test_a_priority_whose_power_is_not_finite():
    memory = filled(alpha=2.0).memory
    index = memory.sample(3)["index"]
    with pytest.raises(BadOption, match="sum of their powers"):
        memory.update_priority(index, 1e200)
    memory.update_priority(index, 1e100)
    assert memory.sample(64)["weight"].isfinite().all()


def test_priorities_of_networks_under_autocast():
    memory = filled(alpha=1.0).memory
    index = memory[:]["index"]
    memory.update_priority(index, torch.zeros(len(index)).bfloat16())
    memory.update_priority(index[:1], torch.ones(1).bfloat16())
    assert (memory.sample(64)["index"] == index[0]).all()


@pytest.mark.parametrize("reward", [np.int64, np.int8, np.float16, np.float64])
def test_a_discounted_sum_of_rewards_of_any_dtype(reward):
    memory = ReplayMemory(50, seed=0)
    columns = [
        Column(OBS, (), F32, carry=True, role="observation"),
        Column(("action",), (), np.dtype(np.int64), role="action"),
        Column(REWARD, (), np.dtype(reward), trailing=True, role="reward"),
        *(Column(("next", flag), (), np.dtype(bool), trailing=True) for flag in FLAGS),
    ]
    memory.open(columns, [1], 10)
    rows = {
        column.key: np.ones((10, 1), column.dtype)
        if column.key == REWARD
        else np.zeros((10, 1), column.dtype)
        for column in columns
    }
    memory.write(0, rows, {OBS: np.zeros(1, np.float32)})
    found = memory.sample(64, n_step=3, gamma=0.5)
    expected = {1: 1.0, 2: 1.5, 3: 1.75}
    steps = found["steps_to_next_obs"].reshape(-1).tolist()
    rewards = found["next", "reward"].reshape(-1).tolist()
    assert rewards == [expected[n] for n in steps]
    assert set(steps) == {1, 2, 3}


def test_sequences_longer_than_the_memory_are_refused_at_once():
    memory = filled().memory
    room = memory.rings[0].capacity
    for across in (False, True):
        for length in (room + 1, 10**12):
            with pytest.raises(BadOption, match=f"keeps {room} transitions of each"):
                memory.sample(1, sequence=length, across_episodes=across)


@pytest.mark.parametrize("alpha", [None, 0.5])
@pytest.mark.parametrize(
    "returned", [5, lambda batch: batch[:2], lambda batch: batch["observation"]]
)
def test_what_relabel_returns_is_checked(alpha, returned):
    memory = filled(alpha=alpha).memory
    with pytest.raises(BadOption, match="expected the TensorDict that it got"):
        memory.sample(
            6,
            relabel=lambda batch, _: (
                returned(batch) if callable(returned) else returned
            ),
        )
    assert memory.sample(6, relabel=lambda batch, _: batch.exclude("index")).shape == (
        6,
    )


def test_relabel_that_returns_the_later_transitions_is_refused():
    with pytest.raises(BadOption, match="its second argument"):
        filled().memory.sample(6, relabel=lambda _, later: later)


@pytest.mark.parametrize("options", [{"alpha": 0.5}, {"device": "cpu"}, {}])
def test_relabel_may_return_a_locked_sample_or_leave_the_index_out(options):
    def relabel(batch, _):
        return batch.exclude("index").lock_()

    batch = filled(**options).memory.sample(6, relabel=relabel)
    assert batch.shape == (6,)
    assert "index" not in batch


@pytest.mark.parametrize("kind", [Written, Stacked])
@pytest.mark.parametrize(
    "asked",
    [{}, {"n_step": 3}, {"sequence": 2}, {"relabel": lambda *_: None}],
    ids=lambda asked: "-".join(asked) or "transitions",
)
def test_rows_may_be_overwritten_at_any_line_of_a_read(kind, asked):
    """The sample is drawn again: it has no row of before, and there is no error."""
    written = made(kind, 16, [2], 4, 0, None)
    memory = written.memory
    written.write(0, 20, ends=0.5)
    lines = 0
    at = 0

    def follow(frame: Any, event: str, _: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        if event == "line" and lines == at:
            sys.settrace(None)
            written.write(0, 20, ends=0.5)
        return follow

    def enter(frame: Any, *_: Any) -> Any:
        """Follow what reads without the lock, and what it calls."""
        is_read = frame.f_code.co_name == "_read"
        inside = frame.f_back.f_trace is not None
        return follow if is_read or inside else None

    while lines == at:
        at += 1
        lines = 0
        sys.settrace(enter)
        try:
            batch = memory.sample(6, **asked)
        finally:
            sys.settrace(None)
        now = {cell.obs for row in written.cells[0][-8:] for cell in row}
        assert set(batch["pixels", "place"].reshape(-1).tolist()) <= now
        if at % 20 == 0:
            check_all(written)
    assert at > 50


def test_indices_of_several_dimensions():
    memory = filled().memory
    n = len(memory)
    mask = torch.zeros(n, 2, dtype=torch.bool)
    mask[3] = True
    for bad in (mask, mask.numpy(), [[1, 2], [3, 4]]):
        with pytest.raises(IndexError, match="one dimension"):
            memory[bad]
    assert memory[mask[:, :1]]["index"].equal(memory[[3]]["index"])


def test_a_save_is_of_one_memory(tmp_path, monkeypatch):
    """Another thread that loads waits until it is complete."""
    written = filled()
    memory = written.memory
    other = filled(rows=10).memory.state_dict()
    expected = memory[:]
    began = threading.Event()

    def load() -> None:
        began.set()
        memory.load_state_dict(other)

    thread = threading.Thread(target=load)
    make_folder = replay_files.make_folder

    def make_and_let_load(folder: Any) -> None:
        make_folder(folder)
        thread.start()
        began.wait(10)

    monkeypatch.setattr(replay_files, "make_folder", make_and_let_load)
    memory.save(tmp_path / "saved")
    thread.join(10)
    loaded = ReplayMemory(memory.capacity)
    loaded.load(tmp_path / "saved")
    assert (loaded[:] == expected).all()
    assert len(memory) < len(expected)


def test_columns_that_cannot_be_stored():
    with pytest.raises(BadOption, match=r"there is no other\.key"):
        Written(ReplayMemory(9, keep=[("other", "key")]), [1], 1, 0)
    objects = [*COLUMNS, Column(("graph",), (), OBJECT)]
    memory = ReplayMemory(9, keep=["graph"])
    with pytest.raises(BadOption, match="graph are Python objects"):
        memory.open(objects, [1], 1)
    ReplayMemory(9).open(objects, [1], 1)
    with pytest.raises(BadOption, match="a capacity of at least 12"):
        ReplayMemory(9).open(COLUMNS, [4, 8], 1)


def test_a_memory_of_other_rows():
    written = filled()
    with pytest.raises(
        BadOption, match=r"\[2\] environments, and the collector has \[3\]"
    ):
        written.memory.open(COLUMNS, [3], 4)
    other = [Column(OBS, (5,), F32, carry=True, role="observation"), *COLUMNS[1:]]
    with pytest.raises(BadOption, match="columns that differ: .'observation'"):
        written.memory.open(other, [2], 4)
    written.memory.open(COLUMNS, [2], 4)
    check_all(written)


def test_the_size_is_that_of_what_was_written():
    written = filled(capacity=1000, sizes=(1,), rows=10)
    stored = (
        8 + 8 + 8 + 4 + 3
    ) * 11  # two floats, two integers, the reward and three flags
    aside = 16 * (8 + 8)
    assert written.memory.nbytes == stored + aside


# --- stacks ---------------------------------------------------------------------------------------


def test_frames_are_stored_once():
    """Three of four frames are not stored, but at the beginnings and ends of episodes."""
    columns = [
        Column(OBS, (4, 84, 84), np.dtype(np.uint8), carry=True, role="observation"),
        *COLUMNS[3:],
    ]
    memory = ReplayMemory(3000, stack=4, seed=0)
    memory.open(columns, [1], 1)
    rng = np.random.default_rng(0)
    rows = {
        c.key: np.zeros((1, 1, *c.shape), c.dtype)
        for c in memory.rings[0].stored.columns
    }
    stack = rng.integers(0, 255, (1, 4, 84, 84), np.uint8)
    for t in range(1000):
        done = t % 250 == 249
        frame = rng.integers(0, 255, (1, 1, 84, 84), np.uint8)
        after = np.concatenate([stack[:, 1:], frame], 1)
        following = rng.integers(0, 255, stack.shape, np.uint8) if done else after
        memory.write(
            0,
            {**rows, OBS: stack[None]},
            {OBS: following},
            done=np.array([[True]]) if done else None,
            finals={OBS: after} if done else None,
        )
        stack = following
    assert memory.nbytes / 1000 <= 0.15 * 2 * 4 * 84 * 84
    batch = memory.sample(100)
    index = batch["index"]
    again = memory[index]
    assert torch.equal(batch["next", "observation"][:, :3], batch["observation"][:, 1:])
    assert torch.equal(again["observation"], batch["observation"])


def test_observations_that_are_no_stacks():
    for stack in (4, 2):
        memory = ReplayMemory(30, stack=stack)
        with pytest.raises(
            BadOption, match=rf"stack={stack}.*no observation is a stack"
        ):
            memory.open(COLUMNS, [1], 1)
    with pytest.raises(BadOption, match="stack=0"):
        ReplayMemory(30, stack=0)


# --- saving ---------------------------------------------------------------------------------------


def like(written: Written, **options: Any) -> ReplayMemory:
    """An empty memory with the same options."""
    memory = written.memory
    given: dict[str, Any] = {"capacity": memory.capacity, "stack": memory._stored.stack}
    given |= {"alpha": memory._alpha, "keep": memory._stored.keep}
    return ReplayMemory(**{**given, **options})


def assert_alike(a: ReplayMemory, b: ReplayMemory) -> None:
    """They have the same transitions, and the same will be drawn."""
    assert len(a) == len(b)
    pairs = [(a[:], b[:])]
    if len(a):
        pairs.append((a.sample(20), b.sample(20)))
        pairs.append((a.sample(5, n_step=3), b.sample(5, n_step=3)))
    for one, other in pairs:
        assert set(one.keys(True, True)) == set(other.keys(True, True))
        for key in one.keys(True, True):
            assert torch.equal(one[key], other[key]), key


def go_on(written: Written, other: ReplayMemory) -> None:
    """Let the rows that follow be written to ``other``."""
    written.memory = other
    assert [ring.hi for ring in other.rings] == [len(rows) for rows in written.cells]


def saved_files(directory: Any) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}


@pytest.fixture
def small_blocks(monkeypatch):
    """A file has few rows."""
    monkeypatch.setattr("muster.memory.replay_files.BLOCK_BYTES", 700)


ONE = ("write", 0, 1)
CHECK = ("check", 0, 0)
SEAMS = [
    ONE,
    CHECK,
    ("jump", 0, [0]),
    ONE,
    CHECK,
]  # the newest row gets an end after it was saved


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    sizes=st.sampled_from([[1], [3], [2, 3]]),
    extra=st.integers(0, 40),
    margin=st.integers(1, 9),
    gaps=st.sampled_from([0.0, 0.3]),
    alpha=st.sampled_from([None, 0.7]),
    loads=st.booleans(),
    block=st.sampled_from([1, 300, 900, 10**6]),
    kind=st.sampled_from([Written, Stacked]),
    seed=st.integers(0, 1000),
    todo=operations,
)
@example(
    [1], 4, 1, 0.0, None, True, 300, Stacked, 0, [("write", 0, 9), ("check", 0, 0)] * 10
)
@example(
    [2, 3],
    40,
    3,
    0.3,
    0.7,
    True,
    900,
    Written,
    0,
    [("write", 0, 9), ("check", 0, 0)] * 10,
)
@example(
    [1],
    11,
    1,
    0.0,
    None,
    True,
    300,
    Stacked,
    0,
    [("write", 0, 1), ("check", 0, 0)] * 60,
)
@example([1], 9, 1, 0.0, None, False, 1, Stacked, 0, SEAMS * 5)
def test_what_was_saved_is_loaded_exactly(
    tmp_path_factory, sizes, extra, margin, gaps, alpha, loads, block, kind, seed, todo
):
    """A directory is saved into again and again, sometimes by the memory that has loaded it."""
    directory = tmp_path_factory.mktemp("memory")
    written = made(kind, sum(sizes) + extra, sizes, margin, seed, alpha)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("muster.memory.replay_files.BLOCK_BYTES", block)
        for name, ring, how in [*todo, ("check", 0, 0)]:
            ring = min(ring, len(sizes) - 1)
            if name == "write":
                written.write(ring, how, gaps=gaps)
            elif name == "jump":
                written.jump(ring, sorted({env for env in how if env < sizes[ring]}))
            elif name == "clear":
                written.clear()
            else:
                if alpha is not None and len(written.memory):
                    index = written.memory[:]["index"]
                    written.memory.update_priority(
                        index, written.rng.random(len(index))
                    )
                written.memory.save(directory)
                other = like(written)
                other.load(directory)
                third = like(written)
                third.load_state_dict(written.memory.state_dict())
                assert_alike(third, other)
                third.load_state_dict(written.memory.state_dict())
                if len(other):
                    other.load(directory)
                assert_alike(written.memory, third)
                other.load(directory)
                if loads:
                    go_on(written, other)
                check_all(written)


def test_a_loaded_memory_knows_where_steps_are_missing(tmp_path):
    """Sequences do not go on over them, also in another episode."""
    written = filled(sizes=(2,), ends=0.0, rows=6)
    ring = written.memory.rings[0]
    missing = np.full(2, 7)
    for _ in range(3):
        ring.follow(ring.ids.copy(), missing, np.array([True, False]))
        written.now[0][1] = written.new()
        written.chain[0][1] = written.new()
        written.breaks[0][1] = True
        written.write(0, 4, ends=0.0)
    check_sequences(written)
    written.memory.save(tmp_path)
    other = like(written)
    other.load(tmp_path)
    go_on(written, other)
    check_sequences(written)
    lines = other.sample(500, sequence=3, across_episodes=True)
    assert len(set(lines["index"][:, 0].tolist())) == 16 + 4 + 3 * 2


def test_rows_are_written_once(tmp_path, small_blocks):
    written = filled(capacity=60, sizes=(2,), rows=20)
    written.memory.save(tmp_path)
    before = saved_files(tmp_path)
    written.write(0, 4)
    written.memory.save(tmp_path)
    after = saved_files(tmp_path)
    rows = {name for name in before if name.startswith("rows")}
    assert len(rows) == 2
    assert {name: before[name] for name in rows} == {name: after[name] for name in rows}
    assert len(after) <= len(before) + 2
    other = like(written)
    other.load(tmp_path)
    go_on(written, other)
    other.save(tmp_path)
    kept = saved_files(tmp_path)
    assert {name: before[name] for name in rows} == {name: kept[name] for name in rows}
    written.write(0, 30)
    other.save(tmp_path)
    assert not rows & set(saved_files(tmp_path))  # all were overwritten
    third = like(written)
    third.load(tmp_path)
    assert_alike(other, third)


def test_two_memories_that_went_on_from_the_same_files(tmp_path, small_blocks):
    """They have rows of the same numbers, and one is saved where the other was."""
    written = filled(capacity=60, sizes=(2,), rows=12)
    written.memory.save(tmp_path)
    other = Written(like(written), [2], 8, 9)
    other.memory.load(tmp_path)
    other.cells = [list(rows) for rows in written.cells]
    other.now = [[other.new() + 10**6 for _ in range(2)]]
    other.jump(0, [0, 1])
    for each_one in (written, other, written):
        each_one.write(0, 9)
        each_one.memory.save(tmp_path)
        loaded = like(each_one)
        loaded.load(tmp_path)
        assert_alike(each_one.memory, loaded)


@pytest.mark.parametrize("stage", range(12))
def test_a_crash_leaves_a_whole_memory(tmp_path, small_blocks, monkeypatch, stage):
    """The save ends after so many files: those before are there, the manifest is the old one."""
    written = filled(capacity=60, sizes=(2,), rows=28)
    old = like(written)
    old.load_state_dict(written.memory.state_dict())
    written.memory.save(tmp_path)
    written.write(0, 25)
    count = 0

    def crashing(path: Any, parts: Any) -> None:
        nonlocal count
        if count == stage:
            (tmp_path / f"{path.name}.0123456789ab.tmp").write_bytes(b"half")
            raise KeyboardInterrupt
        count += 1
        whole(path, parts)

    from muster.memory import replay_files

    whole = replay_files.write_whole
    with monkeypatch.context() as patch:
        patch.setattr(replay_files, "write_whole", crashing)
        try:
            written.memory.save(tmp_path)
        except KeyboardInterrupt:
            expected = old
        else:
            expected = written.memory
    other = like(written)
    other.load(tmp_path)
    assert_alike(expected, other)
    written.memory.save(tmp_path)
    other.load(tmp_path)
    expected = like(written)
    expected.load_state_dict(written.memory.state_dict())
    assert_alike(expected, other)
    assert not [name for name in saved_files(tmp_path) if name.endswith("tmp")]


@pytest.mark.parametrize("capacity", [24, 200])
def test_another_capacity(tmp_path, capacity):
    """A smaller memory loads the newest rows."""
    written = filled(capacity=60, sizes=(2,), rows=50, alpha=0.5)
    written.memory.save(tmp_path)
    other = like(written, capacity=capacity)
    other.load(tmp_path)
    assert len(other) == min(capacity, 60)
    assert torch.equal(other[:]["index"], written.memory[:]["index"][-capacity:])
    third = like(written, capacity=capacity)
    third.load_state_dict(written.memory.state_dict())
    assert_alike(other, third)
    if capacity < 60:
        go_on(written, other)
        written.write(0, 3)
        check_all(written)


def test_files_that_do_not_fit(tmp_path):
    written = filled(alpha=0.5, keep=["extra"])
    written.memory.save(tmp_path)
    for options, match in (
        ({"alpha": None}, "make the memory with priorities"),
        ({"keep": []}, r"\['extra'\], too: name them in keep"),
        ({"keep": ["extra", "recurrent_state"]}, "there is no recurrent_state"),
        ({"capacity": 1}, "at least 2"),
        ({"stack": 4}, "stack=1, and this one stack=4"),
    ):
        other = like(written, **options)
        with pytest.raises(BadCheckpoint, match=match):
            other.load(tmp_path)
        with pytest.raises(BadCheckpoint, match=match):
            other.load_state_dict(written.memory.state_dict())
        assert len(other) == 0
    other = filled(sizes=(3,), alpha=0.5, keep=["extra"])
    with pytest.raises(
        BadCheckpoint, match=r"\[3\] environments, and the collector has \[2\]"
    ):
        other.memory.load(tmp_path)
    check_all(other)
    with pytest.raises(BadCheckpoint, match="no state of a ReplayMemory"):
        other.memory.load_state_dict({"what": 3})
    with pytest.raises(NothingToSample, match="nothing to save"):
        like(written).save(tmp_path / "new")
    with pytest.raises(NothingToSample, match="nothing to save"):
        like(written).state_dict()


def test_damaged_files(tmp_path, small_blocks):
    written = filled()
    memory = written.memory
    with pytest.raises(BadCheckpoint, match="There is no saved ReplayMemory"):
        memory.load(tmp_path)
    memory.save(tmp_path)
    for path in sorted(tmp_path.iterdir()):
        content = path.read_bytes()
        for damaged in (content[:-3], content[:20], b"", flipped(content), None):
            if damaged is None:
                path.unlink()
            else:
                path.write_bytes(damaged)
            with pytest.raises(BadCheckpoint, match=r"damaged|missing|no saved"):
                memory.load(tmp_path)
            path.write_bytes(content)
    check_all(written)
    memory.load(tmp_path)
    check_all(written)


def test_files_that_were_mixed_up(tmp_path, small_blocks):
    written = filled()
    memory = written.memory
    memory.save(tmp_path)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 3
    for path, other in itertools.permutations(files, 2):
        content = path.read_bytes()
        path.write_bytes(other.read_bytes())
        with pytest.raises(BadCheckpoint, match="content of another file"):
            memory.load(tmp_path)
        path.write_bytes(content)
    check_all(written)


def flipped(content: bytes) -> bytes:
    middle = len(content) - 5
    return content[:middle] + bytes([content[middle] ^ 16]) + content[middle + 1 :]


def test_a_file_outside_of_the_directory_is_not_read(tmp_path):
    from muster.utils import tensor_files

    memory = filled().memory
    memory.save(tmp_path / "a")
    path = tmp_path / "a" / "memory.json"
    about = tensor_files.unseal(path.read_bytes())
    (tmp_path / "secret.safetensors").write_bytes(
        (tmp_path / "a" / about["newest"]).read_bytes()
    )
    about["newest"] = "../secret.safetensors"
    path.write_bytes(tensor_files.seal(about))
    with pytest.raises(BadCheckpoint, match="no file of a ReplayMemory"):
        memory.load(tmp_path / "a")


def test_a_full_disk(tmp_path, small_blocks):
    written = filled(rows=30)
    written.memory.save(tmp_path)
    old = like(written)
    old.load_state_dict(written.memory.state_dict())
    written.write(0, 20)
    with files_limited_to(100), pytest.raises(FileError):
        written.memory.save(tmp_path)
    other = like(written)
    other.load(tmp_path)
    assert_alike(old, other)


@pytest.mark.parametrize("kind", [Written, Stacked])
@pytest.mark.parametrize(("capacity", "before"), [(60, 50), (18, 50), (18, 51), (6, 9)])
@pytest.mark.parametrize("rows", [17, 40])
@pytest.mark.parametrize("number", [1, 2, 3, 5, 7])
def test_rows_are_written_while_a_memory_is_saved(
    tmp_path, small_blocks, monkeypatch, number, rows, kind, capacity, before
):
    """Blocks that were overwritten before they were saved are left out, with all that is older. The
    loaded memory goes on as the saved one would have.
    """
    from muster.memory import replay_files

    written = made(kind, capacity, [2], 8, 1, None)
    written.write(0, before)
    saved = copy.copy(written)
    for name in ("cells", "now", "chain", "fresh", "breaks"):
        setattr(saved, name, copy.deepcopy(getattr(written, name)))
    whole = replay_files.write_whole
    count = 0

    def writing(path: Any, parts: Any) -> None:
        nonlocal count
        count += 1
        if count == number:
            written.write(0, rows)
        whole(path, parts)

    with monkeypatch.context() as patch:
        patch.setattr(replay_files, "write_whole", writing)
        written.memory.save(tmp_path)
    saved.memory = like(written)
    saved.memory.load(tmp_path)
    (ring,) = saved.memory.rings
    assert ring.hi == before
    assert 2 <= len(saved.memory) <= capacity
    saved.first = [ring.lo]
    saved.check(saved.memory[:])
    for _ in range(9):
        saved.jump(0, [0])
        saved.write(0, 7)
        check_all(saved)


def test_nothing_is_kept_for_a_row_that_is_not_readable():
    """It would become the next observation of the row that takes its place."""
    written = made(Written, 60, [2], 8, 1, None)
    (ring,) = written.memory.rings
    ring.continue_from(5, 5, ring.episode, np.zeros(2, bool))
    ring.break_off([0, 1])
    check_nothing_is_left(written.memory)


def test_rows_that_are_overwritten_while_they_are_read_are_not_returned():
    """A small memory of long rows, written all the time: every value of a transition says which it is."""
    size = 2000
    keys = [("next", name) for name in ("done", "terminated", "truncated")]
    columns = [
        Column(
            ("observation",),
            (size,),
            np.dtype(np.float64),
            carry=True,
            role="observation",
        ),
        Column(("action",), (), np.dtype(np.int64), role="action"),
        Column(("next", "reward"), (), np.dtype(np.float64), trailing=True),
        *[Column(key, (), np.dtype(bool), trailing=True) for key in keys],
    ]
    memory = ReplayMemory(300, seed=0)
    memory.open(columns, [1], 16)
    is_over = threading.Event()
    is_full = threading.Event()

    def write() -> None:
        rng = np.random.default_rng(0)
        first = 0
        while not is_over.is_set():
            n = min(int(rng.integers(1, 16)), memory.rings[0].room)
            with memory.lock:
                if rng.random() < 0.3:
                    memory.rings[0].break_off([0])
                    first += 1000
                numbers = np.arange(first, first + n)[:, None]
                rows: dict[Any, Any] = {key: np.zeros((n, 1), bool) for key in keys}
                rows["observation",] = np.repeat(numbers[..., None], size, 2).astype(
                    np.float64
                )
                rows["action",] = numbers
                rows["next", "reward"] = numbers.astype(np.float64)
                memory.write(
                    0,
                    rows,
                    {("observation",): np.full((1, size), first + n, np.float64)},
                )
            first += n
            if len(memory) == 300:
                is_full.set()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert is_full.wait(60)
        for _ in range(400):
            batch = memory.sample(64)
            number = batch["action"][:, None]
            assert (batch["observation"] == number).all()
            assert (batch["next", "observation"] == number + 1).all()
            assert (batch["next", "reward"] == number).all()
    finally:
        is_over.set()
        writer.join(60)
