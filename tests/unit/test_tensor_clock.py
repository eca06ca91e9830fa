"""The clock on tensors against the one on arrays: the same columns, ids, records and state, bit for
bit, however the rows are divided into rollouts. It never waits for a device.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from muster.episodes.clock import TrajectoryClock
from muster.episodes.record import join_episodes
from muster.episodes.tensor_clock import (
    BAD_CELL,
    BAD_VALUE,
    CELLS,
    COUNT,
    NO_CELL,
    ClockRows,
    EndedRows,
    TensorClock,
    episodes_of,
)
from tests.fakes.waiting import Waits

CPU = torch.device("cpu")
SIZES = [
    (1, 1),
    (1, 1000),
    (2, 64),
    (5, 1),
    (255, 33),
    (256, 33),
    (700, 12),
    (131_072, 2),
]


class Data:
    """Rows of a group: rewards of very different size, and ends with a probability."""

    def __init__(self, B: int, T: int, ending: float, seed: int = 0) -> None:
        draw = np.random.default_rng(seed)
        sizes = 10.0 ** draw.integers(-6, 6, (T, B))
        self.reward = (draw.normal(size=(T, B)) * sizes).astype(np.float32)
        self.terminated = draw.random((T, B)) < ending
        self.truncated = draw.random((T, B)) < ending / 2
        self.B = B
        self.T = T

    def columns(self, begin: int, end: int) -> Any:
        rows = slice(begin, end)
        return self.reward[rows], self.terminated[rows], self.truncated[rows]


def clock_of(B: int) -> TrajectoryClock:
    return TrajectoryClock(np.arange(B) + 3, B + 7)


def by_arrays(
    clock: TrajectoryClock, data: Data, begin: int, end: int
) -> tuple[Any, Any]:
    reward, terminated, truncated = data.columns(begin, end)
    done = terminated | truncated
    ids = np.zeros(done.shape, np.int64)
    counts = np.zeros(done.shape, np.int64)
    clock.fill_ids(ids, done)
    clock.fill_step_counts(counts, done)
    return (done, ids, counts, counts + 1), clock.advance(
        reward, terminated, truncated, done
    )


def by_tensors(
    clock: TensorClock,
    data: Data,
    begin: int,
    end: int,
    *,
    counted: bool = True,
    cells: int = CELLS,
) -> tuple[Any, Any]:
    reward, terminated, truncated = (
        torch.from_numpy(column.copy()) for column in data.columns(begin, end)
    )
    done = torch.ones_like(terminated)
    ids, counts, next_counts = (torch.full(done.shape, -5) for _ in range(3))
    more = (counts, next_counts) if counted else (None, None)
    rows = ClockRows(reward, terminated, truncated, done, ids, *more)
    ended = EndedRows(*done.shape, CPU, cells)
    clock.on_device()
    clock.advance(rows, ended, checked=False)
    taken = ended.take(int(ended.known[COUNT]))
    columns = (done, ids, *(() if more[0] is None else more))
    return [column.numpy() for column in columns], episodes_of(
        [column.numpy() for column in taken], len(ids[0]) + 7
    )


def assert_bits(a: Any, b: Any) -> None:
    assert a.dtype == b.dtype
    assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("ending", [0, 0.05, 0.5, 1])
@pytest.mark.parametrize(("B", "T"), SIZES)
def test_everything_is_as_the_clock_on_arrays_has_it(B, T, ending):
    data = Data(B, T, ending)
    here = clock_of(B)
    there = TensorClock(clock_of(B), CPU)
    for begin, end in ((0, (T + 1) // 2), ((T + 1) // 2, T)):
        if begin == end:
            continue
        columns, episodes = by_arrays(here, data, begin, end)
        others, records = by_tensors(there, data, begin, end)
        for a, b in zip(columns, others, strict=True):
            assert_bits(a, b)
        for a, b in zip(episodes.columns(), records.columns(), strict=True):
            assert_bits(a, b)
    state, other = here.state_dict(), there.on_host().state_dict()
    assert state.keys() == other.keys()
    for name, value in state.items():
        assert_bits(np.asarray(value), np.asarray(other[name]))


@pytest.mark.parametrize("cells", [1, 10, 64, 10_000])
def test_records_do_not_depend_on_how_many_rows_are_looked_at_at_once(cells):
    data = Data(7, 90, 0.1)
    here = clock_of(7)
    there = TensorClock(clock_of(7), CPU)
    for begin, end in ((0, 50), (50, 51), (51, 90)):
        columns, episodes = by_arrays(here, data, begin, end)
        others, records = by_tensors(there, data, begin, end, cells=cells)
        for a, b in zip(columns, others, strict=True):
            assert_bits(a, b)
        assert list(episodes) == list(records)


@pytest.mark.parametrize("B", [3, 300])
@pytest.mark.parametrize("ending", [0, 0.1])
def test_returns_do_not_depend_on_how_rows_are_divided(B, ending):
    data = Data(B, 40, ending)
    found = []
    for pieces in ([0, 40], [0, 1, 2, 17, 40], list(range(41))):
        clock = clock_of(B)
        parts = []
        for begin, end in pairwise(pieces):
            parts.append(by_arrays(clock, data, begin, end)[1])
        found.append((join_episodes(parts), clock.returns.copy()))
    for episodes, returns in found[1:]:
        assert_bits(episodes.episode_return, found[0][0].episode_return)
        assert_bits(returns, found[0][1])


def test_the_state_goes_from_the_device_to_the_host_and_back():
    data = Data(4, 60, 0.1)
    expected = clock_of(4)
    clock = TensorClock(clock_of(4), CPU)
    for begin in range(0, 60, 10):
        columns, episodes = by_arrays(expected, data, begin, begin + 10)
        expected.abandon([1])
        if begin % 20:
            others, records = by_tensors(clock, data, begin, begin + 10)
        else:
            others, records = by_arrays(clock.on_host(), data, begin, begin + 10)
        clock.on_host().abandon([1])
        for a, b in zip(columns, others, strict=True):
            assert_bits(a, b)
        assert list(episodes) == list(records)


def test_without_columns_of_step_counts():
    data = Data(4, 60, 0.1)
    clocks = [TensorClock(clock_of(4), CPU) for _ in range(2)]
    (_, with_counts), (_, without) = (
        by_tensors(clock, data, 0, 60, counted=counted)
        for clock, counted in zip(clocks, (True, False), strict=True)
    )
    assert len(with_counts)
    assert list(with_counts) == list(without)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("cells", [9, 1000])
def test_the_first_bad_reward_is_found_and_no_other_episode_has_it(bad, cells):
    data = Data(3, 20, 0.2)
    data.reward[7, 2] = bad
    data.reward[9, 0] = math.nan
    reward, terminated, truncated = (
        torch.from_numpy(column) for column in data.columns(0, 20)
    )
    done = torch.zeros_like(terminated)
    ended = EndedRows(20, 3, CPU, cells)
    for checked in (True, False):
        clock = TensorClock(clock_of(3), CPU)
        clock.on_device()
        rows = ClockRows(
            reward, terminated, truncated, done, torch.zeros(20, 3).long(), None, None
        )
        clock.advance(rows, ended, checked=checked)
        assert ended.known[BAD_CELL] == (7 * 3 + 2 if checked else NO_CELL)
    clock = TensorClock(clock_of(3), CPU)
    clock.on_device()
    clock.advance(rows, ended, checked=True)
    assert str(ended.known[BAD_VALUE].view(torch.float64).item()) == str(bad)
    taken = ended.take(int(ended.known[COUNT]))
    records = episodes_of([column.numpy() for column in taken], 10)
    _, episodes = by_arrays(clock_of(3), data, 0, 20)
    assert_bits(episodes.traj_id, records.traj_id)
    assert np.array_equal(
        episodes.episode_return, records.episode_return, equal_nan=True
    )
    assert 0 < np.isfinite(records.episode_return).sum() < len(records)


def test_it_does_not_wait_and_makes_the_same_operations_whatever_ends():
    found = []
    for ending in (0, 0.3, 1):
        data = Data(6, 30, ending)
        clock = TensorClock(clock_of(6), CPU)
        clock.on_device()
        columns = [torch.from_numpy(column) for column in data.columns(0, 30)]
        ids, counts, next_counts = (torch.zeros(30, 6).long() for _ in range(3))
        rows = ClockRows(*columns, columns[1] & False, ids, counts, next_counts)
        ended = EndedRows(30, 6, CPU)
        clock.advance(rows, ended, checked=True)
        with Waits() as mode:
            clock.advance(rows, ended, checked=True)
        assert not mode.found
        found.append(mode.operations)
    assert found[0] == found[1] == found[2]
    assert mode.launches.total() <= 30 + 60
