"""A batch of environments whose step is a Warp kernel on torch's tensors. ``python examples/warp_env.py --device cpu``.

What is needed beside the kernel: Warp shares torch's memory (``wp.from_torch``) and, on a GPU, torch's stream
(``wp.stream_from_torch``). Without that Warp has a stream of its own, and its kernels neither wait for the policy nor
can be recorded by ``capture=True``. Kernels are compiled at their first launch, before anything is recorded.
The task is Gymnasium's Pendulum-v1. Needs ``pip install warp-lang``.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
import warp as wp
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from torch import Tensor, nn

from muster import Collector, policies


@wp.kernel
def advance(state: wp.array2d(dtype=float), torque: wp.array(dtype=float), reward: wp.array(dtype=float)):  # type: ignore[no-untyped-def, valid-type]
    """Step one pendulum: angle (0 is up) and velocity, in place."""
    i = wp.tid()
    angle = state[i, 0]
    velocity = state[i, 1]
    u = wp.clamp(torque[i], -2.0, 2.0)
    turned = angle - 2.0 * wp.pi * wp.floor((angle + wp.pi) / (2.0 * wp.pi))
    reward[i] = -(turned * turned + 0.1 * velocity * velocity + 0.001 * u * u)
    velocity = wp.clamp(velocity + (15.0 * wp.sin(angle) + 3.0 * u) * 0.05, -8.0, 8.0)
    state[i, 0] = angle + velocity * 0.05
    state[i, 1] = velocity


class WarpPendulum:
    """B pendulums: observations are cosine and sine of the angle, and the velocity; actions are torques."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012 (as Gymnasium has it)
    muster_exact = True  # resets respect the mask, and every last observation is returned

    def __init__(self, num_envs: int, device: str, length: int = 200) -> None:
        wp.init()
        self.num_envs, self.device, self.length = num_envs, torch.device(device), length
        high = np.array([1, 1, 8], np.float32)
        self.single_observation_space = spaces.Box(-high, high)
        self.single_action_space = spaces.Box(-2.0, 2.0, (1,), np.float32)
        self.generator = torch.Generator(self.device)
        self.state = torch.zeros(num_envs, 2, device=self.device)
        self.steps = torch.zeros(num_envs, dtype=torch.int64, device=self.device)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Tensor, dict[str, Any]]:
        if seed is not None:
            self.generator.manual_seed(seed)
        everywhere = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        self._begin((options or {}).get("reset_mask", everywhere))
        return self._observe(), {}

    def step(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        reward = torch.empty(self.num_envs, device=self.device)
        arrays = [wp.from_torch(x) for x in (self.state, action[:, 0].contiguous(), reward)]
        on_gpu = self.device.type == "cuda"
        stream = wp.stream_from_torch(torch.cuda.current_stream(self.device)) if on_gpu else None
        wp.launch(advance, self.num_envs, arrays, device=arrays[0].device, stream=stream)
        self.steps += 1
        truncated = self.steps >= self.length
        info = {"final_obs": self._observe()}
        self._begin(truncated)
        return self._observe(), reward, torch.zeros_like(truncated), truncated, info

    def close(self) -> None:
        """Do nothing: torch frees the memory."""

    def _observe(self) -> Tensor:
        angle, velocity = self.state.unbind(1)
        return torch.stack([angle.cos(), angle.sin(), velocity], 1)

    def _begin(self, where: Tensor) -> None:
        angle, velocity = torch.rand(2, self.num_envs, generator=self.generator, device=self.device) * 2 - 1
        fresh = torch.stack([angle * torch.pi, velocity], 1)
        self.state.copy_(torch.where(where[:, None], fresh, self.state))
        self.steps.masked_fill_(where, 0)


def main(arguments: list[str] | None = None) -> float:
    """Collect two episodes of each environment with a network that is not trained; returns the mean reward."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--envs", type=int, default=4096)
    options = parser.parse_args(arguments)
    actor = policies.tanh_gaussian(nn.Linear(3, 2)).to(options.device)
    env = WarpPendulum(options.envs, options.device)
    frames = 2 * env.length * options.envs
    with Collector(env, actor, frames_per_batch=frames, seed=0) as collector:
        batch = collector.next()
        reward = float(batch["next", "reward"].mean())
        print(f"{frames:,} frames, {len(collector.episodes):,} episodes, mean reward {reward:.2f}")
    return reward


if __name__ == "__main__":
    main()
