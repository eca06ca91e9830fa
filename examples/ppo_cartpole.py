"""PPO on CartPole-v1 in one file, in CleanRL's style; Muster collects. ``python examples/ppo_cartpole.py --seed 1``.

What differs from the usual single-file PPO: there is no loop over environments here, and a time limit is
not an end: where an episode is ``truncated`` the value of its true last observation is bootstrapped.
"""

from __future__ import annotations

import argparse
import time
from statistics import fmean

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from muster import Collector, policies

NUM_ENVS, T = 8, 64
LEARNING_RATE, EPOCHS, MINIBATCHES = 2e-3, 4, 4  # the rate falls to zero over the run
GAMMA, LAMBDA, CLIP, ENTROPY, VALUE, MAX_GRAD_NORM = 0.98, 0.9, 0.2, 0.005, 0.5, 0.5


def mlp(outputs: int, scale: float) -> nn.Sequential:
    """4-64-64-outputs with orthogonal weights; ``scale`` of the last layer."""
    layers = [nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)]
    for layer, gain in zip(layers[::2], (2**0.5, 2**0.5, scale), strict=True):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


@torch.no_grad()
def advantages(batch: TensorDict, critic: nn.Module) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates and value targets, ``[B, T]``.

    ``terminated`` stops the bootstrap, ``done`` (also by a time limit) stops the sum.
    """
    value = critic(batch["observation"]).squeeze(-1)
    next_value = critic(batch["next", "observation"]).squeeze(-1)
    bootstrap = ~batch["next", "terminated"].squeeze(-1)
    going_on = ~batch["next", "done"].squeeze(-1)
    delta = batch["next", "reward"].squeeze(-1) + GAMMA * next_value * bootstrap - value
    advantage = torch.empty_like(delta)
    last = torch.zeros(len(delta))
    for t in reversed(range(delta.shape[1])):
        last = delta[:, t] + GAMMA * LAMBDA * going_on[:, t] * last
        advantage[:, t] = last
    return advantage, advantage + value


def update(batch: TensorDict, actor: nn.Module, critic: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Some epochs of PPO's clipped objective."""
    advantage, target = (x.flatten() for x in advantages(batch, critic))
    obs, action = batch["observation"].flatten(0, 1), batch["action"].flatten()
    old_log_prob = batch["action_log_prob"].flatten()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for _ in range(EPOCHS):
        for i in torch.randperm(len(obs)).chunk(MINIBATCHES):
            distribution = actor.distribution(obs[i])
            ratio = (distribution.log_prob(action[i]) - old_log_prob[i]).exp()
            a = (advantage[i] - advantage[i].mean()) / (advantage[i].std() + 1e-8)
            policy_loss = -torch.min(a * ratio, a * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
            value_loss = (critic(obs[i]).squeeze(-1) - target[i]).square().mean()
            loss = policy_loss + VALUE * value_loss - ENTROPY * distribution.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
            optimizer.step()


def evaluate(actor: nn.Module, episodes: int, seed: int) -> float:
    """Mean return of the most probable actions over exactly ``episodes`` episodes, one per environment."""
    with Collector(
        "CartPole-v1",
        actor,
        num_envs=episodes,
        frames_per_batch=500 * episodes,  # CartPole-v1 ends after 500 steps at the latest
        total_frames=500 * episodes,
        exploration_type="mode",
        seed=seed,
    ) as collector:
        batch = next(iter(collector))
    first = batch["collector", "traj_ids"] == batch["collector", "traj_ids"][:, :1]
    return float((batch["next", "reward"].squeeze(-1) * first).sum(1).mean())


def train(seed: int, total_frames: int, *, log_every: int = 4) -> tuple[nn.Module, float]:
    """Returns the trained policy, and the mean return of the last episodes while training."""
    torch.manual_seed(seed)
    actor, critic = policies.categorical(mlp(2, 0.01)), mlp(1, 1.0)
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=LEARNING_RATE, eps=1e-5)
    updates = total_frames // (NUM_ENVS * T)
    returns, started = list[float](), time.perf_counter()
    with Collector(
        "CartPole-v1",
        actor,
        num_envs=NUM_ENVS,
        frames_per_batch=NUM_ENVS * T,
        total_frames=updates * NUM_ENVS * T,
        seed=seed,
    ) as collector:
        for i, batch in enumerate(collector):
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - i / updates)
            update(batch, actor, critic, optimizer)
            collector.update_policy_weights_()
            returns += [episode.episode_return for episode in collector.episodes]
            if (i + 1) % log_every == 0 or i + 1 == updates:
                print(
                    f"{collector.stats().frames:8,} frames  {len(returns):5} episodes  "
                    f"mean return {fmean(returns[-20:]):6.1f}  {time.perf_counter() - started:5.1f} s"
                )
        return actor, fmean(returns[-20:])


def main(arguments: list[str] | None = None) -> float:
    """Train, evaluate; returns the mean evaluation return."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--total-frames", type=int, default=102_400)
    parser.add_argument("--eval-episodes", type=int, default=20)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the networks are too small to share out
    actor, _ = train(options.seed, options.total_frames)
    score = evaluate(actor, options.eval_episodes, seed=10_000 + options.seed)
    print(f"evaluation: mean return {score:.1f} over {options.eval_episodes} episodes")
    return score


if __name__ == "__main__":
    main()
