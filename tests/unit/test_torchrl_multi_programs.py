"""The programs that the second seed document (TorchRL) prints for collectors on one machine, with the data
they must give.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from muster import AsyncCollector, MultiAsyncCollector, MultiSyncCollector
from muster.weights import VanillaWeightUpdater
from tests.tools import assert_accounted

torchrl = pytest.importorskip("torchrl")
from torchrl.data import LazyTensorStorage, ReplayBuffer  # noqa: E402
from torchrl.envs.libs.gym import GymEnv  # noqa: E402
from torchrl.envs.utils import ExplorationType  # noqa: E402

from tests.fakes.pendulum import env_maker, linear  # noqa: E402

pytest.importorskip("gymnasium.envs.classic_control")


def train_step(
    policy: TensorDictModule, batch: Any, optimizer: torch.optim.Optimizer
) -> None:
    """Some loss; that it goes down is not the point."""
    again = policy.module(batch["observation"].clone())
    assert torch.allclose(again.detach(), batch["action"], atol=1e-6), (
        "the weights that acted are those of the learner"
    )
    optimizer.zero_grad()
    again.square().mean().backward()
    optimizer.step()


def test_multi_sync_collector() -> None:
    env_maker = lambda: GymEnv("Pendulum-v1", device="cpu")  # noqa: E731
    policy = linear()
    optimizer = torch.optim.SGD(policy.parameters(), 0.1)
    collector = MultiSyncCollector(
        create_env_fn=[env_maker, env_maker, env_maker],
        policy=policy,
        frames_per_batch=300,
        total_frames=3_000,
        max_frames_per_traj=50,
        device="cpu",
        storing_device="cpu",
        cat_results="stack",
    )
    for batch in collector:
        assert batch.shape == (3, 100)  # 100 frames per worker, stacked
        assert batch.names == [None, "time"]
        assert batch.device == torch.device("cpu")
        ends = batch["next", "truncated"][..., 0].nonzero().tolist()
        assert ends == [[w, t] for w in range(3) for t in (49, 99)]
        assert batch["collector", "traj_ids"].unique().numel() == 6
        assert len(batch["observation"][:, 0, 0].unique()) == 3, (
            "three environments, three seeds"
        )
        train_step(policy, batch, optimizer)
        collector.update_policy_weights_(policy)
    assert (collector.stats().batches, collector.stats().frames) == (10, 3_000)
    assert_accounted(collector)
    collector.shutdown()


def test_multi_async_collector() -> None:
    policy = linear()
    collector = MultiAsyncCollector(
        create_env_fn=[env_maker, env_maker],
        policy=policy,
        frames_per_batch=200,
        total_frames=2_000,
        device="cpu",
        storing_device="cpu",
        cat_results="stack",
    )
    replay_buffer = ReplayBuffer(storage=LazyTensorStorage(2_000))
    groups = set()
    for batch in collector:
        assert batch.shape == (200,)
        groups.add(int(batch["collector", "traj_ids"][0]) % 2)
        replay_buffer.extend(batch)
    assert len(replay_buffer) == 2_000
    assert groups == {0, 1}
    assert collector.stats().executed == 2_000
    after, obs = (
        replay_buffer[:]["next", "observation"],
        replay_buffer[:]["observation"],
    )
    assert torch.isfinite(after).all()
    assert not torch.equal(after, obs)
    collector.shutdown()


def test_async_fill_of_a_replay_buffer() -> None:
    replay_buffer = ReplayBuffer(storage=LazyTensorStorage(1_000))
    collector = AsyncCollector(
        env_maker,
        linear(),
        frames_per_batch=100,
        total_frames=500,
        replay_buffer=replay_buffer,
    )
    collector.start()
    collector._background._thread.join(60)  # type: ignore[union-attr]
    assert not collector.is_running()
    assert len(replay_buffer) == 500
    collector.async_shutdown()


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
def test_vanilla_weight_updater() -> None:
    policy = linear()
    policy_weights = TensorDict.from_module(policy).lock_()
    collector = MultiSyncCollector(
        [env_maker] * 4,
        policy=policy,
        frames_per_batch=400,
        weight_updater=VanillaWeightUpdater(policy_weights=policy_weights),
    )
    with torch.no_grad():
        policy.module.weight.zero_()
        policy.module.bias.fill_(0.25)
    collector.update_policy_weights_(policy)
    batch = collector.next()
    assert batch.shape == (4, 100)
    assert batch["action"].unique().tolist() == [0.25]
    collector.shutdown()


def test_every_parameter_that_is_printed() -> None:
    with MultiSyncCollector(
        [env_maker] * 2,
        None,
        policy_factory=linear,
        frames_per_batch=20,
        total_frames=-1,
        device=None,
        storing_device=None,
        env_device=None,
        policy_device=None,
        max_frames_per_traj=None,
        init_random_frames=None,
        reset_at_each_iter=False,
        postproc=None,
        split_trajs=False,
        exploration_type=ExplorationType.RANDOM,
        cat_results="stack",
        update_at_each_batch=False,
        preemptive_threshold=1.0,
        num_threads=None,
        num_sub_threads=1,
    ) as collector:
        assert collector.next().shape == (2, 10)
