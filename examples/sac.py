"""SAC in one file; Muster collects into a ``ReplayMemory``. ``python examples/sac.py``.

Haarnoja et al., "Soft Actor-Critic Algorithms and Applications" (2018): targets of eq. 3 with two critics, the policy's
objective of eq. 9, the temperature's of eq. 18. Networks, hyperparameters and schedule are those of CleanRL: one
environment, a gradient step for each step of it. A time limit is not an end: ``terminated`` alone stops the bootstrap.
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

from muster import Collector, Evaluator, ReplayMemory, policies

LEARNING_STARTS, BUFFER_SIZE, BATCH_SIZE = 5_000, 1_000_000, 256
ACTOR_RATE, CRITIC_RATE, GAMMA, TAU, POLICY_EVERY = 3e-4, 1e-3, 0.99, 0.005, 2
LOG_STD_BOUNDS = -5.0, 2.0


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    relu = nn.ReLU(inplace=True)  # no memory for its output
    return nn.Sequential(nn.Linear(inputs, 256), relu, nn.Linear(256, 256), relu, nn.Linear(256, outputs))


class MeanAndLogStd(nn.Sequential):
    """Parameters of the policy's distribution; the standard deviation is 0.22 at first."""

    def forward(self, obs: Tensor) -> Tensor:
        mean, raw = super().forward(obs).chunk(2, -1)
        low, high = LOG_STD_BOUNDS
        return torch.cat([mean, low + 0.5 * (high - low) * (torch.tanh(raw) + 1)], -1)


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

    def __init__(self, obs_size: int, action_size: int) -> None:
        net = MeanAndLogStd(*mlp(obs_size, 2 * action_size))
        self.actor = policies.tanh_gaussian(net, log_std_bounds=LOG_STD_BOUNDS)
        self.critics = Critics(obs_size + action_size)
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.log_alpha, self.updates = torch.zeros((), requires_grad=True), 0
        self.entropy = -float(action_size)  # the target
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=ACTOR_RATE, fused=True)
        self.critic_optimizer = torch.optim.Adam(self.critics.parameters(), lr=CRITIC_RATE, fused=True)
        self.alpha_optimizer = torch.optim.Adam([self.log_alpha], lr=CRITIC_RATE, fused=True)

    def sample(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Return actions with gradients, ``[B, n]``, and their log-probabilities, ``[B]``."""
        distribution = self.actor.distribution(obs)
        action = distribution.rsample()
        return action, distribution.log_prob(action)

    def update(self, rows: TensorDict) -> None:
        obs, next_obs = rows["observation"], rows["next", "observation"]
        alpha = self.log_alpha.detach().exp()
        with torch.no_grad():
            action, log_prob = self.sample(next_obs)
            soft_value = self.targets(next_obs, action).amin(0) - alpha * log_prob
            goal = rows["next", "reward"][:, 0] + GAMMA * soft_value * ~rows["next", "terminated"][:, 0]
        loss = (self.critics(obs, rows["action"]) - goal).square().mean(1).sum()
        self.critic_optimizer.zero_grad()
        loss.backward()
        self.critic_optimizer.step()
        self.updates += 1
        if self.updates % POLICY_EVERY == 0:
            for _ in range(POLICY_EVERY):  # makes up for the delay
                self.update_policy(obs)
        with torch.no_grad():
            for target, source in zip(self.targets.parameters(), self.critics.parameters(), strict=True):
                target.lerp_(source, TAU)

    def update_policy(self, obs: Tensor) -> None:
        """Make a gradient step of the policy, and one of the temperature."""
        self.critics.requires_grad_(False)
        action, log_prob = self.sample(obs)
        actor_loss = (self.log_alpha.detach().exp() * log_prob - self.critics(obs, action).amin(0)).mean()
        self.actor_optimizer.zero_grad()
        actor_loss.backward()
        self.actor_optimizer.step()
        self.critics.requires_grad_(True)
        with torch.no_grad():
            entropy = -self.sample(obs)[1].mean()
        alpha_loss = self.log_alpha.exp() * (entropy - self.entropy)
        self.alpha_optimizer.zero_grad()
        alpha_loss.backward()
        self.alpha_optimizer.step()


def main(argv: list[str] | None = None) -> float:
    """Train and evaluate; return the mean return of the most probable actions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="Pendulum-v1")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--total-frames", type=int, default=10_240)
    parser.add_argument("--learning-starts", type=int, default=LEARNING_STARTS, help="frames with random actions")
    parser.add_argument("--eval-episodes", type=int, default=10)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # the networks are small
    torch.manual_seed(args.seed)
    with gymnasium.make(args.env) as env:
        learner = Learner(env.observation_space.shape[0], env.action_space.shape[0])
    memory = ReplayMemory(BUFFER_SIZE, seed=args.seed)
    returns, started = list[float](), time.perf_counter()
    with Collector(
        args.env,
        learner.actor,
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
