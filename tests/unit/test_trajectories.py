"""Ids, step counts and episode records against a loop that counts on its fingers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.episodes.clock import MANY, MOST_REWARDS, TrajectoryClock
from muster.episodes.record import EpisodeRecord, Episodes, join_episodes
from muster.errors import BadCheckpoint


class ByHand:
    """What ``TrajectoryClock`` does, one step of one environment at a time."""

    def __init__(self, env_ids: list[int], total: int) -> None:
        self.env_ids, self.total = env_ids, total
        self.episode = [0] * len(env_ids)
        self.rewards: list[list[float]] = [[] for _ in env_ids]

    def abandon(self, which: list[int]) -> None:
        for i in which:
            self.episode[i] += bool(self.rewards[i])
            self.rewards[i] = []

    def rollout(
        self, reward: Any, terminated: Any, truncated: Any
    ) -> tuple[Any, Any, list[EpisodeRecord]]:
        ids, counts = np.zeros(reward.shape, int), np.zeros(reward.shape, int)
        records = []
        for t, i in np.ndindex(*reward.shape):
            ids[t, i] = self.env_ids[i] + self.total * self.episode[i]
            counts[t, i] = len(self.rewards[i])
            self.rewards[i].append(float(reward[t, i]))
            ends = bool(terminated[t, i]), bool(truncated[t, i])
            if any(ends):
                length = len(self.rewards[i])
                records.append(
                    EpisodeRecord(
                        ids[t, i], self.env_ids[i], sum(self.rewards[i]), length, *ends
                    )
                )
                self.episode[i] += 1
                self.rewards[i] = []
        return ids, counts, records


@st.composite
def histories(draw):
    """Environments, and rollouts of different lengths, each preceded by resets of some of them."""
    B = draw(st.integers(1, 4))
    rollouts = []
    for _ in range(draw(st.integers(1, 4))):
        T = draw(st.integers(0, 6))
        flags = st.lists(
            st.sampled_from([0, 0, 0, 1, 2, 3]), min_size=T * B, max_size=T * B
        )
        kinds = np.array(draw(flags), int).reshape(T, B)
        rewards = draw(st.lists(st.integers(-5, 5), min_size=T * B, max_size=T * B))
        reset = draw(st.lists(st.integers(0, B - 1), unique=True))
        rollouts.append(
            (
                reset,
                np.array(rewards, np.float32).reshape(T, B),
                kinds & 1 > 0,
                kinds & 2 > 0,
            )
        )
    return B, draw(st.integers(0, 3)), rollouts


@pytest.mark.parametrize("times", [1, MANY], ids=["few", "many"])
@given(history=histories())
def test_clock_equals_counting_by_hand(times, history):
    """Also for so many environments that the clock goes through them row by row."""
    B, first, rollouts = history
    B *= times
    rollouts = [
        (reset, *(np.tile(rows, times) for rows in columns))
        for reset, *columns in rollouts
    ]
    env_ids = list(range(first, first + B))
    clock, by_hand = (
        TrajectoryClock(np.array(env_ids), first + B + 1),
        ByHand(env_ids, first + B + 1),
    )
    for reset, reward, terminated, truncated in rollouts:
        clock.abandon(reset)
        by_hand.abandon(reset)
        done = terminated | truncated
        ids, counts = np.zeros(reward.shape, np.int64), np.zeros(reward.shape, np.int64)
        clock.fill_ids(ids, done)
        clock.fill_step_counts(counts, done)
        episodes = clock.advance(reward, terminated, truncated, done)
        expected = by_hand.rollout(reward, terminated, truncated)
        assert ids.tolist() == expected[0].tolist()
        assert counts.tolist() == expected[1].tolist()
        assert list(episodes) == expected[2]


def test_ids_of_two_groups_never_meet():
    clocks = [TrajectoryClock(np.array(ids), 3) for ids in ([0, 1], [2])]
    seen: list[int] = []
    for clock in clocks:
        ids = np.zeros((5, len(clock.env_ids)), np.int64)
        clock.fill_ids(ids, np.ones_like(ids, bool))
        seen += ids.ravel().tolist()
    assert sorted(seen) == list(range(15))


def test_returns_add_up_in_float64():
    clock = TrajectoryClock(np.array([0]), 1)
    reward = np.full((1000, 1), 0.1, np.float32)
    done = np.zeros((1000, 1), bool)
    for last in (False, True):
        done[-1] = last
        episodes = clock.advance(reward, done, done & False, done)
    assert episodes[0].episode_return == pytest.approx(
        2000 * float(np.float32(0.1)), rel=1e-12
    )
    assert episodes[0].length == 2000


@pytest.mark.parametrize("steps", [1, MOST_REWARDS, MOST_REWARDS + 1, 3 * MOST_REWARDS])
def test_rewards_of_single_steps_are_those_at_the_time(steps):
    """They are added up later; the user may change the batch meanwhile."""
    clock, rewards = (
        TrajectoryClock(np.arange(2), 2),
        np.random.default_rng(0).normal(size=(steps, 2)),
    )
    expected, no_end, row = (
        np.zeros(2),
        np.zeros((1, 2), bool),
        np.zeros((1, 2), np.float32),
    )
    for reward in rewards:
        row[...] = reward
        expected += row[0]
        assert len(clock.advance(row, no_end, no_end, no_end)) == 0
        row[...] = np.nan
    assert clock.returns.tolist() == expected.tolist()
    state = clock.state_dict()
    assert (state["returns"].tolist(), state["steps"].tolist()) == (
        expected.tolist(),
        [steps] * 2,
    )


def test_abandoning_what_has_not_begun_keeps_its_id():
    clock = TrajectoryClock(np.array([0, 1]), 2)
    clock.abandon([0, 1])
    clock.abandon([0])
    assert clock.episode.tolist() == [0, 0]
    clock.advance(np.ones((1, 2)), *[np.zeros((1, 2), bool)] * 3)
    clock.abandon([1])
    clock.abandon([1])
    assert clock.episode.tolist() == [0, 1]


def records(*ids: int) -> Episodes:
    n = len(ids)
    flags = np.zeros(n, bool)
    return Episodes(
        np.array(ids, np.int64),
        np.array(ids, np.int64),
        np.full(n, 0.5),
        np.full(n, 3),
        ~flags,
        flags,
    )


def test_episodes_are_a_sequence_of_records():
    episodes = records(4, 5, 6)
    assert len(episodes) == 3
    assert episodes[1] == EpisodeRecord(5, 5, 0.5, 3, True, False)
    assert episodes[-1].traj_id == 6
    assert [type(field) for field in episodes[0]] == [
        int,
        int,
        float,
        int,
        bool,
        bool,
        type(None),
    ]
    assert [record.traj_id for record in episodes[::-1]] == [6, 5, 4]
    assert episodes.index(episodes[2]) == 2
    assert EpisodeRecord(4, 4, 0.5, 3, True, False) in episodes
    with pytest.raises(IndexError):
        episodes[3]


def test_joined_episodes_come_group_by_group():
    assert [
        e.traj_id for e in join_episodes([records(3, 1), records(), records(2)])
    ] == [3, 1, 2]


def test_a_return_that_is_not_finite_is_that_of_its_own_episode_only():
    clock = TrajectoryClock(np.arange(2), 2)
    reward = np.array([[np.inf, 1], [2, np.nan], [3, 4], [np.inf, 5]], np.float32)
    done = np.array([[1, 0], [0, 0], [1, 1], [1, 1]], bool)
    for _ in range(2):  # nor do they change what comes after these rows
        found = [
            (e.env_id, e.episode_return, e.length)
            for e in clock.advance(reward, done, ~done, done)
        ]
        np.testing.assert_equal(
            found,
            [(0, np.inf, 1), (0, 5.0, 2), (1, np.nan, 3), (0, np.inf, 1), (1, 5.0, 1)],
        )


def test_a_state_of_other_environments_is_refused():
    state = TrajectoryClock(np.arange(4, 7), 9).state_dict()
    for stranger in (
        TrajectoryClock(np.arange(3), 9),
        TrajectoryClock(np.arange(4, 7), 8),
    ):
        with pytest.raises(
            BadCheckpoint, match=r"those of environments \[4, 5, 6\] of 9"
        ):
            stranger.load_state_dict(state)
