"""Seeds chosen by hand: one for each environment, or one for each episode."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import gymnasium
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from muster import Collector, Evaluator, MultiSyncCollector
from muster.errors import BadOption, EnvError, UnsupportedEnv, WorkerDied
from muster.restore.crash_report import CrashReport
from muster.testing import TorchCartPole
from tests.fakes.seeded import SeededEnv
from tests.tools import recorded

SEEDS = [5, 3, 11, 7, 2]
IDS = ("collector", "traj_ids")


def assert_chosen(batch: Any, seeds: Any = SEEDS) -> None:
    """Every row is one of the episode whose seed is the entry at its trajectory id."""
    ids = batch[IDS]
    real = ids >= 0
    expected = torch.tensor(seeds)[ids % len(seeds)]
    assert torch.equal(batch["observation"][..., 0].long()[real], expected[real])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_frames_per_traj": 2},
        {"reset_when_done": False},
        {"reset_at_each_iter": True},
        {"max_decorrelation_steps": 3},
        {"compact_obs": True},
        {"set_truncated": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("frames", [4, 28])
def test_each_episode_has_the_seed_at_its_number(
    options: dict[str, Any], frames: int
) -> None:
    given = {"num_envs": 4, "frames_per_batch": frames, "total_frames": 5 * frames}
    with Collector(SeededEnv, None, episode_seeds=SEEDS, **given, **options) as c:
        ids = set()
        for batch in c:
            assert_chosen(batch)
            ids |= set(batch[IDS].flatten().tolist())
            if frames == 28:
                c.reset([1])
        assert max(ids) > len(SEEDS)


def scripted(mode: AutoresetMode) -> SyncVectorEnv:
    return SyncVectorEnv([SeededEnv] * 3, autoreset_mode=mode)


@pytest.mark.parametrize("mode", AutoresetMode)
def test_gymnasiums_vector_environments(mode: AutoresetMode) -> None:
    with Collector(
        partial(scripted, mode), None, frames_per_batch=30, episode_seeds=SEEDS
    ) as c:
        for _ in range(2):
            assert_chosen(c.next())


class Failing(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Fails in the step ``fails_at`` of its life."""

    def __init__(self, fails_at: int) -> None:
        super().__init__(SeededEnv())
        self.steps = 0
        self.fails_at = fails_at

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.steps == self.fails_at:
            raise RuntimeError("planned")
        return self.env.step(action)


@pytest.mark.parametrize("fails_at", [1, 2, 9, 12])
def test_after_an_error_the_next_episodes_follow_in_the_list(fails_at: int) -> None:
    """In the first row of a batch, in the middle of one, and where an episode has just ended."""
    env, _ = recorded(lambda i: Failing(fails_at if i == 0 else 0))
    with Collector(
        env, None, num_envs=2, frames_per_batch=20, episode_seeds=SEEDS
    ) as c:
        with pytest.raises(EnvError, match="planned"):
            for _ in range(3):
                assert_chosen(c.next())
        for _ in range(2):
            assert_chosen(c.next())


def test_a_restarted_worker_continues_in_the_list() -> None:
    with MultiSyncCollector(
        [partial(Failing, 13)] * 2,
        None,
        num_envs=2,
        frames_per_batch=24,
        episode_seeds=SEEDS,
        on_failure="restart",
    ) as c:
        for _ in range(4):
            assert_chosen(c.next())
        assert c.stats().restarts


class Dying(SeededEnv):
    """Ends its process in the first step of the episode with seed 11."""

    def step(self, action: Any) -> Any:
        if self.shown == 11:
            os._exit(3)
        return super().step(action)


def test_a_crash_report_of_the_first_rollout_has_the_chosen_seed(tmp_path: Any) -> None:
    options: dict[str, Any] = {
        "num_envs": 3,
        "frames_per_batch": 30,
        "crash_dir": tmp_path,
    }
    collector = MultiSyncCollector([Dying], None, episode_seeds=[8, 3, 11], **options)
    with collector as c, pytest.raises(WorkerDied) as raised:
        c.next()
    assert raised.value.crash_report is not None
    report = CrashReport.load(raised.value.crash_report, trust=True)
    assert report.special[0].seed == 11


def test_an_interrupted_collection_continues_in_the_list(tmp_path: Any) -> None:
    options: dict[str, Any] = {
        "num_envs": 3,
        "frames_per_batch": 21,
        "episode_seeds": SEEDS,
    }
    with Collector(SeededEnv, None, **options) as c:
        c.next()
        c.set_seed(0)
        c.next()
        state = c.state_dict()
        expected = c.next()
    with Collector(SeededEnv, None, **options) as c:
        c.load_state_dict(state)
        batch = c.next()
        assert torch.equal(batch["observation"], expected["observation"])
        assert torch.equal(batch[IDS], expected[IDS])


def test_set_seed_begins_the_list_again_within_an_episode() -> None:
    with Collector(
        SeededEnv, None, num_envs=2, frames_per_batch=6, episode_seeds=SEEDS
    ) as c:
        c.next()
        c.set_seed(9)
        batch = c.next()
        firsts = batch["observation"][:, 0, 0].tolist()
        assert firsts == SEEDS[:2]
        later = batch[IDS] - batch[IDS][:, :1] + torch.arange(2)[:, None]
        assert torch.equal(
            batch["observation"][..., 0].long(), torch.tensor(SEEDS)[later % 5]
        )


def test_seeds_of_environments_are_used_once() -> None:
    with Collector(
        SeededEnv, None, num_envs=3, frames_per_batch=30, seed=[6, 2, 9]
    ) as c:
        shown = c.next()["observation"][..., 0]
    assert shown[:, 0].tolist() == [6, 2, 9]
    assert shown[:, -1].tolist() == [-1, -1, -1]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_evaluation_plays_the_scenarios(workers: int) -> None:
    seeds = [4, 9, 2, 14, 6, 1, 3]
    with Evaluator(
        SeededEnv,
        None,
        episodes=7,
        num_envs=2,
        num_workers=workers,
        episode_seeds=seeds,
    ) as evaluator:
        for _ in range(2):  # each evaluation begins with the first one
            records = evaluator.evaluate().records
            assert sorted(record.seed for record in records) == sorted(seeds)
            for record in records:
                length = 1 + record.seed % 4
                assert record.length == length
                assert record.episode_return == length * record.seed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"episode_seeds": []}, "episode_seeds is an empty list"),
        ({"episode_seeds": "12"}, "episode_seeds='12': expected a list of seeds"),
        (
            {"episode_seeds": [1, -2]},
            r"episode_seeds\[1\]=-2: expected an integer of at least 0",
        ),
        ({"seed": [1, 2.5, 3]}, r"seed\[1\]=2.5: expected an integer"),
        ({"seed": [1, 2]}, "set_seed has 2 seeds for 3 environments"),
    ],
    ids=str,
)
def test_wrong_lists(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadOption, match=message):
        Collector(SeededEnv, None, num_envs=3, frames_per_batch=9, **options)
    if "episode_seeds" in options:
        with pytest.raises(BadOption, match=message):
            Evaluator(SeededEnv, None, **options)


def test_an_evaluation_takes_its_seeds_from_one_place() -> None:
    with pytest.raises(
        BadOption, match="episode_seeds are the same in each evaluation"
    ):
        Evaluator(SeededEnv, None, episode_seeds=SEEDS, reseed=True)


def test_environments_that_cannot_be_seeded_one_by_one() -> None:
    with pytest.raises(
        UnsupportedEnv, match=r"episode_seeds: .* cannot be reset with a seed"
    ):
        Collector(TorchCartPole(4), None, frames_per_batch=8, episode_seeds=SEEDS)


# --- track_seeds ----------------------------------------------------------------------------------

SEED = ("collector", "seed")


@pytest.mark.parametrize(
    "options",
    [
        {"seed": 7},
        {"seed": [6, 2, 9, 4]},
        {"episode_seeds": SEEDS},
        {"episode_seeds": SEEDS, "max_frames_per_traj": 2},
        {"seed": 7, "reset_when_done": False},
        {"seed": 7, "reset_at_each_iter": True},
        {"seed": 7, "max_decorrelation_steps": 3},
        {},
    ],
    ids=str,
)
def test_every_row_tells_the_seed_of_its_episode(options: dict[str, Any]) -> None:
    given: dict[str, Any] = {"num_envs": 4, "frames_per_batch": 28, "track_seeds": True}
    with Collector(SeededEnv, None, **given, **options) as c:
        for turn in range(3):
            if turn == 2:
                c.set_seed(31)
            batch = c.next()
            shown = batch["observation"][..., 0].long()
            real = batch[IDS] >= 0
            assert torch.equal(batch[SEED][real], shown[real])
            assert (batch[SEED][~real] == -1).all()
            assert turn == 1 or bool((batch[SEED] >= 0).any()) == bool(
                options or turn == 2
            )


@pytest.mark.parametrize("mode", AutoresetMode)
def test_seeds_of_vector_environments_are_told(mode: AutoresetMode) -> None:
    with Collector(
        partial(scripted, mode), None, frames_per_batch=30, seed=5, track_seeds=True
    ) as c:
        for _ in range(2):
            batch = c.next()
            assert torch.equal(batch[SEED], batch["observation"][..., 0].long())


def test_seeds_are_told_by_workers_and_after_a_load() -> None:
    options: dict[str, Any] = {
        "num_envs": 2,
        "frames_per_batch": 20,
        "track_seeds": True,
    }
    with MultiSyncCollector([SeededEnv] * 2, None, seed=3, **options) as c:
        for _ in range(2):
            batch = c.next()
            assert torch.equal(batch[SEED], batch["observation"][..., 0].long())
    with Collector(
        SeededEnv, None, seed=3, num_envs=2, frames_per_batch=2, track_seeds=True
    ) as c:
        c.next()
        state = c.state_dict()
    with Collector(
        SeededEnv, None, num_envs=2, frames_per_batch=2, track_seeds=True
    ) as c:
        c.load_state_dict(state)
        batch = c.next()
        assert torch.equal(batch[SEED], batch["observation"][..., 0].long())
        assert batch[SEED].max() == 3


def test_seeds_that_cannot_be_known_are_refused() -> None:
    with pytest.raises(
        UnsupportedEnv, match=r"track_seeds: .* resets its environments itself"
    ):
        Collector(TorchCartPole(4), None, frames_per_batch=8, track_seeds=True)
