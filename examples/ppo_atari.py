"""PPO on Atari in one file: ALE's own batch of environments, and Muster. ``python examples/ppo_atari.py``.

``gymnasium.make_vec`` makes ALE's vector environment: threads in C++ that return four grey 84x84 frames at once.
Clipped objective: Schulman et al., "Proximal Policy Optimization Algorithms" (2017), eq. 7 and 9, with the network of
Mnih et al. (2015). Needs ``pip install 'muster-rl[atari]'``. A common budget is 10 million frames.
"""

from __future__ import annotations

import argparse
import time
from statistics import fmean

import ale_py
import gymnasium
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributions import Categorical

from muster import Collector

NUM_ENVS, T = 8, 128
LEARNING_RATE, EPOCHS, MINIBATCHES = 2.5e-4, 4, 4  # the rate falls to zero over the run
GAMMA, LAMBDA, CLIP, ENTROPY, VALUE, MAX_GRAD_NORM = 0.99, 0.95, 0.1, 0.01, 0.5, 0.5


def layer(module: nn.Module, gain: float = 2**0.5) -> nn.Module:
    """Return the layer with orthogonal weights."""
    nn.init.orthogonal_(module.weight, gain)  # type: ignore[arg-type]
    nn.init.zeros_(module.bias)  # type: ignore[arg-type]
    return module


class Agent(nn.Module):
    """Policy and values of pictures ``[B, 4, 84, 84]``, uint8."""

    def __init__(self, actions: int) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            *(layer(nn.Conv2d(4, 32, 8, stride=4)), nn.ReLU(), layer(nn.Conv2d(32, 64, 4, stride=2)), nn.ReLU()),
            *(layer(nn.Conv2d(64, 64, 3)), nn.ReLU(), nn.Flatten(), layer(nn.Linear(64 * 7 * 7, 512)), nn.ReLU()),
        )
        self.actor, self.critic = layer(nn.Linear(512, actions), 0.01), layer(nn.Linear(512, 1), 1.0)

    def evaluate(self, obs: Tensor) -> tuple[Categorical, Tensor]:
        """Return the distribution of actions, and values ``[B]``."""
        features = self.trunk(obs / 255)
        return Categorical(logits=self.actor(features)), self.critic(features).squeeze(-1)

    def forward(self, obs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        distribution, value = self.evaluate(obs)
        action = distribution.sample()
        return action, {"action_log_prob": distribution.log_prob(action), "state_value": value}


@torch.no_grad()
def advantages(batch: TensorDict, agent: Agent) -> Tensor:
    """Generalised advantage estimates (Schulman et al., 2016, eq. 16), ``[B, T]``.

    Values are those of the batch; only last observations, of episodes and of the batch, are evaluated here.
    """
    value, done = batch["state_value"], batch["next", "done"][..., 0]
    next_value, last_rows = value.roll(-1, 1), done.clone()
    last_rows[:, -1] = True
    next_value[last_rows] = agent.evaluate(batch["next", "observation"][last_rows])[1]
    reward = batch["next", "reward"][..., 0].sign()  # clipped, as by Mnih et al.
    delta = reward + GAMMA * next_value * ~batch["next", "terminated"][..., 0] - value
    advantage, last = torch.empty_like(delta), torch.zeros(len(delta))
    for t in reversed(range(delta.shape[1])):
        last = delta[:, t] + GAMMA * LAMBDA * ~done[:, t] * last
        advantage[:, t] = last
    return advantage


def update(batch: TensorDict, agent: Agent, optimizer: torch.optim.Optimizer) -> None:
    """Make some epochs of PPO's clipped objective."""
    advantage = advantages(batch, agent).flatten()
    target = advantage + batch["state_value"].flatten()
    obs, action = batch["observation"].flatten(0, 1), batch["action"].flatten()
    old_log_prob = batch["action_log_prob"].flatten()
    for _ in range(EPOCHS):
        for i in torch.randperm(len(obs)).chunk(MINIBATCHES):
            distribution, value = agent.evaluate(obs[i])
            ratio = (distribution.log_prob(action[i]) - old_log_prob[i]).exp()
            a = (advantage[i] - advantage[i].mean()) / (advantage[i].std() + 1e-8)
            gain = torch.min(a * ratio, a * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
            loss = VALUE * (value - target[i]).square().mean() - gain - ENTROPY * distribution.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), MAX_GRAD_NORM)
            optimizer.step()


def main(argv: list[str] | None = None) -> float:
    """Train; return the mean return of the last episodes (NaN before the first)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="ALE/Pong-v5")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--total-frames", type=int, default=102_400, help="each is four frames of the game")
    parser.add_argument("--steps", type=int, default=T, help="time steps per batch")
    parser.add_argument("--num-envs", type=int, default=NUM_ENVS)
    args = parser.parse_args(argv)
    torch.manual_seed(args.seed)
    gymnasium.register_envs(ale_py)
    envs = gymnasium.make_vec(args.env, num_envs=args.num_envs, reward_clipping=False)  # returns are the game's
    agent = Agent(int(envs.single_action_space.n))
    optimizer = torch.optim.Adam(agent.parameters(), lr=LEARNING_RATE, eps=1e-5, fused=True)
    frames = args.num_envs * args.steps
    updates, returns, started = max(1, args.total_frames // frames), list[float](), time.perf_counter()
    options = {"frames_per_batch": frames, "total_frames": updates * frames, "seed": args.seed}
    with Collector(envs, agent, num_threads=None, **options) as collector:
        for number, batch in enumerate(collector, 1):
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - (number - 1) / updates)
            update(batch, agent, optimizer)
            collector.update_policy_weights_()
            returns += [episode.episode_return for episode in collector.episodes]
            mean = fmean(returns[-20:]) if returns else float("nan")
            print(
                f"{number * frames:8,} frames  {len(returns):5} episodes  mean return {mean:6.1f}  "
                f"{time.perf_counter() - started:5.1f} s",
                flush=True,
            )
    return mean


if __name__ == "__main__":
    main()
