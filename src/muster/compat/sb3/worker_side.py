"""The worker's side of rollouts for Stable-Baselines3: its environments, and the policy that acts
in them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.distributions import (
    CategoricalDistribution,
    DiagGaussianDistribution,
    MultiCategoricalDistribution,
)
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import FlattenExtractor, MlpExtractor
from torch import nn

from muster.envs.stacked import StackedEnvs
from muster.policies.heads import Head, categorical, gaussian

# infos that are not empty with their rows; the last observation
Trace = tuple[list[tuple[int, dict[str, Any]]], Any]


class TracedEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Clips actions as SB3's algorithms do, and keeps the infos of the last ``n_steps`` steps.

    Actions of a Box are float32 without bounds, as the policy draws them.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], n_steps: int) -> None:
        super().__init__(env)
        self._n_steps = n_steps
        self._count = 0
        self._obs = None
        self._infos: deque[tuple[int, dict[str, Any]]] = deque()
        self._bounds: tuple[Any, Any] | None = None
        if isinstance(space := env.action_space, spaces.Box):
            self._bounds = space.low, space.high
            self.action_space = spaces.Box(-np.inf, np.inf, space.shape, np.float32)

    def reset(self, **arguments: Any) -> tuple[Any, dict[str, Any]]:
        self._obs, info = self.env.reset(**arguments)
        return self._obs, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        if self._bounds is not None:
            action = np.clip(action, *self._bounds)
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._count += 1
        self._obs = obs
        if info:
            self._infos.append(
                (self._count, deepcopy(info))
            )  # the environment may change it later
        while self._infos and self._infos[0][0] <= self._count - self._n_steps:
            self._infos.popleft()
        return obs, reward, terminated, truncated, info

    @property
    def trace(self) -> Trace:
        """Infos of the last ``n_steps`` steps, numbered as rows of a rollout of this length, and
        the observation.
        """
        first = self._count - self._n_steps + 1
        return [(count - first, info) for count, info in self._infos], self._obs

    @property
    def own_spaces(self) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
        """Observation and action space of the environment."""
        return self.env.observation_space, self.env.action_space


def stacked(
    env_fns: Sequence[Callable[[], gymnasium.Env[Any, Any]]], n_steps: int
) -> StackedEnvs:
    """Make the environments of one worker."""
    envs = StackedEnvs([TracedEnv(env_fn(), n_steps) for env_fn in env_fns])
    envs.store_as(replace(envs.spec, single=False))  # a batch also if it is one
    return envs


class WholePolicy(nn.Module):
    """Calls a policy of SB3 as its algorithms do.

    Actions have values and log-probabilities as extras.
    """

    def __init__(self, policy: ActorCriticPolicy) -> None:
        super().__init__()
        self.policy = policy

    @torch.no_grad()
    def forward(self, obs: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        space = self.policy.observation_space
        # the only key is "observation"
        if isinstance(space, spaces.Dict) and not isinstance(obs, dict):
            obs = dict.fromkeys(space.spaces, obs)
        actions, values, log_probs = self.policy(obs)
        if not isinstance(self.policy.action_space, spaces.Box):
            actions = actions.long()  # SB3 draws floats for MultiBinary
        return actions, {"state_value": values.flatten(), "action_log_prob": log_probs}


def actor(policy: ActorCriticPolicy) -> Head | WholePolicy:
    """Return a policy that draws actions from the same distribution as ``policy``, and shares its
    parameters.

    Unchanged ``MlpPolicy`` networks act as a head of Muster, which is several times faster: the
    value network is not called, and the actor runs without module dispatch. Other policies are
    called as they are.
    """
    space = policy.observation_space
    is_vector = (
        type(space) is spaces.Box
        and space.dtype == np.float32
        and len(space.shape) == 1
    )
    if (
        is_vector
        and type(policy) is ActorCriticPolicy
        and type(policy.features_extractor) is FlattenExtractor
        and type(policy.mlp_extractor) is MlpExtractor
    ):
        net = nn.Sequential(*policy.mlp_extractor.policy_net, policy.action_net)
        kind, actions = type(policy.action_dist), policy.action_space
        if kind is DiagGaussianDistribution:
            return gaussian(net, log_std=policy.log_std)
        if (
            kind is CategoricalDistribution
            and isinstance(actions, spaces.Discrete)
            and actions.start == 0
        ):
            return categorical(net)
        if (
            kind is MultiCategoricalDistribution
            and isinstance(actions, spaces.MultiDiscrete)
            and not actions.start.any()
        ):
            return categorical(net)
    return WholePolicy(policy)
