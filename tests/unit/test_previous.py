"""``prev_action_reward``: the action and the reward of the step before, as observations."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

from muster import Collector, MultiSyncCollector
from muster.errors import BadOption, EnvError
from muster.restore.crash_report import CrashReport
from muster.restore.player import Player
from muster.testing import ChainEnv, CountingEnv, FaultyEnv, SpaceEnv, TorchCartPole
from tests.fakes.without_torch import Hundredfold
from tests.tools import assert_accounted, assert_same, counting, recorded

PREV = {"prev_action_reward": True}


def counted(obs: dict[str, torch.Tensor]) -> torch.Tensor:
    """1, 0, 1, 0, ... from the beginning of every episode, from what it did before."""
    return torch.where(obs["prev_reward"] == 0, 1, 1 - obs["prev_action"])


def test_policies_see_what_they_did_and_got_and_nothing_at_a_beginning():
    make, _ = recorded(lambda i: CountingEnv((2, 5)[i]))
    with Collector(make, counted, num_envs=2, frames_per_batch=12, **PREV) as c:
        first, second = c.rollout().clone(), c.rollout().clone()
    assert first["action"].tolist() == [[1, 0] * 3, [1, 0, 1, 0, 1, 1]]
    assert first["prev_action"].tolist() == [[0, 1] * 3, [0, 1, 0, 1, 0, 0]]
    assert first["prev_reward"].tolist() == [[0, 1] * 3, [0, 1, 2, 3, 4, 0]]
    assert first["next", "prev_action"].equal(first["action"])
    assert first["next", "prev_reward"].equal(first["next", "reward"].squeeze(-1))
    assert second["prev_action"].tolist() == [[0, 1] * 3, [1, 0, 1, 0, 0, 1]]
    assert second["prev_reward"].tolist() == [[0, 1] * 3, [1, 2, 3, 4, 0, 1]]
    assert (first["prev_action"].dtype, first["prev_reward"].dtype) == (
        torch.int64,
        torch.float32,
    )
    assert first["observation"].shape == (2, 6, 2)


def test_parts_of_actions_have_their_own_names_and_zero_may_be_no_action():
    space = spaces.Dict(
        {
            "move": spaces.Box(1, 2, (2,), np.float32),
            "kind": spaces.Discrete(3, start=5),
        }
    )
    make = partial(SpaceEnv, spaces.Box(0, 1, (3,)), space, 3)
    with Collector(
        make, None, num_envs=2, frames_per_batch=10, validate="full", **PREV
    ) as c:
        batch = c.rollout()
    for name in ("move", "kind"):
        prev, action = batch["prev_action", name], batch["action", name]
        assert prev.dtype == action.dtype
        assert not prev[:, [0, 3]].any()
        for t in (1, 2, 4):
            assert torch.equal(prev[:, t], action[:, t - 1])


def assert_repeated(batch: Any, made: Any = None) -> None:
    """``[..., T]``: every row shows what was delivered in the row before, and nothing where an
    episode begins.
    """
    reward, action = batch["next", "reward"][..., 0], batch["action"]
    made = torch.ones_like(reward, dtype=torch.bool) if made is None else made
    assert reward.max() >= 100
    assert torch.equal(batch["next", "prev_reward"][made], reward[made])
    assert torch.equal(batch["next", "prev_action"][made], action[made])
    ids = batch["collector", "traj_ids"]
    follows = (ids[..., 1:] == ids[..., :-1]) & made[..., 1:]
    assert follows.any()
    for key, value in (("prev_reward", reward), ("prev_action", action)):
        assert torch.equal(batch[key][..., 1:][follows], value[..., :-1][follows])
        assert not batch[key][..., 1:][~follows].any()


ENDS: dict[str, dict[str, Any]] = {
    "": {},
    "limit": {"max_frames_per_traj": 2},
    "random steps first": {"max_decorrelation_steps": 4},
    "reset at each batch": {"reset_at_each_iter": True},
    "one step": {"frames_per_batch": 2},
}


@pytest.mark.parametrize("ends", ENDS)
def test_what_on_step_has_written_is_what_came_before(ends):
    make, _ = recorded(lambda i: CountingEnv((3, 4)[i % 2]))
    options = {"num_envs": 2, "frames_per_batch": 10, "seed": 0, **PREV, **ENDS[ends]}
    with Collector(make, counted, on_step=Hundredfold(), **options) as c:
        batch = torch.cat([c.rollout().clone() for _ in range(8)], -1)
    assert_repeated(batch)


def test_what_on_step_has_written_is_what_came_before_of_an_environment_alone_and_a_vector_environment():
    for env in (counting(3), lambda: SyncVectorEnv([counting(2), counting(3)])):
        with Collector(
            env, counted, frames_per_batch=6, on_step=Hundredfold(), **PREV
        ) as c:
            assert_repeated(torch.cat([c.rollout().clone() for _ in range(3)], -1))


def test_what_on_step_has_written_is_not_shown_to_whoever_waits_or_has_lost_a_life():
    from tests.unit.test_lives import KEY, LivesEnv

    for env in (
        recorded(lambda i: CountingEnv((2, 5)[i % 2]))[0],
        partial(LivesEnv, 4, 2),
    ):
        lives = KEY if isinstance(env, partial) else {}
        for wait in (False, True):
            options = {
                "num_envs": 2,
                "frames_per_batch": 12,
                "reset_when_done": not wait,
                **lives,
                **PREV,
            }
            with Collector(env, counted, on_step=Hundredfold(), **options) as c:
                for _ in range(2):
                    batch = c.rollout()
                    ended = batch["next", "done"][..., 0] & (
                        batch["collector", "traj_ids"] >= 0
                    )
                    made = batch["collector", "traj_ids"] >= 0
                    assert torch.equal(
                        batch["next", "prev_reward"][made],
                        batch["next", "reward"][..., 0][made],
                    )
                    after = batch["prev_reward"][:, 1:]
                    assert torch.equal(
                        after,
                        torch.where(
                            ended | ~made.roll(-1, 1),
                            0,
                            batch["next", "reward"][..., 0],
                        )[:, :-1],
                    )


def test_last_observations_without_columns_of_their_own_have_what_on_step_has_written():
    options = {"num_envs": 2, "frames_per_batch": 8, "compact_obs": True, **PREV}
    make, _ = recorded(lambda i: CountingEnv((2, 5)[i]))
    with Collector(make, counted, on_step=Hundredfold(), **options) as c:
        batch, last = c.rollout(), c.final_observations()
    reward = batch["next", "reward"][..., 0]
    assert (last["env"].tolist(), last["row"].tolist()) == ([0, 0, 1], [1, 3, 3])
    assert (
        last["prev_reward"].tolist()
        == [reward[0, 1], reward[0, 3], reward[1, 3]]
        == [200, 200, 400]
    )
    assert last["prev_action"].tolist() == [
        batch["action"][0, 1],
        batch["action"][0, 3],
        batch["action"][1, 3],
    ]


def test_policies_see_nothing_of_what_on_step_has_written_for_whoever_waits():
    seen: list[Any] = []

    def policy(obs: dict[str, torch.Tensor]) -> torch.Tensor:
        seen.append([obs[key].tolist() for key in ("prev_reward", "prev_action")])
        return torch.zeros(2, dtype=torch.int64)

    def write(step: Any) -> None:
        step["next", "reward"] += 100
        step["action"] = 1

    make, _ = recorded(lambda i: CountingEnv((2, 5)[i]))
    options = {"num_envs": 2, "frames_per_batch": 8, "reset_when_done": False, **PREV}
    with Collector(make, policy, on_step=write, **options) as c:
        c.rollout()
    assert seen[:4] == [
        [[0, 0], [0, 0]],
        [[101, 101], [1, 1]],
        [[0, 102], [0, 1]],
        [[0, 103], [0, 1]],
    ]


def test_what_came_before_can_only_be_read():
    def write(step: Any) -> None:
        assert step["prev_reward"].shape == (2,)
        for key in (
            "prev_action",
            "prev_reward",
            ("next", "prev_action"),
            ("next", "prev_reward"),
        ):
            with pytest.raises(BadOption, match="can only be read"):
                step[key] = 1
            with pytest.raises(ValueError, match="read-only"):
                step[key][0] = 1

    with Collector(
        counting(4), counted, num_envs=2, frames_per_batch=10, on_step=write, **PREV
    ) as c:
        assert c.rollout()["prev_reward"].tolist() == [[0, 1, 2, 3, 0]] * 2


PLACES = {
    "threads": {"backend": "threads"},
    "processes": {},
    "server, threads": {"backend": "threads", "inference": "server"},
    "server, processes": {"inference": "server"},
}


class Follows(torch.nn.Module):
    """Acts on all that it sees."""

    def forward(self, obs: dict[str, torch.Tensor]) -> torch.Tensor:
        return (
            obs["observation"][..., 2] + obs["prev_action"] + obs["prev_reward"].long()
        ) % 5


@pytest.mark.parametrize("place", PLACES)
def test_wherever_the_policy_acts_it_sees_what_on_step_has_written(place):
    options = {
        "num_envs": 2,
        "frames_per_batch": 24,
        "seed": 2,
        "on_step": Hundredfold(),
        **PREV,
    }
    with MultiSyncCollector(
        [counting(4), counting(7)], Seen(), **options, **PLACES[place]
    ) as c:
        batch = torch.cat([c.next().clone() for _ in range(3)], -1)
        assert_accounted(c)
    assert torch.equal(batch["seen"], batch["prev_reward"] + batch["prev_action"])
    assert_repeated(batch)


class Seen(torch.nn.Module):
    """Says what it has seen."""

    def forward(self, obs: dict[str, torch.Tensor]) -> Any:
        rows = obs["prev_reward"].shape
        return torch.ones(rows, dtype=torch.int64), {
            "seen": obs["prev_reward"] + obs["prev_action"]
        }


def test_a_state_has_them(tmp_path):
    def run(state: Any = None) -> tuple[Any, Any]:
        with Collector(
            ChainEnv, Follows(), num_envs=2, frames_per_batch=14, seed=3, **PREV
        ) as c:
            if state is None:
                c.rollout()
                return c.state_dict(), c.rollout().clone()
            c.load_state_dict(state)
            return state, c.rollout().clone()

    state, expected = run()
    assert_same(run(state)[1], expected)


def test_a_failure_is_replayed_without_them(tmp_path):
    make = partial(FaultyEnv, 5, error=partial(ValueError, "as asked"), length=4)
    options = {"frames_per_batch": 10, "seed": 4, "crash_dir": tmp_path, **PREV}
    with (
        MultiSyncCollector([make], None, backend="threads", **options) as c,
        pytest.raises(EnvError, match="as asked") as caught,
    ):
        c.next()
    crash_report = CrashReport.load(caught.value.crash_report, trust=True)
    assert crash_report.alone
    player = Player(crash_report)
    for move in player.moves()[:-1]:
        player.make(move)
    assert "bit for bit" in player.verdict()


class Has(CountingEnv):
    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Dict({"prev_reward": spaces.Box(0, 1, (2,))})


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (Has, "prev_reward.* already"),
        (partial(SpaceEnv, spaces.Box(0, 1, (2,)), spaces.Text(3)), "not arrays"),
        (lambda: TorchCartPole(3), "resets itself on a device"),
    ],
)
def test_what_cannot_have_them_is_refused(env, message):
    with pytest.raises(
        BadOption, match=f"prev_action_reward: .*{message}.*leave it out"
    ):
        Collector(env, None, frames_per_batch=6, **PREV)
