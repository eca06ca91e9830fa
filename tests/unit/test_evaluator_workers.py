"""Resets and steps of evaluations and of ``collect(n_episode=)`` in workers, by environments that
count them.
"""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any, get_args

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from muster import Evaluator, MultiSyncCollector
from muster.episodes.rules import RuleName
from muster.errors import WorkerDied
from tests.tools import assert_balanced

RULES = get_args(RuleName)


class Counted(gymnasium.Env[Any, Any]):
    """Its seed is a scenario, the length of its episodes: ``2 + seed % 3``.

    Notes resets and steps in a folder.

    Args:
        kills_at: ends its process at this step of an episode, before it is noted, if the file
            ``armed`` exists.
        lengths: of all episodes, by the number of the environment in its file.
    """

    def __init__(self, folder: str, kills_at: int = 0, length: int = 0) -> None:
        self.observation_space = spaces.Box(0, 10**6, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.folder, self.kills_at, self.fixed = Path(folder), kills_at, length

    def note(self, name: str, text: str) -> None:
        with open(self.folder / name, "a") as file:
            file.write(text + "\n")

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.length = self.fixed or 2 + (seed or 0) % 3
        self.note("resets", str(seed))
        self.t = 0
        return np.array([self.length, 0], np.float32), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        if self.t == self.kills_at and (self.folder / "armed").exists():
            (self.folder / "armed").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        self.note("steps", "")
        return (
            np.array([self.length, self.t], np.float32),
            1.0,
            self.t >= self.length,
            False,
            {},
        )


def noted(folder: Path, name: str) -> list[str]:
    path = folder / name
    return path.read_text().splitlines() if path.exists() else []


def act(obs: torch.Tensor) -> torch.Tensor:
    return torch.zeros(obs.shape[:-1], dtype=torch.long)


@pytest.mark.parametrize(
    ("num_workers", "num_envs", "episodes", "rule"),
    [
        (1, None, 5, "per_env"),
        (1, 3, 10, "per_env"),
        (2, 2, 10, "per_env"),
        (2, 3, 5, "per_env"),
        (2, 2, 11, "last_even"),
    ],
)
def test_workers_reset_as_often_as_there_are_episodes(
    tmp_path, num_workers, num_envs, episodes, rule
):
    options = {
        "num_workers": num_workers,
        "num_envs": num_envs,
        "episodes": episodes,
        "rule": rule,
    }
    with Evaluator(partial(Counted, str(tmp_path)), act, **options) as evaluator:
        done = evaluator.evaluate()
        seeds = [int(seed) for seed in noted(tmp_path, "resets")]
        assert len(seeds) == episodes
        if rule == "per_env":
            assert sorted(seeds) == [*range(episodes)]
        assert (
            len(noted(tmp_path, "steps"))
            == done.frames
            == done.frames_counted
            == evaluator.stats().frames
        )
        assert (done.started, done.discarded) == (episodes, {})
        evaluator.trigger()
        assert evaluator.wait(60).records == tuple(
            r._replace(version=2) for r in done.records
        )
        assert len(noted(tmp_path, "resets")) == 2 * episodes


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "limits", [{}, {"max_trajectories": 7}, {"max_T": 9}, {"max_frames": 31}]
)
def test_workers_find_what_this_process_finds_by_every_rule(tmp_path, rule, limits):
    folders = [tmp_path / "here", tmp_path / "there"]
    found = []
    for folder, num_workers in zip(folders, (0, 2), strict=True):
        folder.mkdir()
        source = [partial(Counted, str(folder), length=n) for n in (2, 3, 5)]
        options = {
            "num_workers": num_workers,
            "num_envs": 2,
            "episodes": 9,
            "rule": rule,
            **limits,
        }
        with Evaluator(source, act, **options) as evaluator:
            found.append(evaluator.evaluate())
    assert found[0] == found[1]
    for name in ("resets", "steps"):
        assert sorted(noted(folders[0], name)) == sorted(noted(folders[1], name))


def test_a_single_environment_that_cannot_be_left_out_is_not_reset_after_its_last_episode():
    envs = pytest.importorskip("torchrl.envs")
    resets: list[Any] = []

    class Resets(gymnasium.Env[Any, Any]):
        observation_space = spaces.Box(0, 10, (1,), np.float32)
        action_space = spaces.Discrete(2)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            resets.append(seed)
            self.t = 0
            return np.zeros(1, np.float32), {}

        def step(self, action: Any) -> Any:
            self.t += 1
            return np.zeros(1, np.float32), 1.0, self.t == 3, False, {}

    with Evaluator(lambda: envs.GymWrapper(Resets()), None, episodes=4) as evaluator:
        assert evaluator.evaluate().started == 4
    assert resets == [0, None, None, None, None], "TorchRL's set_seed resets, too"


def test_collect_resets_as_often_as_there_are_episodes_in_workers(tmp_path):
    source = [partial(Counted, str(tmp_path), length=n) for n in (2, 5)]
    with MultiSyncCollector(source, act, num_envs=2) as collector:
        stats = collector.collect(n_episode=8)
    assert len(noted(tmp_path, "resets")) == 8
    assert len(noted(tmp_path, "steps")) == stats.n_collected_steps == 4 * 2 + 4 * 5


@pytest.mark.parametrize("place", [1, 2])
def test_the_steps_of_a_killed_worker_are_exact_when_environments_were_left_out(
    tmp_path, place
):
    lengths = iter([2, 40, 40] if place == 1 else [40, 2, 40])
    making = partial(Chosen, str(tmp_path), [*lengths], place)
    (tmp_path / "armed").touch()
    with MultiSyncCollector([making], act, num_envs=3, on_failure="raise") as collector:
        with pytest.raises(WorkerDied):
            collector.collect(n_episode=3)
        stats = collector.stats()
        assert (
            stats.executed == len(noted(tmp_path, "steps")) == 2 + 2 * 17 + (place != 1)
        )
        assert_balanced(stats)


class Chosen(Counted):
    """The environment ``place`` of its process ends it at its 18th step."""

    made = 0

    def __init__(self, folder: str, lengths: list[int], place: int) -> None:
        number, Chosen.made = Chosen.made, Chosen.made + 1
        super().__init__(
            folder, 18 if number == place else 0, lengths[number % len(lengths)]
        )
