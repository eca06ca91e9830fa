"""Returns and lengths from rewards and done flags."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muster import load_state, save_state
from muster.errors import BadCheckpoint, BadOption, HookError
from muster.observing.metrics import MetricsTracker


def tracked(
    num_envs: int, steps: list[tuple[Any, Any]]
) -> tuple[MetricsTracker, list[tuple[int, dict[str, float]]]]:
    """A tracker after these steps, and what it has logged."""
    records: list[tuple[int, dict[str, float]]] = []
    tracker = MetricsTracker(
        num_envs, lambda metrics, step: records.append((step, dict(metrics)))
    )
    for reward, done in steps:
        tracker.update(reward, done)
    return tracker, records


def record(
    reward: float, length: int, cumulative: float, number: int
) -> dict[str, float]:
    return {
        "episode_reward": reward,
        "episode_length": length,
        "cumulative_reward": cumulative,
        "episode_number": number,
    }


def test_it_logs_only_when_episodes_finish():
    tracker, records = tracked(
        2,
        [([1, 10], [False, False]), ([2, 20], [False, True]), ([4, 40], [True, False])],
    )
    assert records == [(4, record(30.0, 2, 33.0, 1)), (6, record(7.0, 3, 77.0, 2))]
    assert (
        tracker.collected_steps,
        tracker.cumulative_reward,
        tracker.episode_count,
    ) == (
        6,
        77.0,
        2,
    )
    assert (tracker.last_episode_reward, tracker.last_episode_length) == (7.0, 3)


def test_episodes_that_finish_together_have_a_record_each_at_the_same_step():
    tracker, records = tracked(
        3, [([1, 2, 4], [True, False, True]), ([1, 1, 1], [True, True, False])]
    )
    assert records == [
        (3, record(1.0, 1, 7.0, 1)),
        (3, record(4.0, 1, 7.0, 2)),
        (6, record(1.0, 1, 10.0, 3)),
        (6, record(3.0, 2, 10.0, 4)),
    ]
    assert (tracker.last_episode_reward, tracker.last_episode_length) == (3.0, 2)


@pytest.mark.parametrize(
    ("num_envs", "reward", "done"),
    [
        (1, 3.0, True),
        (1, torch.tensor(3.0), torch.tensor(True)),
        (1, np.float32(3.0), np.bool_(True)),
        (2, [1.0, 3.0], [False, True]),
        (2, np.array([[1], [3]], np.int64), np.array([[0], [1]], np.uint8)),
        (
            2,
            torch.tensor([[1.0], [3.0]]).requires_grad_(),
            torch.tensor([[False], [True]]),
        ),
        (2, torch.tensor([1.0, 3.0], dtype=torch.bfloat16), torch.tensor([0.0, 1.0])),
        (
            2,
            torch.tensor([[[0.5], [0.5]], [[1.0], [2.0]]]),
            torch.tensor([[False], [True]]),
        ),
        (2, np.array([[0.5, 0.5], [1.0, 2.0]]), np.array([False, True])),
    ],
)
def test_rewards_are_summed_over_all_but_the_environments(num_envs, reward, done):
    tracker, records = tracked(num_envs, [(reward, done)])
    total = 3.0 if num_envs == 1 else 4.0
    assert records == [(num_envs, record(3.0, 1, total, 1))]
    assert tracker.collected_steps == num_envs


@pytest.mark.parametrize(
    ("reward", "done", "message"),
    [
        ([1.0, 1.0, 1.0], [False] * 2, r"reward has shape \[3\]: expected 2 rows"),
        (1.0, [False] * 2, r"reward has shape \[\]"),
        (torch.ones(1, 2), [False] * 2, r"reward has shape \[1, 2\]"),
        ([1.0, 1.0], True, r"done has shape \[\]"),
        ([1.0, 1.0], [False] * 3, r"done has shape \[3\]"),
        (
            [1.0, 1.0],
            np.zeros((2, 2), bool),
            r"done has shape \[2, 2\]: expected one flag for each of 2",
        ),
        ([[1.0], [1.0, 2.0]], [False] * 2, "expected numbers"),
        ([None, "x"], [False] * 2, "expected numbers"),
    ],
)
def test_another_shape_is_refused_and_nothing_is_counted(reward, done, message):
    tracker = MetricsTracker(2)
    with pytest.raises(BadOption, match=message):
        tracker.update(reward, done)
    assert (
        tracker.collected_steps,
        tracker.cumulative_reward,
        tracker.state_dict()["lengths"].tolist(),
    ) == (
        0,
        0,
        [0, 0],
    )


@pytest.mark.parametrize("num_envs", [0, -1, 2.0, True, None])
def test_the_number_of_environments_is_a_positive_integer(num_envs):
    with pytest.raises(BadOption, match="num_envs"):
        MetricsTracker(num_envs)


def test_abandoned_episodes_leave_nothing_to_the_next_ones():
    tracker, records = tracked(3, [([1, 1, 1], [False] * 3), ([1, 1, 1], [False] * 3)])
    tracker.abandon([0, 2])
    tracker.update([5, 5, 5], [True] * 3)
    assert [(r["episode_reward"], r["episode_length"]) for _, r in records] == [
        (5, 1),
        (7, 3),
        (5, 1),
    ]
    assert (tracker.collected_steps, tracker.cumulative_reward) == (9, 21)
    tracker.update([1, 1, 1], [False] * 3)
    tracker.abandon()
    tracker.update([2, 2, 2], [True] * 3)
    assert [(r["episode_reward"], r["episode_length"]) for _, r in records[3:]] == [
        (2, 1)
    ] * 3


def test_reset_begins_anew_with_all_counts():
    tracker, records = tracked(2, [([1, 1], [False, True]), ([1, 1], [False, False])])
    tracker.reset()
    assert (
        tracker.collected_steps,
        tracker.cumulative_reward,
        tracker.episode_count,
    ) == (
        0,
        0.0,
        0,
    )
    assert (tracker.last_episode_reward, tracker.last_episode_length) == (0.0, 0)
    tracker.update([1, 2], [True, True])
    assert records[1:] == [(2, record(1.0, 1, 3.0, 1)), (2, record(2.0, 1, 3.0, 2))]


@given(
    st.lists(
        st.tuples(*[st.tuples(st.integers(-9, 9), st.booleans())] * 3), max_size=20
    ),
    st.integers(0, 20),
)
def test_a_loaded_state_goes_on_as_if_nothing_had_happened(steps, cut):
    split = [([r for r, _ in row], [d for _, d in row]) for row in steps]
    whole, all_records = tracked(3, split)
    first, records = tracked(3, split[:cut])
    second, more = tracked(3, [])
    second.load_state_dict(first.state_dict())
    for reward, done in split[cut:]:
        second.update(reward, done)
    assert records + more == all_records
    assert all(
        np.array_equal(a, b)
        for a, b in zip(
            whole.state_dict().values(), second.state_dict().values(), strict=True
        )
    )


def test_a_state_survives_a_file_and_is_a_copy(tmp_path):
    tracker, _ = tracked(2, [([1, 2], [False, False])])
    state = tracker.state_dict()
    tracker.update([1, 2], [True, True])
    save_state(tmp_path / "state", state)
    other = MetricsTracker(2)
    other.load_state_dict(load_state(tmp_path / "state"))
    other.update([4, 4], [False, True])
    assert (
        other.last_episode_reward,
        other.last_episode_length,
        other.collected_steps,
    ) == (
        6.0,
        2,
        4,
    )


def test_a_state_of_another_number_of_environments_is_refused():
    with pytest.raises(
        BadCheckpoint, match="of 2 environments, and this tracker is for 3"
    ):
        MetricsTracker(3).load_state_dict(MetricsTracker(2).state_dict())


def test_an_error_of_the_logger_loses_neither_counts_nor_other_records():
    records = []

    def fails_at_first(metrics, step):
        records.append(metrics["episode_number"])
        if len(records) == 1:
            raise OSError("disk full")

    tracker = MetricsTracker(2, fails_at_first)
    with pytest.raises(HookError, match="disk full") as caught:
        tracker.update([1, 2], [True, True])
    assert isinstance(caught.value.__cause__, OSError)
    assert (records, tracker.episode_count) == ([1, 2], 2)
    tracker.update([1, 2], [True, False])
    assert (tracker.last_episode_reward, tracker.last_episode_length) == (1.0, 1)


class OncePerInterval:
    """prt_rl's rule: yes once for every interval of steps."""

    def __init__(self, every: int = 1) -> None:
        self.every, self.last, self.scalars = every, 0, []

    def should_log(self, step: int) -> bool:
        now, before = (step + 1) // self.every, self.last // self.every
        self.last = step + 1 if now > before else self.last
        return now > before

    def log_scalar(self, name: str, value: float, iteration: int | None = None) -> None:
        self.scalars.append((name, value, iteration))


def test_a_logger_that_says_yes_once_per_step_gets_all_records_of_that_step():
    logger = OncePerInterval()
    tracker = MetricsTracker(2, logger)
    tracker.update([1, 2], [True, True])
    assert logger.scalars == [
        (name, value, 2)
        for row in (record(1, 1, 3, 1), record(2, 1, 3, 2))
        for name, value in row.items()
    ]


@given(
    st.integers(1, 3).flatmap(
        lambda n: st.lists(
            st.tuples(*[st.tuples(st.integers(-9, 9), st.booleans())] * n), max_size=9
        )
    ),
    st.data(),
)
def test_many_rows_at_once_are_counted_as_one_after_another(steps, data):
    N = len(steps[0]) if steps else 2
    rows = [
        ([reward for reward, _ in step], [done for _, done in step]) for step in steps
    ]
    one_by_one, expected = tracked(N, rows)
    tracker, records = tracked(N, [])
    cut = data.draw(st.integers(0, len(rows)))
    for part in (rows[:cut], rows[cut:]):
        reward, done = (
            np.array([row[i] for row in part]).reshape(len(part), N) for i in (0, 1)
        )
        tracker.update_rows(reward.astype(np.float32), done.astype(bool))
    assert records == expected
    for name, value in one_by_one.state_dict().items():
        assert np.array_equal(tracker.state_dict()[name], value)
