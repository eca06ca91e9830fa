"""APPO: worker processes collect CartPole-v1 while this one trains, with V-trace. ``python examples/appo_vtrace.py``.

The weights that made a batch may be ``--max-policy-lag`` publications old. V-trace corrects values for that: Espeholt
et al., "IMPALA" (2018), eq. 1, with rho and c clipped at 1. The policy's loss is PPO's clipped objective (Schulman et
al., 2017, eq. 7) with the ratio to the policy that acted, so that several passes over a batch are safe.
"""

from __future__ import annotations

import argparse
import time
from statistics import fmean

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from muster import Evaluator, MultiAsyncCollector, policies

WORKERS, NUM_ENVS, T = 2, 8, 64  # a batch is a rollout of one worker: 8 environments, 64 steps
LEARNING_RATE, PASSES = 2e-3, 6  # the rate falls to zero over the run
GAMMA, CLIP, ENTROPY, VALUE, MAX_GRAD_NORM = 0.98, 0.2, 0.005, 0.5, 0.5


def mlp(outputs: int, scale: float) -> nn.Sequential:
    """4-64-64-outputs with orthogonal weights; ``scale`` of the last layer."""
    layers = [nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)]
    for layer, gain in zip(layers[::2], (2**0.5, 2**0.5, scale), strict=True):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


@torch.no_grad()
def vtrace(batch: TensorDict, log_prob: Tensor, value: Tensor, next_value: Tensor) -> tuple[Tensor, Tensor]:
    """Return value targets (eq. 1) and advantages (``r + gamma v' - V``, section 4.2, without rho), ``[B, T]``.

    Where an episode was truncated, its last step bootstraps from the value of its true last observation.

    Args:
        batch: a batch ``[B, T]``.
        log_prob: of the actions under the policy to be trained, ``[B, T]``.
        value: values of ``observation``, ``[B, T]``.
        next_value: values of ``next/observation``, ``[B, T]``.
    """
    rho = (log_prob - batch["action_log_prob"]).exp().clamp(max=1)
    discount, going_on = GAMMA * ~batch["next", "terminated"][..., 0], ~batch["next", "done"][..., 0]
    reward = batch["next", "reward"][..., 0]
    delta = rho * (reward + discount * next_value - value)
    correction, next_correction = torch.empty_like(delta), torch.empty_like(delta)  # target - value, here and next
    last = torch.zeros(len(delta))
    for t in reversed(range(delta.shape[1])):
        next_correction[:, t] = going_on[:, t] * last
        last = delta[:, t] + discount[:, t] * rho[:, t] * next_correction[:, t]
        correction[:, t] = last
    return value + correction, reward + discount * (next_value + next_correction) - value


def update(batch: TensorDict, actor: policies.Head, critic: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Make some passes over a batch."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for _ in range(PASSES):
        distribution = actor.distribution(batch["observation"])
        log_prob, value = distribution.log_prob(batch["action"]), critic(batch["observation"])[..., 0]
        next_value = critic(batch["next", "observation"])[..., 0]
        target, advantage = vtrace(batch, log_prob, value, next_value)
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        ratio = (log_prob - batch["action_log_prob"]).exp()
        gain = torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
        error = (value - target).square().mean()
        loss = VALUE * error - gain.mean() - ENTROPY * distribution.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
        optimizer.step()


def main(argv: list[str] | None = None) -> float:
    """Train and evaluate; return the mean return of the most probable actions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--total-frames", type=int, default=102_400)
    parser.add_argument("--max-policy-lag", type=int, default=2, help="publications")
    parser.add_argument("--eval-episodes", type=int, default=20)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # the networks are small
    torch.manual_seed(args.seed)
    actor, critic = policies.categorical(mlp(2, 0.01)), mlp(1, 1.0)
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=LEARNING_RATE, eps=1e-5, fused=True)
    updates, returns, started = args.total_frames // (NUM_ENVS * T), list[float](), time.perf_counter()
    with MultiAsyncCollector(
        ["CartPole-v1"] * WORKERS,
        actor,
        num_envs=NUM_ENVS,
        frames_per_batch=NUM_ENVS * T,
        total_frames=updates * NUM_ENVS * T,
        max_policy_lag=args.max_policy_lag,
        seed=args.seed,
    ) as collector:
        for number, batch in enumerate(collector, 1):
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - (number - 1) / updates)
            update(batch, actor, critic, optimizer)
            collector.update_policy_weights_()
            returns += [episode.episode_return for episode in collector.episodes]
            if number % 8 == 0 or number == updates:
                print(
                    f"{number * NUM_ENVS * T:8,} frames  {len(returns):5} episodes  mean return "
                    f"{fmean(returns[-20:]):6.1f}  {time.perf_counter() - started:5.1f} s",
                    flush=True,
                )
        print(f"batches by the age of their weights, in publications: {dict(collector.stats().policy_lag)}")
    with Evaluator("CartPole-v1", actor, episodes=args.eval_episodes, num_envs=4) as evaluator:
        score = evaluator.evaluate().mean
    print(f"evaluation: mean return {score:.1f} over {args.eval_episodes} episodes")
    return score


if __name__ == "__main__":
    main()
