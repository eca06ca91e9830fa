"""Stable-Baselines3's algorithms, which collect by themselves or with Muster: speed of collection,
and learning curves.

    python -m benchmarks.sb3_curves [--rounds 8] [--seeds 3] [--frames 50000] [--json FILE]

Speed is the time from ``on_rollout_start`` to ``on_rollout_end`` for a step of all 8 CartPoles.
Every round measures all systems one after another; the processor time of all processes is a second
measure, on which other programs of the machine have little influence. torch has one thread. Curves
are mean returns of the episodes since the row before.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import torch
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

from muster.compat.sb3 import collect_with_muster

NUM_ENVS, WORKERS = 8, 2
TUNED = {
    "n_steps": 32,
    "batch_size": 256,
    "n_epochs": 20,
    "gae_lambda": 0.8,
    "gamma": 0.98,
    "learning_rate": 1e-3,
}


def make() -> Any:
    return Monitor(gymnasium.make("CartPole-v1"))


def ppo(env: Any, **options: Any) -> PPO:
    return PPO("MlpPolicy", env, device="cpu", **options)


def dqn(env: Any) -> DQN:
    return DQN(
        "MlpPolicy",
        env,
        device="cpu",
        train_freq=1,
        learning_starts=10**9,
        buffer_size=50_000,
    )


def with_muster(model: Any, **options: Any) -> Any:
    collect_with_muster(model, make, **options)
    return model


def cpu_seconds() -> float:
    """Return the processor time of this process and all processes below it."""
    stats = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = path.read_text().rpartition(")")
        except OSError:  # it has ended
            continue
        stats[int(name.split()[0])] = rest.split()
    total, family = 0, {os.getpid()}
    while family:
        total += sum(
            int(stats[pid][11]) + int(stats[pid][12]) for pid in family if pid in stats
        )
        family = {pid for pid, fields in stats.items() if int(fields[1]) in family}
    return total / os.sysconf("SC_CLK_TCK")


class Clock(BaseCallback):
    """Measures rollouts: microseconds per step of all environments."""

    def __init__(self) -> None:
        super().__init__()
        self.walls, self.cpu, self.steps = list[float](), 0.0, 0

    def _on_rollout_start(self) -> None:
        self._begin, self._first = time.perf_counter(), self.n_calls

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        steps = self.n_calls - self._first
        self.walls.append((time.perf_counter() - self._begin) / steps * 1e6)
        self.steps += steps


def speed(
    systems: dict[str, Callable[[], Any]], rounds: int, frames: int
) -> dict[str, dict[str, float]]:
    """Measure ``frames`` frames of every system in every round."""
    models = {name: make_model() for name, make_model in systems.items()}
    clocks = {name: Clock() for name in models}
    for model in models.values():
        model.learn(frames)  # warm-up
    for _ in range(rounds):
        for name, model in models.items():
            before = cpu_seconds()
            model.learn(frames, clocks[name], reset_num_timesteps=False)
            clocks[name].cpu += cpu_seconds() - before
    found = {}
    for name, clock in clocks.items():
        found[name] = {
            "wall_us_p10": statistics.quantiles(clock.walls, n=10)[0],
            "wall_us_median": statistics.median(clock.walls),
            "cpu_us": clock.cpu
            / clock.steps
            * 1e6,  # with the training of PPO, the same for all
        }
        print(
            f"{name:32}"
            + "".join(f" {key} {value:8.0f}" for key, value in found[name].items()),
            flush=True,
        )
    for model in models.values():
        model.env.close()
    return found


class Curve(BaseCallback):
    """Mean returns of the episodes in parts of a run."""

    def __init__(self, every: int) -> None:
        super().__init__()
        self.every, self.returns, self.rows = (
            every,
            list[float](),
            list[tuple[int, float]](),
        )

    def _on_step(self) -> bool:
        self.returns += [
            info["episode"]["r"] for info in self.locals["infos"] if "episode" in info
        ]
        if self.num_timesteps % self.every == 0 and self.returns:
            self.rows.append(
                (self.num_timesteps, round(statistics.mean(self.returns), 1))
            )
            self.returns = []
        return True


def curves(seeds: int, frames: int) -> dict[str, list[list[tuple[int, float]]]]:
    """Train PPO with and without Muster, with several seeds."""
    found: dict[str, list[Any]] = {
        "SB3": [],
        "Muster, in process": [],
        f"Muster, {WORKERS} workers": [],
    }
    for seed in range(seeds):
        for name, rows in found.items():
            model = ppo(DummyVecEnv([make] * NUM_ENVS), seed=seed, **TUNED)
            if name != "SB3":
                with_muster(model, num_workers=0 if "in process" in name else WORKERS)
            curve = Curve(frames // 10 // 256 * 256)
            model.learn(frames, curve)
            rows.append(curve.rows)
            print(
                f"seed {seed} {name:20}",
                *(f"{value:4.0f}" for _, value in curve.rows),
                flush=True,
            )
    return found


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--frames", type=int, default=50_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    few = {"n_steps": 128, "batch_size": 1024, "n_epochs": 1}
    results: dict[str, Any] = {
        "load": os.getloadavg(),
        "cpus": os.cpu_count(),
        "workers": WORKERS,
        "envs": NUM_ENVS,
    }
    results["ppo"] = speed(
        {
            "DummyVecEnv": lambda: ppo(DummyVecEnv([make] * NUM_ENVS), **few),
            "SubprocVecEnv": lambda: ppo(SubprocVecEnv([make] * NUM_ENVS), **few),
            "Muster, in process": lambda: with_muster(
                ppo(DummyVecEnv([make] * NUM_ENVS), **few), num_workers=0
            ),
            "Muster, workers": lambda: with_muster(
                ppo(DummyVecEnv([make] * NUM_ENVS), **few), num_workers=WORKERS
            ),
        },
        options.rounds,
        4 * 1024,
    )
    results["dqn"] = speed(
        {
            "DummyVecEnv": lambda: dqn(DummyVecEnv([make] * NUM_ENVS)),
            "SubprocVecEnv": lambda: dqn(SubprocVecEnv([make] * NUM_ENVS)),
            "Muster, workers": lambda: with_muster(
                dqn(DummyVecEnv([make] * NUM_ENVS)), num_workers=WORKERS
            ),
        },
        options.rounds,
        1024,
    )
    results["curves"] = curves(options.seeds, options.frames)
    results["load_at_the_end"] = os.getloadavg()
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
