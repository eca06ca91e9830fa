"""The same environments through TorchRL's collector: the same columns with the same values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from muster import Collector
from muster.testing import CountingEnv
from tests.tools import counting

T, BATCHES = 7, 4
LENGTHS = [2, 3, 5]


def alternate(obs: torch.Tensor) -> torch.Tensor:
    return (obs[..., 1] % 2).long()


@pytest.fixture(scope="module")
def torchrl() -> Any:
    return pytest.importorskip("torchrl")


def from_torchrl(envs: list[Any], **options: Any) -> list[Any]:
    from tensordict.nn import TensorDictModule
    from torchrl.collectors import Collector as TorchRLCollector
    from torchrl.envs import GymWrapper, SerialEnv

    def wrap(env: Any) -> Any:
        return lambda: GymWrapper(env, categorical_action_encoding=True)

    env = (
        wrap(envs[0])()
        if len(envs) == 1
        else SerialEnv(len(envs), [wrap(e) for e in envs])
    )
    policy = TensorDictModule(alternate, in_keys=["observation"], out_keys=["action"])
    collector = TorchRLCollector(
        env, policy, frames_per_batch=T * len(envs), total_frames=-1, **options
    )
    batches = [
        batch.clone() for batch, _ in zip(collector, range(BATCHES), strict=False)
    ]
    collector.shutdown()
    return batches


def from_muster(envs: list[Any], **options: Any) -> list[Any]:
    remaining = iter(envs)
    num_envs = None if len(envs) == 1 else len(envs)
    with Collector(
        lambda: next(remaining),
        alternate,
        num_envs=num_envs,
        frames_per_batch=T * len(envs),
        **options,
    ) as c:
        return [c.rollout() for _ in range(BATCHES)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("limit", [None, 4])
@pytest.mark.parametrize("lengths", [[3], LENGTHS], ids=["one", "three"])
def test_batches_equal_torchrls(torchrl, lengths, limit):
    options: dict[str, Any] = {} if limit is None else {"max_frames_per_traj": limit}
    expected = from_torchrl([CountingEnv(n) for n in lengths], **options)
    got = from_muster([counting(n)() for n in lengths], **options)
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.batch_size == theirs.batch_size
        assert mine.names == theirs.names
        keys = set(mine.keys(True, True))
        assert keys == set(theirs.keys(True, True))
        for key in keys - {("collector", "traj_ids")}:
            assert mine[key].dtype == theirs[key].dtype, key
            assert mine[key].shape == theirs[key].shape, key
            assert torch.equal(mine[key], theirs[key]), key
    mine, theirs = (
        torch.cat([b["collector", "traj_ids"] for b in batches], -1)
        for batches in (got, expected)
    )
    assert mine.dtype == theirs.dtype
    assert torch.equal(
        mine[..., 1:] != mine[..., :-1], theirs[..., 1:] != theirs[..., :-1]
    )
    assert len(mine.unique()) == len(theirs.unique()), "the same number of trajectories"


def test_a_batch_goes_into_torchrls_losses_and_buffers_like_any_tensordict():
    from tensordict.nn import TensorDictModule
    from torchrl.data import LazyTensorStorage, ReplayBuffer
    from torchrl.objectives.value import GAE

    value = TensorDictModule(
        torch.nn.Linear(4, 1), in_keys=["observation"], out_keys=["state_value"]
    )
    with Collector(
        "CartPole-v1", None, num_envs=4, frames_per_batch=64, seed=0
    ) as collector:
        batch = collector.rollout()
    GAE(gamma=0.99, lmbda=0.95, value_network=value)(batch)
    assert batch["advantage"].shape == (4, 16, 1)
    flat = batch.reshape(-1)
    assert flat.batch_size == (64,)
    assert torch.equal(flat["next", "reward"], batch["next", "reward"].reshape(-1, 1))
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=8)
    buffer.extend(flat)
    assert len(buffer) == 64
    assert buffer.sample()["next", "observation"].shape == (8, 4)
