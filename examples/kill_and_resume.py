"""A training that is killed with SIGKILL and resumed ends with the same bits as one that was never interrupted.

    python examples/kill_and_resume.py

After each update one file gets the state of everything: environments in the middle of episodes, random generators and
counters (``collector.state_dict()``), networks and optimizer. ``save_state`` replaces the file atomically, so a kill at
any moment leaves a complete one. The algorithm is A2C: Mnih et al., "Asynchronous Methods for Deep RL" (2016), alg. S3.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from muster import Collector, load_state, policies, save_state

NUM_ENVS, T = 8, 16
LEARNING_RATE, GAMMA, ENTROPY, VALUE = 3e-3, 0.98, 0.005, 0.5


def mlp(outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, outputs))


def update(batch: TensorDict, actor: policies.Head, critic: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Make a gradient step with returns of up to T steps; where an episode was cut, its value is bootstrapped."""
    with torch.no_grad():
        next_value = critic(batch["next", "observation"])
    bootstrap, target = next_value * ~batch["next", "terminated"], torch.empty_like(next_value)
    following = bootstrap[:, -1]  # the return from the next step on
    for t in reversed(range(T)):
        following = torch.where(batch["next", "done"][:, t], bootstrap[:, t], following)
        target[:, t] = following = batch["next", "reward"][:, t] + GAMMA * following
    value: Tensor = critic(batch["observation"])
    distribution = actor.distribution(batch["observation"])
    advantage = (target - value).detach()[..., 0]
    gain = (distribution.log_prob(batch["action"]) * advantage / (advantage.std() + 1e-8)).mean()
    loss = VALUE * (value - target).square().mean() - gain - ENTROPY * distribution.entropy().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def train(file: Path, updates: int) -> str:
    """Train from the state in ``file``, if there is one, until ``updates``; return a digest of all weights."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    actor, critic = policies.categorical(mlp(2)), mlp(1)
    networks = nn.ModuleList([actor, critic])
    optimizer = torch.optim.Adam(networks.parameters(), lr=LEARNING_RATE)
    with Collector("CartPole-v1", actor, num_envs=NUM_ENVS, frames_per_batch=NUM_ENVS * T, seed=0) as collector:
        done = 0
        if file.exists():
            state = load_state(file)
            report = collector.load_state_dict(state["collector"])
            assert report.exact, report
            networks.load_state_dict(state["networks"])
            optimizer.load_state_dict(state["optimizer"])
            done = state["updates"]
            print(f"resumed after update {done}", flush=True)
        for number in range(done + 1, updates + 1):
            update(collector.next(), actor, critic, optimizer)
            collector.update_policy_weights_()
            state = {"collector": collector.state_dict(), "networks": networks.state_dict()}
            save_state(file, {**state, "optimizer": optimizer.state_dict(), "updates": number})
            print(f"update {number}: mean return {collector.stats().return_mean or 0:.1f}", flush=True)
    content = b"".join(tensor.numpy().tobytes() for tensor in networks.state_dict().values())
    return hashlib.sha256(content).hexdigest()


def child(file: Path, updates: int, kill_after: int | None) -> str:
    """Train in another process, kill it ``kill_after`` updates later (None: never); return its last line."""
    command = (sys.executable, __file__, "--child", str(file), "--updates", str(updates))
    killed = False
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = ""
        for line in process.stdout:
            if line.startswith("resumed"):
                print(line, end="")
            number = int(line.split()[1].rstrip(":")) if line.startswith("update ") else 0
            if kill_after is not None and number >= kill_after and not killed:
                process.kill()  # SIGKILL, probably in the middle of the next update or save
                print(f"killed after update {number}")
                killed = True
    assert process.returncode in ((0, -signal.SIGKILL) if killed else (0,)), process.returncode  # 0: it was quicker
    return line.strip()


def main(argv: list[str] | None = None) -> bool:
    """Return whether the killed and resumed training ended with the same weights, bit for bit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--seed", type=int, default=None, help="of the moments of the kills")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child is not None:
        print(train(args.child, args.updates))
        return True
    with tempfile.TemporaryDirectory() as folder:
        expected = train(Path(folder) / "whole", args.updates)
        for after in sorted(random.Random(args.seed).sample(range(1, args.updates), args.kills)):
            child(Path(folder) / "killed", args.updates, after)
        found = child(Path(folder) / "killed", args.updates, None)
    print(f"not interrupted: {expected}\nkilled {args.kills} times: {found}")
    return found == expected


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
