"""Learning curves of the examples, beside CleanRL's scripts of the same algorithm and
hyperparameters.

    python -m benchmarks.curves [--example NAME ...] [--seeds 3] [--add] [--frames N] [--gym PYTHON]
    [--gymnasium PYTHON]

Each run is a process of its own, one at a time; seed by seed, an example and then CleanRL's script.
A point is the mean return of the last episodes (``Curve.window``) while training. Seconds are those
of the whole process with its imports, and its processor time. CleanRL 1.2.0 needs older packages:
benchmarks/README.md has the two environments for it. Results are added to
``benchmarks/results/curves.json`` after every run; the table of docs/examples.md is made from it.
With ``--add``, seeds that are there with as many frames are not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, machine
from benchmarks.runner import ROOT, environment
from muster.evaluation.result import student_quantile

OUTPUT, PAGE = RESULTS / "curves.json", ROOT / "docs" / "examples.md"
POINTS = 25  # of a curve of CleanRL
BEGIN, END = "<!-- curves: begin -->\n", "<!-- curves: end -->"
ROW = re.compile(r"([\d,]+) frames .*mean return +(-?[\d.]+) ")
EPISODE = re.compile(r"global_step=(\d+), episodic_return=\[?(-?[\d.]+)")


@dataclass(frozen=True)
class Curve:
    """An example, its number of frames, and CleanRL's script with equal hyperparameters.

    ``example`` is the name of its file if that is not the curve's. ``python`` is the kind of
    environments that CleanRL's script needs: "gym" 0.23 or "gymnasium" 0.28.
    """

    title: str
    frames: int
    python: str = ""
    script: str = ""
    arguments: str = ""
    options: str = "--eval-episodes 1"  # of the example
    window: int = 20  # episodes of a point, as the example prints them
    gymnasium: bool = False  # CleanRL's script with environments of Gymnasium, by ``benchmarks.gym_envs``
    example: str = ""


def _mujoco(algorithm: str, title: str, env: str, arguments: str) -> Curve:
    return Curve(
        f"{title}, {env} (MuJoCo)",
        100_000,
        "gym",
        f"{algorithm}_continuous_action.py",
        f"--env-id {env} --batch-size 256 {arguments}",
        f"--eval-episodes 1 --env {env}",
        window=4,
        gymnasium=True,
        example=algorithm,
    )


_SAC = "--learning-starts 5000 --policy-frequency 2"
_TD3 = "--learning-starts 25000 --learning-rate 3e-4"
CURVES = {
    "ppo_cartpole": Curve(
        "PPO, CartPole-v1",
        51_200,
        "gym",
        "ppo.py",
        "--num-envs 8 --num-steps 64 --learning-rate 2e-3 --gamma 0.98 --gae-lambda 0.9 --ent-coef 0.005 "
        "--clip-vloss False",
    ),
    "dqn_cartpole": Curve(
        "DQN, CartPole-v1",
        51_200,
        "gymnasium",
        "dqn.py",
        "--learning-rate 2.3e-3 --batch-size 64 --buffer-size 100000 --train-frequency 2 --learning-starts 1000 "
        "--target-network-frequency 256 --exploration-fraction 0.16 --end-e 0.04",
    ),
    "ppo_lstm": Curve("PPO with LSTM, CartPole-v1 without velocities", 102_400),
    "appo_vtrace": Curve("APPO with V-trace, two workers, CartPole-v1", 102_400),
    "ppo_on_gpu": Curve(
        "PPO on tensors until solved, 512 CartPoles, on the CPU",
        2_000_000,
        options="--device cpu --envs 512 --eval-episodes 1",
        window=100,
    ),
    "self_play": Curve(
        "PPO against itself, tic-tac-toe (PettingZoo)", 160_000, options=""
    ),
    "sac": _mujoco("sac", "SAC", "HalfCheetah-v5", _SAC),
    "sac_hopper": _mujoco("sac", "SAC", "Hopper-v5", _SAC),
    "td3": _mujoco("td3", "TD3", "HalfCheetah-v5", _TD3),
    "td3_hopper": _mujoco("td3", "TD3", "Hopper-v5", _TD3),
    "ppo_atari": Curve(
        "PPO, Boxing (Atari)",
        102_400,
        "gym",
        "ppo_atari.py",
        "--env-id BoxingNoFrameskip-v4",
        "--env ALE/Boxing-v5",
        gymnasium=True,
    ),
}


def example_of(name: str) -> str:
    """Return the name of the file of a curve's example."""
    return f"{CURVES[name].example or name}.py"


def lines(command: list[str]) -> Iterator[tuple[float, str]]:
    """Run a program; yield what it prints, with the seconds since its start, and last ("cpu", its
    processor time).
    """
    started, before = time.perf_counter(), os.times()
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryFile("w+") as errors,
    ):
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=folder,
            env=environment(),
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                yield time.perf_counter() - started, line
        if process.returncode:
            errors.seek(0)
            raise RuntimeError(
                f"{command} ended with {process.returncode}: {errors.read()[-2000:]}"
            )
    after = os.times()
    yield (
        after.children_user
        + after.children_system
        - before.children_user
        - before.children_system,
        "cpu",
    )


def ours(name: str, seed: int, frames: int) -> dict[str, Any]:
    """Run an example; return its curve, rows of frames, mean return and seconds."""
    rows, cpu = [], 0.0
    command = [
        sys.executable,
        "-u",
        str(ROOT / "examples" / example_of(name)),
        "--seed",
        str(seed),
    ]
    for seconds, line in lines(
        [*command, "--total-frames", str(frames), *CURVES[name].options.split()]
    ):
        if line == "cpu":
            cpu = seconds
        elif found := ROW.search(line):
            rows.append(
                [int(found[1].replace(",", "")), float(found[2]), round(seconds, 1)]
            )
    return {"seed": seed, "frames": frames, "cpu_s": round(cpu, 1), "rows": rows}


def cleanrl(curve: Curve, python: str, seed: int, frames: int) -> dict[str, Any]:
    """Run CleanRL's script; return the same as ``ours``."""
    script = next(
        Path(python).parent.parent.glob(
            f"lib/python*/site-packages/cleanrl/{curve.script}"
        )
    )
    command = [
        python,
        "-u",
        "-W",
        "ignore",
        *(["-m", "benchmarks.gym_envs"] if curve.gymnasium else []),
        str(script),
    ]
    command += ["--seed", str(seed), "--total-timesteps", str(frames)]
    returns, rows, cpu, ended = list[float](), [], 0.0, 0.0
    every = max(1, frames // POINTS)
    following = every
    for seconds, line in lines([*command, *curve.arguments.split()]):
        if line == "cpu":
            cpu = seconds
            continue
        ended = seconds
        if found := EPISODE.search(line):
            step = int(found[1])
            while step >= following and returns:
                rows.append(
                    [
                        following,
                        round(statistics.fmean(returns[-curve.window :]), 1),
                        round(seconds, 1),
                    ]
                )
                following += every
            returns.append(float(found[2]))
    rows.append(
        [frames, round(statistics.fmean(returns[-curve.window :]), 1), round(ended, 1)]
    )
    return {"seed": seed, "frames": frames, "cpu_s": round(cpu, 1), "rows": rows}


def interval(values: list[float]) -> tuple[float, float]:
    """Return the mean, and half of its 95 % interval by Student's t (NaN for one value)."""
    mean, n = statistics.fmean(values), len(values)
    if n < 2:
        return mean, math.nan
    return mean, student_quantile(0.95, n - 1) * statistics.stdev(values) / math.sqrt(n)


def table(results: dict[str, Any]) -> str:
    """Return the rows of docs/examples.md: final return, seconds and processor seconds of each
    system.
    """
    text = [
        "| example | frames | seeds | system | mean return at the end (95 % interval) | seconds | CPU seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in CURVES:
        if name not in results:
            continue
        for system, runs in results[name]["runs"].items():
            mean, half = interval([run["rows"][-1][1] for run in runs])
            digits = 0 if abs(mean) >= 10 else 2
            cells = [
                f"{results[name]['title']} (`{example_of(name)}`)",
                f"{runs[0]['rows'][-1][0]:,}",
                str(len(runs)),
                system,
                f"{mean:.{digits}f}"
                + ("" if math.isnan(half) else f" ± {half:.{digits}f}"),
                f"{statistics.fmean(run['rows'][-1][2] for run in runs):.0f}",
                f"{statistics.fmean(run['cpu_s'] for run in runs):.0f}",
            ]
            text.append("| " + " | ".join(cells) + " |")
    return "\n".join(text) + "\n"


def read() -> dict[str, Any]:
    """Return the results so far, by example."""
    found: dict[str, Any] = (
        json.loads(OUTPUT.read_text("utf-8")) if OUTPUT.exists() else {}
    )
    return found


def with_results_of(
    name: str, runs: dict[str, list[Any]], frames: int
) -> dict[str, list[Any]]:
    """Return the runs of the results with so many frames, by system."""
    known = read().get(name, {"runs": {}})["runs"]
    return {
        system: [run for run in known.get(system, []) if run.get("frames") == frames]
        for system in runs
    }


def write(results: dict[str, Any]) -> None:
    """Write the results, and the table into the page."""
    OUTPUT.write_text(
        json.dumps(results, indent=None, separators=(",", ":")).replace(
            '{"seed"', '\n{"seed"'
        )
        + "\n"
    )
    before, rest = PAGE.read_text("utf-8").split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n{table(results)}\n{END}{after}", "utf-8")


def main() -> None:
    """Run, and write what was found so far after each run."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.curves", description=__doc__
    )
    parser.add_argument(
        "--example", action="append", choices=CURVES, help="repeatable; default: all"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--add",
        action="store_true",
        help="run only the seeds that the results do not have",
    )
    parser.add_argument(
        "--frames", type=int, help="of each run, in place of the example's own number"
    )
    parser.add_argument(
        "--gym",
        default=os.environ.get("MUSTER_CLEANRL_GYM"),
        help="Python with CleanRL and gym 0.23",
    )
    parser.add_argument(
        "--gymnasium",
        default=os.environ.get("MUSTER_CLEANRL_GYMNASIUM"),
        help="Python with CleanRL and gymnasium 0.28",
    )
    options = parser.parse_args()
    for name in options.example or CURVES:
        curve = CURVES[name]
        frames = options.frames or curve.frames
        python = {"gym": options.gym, "gymnasium": options.gymnasium}.get(curve.python)
        runs: dict[str, list[Any]] = {"Muster": []} | (
            {"CleanRL": []} if python else {}
        )
        if options.add:
            runs = with_results_of(name, runs, frames)
        for seed in range(1, options.seeds + 1):
            for system, done in runs.items():
                if any(run["seed"] == seed for run in done):
                    continue
                done.append(
                    ours(name, seed, frames)
                    if system == "Muster"
                    else cleanrl(curve, python, seed, frames)
                )
                print(
                    f"{name} seed {seed} {system}: {done[-1]['rows'][-1]}, cpu {done[-1]['cpu_s']} s",
                    flush=True,
                )
                made = {system: done for system, done in runs.items() if done}
                of_example = {
                    "title": curve.title,
                    "machine": machine(),
                    "runs": made,
                }
                write(read() | {name: of_example})


if __name__ == "__main__":
    main()
