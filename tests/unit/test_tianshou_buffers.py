"""Steps that are added to Tianshou's buffers all at once, beside the same steps added one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("tianshou")
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

from muster.dialects.tianshou.buffers import add_in_bulk, add_one_by_one, adds_in_bulk
from muster.dialects.tianshou.episodes import Going, Taken
from tests.parity.tianshou_tools import assert_same, contents

KINDS = {
    "vector": lambda n: VectorReplayBuffer(7 * n, n),
    "more rings than environments": lambda n: VectorReplayBuffer(9 * (n + 2), n + 2),
    "unequal rings": lambda n: ReplayBufferManager([ReplayBuffer(2 + 3 * i) for i in range(n)]),
    "prioritized": lambda n: PrioritizedVectorReplayBuffer(5 * n, n, alpha=0.6, beta=0.4),
    "stacked": lambda n: VectorReplayBuffer(8 * n, n, stack_num=2, ignore_obs_next=True),
    "last frames": lambda n: VectorReplayBuffer(8 * n, n, stack_num=2, save_only_last_obs=True),
}
SINGLE = {
    "ring": lambda n: ReplayBuffer(6),
    "prioritized ring": lambda n: PrioritizedReplayBuffer(6, alpha=0.6, beta=0.4),
}


def row(n: int) -> Any:
    """Of each environment: whether it takes part ("-" if not), and how its episode ends, if it does."""
    return st.lists(st.sampled_from("-.TX"), min_size=n, max_size=n).filter(lambda row: set(row) != {"-"})


rollouts = st.integers(1, 4).flatmap(
    lambda n: st.lists(
        st.lists(row(n), min_size=1, max_size=12),
        min_size=1,
        max_size=4,
    )
)


def taken(rows: list[list[str]], begin: int, *, agents: int = 0, dtype: Any = float, extra: bool = False) -> Taken:
    """Steps as the rows say, with values that occur once only."""
    cells = [(t, env) for t, row in enumerate(rows) for env, what in enumerate(row) if what != "-"]
    t, env = np.array(cells, int).reshape(-1, 2).T
    number = (begin + t) * 10 + env
    terminated, truncated = (np.array([rows[i][j] == flag for i, j in cells], bool) for flag in "TX")
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
    return Taken(t, env, len(rows), batch)


def both(make: Any, parts: list[Taken], num_envs: int) -> tuple[Any, Any]:
    at_once, one_by_one = make(num_envs), make(num_envs)
    going = Going.of([0.0] * num_envs, [0] * num_envs)
    for part in parts:
        assert adds_in_bulk(at_once)
        after, _ = going.after(part)
        add_in_bulk(at_once, part, going, after)
        add_one_by_one(one_by_one, part)
        going = after
    return contents(at_once), contents(one_by_one)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(data=rollouts, agents=st.sampled_from([0, 2]), dtype=st.sampled_from([float, np.float32, int]))
def test_a_buffer_is_as_if_the_steps_had_been_added_one_by_one(
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
@given(data=st.lists(st.lists(st.sampled_from([["."], ["T"], ["X"]]), min_size=1, max_size=15), max_size=4))
def test_so_is_a_single_ring(kind: str, data: list[list[list[str]]]) -> None:
    begins = np.cumsum([0, *map(len, data)])
    parts = [taken(rows, int(t)) for rows, t in zip(data, begins, strict=False)]
    assert_same(*both(SINGLE[kind], parts, 1))


def test_what_a_buffer_knew_of_episodes_already_goes_on() -> None:
    buffers = VectorReplayBuffer(20, 2), VectorReplayBuffer(20, 2)
    for buffer in buffers:
        add_one_by_one(buffer, taken([[".", "."], [".", "."]], 0))
    new = Going.of([0.0, 0.0], [0, 0])  # a collector that begins, with a buffer that does not
    part = taken([[".", "."], ["X", "."]], 2)
    add_in_bulk(buffers[0], part, new, new.after(part)[0])
    add_one_by_one(buffers[1], part)
    assert_same(contents(buffers[0]), contents(buffers[1]))


def test_a_buffer_shares_no_memory_with_who_counts_the_episodes() -> None:
    buffer, part = VectorReplayBuffer(20, 2), taken([[".", "."], [".", "."]], 0, agents=2)
    going = Going.of([0.0, 0.0], [0, 0])
    after, _ = going.after(part)
    add_in_bulk(buffer, part, going, after)
    after.forget([0, 1])
    np.testing.assert_allclose(buffer.buffers[1]._ep_return, [4.0, 4.0])


def test_memory_is_made_for_the_first_row_and_for_what_comes_later() -> None:
    first, later = taken([[".", "."], [".", "."]], 0), taken([[".", "."]], 2)
    first.batch.info = Batch(number=np.array([1, 1, 2, 2]))
    later.batch.info = Batch(number=np.array([0.5, 0.5]), name=np.array(["a", "b"], object))
    ours, theirs = both(lambda n: VectorReplayBuffer(12, n), [first, later], 2)
    assert_same(ours, theirs)
    assert ours["memory"]["info"]["number"].dtype.kind == "i"
    assert ours["memory"]["info"]["name"].tolist()[:3] == [None, None, "a"]


class Doubling(VectorReplayBuffer):
    def add(self, batch: Any, buffer_ids: Any = None) -> Any:
        return super().add(batch, buffer_ids)


class OwnRing(ReplayBuffer):
    def _update_state_pre_add(self, rew: Any, done: Any) -> Any:
        return super()._update_state_pre_add(rew, done)


@pytest.mark.parametrize(
    "buffer",
    [
        Doubling(10, 2),
        ReplayBufferManager([OwnRing(5), OwnRing(5)]),
        CachedReplayBuffer(ReplayBuffer(10), 2, 5),
        HERVectorReplayBuffer(10, 2, compute_reward_fn=lambda a, g: a, horizon=3),
    ],
)
def test_buffers_that_add_in_their_own_way_are_given_row_after_row(buffer: Any) -> None:
    assert not adds_in_bulk(buffer)


def test_returns_and_lengths_are_of_whole_episodes() -> None:
    going = Going.of([0.5, 0.0], [1, 0])
    after, ended = going.after(taken([[".", "."], ["T", "-"], [".", "X"], ["T", "."]], 0))
    assert [(end.t, end.env, end.steps) for end in ended] == [(1, 0, 3), (2, 1, 2), (3, 0, 2)]
    np.testing.assert_allclose([end.total for end in ended], [0.5 + 10 / 3, 1 / 3 + 21 / 3, 50 / 3])
    assert after.steps.tolist() == [0, 1]
    assert after.totals.tolist() == [0.0, 31 / 3]
    assert (going.totals.tolist(), going.steps.tolist()) == ([0.5, 0.0], [1, 0])
