"""Time steps of many environments that wait 100 ms per step, as coroutines on one event loop, in
units of the delay.

    python -m benchmarks.coroutines [--envs 1 10 100 1000 3000] [--json
    benchmarks/results/coroutines.json]

A process-wide measure of processor time shows what Muster and asyncio add per environment and step.
``asyncio`` is the bare loop: the same coroutines in ``asyncio.gather``, with nothing stored.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from muster import Collector

DELAY_S = 0.1
OBSERVATION = np.zeros(4, np.float32)


class WaitingEnv:
    """Returns after ``DELAY_S``."""

    observation_space = spaces.Box(-1, 1, (4,), np.float32)
    action_space = spaces.Discrete(2)

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return OBSERVATION, {}

    async def step(self, action: int) -> Any:
        await asyncio.sleep(DELAY_S)
        return OBSERVATION, 1.0, False, False, {}


async def bare(num_envs: int, steps: int) -> tuple[list[float], float]:
    """Return the seconds of each time step, and the processor time of all."""
    envs, walls = [WaitingEnv() for _ in range(num_envs)], []
    cpu = time.process_time()
    for _ in range(steps):
        begin = time.perf_counter()
        await asyncio.gather(*(env.step(0) for env in envs))
        walls.append(time.perf_counter() - begin)
    return walls, time.process_time() - cpu


def muster(num_envs: int, steps: int) -> tuple[list[float], float]:
    """See ``bare``."""
    actions = torch.zeros(num_envs, dtype=torch.int64)
    with Collector(
        WaitingEnv, lambda obs: actions, num_envs=num_envs, frames_per_batch=num_envs
    ) as collector:
        collector.rollout()
        walls = []
        cpu = time.process_time()
        for _ in range(steps):
            begin = time.perf_counter()
            collector.rollout()
            walls.append(time.perf_counter() - begin)
        return walls, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--envs", type=int, nargs="+", default=[1, 10, 100, 1000, 3000])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(
            0, {min(os.sched_getaffinity(0))}
        )  # one core for everything
    rows = []
    for num_envs in args.envs:
        measured = {
            "asyncio": asyncio.run(bare(num_envs, args.steps)),
            "muster": muster(num_envs, args.steps),
        }
        for system, (walls, cpu) in measured.items():
            rows.append(
                {
                    "system": system,
                    "envs": num_envs,
                    "delays_per_step": round(statistics.median(walls) / DELAY_S, 3),
                    "best": round(min(walls) / DELAY_S, 3),
                    "cpu_us_per_env_step": round(cpu / args.steps / num_envs * 1e6, 2),
                }
            )
            print(rows[-1])
    if args.json:
        found = {
            "date": time.strftime("%Y-%m-%d"),
            "machine": f"{platform.machine()}, one core of {os.cpu_count()}",
            "python": platform.python_version(),
            "load": os.getloadavg(),
            "delay_s": DELAY_S,
            "steps": args.steps,
            "rows": rows,
        }
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
