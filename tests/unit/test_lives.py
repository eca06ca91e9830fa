"""Episodic lives: ``traj_done_key`` says whether the environment's episode is over where the
agent's is.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

from muster import Collector, MultiSyncCollector
from muster.errors import BadEnvOutput, BadOption, EnvError
from muster.restore.crash_report import CrashReport
from muster.restore.player import Player
from muster.testing import CountingEnv
from tests.tools import assert_accounted, assert_same, collect, column, recorded

KEY = {"traj_done_key": "traj_done"}


class LivesEnv(CountingEnv):
    """A life is lost every ``life`` steps, and the episode is over after ``length``."""

    def __init__(
        self,
        length: int = 4,
        life: int = 2,
        *,
        fails_at: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(length, **options)
        self.life, self.fails_at = life, fails_at

    def step(self, action: int) -> Any:
        if self.executed == self.fails_at:
            raise ValueError("as asked")
        obs, reward, terminated, truncated, _ = super().step(action)
        return (
            obs,
            reward,
            terminated or self.t % self.life == 0,
            truncated,
            {"traj_done": terminated or truncated},
        )


def numbered(*sizes: tuple[int, int]) -> tuple[Any, list[Any]]:
    return recorded(lambda i: LivesEnv(*sizes[i % len(sizes)]))


def recurrent(obs: torch.Tensor, state: Any) -> Any:
    state = torch.zeros(*obs.shape[:-1], 1) if state is None else state
    return torch.ones(obs.shape[:-1], dtype=torch.int64), state + 1


def times(batch: Any, *key: str) -> Any:
    return batch[(*key, "observation")][..., 1].int().tolist()


def flags(batch: Any, name: str) -> Any:
    return batch["next", name].squeeze(-1).int().tolist()


def states(batch: Any) -> Any:
    return batch["recurrent_state"].squeeze(-1).int().tolist()


def test_a_lost_life_ends_the_agents_episode_and_not_the_environments():
    make, made = numbered((4, 2), (6, 3))
    with Collector(make, recurrent, num_envs=2, frames_per_batch=12, **KEY) as c:
        batch = c.rollout()
        assert times(batch) == [[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 4, 5]]
        assert times(batch, "next") == [[1, 2, 3, 4, 1, 2], [1, 2, 3, 4, 5, 6]]
        assert (
            flags(batch, "done")
            == flags(batch, "terminated")
            == [[0, 1, 0, 1, 0, 1], [0, 0, 1, 0, 0, 1]]
        )
        assert batch["next", "traj_done"].shape == (2, 6, 1)
        assert flags(batch, "traj_done") == [[0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 0, 1]]
        assert batch["collector", "traj_ids"].tolist() == [[0, 0, 0, 0, 2, 2], [1] * 6]
        assert states(batch) == [[0, 1, 0, 1, 0, 1], [0, 1, 2, 0, 1, 2]]
        assert [
            (e.traj_id, e.length, e.episode_return, e.terminated) for e in c.episodes
        ] == [
            (0, 4, 10.0, True),
            (1, 6, 21.0, True),
        ]
        after = c.rollout()
        assert times(after)[0] == [2, 3, 0, 1, 2, 3]
        assert states(after)[0] == [0, 1, 0, 1, 0, 1]
        assert after["collector", "traj_ids"].tolist() == [[2, 2, 4, 4, 4, 4], [3] * 6]
    assert [len(env.seeds) for env in made] == [4, 3]


def test_without_the_option_every_end_resets():
    batch = collect(LivesEnv, frames_per_batch=4)
    assert times(batch) == [0, 1, 0, 1]
    assert ("next", "traj_done") not in batch.keys(True)


class EndsQuietly(CountingEnv):
    """Its episode is over after ``length`` steps, which it says in its info only."""

    def step(self, action: int) -> Any:
        obs, reward, terminated, _, _ = super().step(action)
        return obs, reward, False, False, {"traj_done": np.bool_(terminated)}


def test_an_environment_that_is_over_without_an_end_is_truncated():
    batch = collect(partial(EndsQuietly, 2), frames_per_batch=5, **KEY)
    assert times(batch) == [0, 1, 0, 1, 0]
    assert flags(batch, "truncated") == flags(batch, "traj_done") == [0, 1, 0, 1, 0]
    assert flags(batch, "terminated") == [0] * 5


def test_an_end_without_the_entry_is_one_of_the_environment():
    assert times(collect(partial(CountingEnv, 2), frames_per_batch=5, **KEY)) == [
        0,
        1,
        0,
        1,
        0,
    ]


@pytest.mark.parametrize(
    ("info", "message"),
    [({"traj_done": "yes"}, r"info\['traj_done'\] is"), (None, "expected a dict")],
)
def test_what_is_no_flag_is_refused(info, message):
    class Odd(CountingEnv):
        def step(self, action: int) -> Any:
            return (*super().step(action)[:4], info)

    with Collector(Odd, None, frames_per_batch=5, **KEY) as c:
        with pytest.raises(BadEnvOutput, match=message):
            c.rollout()
        assert_accounted(c)


def test_a_batch_of_environments_is_refused_with_the_way_out():
    with pytest.raises(BadOption, match=r"single Gymnasium environments.*num_envs"):
        Collector(lambda: SyncVectorEnv([LivesEnv]), None, frames_per_batch=4, **KEY)
    with pytest.raises(BadOption, match="single Gymnasium environments"):
        MultiSyncCollector(
            [lambda: SyncVectorEnv([LivesEnv])],
            None,
            frames_per_batch=4,
            backend="threads",
            **KEY,
        )
    with pytest.raises(BadOption, match="name of an entry"):
        Collector(LivesEnv, None, frames_per_batch=4, traj_done_key=3)


# --- together with waiting ------------------------------------------------------------------------


def test_steps_of_an_episode_are_counted_over_lives_that_waited():
    options = {
        "num_envs": 2,
        "frames_per_batch": 8,
        "reset_when_done": False,
        "max_frames_per_traj": 5,
        **KEY,
    }
    with Collector(numbered((9, 2), (9, 9))[0], None, **options) as c:
        counts = [column(c.rollout(), "step_count") for _ in range(4)]
        assert [count[0] for count in counts] == [
            [0, 1, 0, 0],
            [2, 3, 0, 0],
            [4, 0, 0, 0],
            [0, 1, 0, 0],
        ]
        assert [count[1] for count in counts] == [
            [0, 1, 2, 3],
            [4, 0, 0, 0],
            [0, 1, 2, 3],
            [4, 0, 0, 0],
        ]


def test_whole_episodes_are_those_of_the_environment():
    options = {"num_envs": 2, "frames_per_batch": 8, "trajs_per_batch": 2, **KEY}
    for wait in ({}, {"reset_when_done": False}):
        with Collector(numbered((4, 2), (6, 5))[0], None, **options, **wait) as c:
            assert column(c.next(), "next", "reward") == [1, 2, 3, 4, 1, 2, 3, 4, 5, 6]
            assert_accounted(c)


@settings(max_examples=10, deadline=None)
@given(
    sizes=st.lists(
        st.tuples(st.integers(1, 9), st.integers(1, 5)), min_size=4, max_size=4
    ),
    rows=st.integers(1, 5),
    limit=st.sampled_from([None, 4]),
    wait=st.booleans(),
    backend=st.sampled_from(["threads", "threads", "processes"]),
)
def test_whatever_the_lives_are_rows_follow_each_other_and_workers_give_the_same(
    sizes, rows, limit, wait, backend
):
    factories = [partial(LivesEnv, *size) for size in sizes]
    options = {
        "frames_per_batch": 4 * rows,
        "max_frames_per_traj": limit,
        "reset_when_done": not wait,
        "seed": 1,
    }
    runs, ended = [], []
    for cls, more in (
        (Collector, {}),
        (MultiSyncCollector, {"num_workers": 2, "backend": backend}),
    ):
        with cls(factories, None, **options, **KEY, **more) as c:
            runs.append([c.next().clone() for _ in range(6)])
            assert_accounted(c)
            assert c.stats().executed == c.stats().frames
            ended.append(list(c.episodes))
    assert ended[0] == ended[1]
    for a, b in zip(*runs, strict=True):
        assert_same(a, b)
    joined = torch.cat(runs[0], -1)
    for env, (length, life) in enumerate(sizes):
        row = joined[env]
        row = row[row["collector", "valid"]] if wait else row
        length = min(length, limit or length)
        expected = [t % length for t in range(len(row))]
        assert times(row) == expected
        over = [t == length - 1 for t in expected]
        assert flags(row, "traj_done") == over
        assert column(row, "next", "done") == [
            end or (t + 1) % life == 0 for t, end in zip(expected, over, strict=True)
        ]
        ids = (row["collector", "traj_ids"] - env) // 4
        assert ids.tolist() == [t // length for t in range(len(row))]


class Uneven(LivesEnv):
    """With an odd seed it has one life, and does not fail."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None and seed % 2:
            self.life, self.fails_at = 30, None
        return super().reset(seed=seed, options=options)


def test_a_failure_after_lives_that_waited_is_replayed(tmp_path):
    make = partial(Uneven, 9, 2, fails_at=7, noise=True)
    options = {
        "num_envs": 2,
        "frames_per_batch": 10,
        "reset_when_done": False,
        "seed": 4,
        "crash_dir": tmp_path,
        **KEY,
    }
    with MultiSyncCollector([make], None, backend="threads", **options) as c:
        for _ in range(3):
            c.next()
        with pytest.raises(EnvError, match="as asked") as caught:
            c.next()
    crash_report = CrashReport.load(caught.value.crash_report, trust=True)
    assert len(crash_report.actions["action",]) == 8
    player = Player(crash_report)
    *before, last = player.moves()
    for move in before:
        player.make(move)
    assert "bit for bit" in player.verdict()
    with pytest.raises(EnvError, match="as asked"):
        player.make(last)
