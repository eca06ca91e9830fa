"""Record, make a Minari dataset of it, and train from that dataset without an environment: behaviour cloning.

    python examples/offline_minari.py

A scripted teacher with noise plays CartPole-v1, and ``record=`` writes its batches. The dataset gets the complete
episodes, and any program that reads Minari can use it. Behaviour cloning is the maximum likelihood of the teacher's
actions: Pomerleau, "ALVINN" (1988). The noise averages out, so the student is better than its teacher.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time

import torch
from torch import Tensor, nn

from muster import Collector, Evaluator, load, policies

EPOCHS, BATCH_SIZE, LEARNING_RATE, NOISE = 8, 256, 3e-3, 0.25


def teacher(obs: Tensor) -> Tensor:
    """Push the cart towards the side to which the pole falls; each fourth action is random."""
    best = (obs[:, 2] + 0.5 * obs[:, 3] > 0).long()
    return torch.where(torch.rand(len(obs)) < NOISE, torch.randint(2, best.shape), best)


def clone(obs: Tensor, action: Tensor) -> nn.Module:
    """Return a network with logits that predict ``action`` from ``obs``."""
    student = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(student.parameters(), lr=LEARNING_RATE, fused=True)
    for epoch in range(EPOCHS):
        losses = []
        for rows in torch.randperm(len(obs)).split(BATCH_SIZE):
            loss = nn.functional.cross_entropy(student(obs[rows]), action[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        print(f"epoch {epoch + 1}: cross-entropy {sum(losses) / len(losses):.3f}", flush=True)
    return student


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Record, export, train; return the mean returns of teacher and student."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--total-frames", type=int, default=20_480)
    parser.add_argument("--dataset", default="cartpole/teacher-v0")
    parser.add_argument("--keep", action="store_true", help="into ~/.minari/datasets, or MINARI_DATASETS_PATH")
    parser.add_argument("--eval-episodes", type=int, default=20)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # the networks are small
    torch.manual_seed(args.seed)
    if not args.keep:
        os.environ["MINARI_DATASETS_PATH"] = tempfile.mkdtemp(prefix="minari-")

    started = time.perf_counter()
    folder = tempfile.mkdtemp(prefix="recording-") + "/teacher"
    options = {"num_envs": 8, "frames_per_batch": 2048, "total_frames": args.total_frames}
    with Collector("CartPole-v1", teacher, record=folder, seed=args.seed, **options) as collector:
        for _ in collector:
            pass
    recording = load(folder)
    print(recording.to_minari(args.dataset, metadata={"algorithm_name": "teacher with noise"}))

    # From here on only the dataset is used, as in another program.
    episodes = list(load(f"minari:{args.dataset}"))
    obs = torch.cat([episode["observation"].flatten(0, -2) for episode in episodes])
    action = torch.cat([episode["action"].flatten() for episode in episodes])
    print(f"{len(episodes)} episodes, {len(obs):,} steps, {time.perf_counter() - started:.1f} s")
    student = clone(obs, action)

    results = {}
    for name, policy in (("teacher", teacher), ("student", policies.deterministic(student))):
        with Evaluator("CartPole-v1", policy, episodes=args.eval_episodes, num_envs=4) as evaluator:
            evaluation = evaluator.evaluate()
        low, high = evaluation.confidence_interval()
        results[name] = evaluation.mean
        print(f"{name}: mean return {evaluation.mean:.1f} (95 %: {low:.0f} to {high:.0f})")
    return results


if __name__ == "__main__":
    main()
