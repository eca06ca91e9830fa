"""Where episodes begin, end and are cut: every option about it, with the arrays it must give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gymnasium import spaces

import muster
from muster import Collector
from muster.errors import BadOption
from muster.testing import CountingEnv, FaultyEnv
from tests.tools import (
    Stopper,
    assert_accounted,
    assert_same,
    column,
    counting,
    lengths,
)


def ids(batch: Any) -> list[Any]:
    return column(batch, "collector", "traj_ids")


def valid(batch: Any) -> list[Any]:
    return column(batch, "collector", "valid")


# --- reset_when_done=False ------------------------------------------------------------------------


def test_without_reset_when_done_a_recurrent_state_begins_anew_with_the_next_batch():
    def policy(obs: torch.Tensor, state: Any) -> Any:
        state = torch.zeros(2, 1) if state is None else state
        return state[:, 0].long() % 2, state + 1

    with Collector(
        lengths(2, 4), policy, num_envs=2, frames_per_batch=10, reset_when_done=False
    ) as c:
        for _ in range(2):
            assert c.rollout()["recurrent_state"][..., 0].tolist() == [
                [0, 1, 0, 0, 0],
                [0, 1, 2, 3, 0],
            ]


# --- interruptor ----------------------------------------------------------------------------------


def test_an_interruptor_stops_every_group_of_the_batch():
    class Stopped:
        def collection_stopped(self) -> bool:
            return True

    with Collector(
        [counting(9)] * 2, None, frames_per_batch=8, interruptor=Stopped()
    ) as c:
        assert valid(c.rollout()) == [[True, False, False, False]] * 2
        assert_accounted(c)


def test_an_error_of_the_interruptor_is_the_users_own():
    class Broken:
        def collection_stopped(self) -> bool:
            raise ZeroDivisionError("in the interruptor")

    with Collector(counting(9), None, frames_per_batch=4, interruptor=Broken()) as c:
        with pytest.raises(ZeroDivisionError, match="in the interruptor"):
            c.rollout()
        assert_accounted(c)


def test_objects_of_blank_rows_are_none():
    class Talking(CountingEnv):
        def __init__(self) -> None:
            super().__init__(9)
            self.observation_space = spaces.Text(10)

        def _observe(self) -> Any:
            return f"t{self.t}"

    with Collector(Talking, None, frames_per_batch=4, interruptor=Stopper(2)) as c:
        assert c.rollout()["observation"] == ["t0", "t1", None, None]


# --- max_frames_per_traj, set_truncated, reset_at_each_iter ---------------------------------------


def test_reset_takes_a_mask():
    with Collector(counting(9), None, num_envs=3, frames_per_batch=6) as c:
        c.rollout()
        c.reset(torch.tensor([True, False, True]))
        assert column(c.rollout(), "next", "reward") == [[1, 2], [3, 4], [1, 2]]


@pytest.mark.parametrize("index", [[-1], [3], 1.5, [True, False]])
def test_reset_of_what_is_no_environment_is_refused(index):
    with Collector(counting(9), None, num_envs=3, frames_per_batch=6) as c:
        with pytest.raises(BadOption, match="numbered 0 to 2"):
            c.reset(index)
        assert column(c.rollout(), "next", "reward") == [[1, 2]] * 3


# --- surplus --------------------------------------------------------------------------------------


def test_whole_episodes_may_not_have_holes():
    with pytest.raises(BadOption, match="holes.*multiple of 2"):
        Collector(counting(9), None, num_envs=2, frames_per_batch=3, trajs_per_batch=2)


# --- split_trajs ----------------------------------------------------------------------------------


def test_split_trajs_has_one_trajectory_per_row():
    with Collector(
        lengths(2, 9), None, num_envs=2, frames_per_batch=10, split_trajs=True
    ) as c:
        batch = next(iter(c))
        assert batch.shape == (4, 5)
        assert batch.names == [None, "time"]
        assert column(batch, "next", "reward") == [
            [1, 2, 0, 0, 0],
            [1, 2, 0, 0, 0],
            [1, 0, 0, 0, 0],
            [1, 2, 3, 4, 5],
        ]
        assert ids(batch) == [
            [0, 0, -1, -1, -1],
            [2, 2, -1, -1, -1],
            [4, -1, -1, -1, -1],
            [1] * 5,
        ]
        assert column(batch, "collector", "mask") == [
            [True] * n + [False] * (5 - n) for n in (2, 2, 1, 5)
        ]
        assert c.stats().frames == 10
        assert c.rollout().shape == (2, 5), "rollout() is as it is"


def test_split_trajs_sees_the_ends_that_set_truncated_made_and_postproc_sees_it_split():
    seen = []
    options = {
        "frames_per_batch": 4,
        "split_trajs": True,
        "set_truncated": True,
        "postproc": lambda b: seen.append(b),
    }
    with Collector(counting(3), None, total_frames=8, **options) as c:
        for batch, _ in zip(c, range(2), strict=False):
            assert batch is seen[-1]
    assert [column(b, "next", "truncated") for b in seen] == [
        [[False, False, False], [True, False, False]],
        [[False, False], [False, True]],
    ]


# --- trajs_per_batch ------------------------------------------------------------------------------


def test_reset_drops_the_episodes_it_cuts_and_counts_them():
    with Collector(
        counting(4), None, num_envs=2, frames_per_batch=12, trajs_per_batch=2
    ) as c:
        batches = iter(c)
        assert ids(next(batches)) == [0] * 4 + [1] * 4
        assert c.stats().in_flight == 4
        c.reset(0)
        rows = next(batches)
        assert column(rows, "next", "reward") == [1, 2, 3, 4] * 2
        assert ids(rows) == [3] * 4 + [4] * 4
        assert c.stats().discarded == {"cut": 2}
        assert_accounted(c)


def test_episodes_with_an_error_in_them_are_whole_all_the_same():
    env = FaultyEnv(5, error=RuntimeError, length=4)
    with Collector(env, None, frames_per_batch=4, trajs_per_batch=1) as c:
        seen = []
        while len(seen) < 3:
            try:
                seen.append(next(iter(c)))
            except muster.errors.EnvError:
                pass
        for batch in seen:
            assert column(batch, "observation")[0] == [4, 0]
            assert column(batch, "next", "done")[-1]
        assert_accounted(c)


# --- compact_obs ----------------------------------------------------------------------------------


def expand(batch: Any, finals: Any) -> torch.Tensor:
    """``next/observation`` as it would be, from a compact batch ``[B, T]``."""
    after = torch.full_like(batch["observation"], torch.nan)
    after[:, :-1] = batch["observation"][:, 1:]
    for n in range(len(finals)):
        after[finals["env"][n], finals["row"][n]] = finals["observation"][n]
    return after


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_frames_per_traj": 3},
        {"set_truncated": True},
        {"reset_when_done": False},
        {"reset_at_each_iter": True},
        {"reset_when_done": False, "max_frames_per_traj": 3, "set_truncated": True},
        {"interruptor": 4},
    ],
    ids=str,
)
def test_compact_batches_and_their_final_observations_have_it_all(options):
    def of(compact: bool) -> Collector:
        chosen = {
            **options,
            "num_envs": 3,
            "frames_per_batch": 21,
            "compact_obs": compact,
        }
        if "interruptor" in options:
            chosen["interruptor"] = Stopper(options["interruptor"])
        return Collector(lengths(2, 4, 5), None, seed=0, **chosen)

    with of(True) as small, of(False) as full:
        for _ in range(3):
            batch, expected = small.rollout(), full.rollout()
            assert ("next", "observation") not in batch.keys(True)
            assert_same(batch, expected, ignore=(("next", "observation"),))
            finals = small.final_observations()
            where = expected["collector", "traj_ids"] >= 0
            rebuilt = expand(batch, finals)
            assert torch.equal(rebuilt[where], expected["next", "observation"][where])
            shown = {
                (int(e), int(r))
                for e, r in zip(finals["env"], finals["row"], strict=True)
            }
            assert len(shown) == len(finals), "each once"
            assert all(where[e, r] for e, r in shown), "none of what is blank"
