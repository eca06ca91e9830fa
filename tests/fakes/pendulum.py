"""What the programs of the seeds use: TorchRL's Pendulum, and an actor that is one layer."""

from __future__ import annotations

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.envs.libs.gym import GymEnv


def env_maker() -> GymEnv:
    return GymEnv("Pendulum-v1", device="cpu")


def linear() -> TensorDictModule:
    torch.manual_seed(0)
    return TensorDictModule(
        nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"]
    )
