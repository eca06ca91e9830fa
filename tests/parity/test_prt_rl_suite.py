"""The behaviour that prt_rl's own ``tests/common/test_collectors.py`` checks, under its headings.

Its tests read 28 private names of prt_rl's classes; these look at the same from outside.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from muster.compat.prt_rl import Collector, MetricsTracker
from tests.fakes.prt_rl_parts import Counting

CALLS: list[list[list[float]]] = []  # states that any ``Valued`` was called with


class Valued:
    """Its calls are counted outside of it, since what an object remembers is restored."""

    def act(
        self, state: torch.Tensor, deterministic: bool = False
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        CALLS.append(state.tolist())
        values = {"value": state[:, 2:] * 0.5, "log_prob": state[:, 2:] * -0.1}
        return torch.zeros(len(state), 1, dtype=torch.long), values


class Kept:
    """A logger that keeps what it gets."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int | None]] = []

    def should_log(self, iteration: int) -> bool:
        return True

    def log_scalar(self, name: str, value: float, iteration: int | None = None) -> None:
        self.scalars.append((name, value, iteration))

    def named(self, name: str) -> list[tuple[float, int | None]]:
        return [(value, at) for known, value, at in self.scalars if known == name]


def numbers(tracker: MetricsTracker) -> tuple[Any, ...]:
    return (
        tracker.collected_steps,
        tracker.cumulative_reward,
        tracker.episode_count,
        tracker.last_episode_reward,
        tracker.last_episode_length,
    )


def column(*values: Any) -> torch.Tensor:
    return torch.tensor(values).unsqueeze(-1)


# --- MetricsTracker -------------------------------------------------------------------------------


def test_initial_state_and_reset() -> None:
    tracker = MetricsTracker(num_envs=1, logger=Kept())
    assert numbers(tracker) == (0, 0.0, 0, 0.0, 0)
    tracker.update(column(1.0), column(False))
    tracker.reset()
    assert numbers(tracker) == (0, 0.0, 0, 0.0, 0)
    tracker.update(column(2.0), column(True))
    assert numbers(tracker) == (1, 2.0, 1, 2.0, 1), (
        "the step before the reset is forgotten"
    )


@pytest.mark.parametrize(
    ("done", "ended"),
    [
        (torch.tensor(True), 1),
        (torch.tensor([True, False, True]), 2),
        (column(True, False, True), 2),
    ],
    ids=["scalar", "one-dimension", "column"],
)
def test_done_mask_variants(done: torch.Tensor, ended: int) -> None:
    tracker = MetricsTracker(num_envs=done.numel(), logger=None)
    tracker.update(torch.ones(done.numel(), 1), done)
    assert (tracker.episode_count, tracker.collected_steps) == (ended, done.numel())


@pytest.mark.parametrize(
    ("reward", "last", "total"),
    [
        (torch.tensor(5.0), 5.0, 5.0),
        (torch.tensor([1.0, 2.0, 3.0]), 3.0, 6.0),
        (column(1.0, 2.0, 3.0), 3.0, 6.0),
        (torch.ones(3, 4, 1), 4.0, 12.0),
    ],
    ids=["scalar", "one-dimension", "column", "agents"],
)
def test_sum_per_env_variants(reward: torch.Tensor, last: float, total: float) -> None:
    count = 1 if reward.ndim == 0 else len(reward)
    tracker = MetricsTracker(num_envs=count, logger=None)
    tracker.update(reward, torch.ones(count, 1, dtype=torch.bool))
    assert tracker.last_episode_reward == last, "of the last environment"
    assert (tracker.cumulative_reward, tracker.episode_count) == (total, count)


def test_update_no_done_no_logging() -> None:
    logger = Kept()
    tracker = MetricsTracker(num_envs=2, logger=logger)
    tracker.update(column(1.0, 2.0), column(False, False))
    assert numbers(tracker) == (2, 3.0, 0, 0.0, 0)
    assert logger.scalars == []


def test_update_single_env_done_logs_and_resets() -> None:
    logger = Kept()
    tracker = MetricsTracker(num_envs=2, logger=logger)
    tracker.update(column(1.0, 2.0), column(False, False))
    tracker.update(column(3.0, 4.0), column(True, False))
    assert numbers(tracker) == (4, 10.0, 1, 4.0, 2)
    names = ("episode_reward", "episode_length", "cumulative_reward", "episode_number")
    assert [logger.named(name) for name in names] == [
        [(4, 4)],
        [(2, 4)],
        [(10, 4)],
        [(1, 4)],
    ]
    # the reward of the running episode of environment 1 goes on, that of 0 has begun again
    tracker.update(column(5.0, 6.0), column(True, True))
    assert logger.named("episode_reward")[1:] == [(5, 6), (2 + 4 + 6, 6)]
    assert logger.named("episode_length")[1:] == [(1, 6), (3, 6)]


def test_update_multiple_envs_done_same_step() -> None:
    logger = Kept()
    tracker = MetricsTracker(num_envs=3, logger=logger)
    tracker.update(column(1.0, 10.0, 100.0), column(False, False, False))
    tracker.update(column(2.0, 20.0, 200.0), column(True, False, True))
    assert logger.named("episode_reward") == [(3, 6), (300, 6)], (
        "ascending by environment"
    )
    assert numbers(tracker) == (6, 333.0, 2, 300.0, 2), "the last is of environment 2"


def test_rewards_of_agents_are_summed() -> None:
    logger = Kept()
    tracker = MetricsTracker(num_envs=2, logger=logger)
    first = torch.tensor([[[1.0], [0.5], [0.5]], [[2.0], [1.0], [1.0]]])
    second = torch.tensor([[[0.0], [1.0], [1.0]], [[1.0], [1.0], [0.0]]])
    tracker.update(first, column(False, False))
    tracker.update(second, column(True, True))
    assert logger.named("episode_reward") == [(4, 4), (6, 4)]


# --- collect_experience ---------------------------------------------------------------------------


@pytest.mark.parametrize("flatten", [True, False])
def test_collect_shapes_of_several_environments(flatten: bool) -> None:
    collector = Collector(Counting([9, 9, 9]), None, flatten)
    found = collector.collect_experience(Valued(), num_steps=7)  # three steps of three
    lead = (9,) if flatten else (3, 3)
    shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
    ones = dict.fromkeys(("action", "reward", "done", "value", "log_prob"), (*lead, 1))
    states = {"state": (*lead, 3), "next_state": (*lead, 3)}
    assert shapes == ones | states | {"last_value_est": (3, 1)}
    times = found["state"][..., 2].flatten().tolist()
    assert times == [0, 0, 0, 1, 1, 1, 2, 2, 2], "by time, then by environment"


def test_collect_bootstraps_last_value_estimate() -> None:
    CALLS.clear()
    collector = Collector(Counting([9]))
    found = collector.collect_experience(Valued(), num_steps=6)
    assert [state[0][2] for state in CALLS] == [0, 1, 2, 3, 4, 5, 6], (
        "one call more than steps"
    )
    assert found["last_value_est"].tolist() == [[3.0]], (
        "of the state after the last step"
    )
    CALLS.clear()
    collector.collect_experience(Valued(), num_steps=2, bootstrap=False)
    assert [state[0][2] for state in CALLS] == [6, 7]


def test_collect_resets_done_envs_with_reset_index() -> None:
    env = Counting([2, 9])
    collector = Collector(env)
    collector.collect_experience(Valued(), num_steps=8)
    assert env.resets == [None, 0], "environment 0, before its third step"
    found = collector.collect_experience(Valued(), num_steps=2)
    assert env.resets == [None, 0, 0]
    assert found["state"].tolist() == [[2, 3, 0], [9, 1, 4]]


def test_collect_handles_partial_last_done_without_reset() -> None:
    env = Counting([3])
    found = Collector(env).collect_experience(Valued(), num_steps=3)
    assert env.resets == [None]
    assert found["done"].tolist() == [[False], [False], [True]]
    assert found["last_value_est"].tolist() == [[0.0]]


class Custom(Valued):
    def act(self, state: torch.Tensor, deterministic: bool = False) -> Any:
        return super().act(state)[0], {
            "entropy": state[:, 2:] + 7,
            "mean": state[:, :2],
        }


def test_custom_policy_values_are_kept_for_every_step() -> None:
    found = Collector(Counting([9]), None, False).collect_experience(
        Custom(), num_steps=3
    )
    assert found["entropy"].flatten().tolist() == [7, 8, 9]
    assert found["mean"].shape == (3, 1, 2)
    assert found.keys() & {"value", "log_prob", "last_value_est"} == set()


# --- collect_trajectory ---------------------------------------------------------------------------


def begun(found: dict[str, torch.Tensor]) -> list[tuple[int, int]]:
    """Length and number of the episode, of each trajectory."""
    starts = found["state"][found["state"][:, 2] == 0]
    return [(int(length), int(number)) for length, number, _ in starts]


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (3, [(2, 1), (3, 1), (5, 1)]),
        (5, [(2, 1), (3, 1), (2, 2), (5, 1), (3, 2)]),
        (6, [(2, 1), (3, 1), (2, 2), (5, 1), (3, 2), (5, 2)]),
    ],
    ids=["exact match", "with remainder", "even split"],
)
def test_trajectories_are_shared_fairly(
    count: int, expected: list[tuple[int, int]]
) -> None:
    found = Collector(Counting([2, 3, 5])).collect_trajectory(
        Valued(), num_trajectories=count
    )
    assert begun(found) == expected
    assert int(found["done"].sum()) == count
    assert "last_value_est" not in found


def test_custom_policy_values_of_trajectories() -> None:
    """Without a value and a log-probability, there are no such keys."""
    env = Counting([2, 3])
    found = Collector(env).collect_trajectory(Custom(), num_trajectories=2)
    assert found["entropy"].flatten().tolist() == [7, 8, 7, 8, 9]
    assert torch.equal(found["mean"], found["state"][:, :2])
    assert found.keys() & {"value", "log_prob", "last_value_est"} == set()


def test_trajectories_until_there_are_enough_steps() -> None:
    found = Collector(Counting([2, 3])).collect_trajectory(Valued(), min_num_steps=6)
    assert begun(found) == [(2, 1), (3, 1), (2, 2)], (
        "the earliest episodes with 6 steps or more"
    )
    assert len(found["reward"]) == 7


def test_get_metric_tracker() -> None:
    collector = Collector(Counting([2]), Kept())
    collector.collect_experience(Valued(), num_steps=4)
    tracker = collector.get_metric_tracker()
    assert isinstance(tracker, MetricsTracker)
    assert numbers(tracker) == (4, 6.0, 2, 3.0, 2)
