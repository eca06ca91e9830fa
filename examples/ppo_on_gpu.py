"""PPO where nothing leaves the GPU: environments, batches and the learner. ``python examples/ppo_on_gpu.py``.

4,096 CartPoles on tensors stand for your simulator. The host waits for the device once per iteration, to print a line.
Clipped objective: Schulman et al., "Proximal Policy Optimization Algorithms" (2017), eq. 7 and 9. ``--capture`` records
each rollout as a CUDA graph. Without a GPU: ``python examples/ppo_on_gpu.py --device cpu --envs 512``.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from muster import Collector, Evaluator, policies
from muster.testing import TorchCartPole

T, SOLVED, WINDOW = 32, 475.0, 100  # solved: the mean return of the last 100 episodes is 475
LEARNING_RATE, EPOCHS, MINIBATCHES = 3e-3, 4, 8  # the rate falls to zero over the run
GAMMA, LAMBDA, CLIP, ENTROPY, VALUE, MAX_GRAD_NORM = 0.99, 0.95, 0.2, 0.005, 0.5, 0.5


def mlp(outputs: int, scale: float) -> nn.Sequential:
    """4-64-64-outputs with orthogonal weights; ``scale`` of the last layer."""
    layers = [nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)]
    for layer, gain in zip(layers[::2], (2**0.5, 2**0.5, scale), strict=True):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


class Learner:
    """Networks, optimizer, and updates that never wait for the device."""

    def __init__(self, device: str) -> None:
        self.net, self.critic = mlp(2, 0.01).to(device), mlp(1, 1.0).to(device)
        self.parameters = [*self.net.parameters(), *self.critic.parameters()]
        self.optimizer = torch.optim.Adam(self.parameters, lr=LEARNING_RATE, eps=1e-5, fused=True)

    @torch.no_grad()
    def advantages(self, batch: TensorDict) -> tuple[Tensor, Tensor]:
        """Generalised advantage estimates (Schulman et al., 2016, eq. 16) and value targets, ``[T, B]``.

        ``next/observation`` has the true last observation of an episode: a time limit is not an end.
        """
        after = batch["next"]
        value = self.critic(batch["observation"]).squeeze(-1)
        next_value = self.critic(after["observation"]).squeeze(-1)
        discount = GAMMA * ~after["terminated"].squeeze(-1)
        going_on = GAMMA * LAMBDA * ~after["done"].squeeze(-1)
        delta = after["reward"].squeeze(-1) + discount * next_value - value
        advantage, last = torch.empty_like(delta), torch.zeros_like(delta[0])
        for t in reversed(range(len(delta))):
            last = torch.addcmul(delta[t], going_on[t], last, out=advantage[t])
        return advantage, advantage + value

    def update(self, batch: TensorDict, progress: float) -> None:
        """Some epochs of PPO's clipped objective on a batch ``[T, B]``; ``progress`` of the run, from 0 to 1."""
        self.optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - progress)
        advantage, target = (x.flatten() for x in self.advantages(batch))
        obs, action = batch["observation"].flatten(0, 1), batch["action"].flatten()
        old_log_prob = batch["action_log_prob"].flatten()
        for _ in range(EPOCHS):
            for i in torch.randperm(len(obs), device=obs.device).chunk(MINIBATCHES):
                log_probs = self.net(obs[i]).log_softmax(-1)  # torch.distributions would check values: it waits
                ratio = (log_probs.gather(-1, action[i, None]).squeeze(-1) - old_log_prob[i]).exp()
                a = (advantage[i] - advantage[i].mean()) / (advantage[i].std() + 1e-8)
                gain = torch.min(a * ratio, a * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
                value_loss = (self.critic(obs[i]).squeeze(-1) - target[i]).square().mean()
                entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
                loss = VALUE * value_loss - gain - ENTROPY * entropy
                self.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.parameters, MAX_GRAD_NORM)
                self.optimizer.step()


class Curve:
    """Mean returns of the last episodes over frames and seconds; prints them."""

    def __init__(self) -> None:
        self.rows, self.episodes, self.recent = list[tuple[int, float, float]](), 0, np.empty(0)
        self.started = time.perf_counter()

    def add(self, frames: int, returns: np.ndarray[Any, Any]) -> bool:
        """Add the returns of the episodes that ended in an iteration; return whether CartPole is solved."""
        self.episodes += len(returns)
        self.recent = np.concatenate([self.recent, returns])[-WINDOW:]
        mean = float(self.recent.mean()) if self.episodes else float("nan")
        seconds = time.perf_counter() - self.started
        self.rows.append((frames, mean, seconds))
        print(
            f"{frames:11,} frames  {self.episodes:7} episodes  mean return {mean:6.1f}  {seconds:5.1f} s",
            flush=True,
        )
        return self.episodes >= WINDOW and mean >= SOLVED


def train(learner: Learner, device: str, envs: int, total_frames: int, seed: int, **options: Any) -> Curve:
    """Train until CartPole is solved, or for ``total_frames``."""
    curve, actor, frames = Curve(), policies.categorical(learner.net), envs * T
    iterations = max(1, total_frames // frames)
    options |= {"frames_per_batch": frames, "total_frames": iterations * frames, "seed": seed}
    with Collector(TorchCartPole(envs, device), actor, layout="time_major", **options) as collector:
        for number, batch in enumerate(collector, 1):
            learner.update(batch, (number - 1) / iterations)
            if curve.add(number * frames, collector.episodes.episode_return):  # here the host waits
                break
    return curve


def main(arguments: list[str] | None = None) -> float:
    """Train, evaluate; returns the mean evaluation return."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--envs", type=int, default=4096)
    parser.add_argument("--capture", action="store_true", help="record each rollout as a CUDA graph")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--total-frames", type=int, default=20_000_000, help="at most")
    parser.add_argument("--eval-episodes", type=int, default=100)
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)  # on a CPU, the networks are too small to share out
    learner = Learner(options.device)
    more = {"capture": True} if options.capture else {}
    train(learner, options.device, options.envs, options.total_frames, options.seed, **more)
    actor, make = policies.categorical(learner.net), lambda: TorchCartPole(options.eval_episodes, options.device)
    with Evaluator(make, actor, episodes=options.eval_episodes) as evaluator:
        score = evaluator.evaluate().mean
    print(f"evaluation: mean return {score:.1f} over {options.eval_episodes} episodes")
    return score


if __name__ == "__main__":
    main()
