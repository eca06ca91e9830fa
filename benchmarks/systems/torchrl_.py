"""TorchRL's Collector; several environments are a SerialEnv, as its documentation advises for one
process.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, Normal
from torchrl.collectors import Collector
from torchrl.envs import GymWrapper, SerialEnv
from torchrl.modules import ProbabilisticActor

from benchmarks.nets import PlainPolicy
from benchmarks.workloads import Workload


class _Gaussian(nn.Module):
    def __init__(self, plain: PlainPolicy) -> None:
        super().__init__()
        self.plain = plain

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        mean = self.plain.net(obs)
        return mean, self.plain.log_std.exp().expand_as(mean)


def _normal(loc: Tensor, scale: Tensor) -> Independent:
    return Independent(Normal(loc, scale), 1)


class TorchRL:
    def __init__(self, workload: Workload) -> None:
        plain = PlainPolicy(workload.make())
        out_keys = ["logits"] if plain.discrete else ["loc", "scale"]
        key = "pixels" if "Frames" in workload.env_id else "observation"
        module = TensorDictModule(
            plain.net if plain.discrete else _Gaussian(plain), [key], out_keys
        )
        dist: Any = Categorical if plain.discrete else _normal

        def make() -> GymWrapper:
            # Class indices instead of TorchRL's one-hot actions: less work for it.
            return GymWrapper(
                workload.make(), categorical_action_encoding=True, from_pixels=False
            )

        env = make() if workload.B == 1 else SerialEnv(workload.B, make)
        actor = ProbabilisticActor(
            module,
            in_keys=out_keys,
            spec=env.action_spec,
            distribution_class=dist,
            return_log_prob=True,
        )
        if key == "pixels" and key not in env.observation_spec:
            module.in_keys = ["observation"]
        torch.manual_seed(0)
        self.collector: Any = Collector(
            env, actor, frames_per_batch=workload.frames, total_frames=-1
        )
        self.batches: Iterator[Any] = iter(self.collector)

    def rollout(self) -> int:
        return int(next(self.batches).numel())

    def close(self) -> None:
        self.collector.shutdown()
