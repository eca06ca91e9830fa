"""Environments, policies and calls that both prt_rl's collector and Muster's compat layer of it can
run.

Needs torch, numpy and gymnasium only: ``scripts/record_prt_rl.py`` runs it beside prt_rl.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import torch

Call = tuple[str, dict[str, Any]]


class Counting:
    """N environments: state ``[length, episode, t]``, reward ``t + number of the environment / 8``.

    Args:
        lengths: of all episodes of each; 0: drawn from torch's generator at every reset, 1 to 5.
        agents: rewards are ``[N, agents, 1]``.
    """

    def __init__(self, lengths: list[int], agents: int = 0) -> None:
        self.lengths, self.agents, self.num_envs = lengths, agents, len(lengths)
        self.state = torch.zeros(self.num_envs, 3)
        self.resets: list[int | None] = []  # None: all
        self.actions: list[Any] = []

    def get_num_envs(self) -> int:
        return self.num_envs

    def get_parameters(self) -> Any:
        return SimpleNamespace(
            action_len=1, action_continuous=False, action_min=0, action_max=9
        )

    def reset(self, seed: int | None = None) -> tuple[torch.Tensor, dict[str, Any]]:
        self.resets.append(None)
        for i in range(self.num_envs):
            self._begin(i)
        return self.state.clone(), {}

    def reset_index(
        self, index: int, seed: int | None = None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        self.resets.append(index)
        self._begin(index)
        return self.state[index].clone(), {}

    def step(
        self, action: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
        self.actions.append(action.tolist())
        self.state[:, 2] += 1
        reward = (self.state[:, 2] + torch.arange(self.num_envs) / 8).unsqueeze(-1)
        if self.agents:
            reward = reward.unsqueeze(1) * torch.arange(1.0, self.agents + 1).reshape(
                1, -1, 1
            )
        return self.state.clone(), reward, self.state[:, 2:] >= self.state[:, :1], {}

    def _begin(self, i: int) -> None:
        length = self.lengths[i] or int(torch.randint(1, 6, ()))
        self.state[i] = torch.tensor([length, self.state[i, 1] + 1, 0.0])


class CountingGym(gymnasium.Env[Any, Any]):
    """One of them for Gymnasium: state ``[length, t]`` (float64), reward ``t``."""

    def __init__(self, length: int) -> None:
        self.length, self.t, self.resets = length, 0, 0
        self.observation_space = gymnasium.spaces.Box(0, 100, (2,), np.float64)
        self.action_space = gymnasium.spaces.Discrete(10)

    def reset(
        self, *, seed: int | None = None, options: Any = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t, self.resets = 0, self.resets + 1
        return np.array([self.length, 0.0]), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        over = self.t >= self.length
        return (
            np.array([self.length, self.t], np.float64),
            float(self.t),
            over and action < 5,
            over and action >= 5,
            {},
        )


class Policy:
    """Acts as the state says; its value of a state is ``100 + 10 * length + t``.

    Attributes:
        calls: so many.
    """

    def __init__(self) -> None:
        self.calls = 0

    def act(
        self, obs: torch.Tensor, deterministic: bool = False
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        assert not deterministic
        self.calls += 1
        action = (obs[:, :1] + 2 * obs[:, -1:]).long() % 10
        return action, {
            "value": 100 + 10 * obs[:, :1] + obs[:, -1:],
            "log_prob": -action.float() / 8,
        }


class Sampling:
    """Acts at random, and returns no value; its logits have two dimensions."""

    def act(
        self, obs: torch.Tensor, deterministic: bool = False
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        noise = torch.rand(len(obs), 2, 2)
        return (noise.sum((1, 2)) * 2).long().unsqueeze(-1), {"logits": noise}


STEPS = {n: ("experience", {"num_steps": n}) for n in range(1, 31)}
MIXED: list[Call] = [
    STEPS[5],
    ("trajectory", {"num_trajectories": 7}),
    STEPS[11],
    ("trajectory", {"min_num_steps": 17}),
    STEPS[4],
]
# name: (lengths, agents, policy, flatten, calls); a length of 0 is drawn anew for every episode
CASES: dict[str, tuple[list[int], int, type, bool, list[Call]]] = {
    "one": ([3], 0, Policy, True, [STEPS[n] for n in (1, 1, 1, 2, 7, 3)]),
    "two": ([2, 3], 0, Policy, True, [STEPS[n] for n in (7, 1, 2, 12)]),
    "two-rows": ([2, 3], 0, Policy, False, [STEPS[n] for n in (7, 1, 2, 12)]),
    "no-bootstrap": (
        [2, 3],
        0,
        Policy,
        True,
        [("experience", {"num_steps": 5, "bootstrap": False})],
    ),
    "agents": (
        [2, 5],
        3,
        Policy,
        False,
        [STEPS[9], ("trajectory", {"num_trajectories": 3})],
    ),
    "drawn": ([0, 0, 0], 0, Sampling, True, [STEPS[n] for n in (10, 3, 30)]),
    "mixed": ([0, 0, 3], 0, Sampling, True, MIXED),
    "mixed-rows": ([0, 2], 0, Sampling, False, MIXED),
    "default": (
        [4],
        0,
        Policy,
        False,
        [("trajectory", {}), ("trajectory", {"num_trajectories": 3})],
    ),
    "long": (
        [1, 4, 150],
        0,
        Policy,
        True,
        [("trajectory", {"num_trajectories": 4}), STEPS[1]],
    ),
    **{
        f"fair-{n}": (
            [1, 2, 3],
            0,
            Policy,
            True,
            [("trajectory", {"num_trajectories": n})],
        )
        for n in range(3, 10)
    },
    **{
        f"ties-{n}": (
            [3, 1, 1, 3],
            0,
            Policy,
            True,
            [("trajectory", {"num_trajectories": n})] * 2,
        )
        for n in (6, 7)
    },
    **{
        f"steps-{n}": (
            [2, 2, 5],
            0,
            Policy,
            True,
            [("trajectory", {"min_num_steps": n})],
        )
        for n in (1, 2, 3, 5, 9, 23)
    },
}


def run(collector_class: Any, case: str) -> list[dict[str, Any]]:
    """What the calls of a case returned, with what the tracker says after each and what the
    environments were asked.
    """
    lengths, agents, policy, flatten, calls = CASES[case]
    torch.manual_seed(7)
    env, acting = Counting(lengths, agents), policy()
    collector = collector_class(env, flatten=flatten)
    answers = []
    for kind, arguments in calls:
        found = getattr(collector, f"collect_{kind}")(acting, **arguments)
        tracker = collector.get_metric_tracker()
        answers.append(
            {
                "keys": list(found),
                "dtypes": {name: str(tensor.dtype) for name, tensor in found.items()},
                "values": {name: tensor.tolist() for name, tensor in found.items()},
                "counts": [
                    tracker.collected_steps,
                    tracker.cumulative_reward,
                    tracker.episode_count,
                ],
                "last": [tracker.last_episode_reward, tracker.last_episode_length],
                "resets": env.resets[:],
                "drawn": torch.get_rng_state().sum().item(),
            }
        )
    return answers
