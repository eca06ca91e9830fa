"""A slow simulator that crashes and hangs: workers restart, every frame is counted, and a crash is replayed.

    python examples/slow_simulator.py

``on_failure=Restart(...)`` replaces a worker that died, hung or raised; ``timeouts`` has the deadline of a step. The
crash report of each failure has the seed and all actions of the environment: ``muster replay FILE`` repeats it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from muster import CollectorStats, MultiAsyncCollector, Restart
from muster.restore.crash_report import CrashReport

EXIT_CODE = 7


class Simulator(gymnasium.Env[Any, Any]):
    """Waits in each step. With small probabilities it ends its process, raises, or hangs; its seed decides when."""

    observation_space = spaces.Box(-1, 1, (3,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, delay: float) -> None:
        self.delay, self.steps = delay, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(3, np.float32), {}

    def step(self, action: int) -> Any:
        time.sleep(self.delay)  # noqa: TID251  as a simulator that computes elsewhere
        self.steps += 1
        draw = self.np_random.random()
        if draw < 0.002:
            os._exit(EXIT_CODE)  # as a crash in C++
        if draw < 0.003:
            raise OSError("the simulator's licence server does not answer")
        if draw < 0.0035:
            time.sleep(3600)  # noqa: TID251  a hang
        return np.full(3, self.steps / 100, np.float32), float(action), self.steps == 50, False, {}


def replay(reports: list[Path]) -> int | None:
    """Replay the first report of a crash in a process of its own; return that process's exit code."""
    for report in reports:
        if CrashReport.load(report, trust=True).kind == "WorkerDied":
            # --trust: the report has the simulator's class as a pickle.
            command = (sys.executable, "-m", "muster", "replay", str(report), "--trust", "--no-pdb")
            print(f"$ muster replay {report} --trust", flush=True)
            return subprocess.run(command, stdin=subprocess.DEVNULL, timeout=120).returncode
    return None


def main(argv: list[str] | None = None) -> CollectorStats:
    """Collect, print what was lost, and replay a crash."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--total-frames", type=int, default=8000)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--delay", type=float, default=0.005, help="seconds of a step")
    parser.add_argument("--deadline", type=float, default=3.0, help="seconds after which a step counts as hung")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replay", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args(argv)

    folder = Path(tempfile.mkdtemp(prefix="crashes-"))
    delivered = 0
    with MultiAsyncCollector(
        [lambda: Simulator(args.delay)] * args.workers,
        None,  # random actions; what learns is left out
        num_envs=2,
        frames_per_batch=100,
        total_frames=args.total_frames,
        seed=args.seed,
        on_failure=Restart(max_restarts=100),
        timeouts={"step": args.deadline},
        crash_dir=folder,
    ) as collector:
        for batch in collector:  # of the worker that is ready first
            delivered += batch.numel()
        stats = collector.stats()
    reports = sorted(folder.iterdir())
    for worker in stats.workers:
        print(f"worker {worker.index}: {worker.frames:,} frames, {worker.restarts} restarts")
    lost = {reason: steps for reason, steps in stats.discarded.items() if steps}
    print(f"executed {stats.executed:,} = delivered {stats.frames:,} + lost {lost} + in flight {stats.in_flight}")
    print(f"{len(reports)} crash reports in {folder}")
    assert delivered == stats.frames == args.total_frames
    if args.replay and (code := replay(reports)) is not None:
        print(f"The replay ended with exit code {code}; the simulator's is {EXIT_CODE}.")
    return stats


if __name__ == "__main__":
    main()
