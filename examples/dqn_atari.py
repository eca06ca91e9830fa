"""DQN on Atari in one file; stacks of frames in a ``ReplayMemory``. ``python examples/dqn_atari.py``.

Mnih et al., "Human-level control through deep reinforcement learning" (2015), algorithm 1, with the network and
hyperparameters of CleanRL's ``dqn_atari.py``: one environment, and a gradient step for every fourth step of it; the
warm-up is shorter. ALE's own vector environment makes grey 84x84 frames and stacks of four; with ``stack=4`` the
memory stores each frame once. Needs ``pip install 'muster-rl[atari]'``. A common budget is 10 million frames.
"""

from __future__ import annotations

import argparse
import copy
import time
from statistics import fmean

import ale_py
import gymnasium
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from muster import Collector, ReplayMemory, policies

FRAMES_PER_UPDATE, TARGET_EVERY = 4, 1000  # the target network is replaced after so many frames
LEARNING_RATE, BATCH_SIZE, GAMMA = 1e-4, 32, 0.99
EPSILON_END, EXPLORATION = 0.01, 0.1  # epsilon falls during this part of the run


class Values(nn.Sequential):
    """Action values of pictures ``[B, 4, 84, 84]``, uint8."""

    def __init__(self, actions: int) -> None:
        super().__init__(
            *(nn.Conv2d(4, 32, 8, stride=4), nn.ReLU(), nn.Conv2d(32, 64, 4, stride=2), nn.ReLU()),
            *(nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 7 * 7, 512), nn.ReLU()),
            nn.Linear(512, actions),
        )

    def forward(self, obs: Tensor) -> Tensor:
        return super().forward(obs / 255)


def update(q: nn.Module, target: nn.Module, optimizer: torch.optim.Optimizer, rows: TensorDict) -> None:
    """Make a gradient step on the squared error of one-step targets; rewards are clipped, as by Mnih et al."""
    with torch.no_grad():
        best = target(rows["next", "observation"]).amax(-1)
        goal = rows["next", "reward"][:, 0].sign() + GAMMA * best * ~rows["next", "terminated"][:, 0]
    value = q(rows["observation"]).gather(1, rows["action"][:, None])[:, 0]
    loss = nn.functional.mse_loss(value, goal)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def main(argv: list[str] | None = None) -> ReplayMemory:
    """Train; return the memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="ALE/Pong-v5")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--total-frames", type=int, default=102_400, help="each is four frames of the game")
    parser.add_argument("--buffer-size", type=int, default=100_000, help="transitions: 100,000 take 0.7 GB")
    parser.add_argument("--learning-starts", type=int, default=8_000, help="frames; CleanRL's script: 80,000")
    args = parser.parse_args(argv)
    torch.manual_seed(args.seed)
    gymnasium.register_envs(ale_py)
    envs = gymnasium.make_vec(args.env, num_envs=1, reward_clipping=False)  # returns are the game's
    q = Values(int(envs.single_action_space.n))
    target, policy = copy.deepcopy(q), policies.epsilon_greedy(q, 1.0)
    optimizer = torch.optim.Adam(q.parameters(), lr=LEARNING_RATE, fused=True)
    memory = ReplayMemory(args.buffer_size, stack=4, seed=args.seed)
    returns, started = list[float](), time.perf_counter()
    options = {"frames_per_batch": 1, "total_frames": args.total_frames, "seed": args.seed}
    with Collector(envs, policy, replay_buffer=memory, **options) as collector:
        for frames, _ in enumerate(collector, 1):  # each step goes into the memory
            if frames > args.learning_starts and frames % FRAMES_PER_UPDATE == 0:
                update(q, target, optimizer, memory.sample(BATCH_SIZE))
                collector.update_policy_weights_()
            if frames % TARGET_EVERY == 0:
                target.load_state_dict(q.state_dict())
            fallen = (1 - EPSILON_END) * frames / (EXPLORATION * args.total_frames)
            policy.epsilon.fill_(max(EPSILON_END, 1 - fallen))
            returns += [episode.episode_return for episode in collector.episodes]
            if frames % 2048 == 0 or frames == args.total_frames:
                mean = fmean(returns[-20:]) if returns else float("nan")
                print(
                    f"{frames:8,} frames  {len(returns):5} episodes  mean return {mean:6.1f}  "
                    f"{memory.nbytes / 1e6:6.0f} MB of memory  {time.perf_counter() - started:5.1f} s",
                    flush=True,
                )
    return memory


if __name__ == "__main__":
    main()
