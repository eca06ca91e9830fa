"""What the user holds: iterating, weights, devices, the end."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium
import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

import muster
from muster import Collector, CollectorStats
from muster.errors import BadOption, BadWeights, EnvError
from muster.testing import CountingEnv
from tests.tools import column, counting, recorded


def collector(
    total_frames: int = -1, policy: Any = None, env: Any = CountingEnv, **options: Any
) -> Collector:
    return Collector(
        env, policy, **{"frames_per_batch": 4, "total_frames": total_frames, **options}
    )


def test_rollout_in_the_middle_of_a_loop():
    with collector(8) as c:
        rewards = []
        for batch in c:
            rewards += column(batch, "next", "reward") + column(
                c.rollout(), "next", "reward"
            )
        assert rewards == [1, 2, 3] * 5 + [1]


# --- the end --------------------------------------------------------------------------------------


def test_environments_may_be_left_open():
    env = CountingEnv()
    collector(env=env).shutdown(close_env=False)
    assert env.closed == 0


class Stuck(CountingEnv):
    def close(self) -> None:
        super().close()
        raise OSError("window is gone")


def stuck_vector() -> gymnasium.vector.VectorEnv:
    made = gymnasium.vector.SyncVectorEnv([CountingEnv] * 2)
    made.close_extras = Stuck().close
    return made


@pytest.mark.parametrize(
    ("env", "name"),
    [(Stuck, r"Stuck\[0\]"), (stuck_vector, "SyncVectorEnv")],
)
def test_errors_of_close_name_the_environment(env, name):
    with pytest.raises(
        EnvError, match=rf"{name}\.close raised OSError: window"
    ) as caught:
        Collector(env, None, frames_per_batch=4).shutdown()
    assert isinstance(caught.value.__cause__, OSError)


def test_errors_of_close_can_be_hidden():
    collector(env=Stuck).shutdown(raise_on_error=False)
    with pytest.raises(ZeroDivisionError), collector(env=Stuck):
        _ = 1 / 0


def test_every_environment_is_closed_even_if_one_cannot_be():
    factory, made = recorded(Stuck)
    c = Collector([factory, factory], None, num_envs=2, frames_per_batch=4)
    with pytest.raises(EnvError, match="window"):
        c.shutdown()
    assert [env.closed for env in made] == [1] * 4


# --- looking at it --------------------------------------------------------------------------------


def test_stats_before_and_after():
    with collector(num_envs=2) as c:
        fresh = c.stats()
        assert (fresh.frames, fresh.executed, fresh.batches, fresh.episodes) == (
            0,
            0,
            0,
            0,
        )
        assert (fresh.in_flight, fresh.discarded, fresh.frames_per_s) == (0, {}, 0.0)
        for _ in range(3):
            c.rollout()
        stats = c.stats()
    assert isinstance(stats, CollectorStats)
    assert (stats.frames, stats.executed, stats.batches, stats.episodes) == (
        12,
        12,
        3,
        4,
    )
    assert stats.frames_per_s > 0
    assert min(stats.env_s, stats.policy_s, stats.copy_s, stats.rest_s) >= 0
    assert stats.policy_path == "random"
    with pytest.raises(AttributeError):
        stats.frames = 3  # type: ignore[misc]


# --- weights --------------------------------------------------------------------------------------


class Threshold(nn.Module):
    """Acts 1 where its weight is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([-1.0, -1.0]))

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return (self.weight.sum() > 0).long().expand(obs.shape[:-1])


def positive() -> Threshold:
    net = Threshold()
    net.weight.data.fill_(1.0)
    return net


@pytest.mark.parametrize("nothing", [{}, nn.Tanh()], ids=str)
def test_no_weights_are_not_taken_for_those_of_an_activation(nothing):
    policy = muster.policies.categorical(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    with collector(policy=policy) as c:
        with pytest.raises(BadWeights, match="missing"):
            c.update_policy_weights_(nothing)
        assert c.policy_version == 0


def test_a_diverged_policy_is_not_counted():
    policy = Threshold()
    with collector(policy=policy) as c:
        policy.weight.data[0] = torch.nan
        with pytest.raises(BadWeights, match="diverged"):
            c.update_policy_weights_(policy)
        assert c.policy_version == 0


def test_weights_that_fit_two_parts_are_refused():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.actor, self.critic = nn.Linear(2, 1), nn.Linear(2, 1)

        def forward(self, obs: torch.Tensor) -> torch.Tensor:
            return (self.actor(obs)[..., 0] > 0).long()

    policy = Two()
    before = copy.deepcopy(policy.state_dict())
    with collector(policy=policy) as c:
        with pytest.raises(BadWeights, match="actor.*critic"):
            c.update_policy_weights_(nn.Linear(2, 1))
        assert all(torch.equal(t, before[n]) for n, t in policy.state_dict().items())
        c.update_policy_weights_(copy.deepcopy(policy))
        c.update_policy_weights_(policy.actor)
        assert c.policy_version == 2


def test_a_function_has_no_weights_to_publish():
    net = Threshold()
    with collector(policy=lambda obs: net(obs)) as c:
        with pytest.raises(BadWeights, match="not a module"):
            c.update_policy_weights_(positive())
        c.update_policy_weights_()
        c.update_policy_weights_(net)
        assert c.policy_version == 2


# --- devices --------------------------------------------------------------------------------------


def test_another_storing_device_gets_every_column():
    with (
        collector(storing_device="meta", num_envs=2, max_frames_per_traj=2) as moved,
        collector(num_envs=2, max_frames_per_traj=2) as here,
    ):
        batch, expected = moved.rollout(), here.rollout()
        assert moved.stats().slots["lent"] == 0, "what was moved needs no slot"
    assert batch.device == torch.device("meta")
    for key in expected.keys(True, True):
        assert batch[key].device.type == "meta"
        assert batch[key].shape == expected[key].shape
        assert batch[key].dtype == expected[key].dtype


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without CUDA")
@pytest.mark.parametrize(
    "option", ["device", "storing_device", "policy_device", "env_device"]
)
def test_cuda_without_cuda_is_refused(option):
    with pytest.raises(
        BadOption, match=f"{option}='cuda:0': this machine.*has no CUDA"
    ):
        collector(**{option: "cuda:0"})


def test_is_init_is_right_in_memory_that_was_used_before():
    def still(obs: torch.Tensor, is_init: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(obs), dtype=torch.long)

    module = TensorDictModule(
        still, in_keys=["observation", "is_init"], out_keys=["action"]
    )
    with Collector(counting(3), module, num_envs=2, frames_per_batch=8) as collector:
        for _ in range(6):
            batch = collector.rollout()
            assert torch.equal(
                batch["is_init"][..., 0], batch["observation"][..., 1] == 0
            )
            del batch  # so that the slot is used again
