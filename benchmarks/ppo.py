"""``python -m benchmarks.ppo``: does what is collected train?

The PPO example with several seeds, one at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.report import RESULTS, machine
from benchmarks.runner import ROOT, environment

SOLVED = 475.0  # mean return over 20 evaluation episodes, CartPole-v1's own threshold
EXAMPLE = ROOT / "examples" / "ppo_cartpole.py"


def run(seed: int, total_frames: int) -> dict[str, float]:
    """One training run in a process of its own."""
    command = [
        sys.executable,
        str(EXAMPLE),
        "--seed",
        str(seed),
        "--total-frames",
        str(total_frames),
    ]
    start = time.perf_counter()
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=ROOT, env=environment()
    )
    wall = time.perf_counter() - start
    last = re.findall(r"frames .*?([\d.]+) s$", done.stdout, re.M)[-1]
    score = re.search(r"evaluation: mean return ([\d.]+)", done.stdout)
    assert score is not None, done.stdout
    return {
        "seed": seed,
        "return": float(score[1]),
        "train_s": float(last),
        "process_s": round(wall, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ppo", description=__doc__
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--total-frames", type=int, default=102_400)
    parser.add_argument("--output", type=Path, default=RESULTS / "ppo_cartpole.json")
    options = parser.parse_args()
    before = os.times()
    runs = []
    for seed in range(1, options.seeds + 1):
        runs.append(run(seed, options.total_frames))
        print(runs[-1], flush=True)
    after = os.times()
    solved = sum(one["return"] >= SOLVED for one in runs)
    result = {
        "machine": machine(),
        "total_frames": options.total_frames,
        "eval_episodes": 20,
        "solved_at": SOLVED,
        "solved": solved,
        "cpu_s_per_seed": round(
            (after.children_user - before.children_user) / len(runs), 1
        ),
        "runs": runs,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(
        f"{solved} of {len(runs)} seeds reach {SOLVED:.0f}; written to {options.output}"
    )


if __name__ == "__main__":
    main()
