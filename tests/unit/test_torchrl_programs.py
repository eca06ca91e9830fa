"""The programs that the first seed document prints, on Gymnasium's and on TorchRL's environments."""

from __future__ import annotations

import time
import warnings
from typing import Any

import gymnasium
import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from muster import Collector

torchrl = pytest.importorskip("torchrl")
from torchrl.data import LazyTensorStorage, ReplayBuffer  # noqa: E402
from torchrl.envs import GymEnv, SerialEnv  # noqa: E402
from torchrl.modules import RandomPolicy  # noqa: E402

LAYOUT = {  # as printed there, and `terminated`, which the printout predates
    "action": ((200, 1), torch.float32),
    ("collector", "traj_ids"): ((200,), torch.int64),
    "done": ((200, 1), torch.bool),
    ("next", "done"): ((200, 1), torch.bool),
    ("next", "observation"): ((200, 3), torch.float32),
    ("next", "reward"): ((200, 1), torch.float32),
    ("next", "step_count"): ((200, 1), torch.int64),
    ("next", "terminated"): ((200, 1), torch.bool),
    ("next", "truncated"): ((200, 1), torch.bool),
    "observation": ((200, 3), torch.float32),
    "step_count": ((200, 1), torch.int64),
    "terminated": ((200, 1), torch.bool),
    "truncated": ((200, 1), torch.bool),
}


def linear() -> TensorDictModule:
    return TensorDictModule(
        nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"]
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: GymEnv("Pendulum-v1", device="cpu"),
        lambda: gymnasium.make("Pendulum-v1"),
    ],
)
def test_the_printed_batch(make: Any) -> None:
    collector = Collector(
        create_env_fn=make,
        policy=linear(),
        total_frames=2000,
        max_frames_per_traj=50,
        frames_per_batch=200,
        init_random_frames=-1,
        reset_at_each_iter=False,
        device="cpu",
        storing_device="cpu",
    )
    with collector:
        iterator = iter(collector)
        data = [next(iterator) for _ in range(3)][-1]
        assert data.names[-1] == "time"
        assert data.device == torch.device("cpu")
        assert {
            key: (tuple(v.shape), v.dtype) for key, v in data.items(True, True)
        } == LAYOUT
        assert data["next", "truncated"].flatten().nonzero().flatten().tolist() == [
            49,
            99,
            149,
            199,
        ]
        assert data["collector", "traj_ids"].unique().tolist() == [8, 9, 10, 11]


def test_the_seed_that_comes_out_is_that_of_the_last_environment() -> None:
    with pytest.warns(UserWarning, match="shared equally by 6"):
        collector = Collector(
            SerialEnv(6, lambda: GymEnv("Pendulum-v1")),
            linear(),
            total_frames=300,
            frames_per_batch=100,
        )
    with collector:
        assert collector.set_seed(1) == 6
        assert collector.set_seed(1, static_seed=True) == 1
        batches = list(collector)
        assert [batch.shape for batch in batches] == [(6, 17)] * 3
        assert sum(int(batch["collector", "valid"].sum()) for batch in batches) == 300


def test_collecting_in_the_background_into_a_shared_buffer() -> None:
    pytest.importorskip("ale_py")
    env = GymEnv("ALE/Pong-v5")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        buffer = ReplayBuffer(storage=LazyTensorStorage(1000), shared=True)
    collector = Collector(
        env,
        policy=RandomPolicy(env.action_spec),
        replay_buffer=buffer,
        frames_per_batch=64,
        total_frames=-1,
    )
    collector.start()
    deadline = time.monotonic() + 60
    while buffer.write_count < 200:
        assert time.monotonic() < deadline, "the thread writes"
    collector.async_shutdown()
    assert buffer.write_count == collector.stats().frames >= 200
    assert buffer[:3]["pixels"].shape == (3, 210, 160, 3)


def test_paths_that_remote_callers_use() -> None:
    with Collector(
        "Pendulum-v1", linear(), frames_per_batch=8, worker_idx=3
    ) as collector:
        assert collector.worker_idx == 3
        assert collector.cascade_execute("policy.module.state_dict").keys() == {
            "weight",
            "bias",
        }
        assert collector.get_model("policy") is collector.policy
        with pytest.raises(ValueError, match="critic"):
            collector.get_model("critic")
    with (
        Collector("Pendulum-v1", None, frames_per_batch=8) as collector,
        pytest.raises(RuntimeError, match="worker_idx"),
    ):
        _ = collector.worker_idx
