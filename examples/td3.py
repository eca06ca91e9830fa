"""TD3 in one file; Muster collects into a ``ReplayMemory``. ``python examples/td3.py``.

Fujimoto et al., "Addressing Function Approximation Error in Actor-Critic Methods" (2018), algorithm 1: the smaller of
two critics, noise on the target's actions, and a policy that is trained half as often. ``Explorer`` adds the noise of
exploration where actions are collected. Networks, hyperparameters and schedule are those of CleanRL: one environment,
a gradient step for each step of it. A time limit is not an end: ``terminated`` alone stops the bootstrap.
MuJoCo: ``--env HalfCheetah-v5 --total-frames 1000000``.
"""

from __future__ import annotations

import argparse
import copy
import time
from statistics import fmean

import gymnasium
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from muster import Collector, Evaluator, ReplayMemory

LEARNING_STARTS, BUFFER_SIZE, BATCH_SIZE = 25_000, 1_000_000, 256
LEARNING_RATE, GAMMA, TAU, POLICY_EVERY = 3e-4, 0.99, 0.005, 2
EXPLORATION, SMOOTHING, SMOOTHING_CLIP = 0.1, 0.2, 0.5  # standard deviations, in units of the largest action


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    relu = nn.ReLU(inplace=True)  # no memory for its output
    return nn.Sequential(nn.Linear(inputs, 256), relu, nn.Linear(256, 256), relu, nn.Linear(256, outputs))


class Actor(nn.Module):
    """The policy without noise. Actions are between ``-limit`` and ``limit``."""

    def __init__(self, obs_size: int, limit: Tensor) -> None:
        super().__init__()
        self.net, self.limit = mlp(obs_size, len(limit)), nn.Buffer(limit)

    def forward(self, obs: Tensor) -> Tensor:
        return torch.tanh(self.net(obs)) * self.limit


class Explorer(nn.Module):
    """A policy with normal noise on its actions."""

    def __init__(self, actor: Actor) -> None:
        super().__init__()
        self.actor = actor

    def forward(self, obs: Tensor) -> Tensor:
        action, limit = self.actor(obs), self.actor.limit
        return (action + EXPLORATION * limit * torch.randn_like(action)).clamp(-limit, limit)


class Critics(nn.Module):
    """Two action values."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.nets = nn.ModuleList([mlp(inputs, 1), mlp(inputs, 1)])

    def forward(self, obs: Tensor, action: Tensor) -> Tensor:
        """Return both values, ``[2, B]``."""
        both = torch.cat([obs, action], -1)
        return torch.stack([net(both)[:, 0] for net in self.nets])


class Learner:
    """The networks, and a gradient step."""

    def __init__(self, obs_size: int, limit: Tensor) -> None:
        self.actor, self.critics = Actor(obs_size, limit), Critics(obs_size + len(limit))
        self.networks = nn.ModuleList([self.actor, self.critics])
        self.targets = copy.deepcopy(self.networks).requires_grad_(False)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=LEARNING_RATE, fused=True)
        self.critic_optimizer = torch.optim.Adam(self.critics.parameters(), lr=LEARNING_RATE, fused=True)
        self.updates = 0

    def update(self, rows: TensorDict) -> None:
        obs, next_obs, limit = rows["observation"], rows["next", "observation"], self.actor.limit
        target_actor, target_critics = self.targets
        with torch.no_grad():
            noise = (SMOOTHING * torch.randn_like(rows["action"])).clamp(-SMOOTHING_CLIP, SMOOTHING_CLIP) * limit
            action = (target_actor(next_obs) + noise).clamp(-limit, limit)
            value = target_critics(next_obs, action).amin(0)
            goal = rows["next", "reward"][:, 0] + GAMMA * value * ~rows["next", "terminated"][:, 0]
        loss = (self.critics(obs, rows["action"]) - goal).square().mean(1).sum()
        self.critic_optimizer.zero_grad()
        loss.backward()
        self.critic_optimizer.step()
        self.updates += 1
        if self.updates % POLICY_EVERY:
            return
        actor_loss = -self.critics.nets[0](torch.cat([obs, self.actor(obs)], -1)).mean()
        self.actor_optimizer.zero_grad()
        actor_loss.backward()
        self.actor_optimizer.step()
        with torch.no_grad():
            for target, source in zip(self.targets.parameters(), self.networks.parameters(), strict=True):
                target.lerp_(source, TAU)


def main(argv: list[str] | None = None) -> float:
    """Train and evaluate; return the mean return of the actions without noise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="Pendulum-v1")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--total-frames", type=int, default=32_768)
    parser.add_argument("--learning-starts", type=int, default=LEARNING_STARTS, help="frames with random actions")
    parser.add_argument("--eval-episodes", type=int, default=10)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # the networks are small
    torch.manual_seed(args.seed)
    with gymnasium.make(args.env) as env:
        learner = Learner(env.observation_space.shape[0], torch.as_tensor(env.action_space.high))
    memory = ReplayMemory(BUFFER_SIZE, seed=args.seed)
    returns, started = list[float](), time.perf_counter()
    with Collector(
        args.env,
        Explorer(learner.actor),
        frames_per_batch=1,
        total_frames=args.total_frames,
        init_random_frames=args.learning_starts,
        replay_buffer=memory,
        seed=args.seed,
    ) as collector:
        for frames, _ in enumerate(collector, 1):  # each step goes into the memory
            if frames > args.learning_starts:
                learner.update(memory.sample(BATCH_SIZE))
                collector.update_policy_weights_()
            returns += [episode.episode_return for episode in collector.episodes]
            if frames % 1024 == 0 and returns:
                row = f"{frames:8,} frames  {len(returns):5} episodes  mean return {fmean(returns[-4:]):8.1f}"
                print(f"{row}  {time.perf_counter() - started:6.1f} s", flush=True)
    with Evaluator(args.env, learner.actor, episodes=args.eval_episodes, num_envs=5) as evaluator:
        score = evaluator.evaluate().mean
    print(f"evaluation: mean return {score:.1f} over {args.eval_episodes} episodes")
    return score


if __name__ == "__main__":
    main()
