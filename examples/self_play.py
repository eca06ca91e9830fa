"""Self-play: PPO learns tic-tac-toe against itself, and then hardly loses against random moves.

    python examples/self_play.py

One policy plays both sides. In the evaluation each side has its own: ``{"player_1": actor, "others": None}``.
"""

from __future__ import annotations

import argparse

import torch
from pettingzoo.classic import tictactoe_v3
from tensordict import TensorDict
from torch import nn

from muster import Collector, policies

SIDES = ("player_1", "player_2")


class Board(nn.Module):
    """A network for boards, ``[*batch, 3, 3, 2]``: own marks and those of the other side."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(18, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, outputs))

    def forward(self, board: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(board.flatten(-3).float())
        return out


def update(actor: policies.Head, critic: Board, optimizer: torch.optim.Optimizer, batch: TensorDict) -> None:
    """Make some steps of PPO on whole episodes. The discount is 1: a turn is worth the result of its episode."""
    _, episode = batch["collector", "traj_ids"].unique(return_inverse=True)
    results = torch.zeros(int(episode.max()) + 1).index_add(0, episode, batch["next", "reward"][:, 0])
    result = results[episode]
    advantage = result - critic(batch["observation"])[..., 0].detach()
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
    for _ in range(4):
        for some in torch.randperm(len(batch)).split(512):
            rows = batch[some]
            # With the action masks of the batch, this is the distribution from which the actions were drawn.
            distribution = actor.distribution(rows.select("observation", "action_mask"))
            ratio = (distribution.log_prob(rows["action"]) - rows["action_log_prob"]).exp()
            gain = torch.min(ratio * advantage[some], ratio.clamp(0.8, 1.2) * advantage[some])
            error = critic(rows["observation"])[..., 0] - result[some]
            loss = (0.5 * error.square() - gain - 0.01 * distribution.entropy()).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def against_random(actor: policies.Head, episodes: int, seed: int) -> dict[str, float]:
    """Return the shares of games won, drawn and lost without exploration, half of them on each side."""
    results: list[float] = []
    for side in SIDES:
        players = {side: actor, "others": None}
        options = {"num_envs": 10, "frames_per_batch": 500, "exploration_type": "mode"}
        with Collector(tictactoe_v3.raw_env, players, seed=seed, **options) as collector:
            own: list[float] = []
            while len(own) < episodes // 2:
                collector.rollout()
                own += [e.episode_return for e in collector.episodes if e.info and e.info["agent"] == side]
            results += own[: episodes // 2]
    return {name: results.count(value) / len(results) for name, value in (("won", 1), ("drawn", 0), ("lost", -1))}


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Train, and return the shares of games won, drawn and lost against random moves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--total-frames", type=int, default=160_000, help="turns of all agents, roughly")
    parser.add_argument("--episodes", type=int, default=512, help="episodes of agents in a batch")
    parser.add_argument("--eval-episodes", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    torch.set_num_threads(1)  # the networks are small
    torch.manual_seed(args.seed)
    actor, critic = policies.categorical(Board(9)), Board(1)
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=1e-3)
    frames = 0
    with Collector(
        tictactoe_v3.raw_env,
        actor,  # one policy for both sides
        num_envs=64,
        frames_per_batch=64 * 16,
        trajs_per_batch=args.episodes,
        seed=args.seed,
    ) as collector:
        for number, batch in enumerate(collector, 1):
            update(actor, critic, optimizer, batch)  # complete episodes, each of one agent, one after another
            frames += len(batch)
            is_last = frames >= args.total_frames
            if number % 10 == 0 or is_last:
                shares = against_random(actor, 100, args.seed + number)
                score = shares["won"] - shares["lost"]
                print(f"{frames:8,} frames  mean return {score:5.2f} in 100 games against random moves", flush=True)
            if is_last:
                break
    shares = against_random(actor, args.eval_episodes, args.seed + 1000)
    print("against random moves: " + ", ".join(f"{share:.1%} {name}" for name, share in shares.items()))
    return shares


if __name__ == "__main__":
    main()
