"""Where episodes begin, end and are cut: every option about it, with the arrays it must give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

import muster
from muster import Collector
from muster.errors import BadOption
from muster.testing import ChainEnv, CountingEnv, FaultyEnv
from tests.tools import assert_accounted, assert_same, column, counting, recorded


class CountDown:
    """An interruptor that stops a rollout after ``steps`` calls, once."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def collection_stopped(self) -> bool:
        self.steps -= 1
        return self.steps == 0


def lengths(*each: int) -> Any:
    """Counting environments with episodes of these lengths, environment by environment."""
    factory, _ = recorded(lambda i: CountingEnv(each[i]))
    return factory


def ids(batch: Any) -> list[Any]:
    return column(batch, "collector", "traj_ids")


def valid(batch: Any) -> list[Any]:
    return column(batch, "collector", "valid")


# --- reset_when_done=False -------------------------------------------------------------------------


def test_without_reset_when_done_each_environment_plays_one_episode_per_batch_at_most():
    with Collector(lengths(2, 4), None, num_envs=2, frames_per_batch=10, reset_when_done=False) as c:
        first, second = c.rollout(), c.rollout()
        assert column(first, "next", "reward") == [[1, 2, 0, 0, 0], [1, 2, 3, 4, 0]]
        assert ids(first) == [[0, 0, -1, -1, -1], [1, 1, 1, 1, -1]]
        assert valid(first) == [[True] * 2 + [False] * 3, [True] * 4 + [False]]
        ended = [[False, True, True, True, True], [False] * 3 + [True, True]]
        assert column(first, "next", "done") == column(first, "next", "terminated") == ended
        assert column(first, "done") == [[False, False, True, True, True], [False] * 4 + [True]]
        assert not first["next", "truncated"].any()
        assert first["observation"][0, 2:].eq(0).all()
        assert first["next", "observation"][0, 2:].eq(0).all()
        assert ids(second) == [[2, 2, -1, -1, -1], [3, 3, 3, 3, -1]]
        assert column(second, "next", "reward") == column(first, "next", "reward")
        stats = c.stats()
        assert (stats.frames, stats.executed, stats.discarded) == (12, 12, {})
        assert [(e.traj_id, e.length, e.episode_return) for e in c.episodes] == [(2, 2, 3.0), (3, 4, 10.0)]
        assert_accounted(c)


def test_without_reset_when_done_an_episode_longer_than_a_batch_goes_on_in_the_next():
    with Collector(lengths(2, 5), None, num_envs=2, frames_per_batch=6, reset_when_done=False) as c:
        first, second, third = (c.rollout() for _ in range(3))
        assert column(first, "next", "reward") == [[1, 2, 0], [1, 2, 3]]
        assert column(second, "next", "reward") == [[1, 2, 0], [4, 5, 0]]
        assert column(third, "next", "reward") == [[1, 2, 0], [1, 2, 3]]
        assert ids(second) == [[2, 2, -1], [1, 1, -1]]
        assert ids(third) == [[4, 4, -1], [3, 3, 3]]
        assert [e.length for e in c.episodes] == [2]
        assert_accounted(c)


def test_without_reset_when_done_a_limit_ends_episodes_too():
    options = {"num_envs": 2, "frames_per_batch": 10, "reset_when_done": False, "max_frames_per_traj": 3}
    with Collector(lengths(2, 9), None, **options) as c:
        batch = c.rollout()
        assert column(batch, "step_count") == [[0, 1, 0, 0, 0], [0, 1, 2, 0, 0]]
        assert column(batch, "next", "step_count") == [[1, 2, 0, 0, 0], [1, 2, 3, 0, 0]]
        assert column(batch, "next", "truncated") == [[False] * 5, [False, False, True, True, True]]
        assert column(batch, "next", "terminated") == [[False, True, True, True, True], [False] * 5]
        assert column(c.rollout(), "next", "reward") == [[1, 2, 0, 0, 0], [1, 2, 3, 0, 0]]
        assert_accounted(c)


def test_without_reset_when_done_a_recurrent_state_begins_anew_with_the_next_batch():
    def policy(obs: torch.Tensor, state: Any) -> Any:
        state = torch.zeros(2, 1) if state is None else state
        return state[:, 0].long() % 2, state + 1

    with Collector(lengths(2, 4), policy, num_envs=2, frames_per_batch=10, reset_when_done=False) as c:
        for _ in range(2):
            assert c.rollout()["recurrent_state"][..., 0].tolist() == [[0, 1, 0, 0, 0], [0, 1, 2, 3, 0]]


def test_without_reset_when_done_and_without_buffers_empty_rows_are_left_out():
    options = {"num_envs": 2, "frames_per_batch": 10, "reset_when_done": False, "use_buffers": False}
    with Collector(lengths(2, 4), None, **options) as c:
        assert c.rollout().shape == (2, 4)


# --- interruptor -----------------------------------------------------------------------------------


def test_an_interrupted_batch_is_blank_after_the_stop_and_the_episode_goes_on():
    with Collector(counting(9), None, num_envs=2, frames_per_batch=10, interruptor=CountDown(2)) as c:
        first, second = c.rollout(), c.rollout()
        assert first.shape == (2, 5)
        assert column(first, "next", "reward") == [[1, 2, 0, 0, 0]] * 2
        assert ids(first) == [[0, 0, -1, -1, -1], [1, 1, -1, -1, -1]]
        assert valid(first) == [[True, True, False, False, False]] * 2
        assert not first["next", "done"].any()
        assert column(second, "next", "reward") == [[3, 4, 5, 6, 7]] * 2
        assert ids(second) == [[0] * 5, [1] * 5]
        assert second["collector", "valid"].all()
        assert c.stats().frames == c.stats().executed == 14
        assert_accounted(c)


def test_an_interrupted_batch_without_buffers_is_short():
    options = {"num_envs": 2, "frames_per_batch": 10, "interruptor": CountDown(2), "use_buffers": False}
    for order, shape in (("batch_major", (2, 2)), ("time_major", (2, 2))):
        options["interruptor"] = CountDown(3)
        with Collector(counting(9), None, layout=order, **options) as c:
            batch = c.rollout()
            assert batch.shape == ((2, 3) if order == "batch_major" else (3, 2)), shape
            assert batch["collector", "valid"].all()
            assert c.rollout().shape == ((2, 5) if order == "batch_major" else (5, 2))


def test_an_interruptor_at_the_last_row_changes_nothing():
    with Collector(counting(9), None, frames_per_batch=5, interruptor=CountDown(5)) as c:
        batch = c.rollout()
        assert valid(batch) == [True] * 5
        assert column(c.rollout(), "next", "reward") == [6, 7, 8, 9, 1]


def test_an_episode_that_ends_where_collection_stops_is_recorded():
    with Collector(counting(2), None, frames_per_batch=5, interruptor=CountDown(2)) as c:
        batch = c.rollout()
        assert column(batch, "next", "done") == [False, True, False, False, False]
        assert [e.length for e in c.episodes] == [2]
        assert column(c.rollout(), "next", "reward") == [1, 2, 1, 2, 1]


def test_with_an_interruptor_total_frames_stays_exact():
    with Collector(counting(9), None, frames_per_batch=4, total_frames=8, interruptor=CountDown(1)) as c:
        batches = list(c)
        assert [int(b["collector", "valid"].sum()) for b in batches] == [1, 4, 3]
        assert c.stats().frames == 8
        assert c.stats().discarded == {"surplus": 1}
        assert_accounted(c)


def test_an_interruptor_stops_every_group_of_the_batch():
    class Stopped:
        def collection_stopped(self) -> bool:
            return True

    with Collector([counting(9)] * 2, None, frames_per_batch=8, interruptor=Stopped()) as c:
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

    with Collector(Talking, None, frames_per_batch=4, interruptor=CountDown(2)) as c:
        assert c.rollout()["observation"] == ["t0", "t1", None, None]


# --- max_frames_per_traj, set_truncated, reset_at_each_iter -----------------------------------------


def test_set_truncated_marks_the_last_step_of_every_batch_only():
    with Collector(lengths(2, 9), None, num_envs=2, frames_per_batch=8, set_truncated=True) as c:
        first, second = c.rollout(), c.rollout()
        assert column(first, "next", "truncated") == [[False] * 4, [False, False, False, True]]
        assert column(first, "next", "terminated") == [[False, True, False, True], [False] * 4]
        assert column(first, "next", "done") == [[False, True, False, True], [False, False, False, True]]
        assert ids(second)[1] == [1] * 4
        assert not second["done"].any()
        assert [e.length for e in c.episodes] == [2, 2]


def test_set_truncated_marks_the_last_step_before_an_interruption():
    with Collector(counting(9), None, frames_per_batch=4, set_truncated=True, interruptor=CountDown(2)) as c:
        assert column(c.rollout(), "next", "truncated") == [False, True, False, False]


def test_set_truncated_and_reset_at_each_iter_make_batches_of_their_own():
    options = {"frames_per_batch": 4, "set_truncated": True, "reset_at_each_iter": True, "max_frames_per_traj": 3}
    with Collector(counting(9), None, **options) as c:
        for first_id in (0, 2):
            batch = c.rollout()
            assert column(batch, "next", "truncated") == [False, False, True, True]
            assert column(batch, "step_count") == [0, 1, 2, 0]
            assert ids(batch) == [first_id] * 3 + [first_id + 1]


def test_the_last_steps_of_a_batch_that_reset_cuts_are_not_marked():
    with Collector(counting(9), None, frames_per_batch=4) as c:
        c.rollout()
        c.reset()
        batch = c.rollout()
        assert (ids(batch), column(batch, "next", "reward")) == ([1] * 4, [1, 2, 3, 4])
        assert c.stats().episodes == 0


class Optional(CountingEnv):
    """Notes what ``reset`` was given."""

    def __init__(self) -> None:
        super().__init__(3)
        self.options: list[Any] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.options.append(options)
        return super().reset(seed=seed)


def test_reset_hands_its_keywords_to_the_environments_once():
    factory, made = recorded(Optional)
    with Collector(factory, None, num_envs=2, frames_per_batch=8) as c:
        c.rollout()
        c.reset([1], options={"level": 2})
        c.rollout()
        c.rollout()
    assert {"level": 2} not in made[0].options
    assert [o for o in made[1].options if o is not None] == [{"level": 2}]


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


# --- surplus ---------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:frames_per_batch")
def test_surplus_cells_hold_what_happened_but_are_not_valid():
    with Collector(counting(9), None, num_envs=2, frames_per_batch=3) as c:
        batch = c.rollout()
        assert column(batch, "next", "reward") == [[1, 2], [1, 2]]
        assert valid(batch) == [[True, True], [True, False]]
        assert column(c.rollout(), "next", "reward") == [[3, 4], [3, 4]]
        assert c.stats().discarded == {"surplus": 2}
        assert_accounted(c)


@pytest.mark.filterwarnings("ignore:frames_per_batch")
def test_surplus_cells_are_in_no_split_trajectory():
    with Collector(counting(9), None, num_envs=2, frames_per_batch=3, split_trajs=True) as c:
        batch = next(iter(c))
        assert column(batch, "collector", "mask") == [[True, True], [True, False]]
        assert ids(batch) == [[0, 0], [1, -1]]


def test_whole_episodes_may_not_have_holes():
    with pytest.raises(BadOption, match="holes.*multiple of 2"):
        Collector(counting(9), None, num_envs=2, frames_per_batch=3, trajs_per_batch=2)


# --- split_trajs -----------------------------------------------------------------------------------


def test_split_trajs_has_one_trajectory_per_row():
    with Collector(lengths(2, 9), None, num_envs=2, frames_per_batch=10, split_trajs=True) as c:
        batch = next(iter(c))
        assert batch.shape == (4, 5)
        assert batch.names == [None, "time"]
        assert column(batch, "next", "reward") == [[1, 2, 0, 0, 0], [1, 2, 0, 0, 0], [1, 0, 0, 0, 0], [1, 2, 3, 4, 5]]
        assert ids(batch) == [[0, 0, -1, -1, -1], [2, 2, -1, -1, -1], [4, -1, -1, -1, -1], [1] * 5]
        assert column(batch, "collector", "mask") == [[True] * n + [False] * (5 - n) for n in (2, 2, 1, 5)]
        assert c.stats().frames == 10
        assert c.rollout().shape == (2, 5), "rollout() is as it is"


def test_split_trajs_sees_the_ends_that_set_truncated_made_and_postproc_sees_it_split():
    seen = []
    options = {"frames_per_batch": 4, "split_trajs": True, "set_truncated": True, "postproc": lambda b: seen.append(b)}
    with Collector(counting(3), None, total_frames=8, **options) as c:
        for batch, _ in zip(c, range(2), strict=False):
            assert batch is seen[-1]
    assert [column(b, "next", "truncated") for b in seen] == [
        [[False, False, False], [True, False, False]],
        [[False, False], [False, True]],
    ]


# --- trajs_per_batch -------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["first_begun", "per_env", "first_done"])
@pytest.mark.parametrize("layout", ["cat", "pad"])
def test_whole_episodes_are_whole(rule, layout):
    options = {"num_envs": 2, "frames_per_batch": 6, "trajs_per_batch": 2, "traj_rule": rule, "traj_format": layout}
    with Collector(lengths(2, 5), None, total_frames=60, **options) as c:
        batches = list(c)
        assert batches
        for batch in batches:
            if layout == "cat":
                done = batch["next", "done"][:, 0]
                assert done[-1]
                begins = torch.cat([torch.tensor([True]), done[:-1]])
                assert (batch["observation"][begins][:, 1] == 0).all()
                assert done.sum() == 2
                assert batch.names == ["time"]
            else:
                mask = batch["collector", "mask"]
                assert batch.shape[0] == 2
                assert mask.sum(1).tolist() == batch["observation"][:, 0, 0].tolist()
                assert batch["next", "done"][..., 0].sum(1).tolist() == [1, 1]
        stats = c.stats()
        delivered = sum(int(b["collector", "mask"].sum()) if layout == "pad" else len(b) for b in batches)
        assert stats.frames == delivered
        assert stats.in_flight == 60 - delivered
        assert_accounted(c)


def test_the_fair_rule_is_in_order_of_beginnings_and_per_env_takes_equal_numbers():
    def lengths_of(rule: str) -> list[int]:
        options = {"num_envs": 2, "frames_per_batch": 8, "trajs_per_batch": 4, "traj_rule": rule}
        with Collector(lengths(1, 4), None, **options) as c:
            first = next(iter(c))
            return first["observation"][first["next", "done"][:, 0]][:, 0].tolist()

    assert lengths_of("first_begun") == [1, 4, 1, 1]
    assert lengths_of("first_done") == [1, 1, 1, 1]
    assert lengths_of("per_env") == [1, 1, 4, 4]


def test_several_groups_of_episodes_from_one_batch_survive_a_break():
    with Collector(counting(2), None, frames_per_batch=8, total_frames=8, trajs_per_batch=1) as c:
        seen = []
        for _ in range(4):
            for batch in c:
                seen.append(ids(batch))
                break
        assert seen == [[0, 0], [1, 1], [2, 2], [3, 3]]
        assert list(c) == []


def test_reset_drops_the_episodes_it_cuts_and_counts_them():
    with Collector(counting(4), None, num_envs=2, frames_per_batch=12, trajs_per_batch=2) as c:
        batches = iter(c)
        assert ids(next(batches)) == [0] * 4 + [1] * 4
        assert c.stats().in_flight == 4
        c.reset(0)
        rows = next(batches)
        assert column(rows, "next", "reward") == [1, 2, 3, 4] * 2
        assert ids(rows) == [3] * 4 + [4] * 4
        assert c.stats().discarded == {"cut": 2}
        assert_accounted(c)


def test_a_rollout_in_between_leaves_no_hole_in_an_episode():
    with Collector(counting(5), None, frames_per_batch=3, trajs_per_batch=1) as c:
        first = next(iter(c))
        assert column(first, "next", "reward") == [1, 2, 3, 4, 5]
        assert column(c.rollout(), "next", "reward") == [2, 3, 4]  # of the second episode
        second = next(iter(c))
        assert column(second, "next", "reward") == [1, 2, 3, 4, 5]
        assert ids(second) == [2] * 5
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


# --- compact_obs -----------------------------------------------------------------------------------


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
        chosen = {**options, "num_envs": 3, "frames_per_batch": 21, "compact_obs": compact}
        if "interruptor" in options:
            chosen["interruptor"] = CountDown(options["interruptor"])
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
            shown = {(int(e), int(r)) for e, r in zip(finals["env"], finals["row"], strict=True)}
            assert len(shown) == len(finals), "each once"
            assert all(where[e, r] for e, r in shown), "none of what is blank"


def test_final_observations_have_global_numbers():
    with Collector([lengths(2), lengths(3)], None, frames_per_batch=6, compact_obs=True) as c:
        c.rollout()
        finals = c.final_observations()
        assert finals["env"].tolist() == [0, 0, 1]
        assert finals["row"].tolist() == [1, 2, 2]
        assert finals["observation"].tolist() == [[2, 2], [2, 1], [3, 3]]


def test_without_compact_obs_or_before_a_batch_there_are_no_final_observations():
    with Collector(counting(3), None, frames_per_batch=4, compact_obs=True) as c:
        assert len(c.final_observations()) == 0


# --- use_buffers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("use_buffers", [None, True, False])
def test_use_buffers_does_not_change_complete_batches(use_buffers):
    with (
        Collector(ChainEnv, None, num_envs=2, frames_per_batch=8, use_buffers=use_buffers, seed=1) as c,
        Collector(ChainEnv, None, num_envs=2, frames_per_batch=8, seed=1) as usual,
    ):
        assert_same(c.rollout(), usual.rollout())


def test_the_same_td_cannot_be_short_sometimes():
    with pytest.raises(BadOption, match="use_buffers=False"):
        Collector(counting(3), None, frames_per_batch=4, return_same_td=True, use_buffers=False)


def test_the_same_td_has_new_values_every_time():
    with Collector(counting(3), None, frames_per_batch=4, total_frames=12, return_same_td=True) as c:
        seen = [(id(b), column(b, "next", "reward")) for b in c]
        assert {i for i, _ in seen} == {seen[0][0]}
        assert [rewards for _, rewards in seen] == [[1, 2, 3, 1], [2, 3, 1, 2], [3, 1, 2, 3]]


def test_numbers_of_environments_and_ids_do_not_depend_on_numpy_types():
    with Collector(counting(9), None, num_envs=2, frames_per_batch=4) as c:
        c.rollout()
        c.reset(np.int64(1))
        assert column(c.rollout(), "next", "reward") == [[3, 4], [1, 2]]
