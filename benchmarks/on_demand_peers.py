"""Tianshou, prt_rl and Stable-Baselines3, as their users call them, and the compat layers in their
place.

Peer and compat layer get equal policies, environments and buffers. The limits are the bare loop
with one call of the policy per time step, observations stacked: what no collector can beat that
calls such a policy.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

from benchmarks.nets import trunk
from benchmarks.on_demand_cases import Case
from benchmarks.systems import System
from benchmarks.systems.bare import BareWithPolicy
from benchmarks.systems.muster_ import head_for

BUFFER_SIZE = 20_000  # of all environments, as in Tianshou's examples
EPSILON = 0.1


class _Calling:
    """``collect`` returns the number of steps."""

    def __init__(self, collect: Callable[[], int], envs: Any) -> None:
        self.rollout, self._envs = collect, envs

    def close(self) -> None:
        self._envs.close()


class _Limit(BareWithPolicy):
    def __init__(self, case: Case, act: Callable[[Any], Any]) -> None:
        super().__init__(case)
        self._act = act

    def policy(self) -> Callable[[], Any]:
        return lambda: self._act(self.obs)


# --- Tianshou -------------------------------------------------------------------------------------


def _tianshou_policy(case: Case, kind: str) -> Any:
    from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy

    from benchmarks.nets import PlainPolicy
    from benchmarks.systems.tianshou_ import _Actor, _categorical, _WithLogProb

    env = case.make()
    actor: Any = _Actor(PlainPolicy(env))
    if kind == "dqn":
        return DiscreteQLearningPolicy(
            model=actor, action_space=env.action_space, eps_inference=EPSILON
        )
    return _WithLogProb(
        actor=actor,
        dist_fn=_categorical,
        action_space=env.action_space,
        action_scaling=False,
        action_bound_method=None,
    )


def tianshou(case: Case, kind: str, compat: bool = False) -> System:
    """A vector replay buffer is filled. DQN explores, as where it is trained."""
    from tianshou.data import VectorReplayBuffer
    from tianshou.env import DummyVectorEnv

    envs, made = (
        DummyVectorEnv(case.factories()),
        "muster.compat.tianshou" if compat else "tianshou.data",
    )
    collector = importlib.import_module(made).Collector(
        _tianshou_policy(case, kind),
        envs,
        VectorReplayBuffer(BUFFER_SIZE, case.B),
        exploration_noise=kind == "dqn",
    )
    collector.reset()
    return _Calling(
        lambda: int(collector.collect(**case.asked).n_collected_steps), envs
    )


def tianshou_limit(case: Case, kind: str) -> System:
    from tianshou.data import Batch

    policy = _tianshou_policy(case, kind)

    def act(obs: Any) -> Any:
        batch = Batch(obs=obs, info=Batch())
        action = policy(batch).act
        if kind == "dqn":
            return policy.add_exploration_noise(action, batch)
        return action.numpy()

    return _Limit(case, act)


# --- prt_rl ---------------------------------------------------------------------------------------


class _Sampled(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.net = trunk(case.make())

    @torch.no_grad()
    def act(
        self, obs: Tensor, deterministic: bool = False
    ) -> tuple[Tensor, dict[str, Tensor]]:
        choice = Categorical(logits=self.net(obs))
        action = choice.sample()
        return action.unsqueeze(-1), {"log_prob": choice.log_prob(action).unsqueeze(-1)}


class _Greedy(_Sampled):
    @torch.no_grad()
    def act(
        self, obs: Tensor, deterministic: bool = False
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return self.net(obs).argmax(-1, keepdim=True), {}


def prt(case: Case, kind: str, compat: bool = False) -> System:
    from prt_rl.env.wrappers import GymnasiumWrapper

    env = GymnasiumWrapper(env_factory=lambda index, seed: case.make(), num_envs=case.B)
    policy: Any = (
        head_for(case.make())
        if kind == "heads"
        else {"sampled": _Sampled, "greedy": _Greedy}[kind](case)
    )
    made = "muster.compat.prt_rl" if compat else "prt_rl.common.collectors"
    collector = importlib.import_module(made).Collector(env)

    def steps() -> int:
        return len(
            collector.collect_experience(policy, num_steps=case.frames)["reward"]
        )

    def episodes() -> int:
        return len(
            collector.collect_trajectory(policy, num_trajectories=case.episodes)[
                "reward"
            ]
        )

    return _Calling(episodes if case.episodes else steps, env)


def prt_limit(case: Case, kind: str) -> System:
    policy = {"sampled": _Sampled, "greedy": _Greedy}[kind](case)
    return _Limit(
        case, lambda obs: policy.act(torch.from_numpy(obs))[0].squeeze(-1).tolist()
    )


# --- Stable-Baselines3 ----------------------------------------------------------------------------


def sb3(case: Case) -> System:
    """PPO with its own actor and critic of 64-64 each.

    Its advantages are left out: nobody else computes any.
    """
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import DummyVecEnv

    from benchmarks.systems.sb3_ import _Nothing

    envs = DummyVecEnv(case.factories())
    ppo: Any = PPO(
        "MlpPolicy",
        envs,
        n_steps=case.T,
        batch_size=case.frames,
        normalize_advantage=False,
        device="cpu",
    )
    ppo.rollout_buffer.compute_returns_and_advantage = lambda **_: None
    _, callback = ppo._setup_learn(total_timesteps=10**12, callback=_Nothing())

    def collect() -> int:
        ppo.collect_rollouts(
            ppo.env, callback, ppo.rollout_buffer, n_rollout_steps=case.T
        )
        return case.frames

    return _Calling(collect, envs)
