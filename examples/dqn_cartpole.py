"""DQN on CartPole-v1 in one file; Muster collects into a ``ReplayMemory``. ``python examples/dqn_cartpole.py``.

Mnih et al., "Human-level control through deep reinforcement learning" (2015), algorithm 1. The schedule is that of
CleanRL's ``dqn.py``: one environment, and one gradient step for every second step of it. Epsilon is a buffer of the
policy, so it is published with the weights. A time limit is not an end: ``terminated`` alone stops the bootstrap.
"""

from __future__ import annotations

import argparse
import copy
import time
from statistics import fmean

import torch
from tensordict import TensorDict
from torch import nn

from muster import Collector, Evaluator, ReplayMemory, policies

FRAMES_PER_UPDATE = 2
TARGET_EVERY = 256  # frames, after which the target network is replaced
LEARNING_RATE, BATCH_SIZE, BUFFER_SIZE, GAMMA = 2.3e-3, 64, 100_000, 0.99
LEARNING_STARTS, EPSILON_END, EXPLORATION = 1000, 0.04, 0.16  # epsilon falls during this part of the run


def update(q: nn.Module, target: nn.Module, optimizer: torch.optim.Optimizer, rows: TensorDict) -> None:
    """Make a gradient step on the squared error of one-step targets."""
    with torch.no_grad():
        best = target(rows["next", "observation"]).amax(-1)
        goal = rows["next", "reward"][:, 0] + GAMMA * best * ~rows["next", "terminated"][:, 0]
    value = q(rows["observation"]).gather(1, rows["action"][:, None])[:, 0]
    loss = nn.functional.mse_loss(value, goal)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def train(seed: int, total_frames: int, *, log_every: int = 2048) -> nn.Module:
    """Return the trained network of action values."""
    torch.manual_seed(seed)
    q = nn.Sequential(nn.Linear(4, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 2))
    target, policy = copy.deepcopy(q), policies.epsilon_greedy(q, 1.0)
    optimizer = torch.optim.Adam(q.parameters(), lr=LEARNING_RATE, fused=True)
    memory = ReplayMemory(BUFFER_SIZE, seed=seed)
    returns: list[float] = []
    started = time.perf_counter()
    with Collector(
        "CartPole-v1",
        policy,
        frames_per_batch=FRAMES_PER_UPDATE,
        total_frames=total_frames,
        replay_buffer=memory,
        seed=seed,
    ) as collector:
        for batches, _ in enumerate(collector, 1):  # each step goes into the memory
            frames = batches * FRAMES_PER_UPDATE
            if frames > LEARNING_STARTS:
                update(q, target, optimizer, memory.sample(BATCH_SIZE))
                collector.update_policy_weights_()
            if frames % TARGET_EVERY == 0:
                target.load_state_dict(q.state_dict())
            policy.epsilon.fill_(max(EPSILON_END, 1 - (1 - EPSILON_END) * frames / (EXPLORATION * total_frames)))
            returns += [episode.episode_return for episode in collector.episodes]
            if frames % log_every == 0 and returns:
                print(
                    f"{frames:8,} frames  {len(returns):5} episodes  mean return {fmean(returns[-20:]):6.1f}  "
                    f"{time.perf_counter() - started:5.1f} s",
                    flush=True,
                )
    return q


def main(argv: list[str] | None = None) -> float:
    """Train and evaluate; return the mean return of the greedy policy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--total-frames", type=int, default=51_200)
    parser.add_argument("--eval-episodes", type=int, default=20)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # the networks are small
    q = train(args.seed, args.total_frames)
    with Evaluator("CartPole-v1", policies.deterministic(q), episodes=args.eval_episodes, num_envs=4) as evaluator:
        score = evaluator.evaluate().mean
    print(f"evaluation: mean return {score:.1f} over {args.eval_episodes} episodes")
    return score


if __name__ == "__main__":
    main()
