"""Steps per second of vector environments: Muster's, Gymnasium's and SB3's, at CartPole,
interleaved in one run.

    python -m benchmarks.vector_envs [--envs 8 16 32 64] [--workers 2] [--json
    benchmarks/results/vector_envs.json]

Every round measures all systems one after another. The processor time of all processes is a second
measure, on which other programs of the machine have little influence.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from muster.compat.gymnasium import VectorEnv

MAKE = partial(gymnasium.make, "CartPole-v1")


def systems(num_envs: int, workers: int) -> dict[str, Any]:
    """Make all vector environments that are installed."""
    env_fns = [MAKE] * num_envs
    made: dict[str, Any] = {
        "muster gymnasium": VectorEnv(env_fns, num_workers=workers),
        "AsyncVectorEnv": AsyncVectorEnv(env_fns),
        "SyncVectorEnv": SyncVectorEnv(env_fns),
    }
    try:
        from stable_baselines3.common.vec_env import SubprocVecEnv

        from muster.compat.sb3 import VecEnv
    except ImportError:
        return made
    return {
        **made,
        "muster sb3": VecEnv(env_fns, num_workers=workers),
        "SubprocVecEnv": SubprocVecEnv(env_fns),
    }


def pids(env: Any) -> list[int]:
    """Return this process and the processes of a vector environment."""
    if hasattr(env, "_workers"):
        return [
            os.getpid(),
            *(handle.process.child.pid for handle in env._workers._handles),
        ]
    return [os.getpid(), *(process.pid for process in getattr(env, "processes", []))]


def cpu_seconds(processes: list[int]) -> float:
    """Return the processor time of processes."""
    total = 0
    for pid in processes:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def measure(
    num_envs: int, workers: int, rounds: int, steps: int
) -> dict[str, dict[str, float]]:
    """Return microseconds per step of the vector environment: wall time and processor time, by
    system.
    """
    made = systems(num_envs, workers)
    walls: dict[str, list[float]] = {name: [] for name in made}
    cpus: dict[str, float] = dict.fromkeys(made, 0.0)
    actions = np.arange(num_envs) % 2
    for env in made.values():
        env.reset()
    for _ in range(rounds):
        for name, env in made.items():
            before = cpu_seconds(pids(env))
            for _ in range(steps):
                actions = 1 - actions
                begin = time.perf_counter()
                env.step(actions)
                walls[name].append(time.perf_counter() - begin)
            cpus[name] += cpu_seconds(pids(env)) - before
    for env in made.values():
        env.close()
    return {
        name: {
            "wall_us_p10": statistics.quantiles(walls[name], n=10)[0] * 1e6,
            "wall_us_median": statistics.median(walls[name]) * 1e6,
            "cpu_us": cpus[name] / len(walls[name]) * 1e6,
        }
        for name in made
    }


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--envs", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {
        "load": os.getloadavg(),
        "cpus": os.cpu_count(),
        "workers": options.workers,
        "envs": {},
    }
    for num_envs in options.envs:
        results["envs"][num_envs] = measured = measure(
            num_envs, options.workers, options.rounds, options.steps
        )
        for name, numbers in measured.items():
            print(
                f"{num_envs:3} {name:17}"
                + "".join(f" {key} {value:8.0f}" for key, value in numbers.items())
            )
    results["load_at_the_end"] = os.getloadavg()
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
