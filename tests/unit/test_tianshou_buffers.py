"""Many steps in one ``add`` of Tianshou's buffers, beside the same steps added row by row."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("tianshou")
import tianshou
from tianshou.data import (
    Batch,
    CachedReplayBuffer,
    HERVectorReplayBuffer,
    PrioritizedReplayBuffer,
    PrioritizedVectorReplayBuffer,
    ReplayBuffer,
    ReplayBufferManager,
    VectorReplayBuffer,
)

from muster.compat.tianshou.steps import Going, Taken, add, takes_many
from tests.parity.tianshou_tools import assert_same, contents

KINDS = {
    "vector": lambda n: VectorReplayBuffer(7 * n, n),
    "more rings than environments": lambda n: VectorReplayBuffer(9 * (n + 2), n + 2),
    "unequal rings": lambda n: ReplayBufferManager(
        [ReplayBuffer(2 + 3 * i) for i in range(n)]
    ),
    "prioritized": lambda n: PrioritizedVectorReplayBuffer(
        5 * n, n, alpha=0.6, beta=0.4
    ),
    "stacked": lambda n: VectorReplayBuffer(
        8 * n, n, stack_num=2, ignore_obs_next=True
    ),
    "last frames": lambda n: VectorReplayBuffer(
        8 * n, n, stack_num=2, save_only_last_obs=True
    ),
}
SINGLE = {
    "ring": lambda n: ReplayBuffer(6),
    "prioritized ring": lambda n: PrioritizedReplayBuffer(6, alpha=0.6, beta=0.4),
}


def row(n: int) -> Any:
    """Of each environment: whether it takes part ("-" if not), and how its episode ends, if it
    does.
    """
    return st.lists(st.sampled_from("-.TX"), min_size=n, max_size=n).filter(
        lambda row: set(row) != {"-"}
    )


rollouts = st.integers(1, 4).flatmap(
    lambda n: st.lists(
        st.lists(row(n), min_size=1, max_size=12),
        min_size=1,
        max_size=4,
    )
)


def taken(
    rows: list[list[str]],
    begin: int,
    *,
    agents: int = 0,
    dtype: Any = float,
    extra: bool = False,
) -> Taken:
    """Steps as the rows say, with values that occur once only."""
    cells = [
        (t, env)
        for t, row in enumerate(rows)
        for env, what in enumerate(row)
        if what != "-"
    ]
    t, env = np.array(cells, int).reshape(-1, 2).T
    number = (begin + t) * 10 + env
    terminated, truncated = (
        np.array([rows[i][j] == flag for i, j in cells], bool) for flag in "TX"
    )
    rew = number / 3
    batch = Batch(
        obs=np.stack([number, -number], -1).astype(np.float32),
        obs_next=np.stack([number + 10, -number], -1).astype(np.float32),
        act=number,
        rew=(np.stack([rew] * agents, -1) if agents else rew).astype(dtype),
        terminated=terminated,
        truncated=truncated,
        done=terminated | truncated,
        info=Batch(env_id=env.copy(), deep=Batch(x=number / 2)),
        policy=Batch(hidden_state=torch.as_tensor(number)) if extra else Batch(),
    )
    return Taken(env, np.searchsorted(t, np.arange(len(rows) + 1)).tolist(), batch)


def add_rows(buffer: Any, part: Taken) -> None:
    """As Tianshou's own collectors do it."""
    for begin, end in itertools.pairwise(part.ends):
        buffer.add(part.batch[begin:end], buffer_ids=part.env[begin:end])


def both(
    make: Any, parts: list[Taken], num_envs: int, *, many: bool = True
) -> tuple[Any, Any]:
    at_once, by_row = make(num_envs), make(num_envs)
    assert takes_many(at_once) == many
    for part in parts:
        add(at_once, part)
        add_rows(by_row, part)
    return contents(at_once), contents(by_row)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(
    data=rollouts,
    agents=st.sampled_from([0, 2]),
    dtype=st.sampled_from([float, np.float32, int]),
)
def test_a_buffer_is_as_if_the_steps_had_been_added_row_by_row(
    kind: str, data: list[list[list[str]]], agents: int, dtype: Any
) -> None:
    begins = np.cumsum([0, *map(len, data)])
    parts = [
        taken(rows, int(t), agents=agents, dtype=dtype, extra=i > 1)
        for i, (rows, t) in enumerate(zip(data, begins, strict=False))
    ]
    parts = [part for part in parts if len(part.env)]
    assert_same(*both(KINDS[kind], parts, len(data[0][0])))


@pytest.mark.parametrize("kind", SINGLE)
@settings(max_examples=25, deadline=None)
@given(
    data=st.lists(
        st.lists(st.sampled_from([["."], ["T"], ["X"]]), min_size=1, max_size=15),
        max_size=4,
    )
)
def test_so_is_a_single_ring(kind: str, data: list[list[list[str]]]) -> None:
    begins = np.cumsum([0, *map(len, data)])
    parts = [taken(rows, int(t)) for rows, t in zip(data, begins, strict=False)]
    assert_same(*both(SINGLE[kind], parts, 1, many=False))


def test_a_buffer_that_was_emptied_starts_over() -> None:
    buffers = VectorReplayBuffer(20, 2), VectorReplayBuffer(20, 2)
    for buffer, adds in zip(buffers, (add, add_rows), strict=True):
        adds(buffer, taken([[".", "."], [".", "."]], 0))
        buffer.reset(keep_statistics=True)
        adds(buffer, taken([[".", "."], ["X", "."]], 2))
    assert_same(contents(buffers[0]), contents(buffers[1]))


def test_many_steps_are_few_calls() -> None:
    calls = list[int]()
    buffer = VectorReplayBuffer(10, 2)
    original = buffer.add
    buffer.add = lambda batch, buffer_ids: (
        calls.append(len(batch)),
        original(batch, buffer_ids),
    )
    add(buffer, taken([[".", "."]] * 12, 0))
    assert calls == [
        2,
        10,
        10,
        2,
    ]  # the first row, of which memory is made, and no more than there is room for


def test_memory_is_made_for_the_first_row_and_for_what_comes_later() -> None:
    first, later = taken([[".", "."], [".", "."]], 0), taken([[".", "."]], 2)
    first.batch.info = Batch(number=np.array([1, 1, 2, 2]))
    later.batch.info = Batch(
        number=np.array([0.5, 0.5]), name=np.array(["a", "b"], object)
    )
    ours, theirs = both(lambda n: VectorReplayBuffer(12, n), [first, later], 2)
    assert_same(ours, theirs)
    assert ours["memory"]["info"]["number"].dtype.kind == "i"
    assert ours["memory"]["info"]["name"].tolist()[:3] == [None, None, "a"]


class Doubling(VectorReplayBuffer):
    def add(self, batch: Any, buffer_ids: Any = None) -> Any:
        return super().add(batch, buffer_ids)


@pytest.mark.parametrize(
    "buffer",
    [
        Doubling(10, 2),
        ReplayBuffer(5),
        CachedReplayBuffer(ReplayBuffer(10), 2, 5),
        HERVectorReplayBuffer(10, 2, compute_reward_fn=lambda a, g: a, horizon=3),
    ],
)
def test_buffers_that_may_look_at_rows_are_given_row_after_row(buffer: Any) -> None:
    assert not takes_many(buffer)


def test_so_are_those_of_another_version(monkeypatch: Any) -> None:
    calls = list[int]()
    buffer = VectorReplayBuffer(40, 2)
    original = buffer.add
    buffer.add = lambda batch, buffer_ids: (
        calls.append(len(batch)),
        original(batch, buffer_ids),
    )
    monkeypatch.setattr(tianshou, "__version__", "2.0.2")
    add(buffer, taken([[".", "."]] * 5, 0))
    assert calls == [2] * 5


def test_returns_and_lengths_are_of_whole_episodes() -> None:
    going = Going(np.array([0.5, 0.0]), np.array([1, 0]))
    after, ended = going.after(
        taken([[".", "."], ["T", "-"], [".", "X"], ["T", "."]], 0)
    )
    assert [(end.env, end.steps) for end in ended] == [(0, 3), (1, 2), (0, 2)]
    np.testing.assert_allclose(
        [end.total for end in ended], [0.5 + 10 / 3, 1 / 3 + 21 / 3, 50 / 3]
    )
    assert after.steps.tolist() == [0, 1]
    assert after.totals.tolist() == [0.0, 31 / 3]
    assert (going.totals.tolist(), going.steps.tolist()) == ([0.5, 0.0], [1, 0])


def test_rewards_may_have_more_than_one_dimension() -> None:
    part = taken([[".", "."], ["T", "."]], 0)
    part.batch.rew = np.arange(24.0).reshape(4, 2, 3)
    after, ended = Going(np.zeros(2), np.zeros(2, int)).after(part)
    expected = part.batch.rew[[0, 1]] + part.batch.rew[[2, 3]]
    np.testing.assert_array_equal(ended[0].total, expected[0])
    np.testing.assert_array_equal(after.totals[1], expected[1])
