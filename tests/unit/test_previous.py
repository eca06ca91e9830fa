"""``prev_action_reward``: the action and the reward of the step before, as observations."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

from muster import Collector, MultiAsyncCollector, MultiSyncCollector
from muster.errors import BadOption, EnvError
from muster.policies import categorical
from muster.sources.capsule import Capsule
from muster.sources.player import Player
from muster.testing import ChainEnv, CountingEnv, FaultyEnv, SpaceEnv, TorchCartPole
from tests.tools import assert_accounted, assert_same, column, counting, recorded

PREV = {"prev_action_reward": True}


def counted(obs: dict[str, torch.Tensor]) -> torch.Tensor:
    """1, 0, 1, 0, ... from the beginning of every episode, from what it did before."""
    return torch.where(obs["prev_reward"] == 0, 1, 1 - obs["prev_action"])


def shifted(batch: Any, key: str, began: list[list[int]]) -> list[list[float]]:
    """A column one row later, and 0 where ``began`` is."""
    value = batch[key] if key == "action" else batch["next", key].squeeze(-1)
    later = torch.roll(value, 1, -1).tolist()
    return [[0 if new else v for v, new in zip(*rows, strict=True)] for rows in zip(later, began, strict=True)]


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
    assert (first["prev_action"].dtype, first["prev_reward"].dtype) == (torch.int64, torch.float32)
    assert first["observation"].shape == (2, 6, 2)


def test_one_environment_has_no_dimension_for_it():
    with Collector(counting(3), None, frames_per_batch=4, **PREV) as c:
        batch = c.rollout()
        assert batch["prev_reward"].tolist() == [0, 1, 2, 0]
        assert batch["prev_action"].tolist() == [0, *batch["action"][:2].tolist(), 0]


def test_parts_of_actions_have_their_own_names_and_zero_may_be_no_action():
    space = spaces.Dict({"move": spaces.Box(1, 2, (2,), np.float32), "kind": spaces.Discrete(3, start=5)})
    make = partial(SpaceEnv, spaces.Box(0, 1, (3,)), space, 3)
    with Collector(make, None, num_envs=2, frames_per_batch=10, validate="full", **PREV) as c:
        batch = c.rollout()
    for name in ("move", "kind"):
        prev, action = batch["prev_action", name], batch["action", name]
        assert prev.dtype == action.dtype
        assert not prev[:, [0, 3]].any()
        for t in (1, 2, 4):
            assert torch.equal(prev[:, t], action[:, t - 1])


def test_a_head_gets_a_dict_of_all_observations():
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 2)

        def forward(self, obs: dict[str, torch.Tensor]) -> torch.Tensor:
            prev = torch.stack([obs["prev_action"].float(), obs["prev_reward"]], -1)
            return self.linear(torch.cat([obs["observation"], prev], -1))

    with Collector(counting(3), categorical(Net()), num_envs=2, frames_per_batch=10, **PREV) as c:
        batch = c.rollout()
        assert c.rollout()["action_log_prob"].isfinite().all()
        assert column(batch, "prev_reward") == [[0, 1, 2, 0, 1]] * 2


def test_a_vector_environment_shows_them_too():
    with Collector(lambda: SyncVectorEnv([counting(2), counting(3)]), counted, frames_per_batch=8, **PREV) as c:
        batch = c.rollout()
        assert batch["prev_reward"].tolist() == [[0, 1, 0, 1], [0, 1, 2, 0]]
        assert batch["prev_action"].tolist() == [[0, 1, 0, 1], [0, 1, 0, 0]]


def test_whoever_waits_has_done_nothing():
    seen: list[Any] = []

    def policy(obs: dict[str, torch.Tensor]) -> torch.Tensor:
        seen.append({key: value.clone() for key, value in obs.items()})
        return torch.ones(2, dtype=torch.int64)

    make, _ = recorded(lambda i: CountingEnv((2, 5)[i]))
    with Collector(make, policy, num_envs=2, frames_per_batch=8, reset_when_done=False, **PREV) as c:
        first, second = c.rollout(), c.rollout()
        assert first["prev_reward"].tolist() == [[0, 1, 0, 0], [0, 1, 2, 3]]
        assert second["prev_reward"].tolist() == [[0, 1, 0, 0], [4, 0, 0, 0]]
        assert second["prev_action"].tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]
        assert_accounted(c)
    assert [obs["prev_action"].tolist() for obs in seen[:4]] == [[0, 0], [1, 1], [0, 1], [0, 1]]
    assert [obs["prev_reward"].tolist() for obs in seen[:4]] == [[0, 0], [1, 1], [0, 2], [0, 3]]


@pytest.mark.parametrize("wait", [False, True])
def test_a_lost_life_is_a_beginning(wait):
    from tests.unit.test_lives import KEY, LivesEnv

    options = {"num_envs": 2, "frames_per_batch": 12, "reset_when_done": not wait, **KEY, **PREV}
    with Collector(partial(LivesEnv, 4, 2), counted, **options) as c:
        first, second = c.rollout(), c.rollout()
        if wait:
            assert first["prev_reward"][0].tolist() == [0, 1, 0, 0, 0, 0]
            assert second["prev_reward"][0].tolist() == [0, 3, 0, 0, 0, 0]
            assert second["prev_action"][0].tolist() == [0, 1, 0, 0, 0, 0]
        else:
            assert first["prev_reward"][0].tolist() == [0, 1, 0, 3, 0, 1]
            assert second["prev_reward"][0].tolist() == [0, 3, 0, 1, 0, 3]
            assert second["prev_action"][0].tolist() == [0, 1, 0, 1, 0, 1]


def test_random_steps_before_the_first_batch_are_what_came_before():
    make, _ = recorded(lambda: CountingEnv(50))
    with Collector(make, counted, num_envs=6, frames_per_batch=12, max_decorrelation_steps=6, seed=1, **PREV) as c:
        batch = c.rollout()
        assert batch["prev_reward"].equal(batch["observation"][..., 1])
        assert len(set(batch["prev_reward"][:, 0].tolist())) > 1
        assert set(batch["prev_action"][:, 0].tolist()) == {0, 1}


PLACES = {
    "threads": {"backend": "threads"},
    "processes": {},
    "server, threads": {"backend": "threads", "inference": "server"},
    "server, processes": {"inference": "server"},
}


class Follows(torch.nn.Module):
    """Acts on all that it sees."""

    def forward(self, obs: dict[str, torch.Tensor]) -> torch.Tensor:
        return (obs["observation"][..., 2] + obs["prev_action"] + obs["prev_reward"].long()) % 5


@pytest.mark.parametrize("place", PLACES)
def test_wherever_the_policy_acts_it_sees_the_same(place):
    options = {"num_envs": 2, "frames_per_batch": 24, "seed": 2, "max_decorrelation_steps": 5, **PREV}
    with Collector([ChainEnv] * 2, Follows(), **options) as c:
        expected = [c.next().clone() for _ in range(3)]
    with MultiSyncCollector([ChainEnv] * 2, Follows(), **options, **PLACES[place]) as c:
        for batch in expected:
            assert_same(c.next(), batch)
        assert_accounted(c)
    began = torch.cat(expected, -1)["observation"][..., 1] == 0
    joined = torch.cat(expected, -1)
    assert joined["prev_action"][..., 1:].tolist() == [
        [row[1:] for row in group]
        for group in [shifted(group, "action", new.tolist()) for group, new in zip(joined, began, strict=True)]
    ]


def test_without_waiting_for_others_it_is_the_same():
    with MultiAsyncCollector([ChainEnv] * 2, Follows(), frames_per_batch=10, backend="threads", **PREV) as c:
        for _ in range(4):
            batch = c.next()
            assert torch.equal(
                batch["action"], Follows()({key: batch[key] for key in ("observation", "prev_action", "prev_reward")})
            )


def test_a_state_has_them(tmp_path):
    def run(state: Any = None) -> tuple[Any, Any]:
        with Collector(ChainEnv, Follows(), num_envs=2, frames_per_batch=14, seed=3, **PREV) as c:
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
    capsule = Capsule.load(caught.value.capsule, trust=True)
    assert capsule.alone
    player = Player(capsule)
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
        (partial(SpaceEnv, spaces.Box(0, 1, (2,)), spaces.Text(3)), "no arrays"),
        (lambda: TorchCartPole(3), "resets itself on a device"),
    ],
)
def test_what_cannot_have_them_is_refused(env, message):
    with pytest.raises(BadOption, match=f"prev_action_reward: .*{message}.*leave it out"):
        Collector(env, None, frames_per_batch=6, **PREV)
