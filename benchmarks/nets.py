"""The one network every system runs: obs-64-64-act with tanh, a sampled action and its
log-probability.
"""

from __future__ import annotations

import math

import gymnasium
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Normal


class Pixels(nn.Module):
    """Every eighth pixel as floats in [0, 1]: a cheap policy, so that moving the images is what is
    measured.
    """

    stride = 8

    def forward(self, image: Tensor) -> Tensor:
        return image[..., :: self.stride, :: self.stride, :].flatten(-3).float() / 255


def trunk(env: gymnasium.Env) -> nn.Sequential:  # type: ignore[type-arg]
    """Logits for discrete actions, the mean for continuous ones."""
    torch.manual_seed(0)
    space, actions = env.observation_space, env.action_space
    assert space.shape is not None
    outputs = (
        int(actions.n)
        if isinstance(actions, gymnasium.spaces.Discrete)
        else math.prod(actions.shape or (1,))
    )
    images = len(space.shape) == 3
    inputs = (
        math.prod(-(-n // Pixels.stride) for n in space.shape[:2]) * space.shape[2]
        if images
        else space.shape[0]
    )
    layers = [
        nn.Linear(inputs, 64),
        nn.Tanh(),
        nn.Linear(64, 64),
        nn.Tanh(),
        nn.Linear(64, outputs),
    ]
    return nn.Sequential(*([Pixels()] * images), *layers)


def is_discrete(env: gymnasium.Env) -> bool:  # type: ignore[type-arg]
    return isinstance(env.action_space, gymnasium.spaces.Discrete)


class PlainPolicy(nn.Module):
    """The policy as most people write it: a network and ``torch.distributions``, as in CleanRL."""

    def __init__(self, env: gymnasium.Env) -> None:  # type: ignore[type-arg]
        super().__init__()
        self.net = trunk(env)
        self.discrete = is_discrete(env)
        if not self.discrete:
            self.log_std = nn.Parameter(
                torch.zeros(math.prod(env.action_space.shape or (1,)))
            )

    def forward(self, obs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """``(action, {"action_log_prob": ...})``."""
        out = self.net(obs)
        if self.discrete:
            choice = Categorical(logits=out)
            action = choice.sample()
            return action, {"action_log_prob": choice.log_prob(action)}
        spread = Normal(out, self.log_std.exp())
        action = spread.sample()
        return action, {"action_log_prob": spread.log_prob(action).sum(-1)}
