"""``python -m benchmarks.ppo_on_device``: PPO on CartPoles on a GPU, until they are solved: with Muster
and with a loop written by hand.

The systems share the environments, the networks, the hyperparameters and the learner of
``examples/ppo_on_gpu.py``. The loop is written in the style of CleanRL, with rows that are allocated
once and one wait for the device per iteration. Seed by seed, each system in turn. Seconds begin with
the construction of environments; imports and the start of the device are before. ``--device cpu
--envs 512`` for a look.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks.on_device import card_of, sample
from benchmarks.report import RESULTS, machine
from examples.ppo_on_gpu import SOLVED, Curve, Learner, T, train
from muster.testing import TorchCartPole


def by_hand(
    learner: Learner, device: str, envs: int, total_frames: int, seed: int
) -> Curve:
    """What a user writes instead of a collector."""
    curve = Curve()
    env = TorchCartPole(envs, device)
    obs, _ = env.reset(seed=seed)
    flag = torch.zeros(T, envs, 1, dtype=torch.bool, device=device)
    rows = TensorDict(
        {
            "observation": torch.zeros(T, envs, 4, device=device),
            "action": torch.zeros(T, envs, dtype=torch.int64, device=device),
            "action_log_prob": torch.zeros(T, envs, device=device),
            "next": {
                "observation": torch.zeros(T, envs, 4, device=device),
                "reward": torch.zeros(T, envs, 1, device=device),
                "terminated": flag.clone(),
                "done": flag.clone(),
            },
        },
        (T, envs),
    )
    after = rows["next"]
    running = torch.zeros(envs, device=device)
    returns = torch.zeros(T, envs, device=device)  # of episodes so far
    iterations = max(1, total_frames // (envs * T))
    for number in range(1, iterations + 1):
        with torch.inference_mode():
            for t in range(T):
                action, log_prob = sample(learner.net(obs))
                following, reward, terminated, truncated, info = env.step(action)
                done = terminated | truncated
                rows["observation"][t].copy_(obs)
                rows["action"][t].copy_(action)
                rows["action_log_prob"][t].copy_(log_prob)
                after["observation"][t].copy_(info["final_obs"])
                after["reward"][t].copy_(reward[:, None])
                after["terminated"][t].copy_(terminated[:, None])
                after["done"][t].copy_(done[:, None])
                running += reward
                returns[t].copy_(running)
                running.masked_fill_(done, 0)
                obs = following
        learner.update(rows, (number - 1) / iterations)
        ended = returns[after["done"].squeeze(-1)].cpu().numpy()  # here the host waits
        if curve.add(number * envs * T, ended):
            break
    return curve


SYSTEMS: dict[str, Callable[..., Curve]] = {
    "loop by hand": by_hand,
    "Muster": train,
    "Muster, capture=True": partial(train, capture=True),
}


def measure(
    system: Callable[..., Curve], device: str, envs: int, frames: int, seed: int
) -> dict[str, Any]:
    torch.manual_seed(seed)
    try:
        curve = system(Learner(device), device, envs, frames, seed)
    except Exception as error:
        return {"seed": seed, "note": f"{type(error).__name__}: {error}"[:300]}
    rows = [
        [at, round(mean, 1), round(seconds, 3)]
        for at, mean, seconds in curve.rows
        if not math.isnan(mean)  # before the first episode has ended
    ]
    return {"seed": seed, "solved": rows[-1][1] >= SOLVED, "rows": rows}


def summary(runs: list[dict[str, Any]]) -> str:
    """Seconds and frames until CartPole was solved, medians over seeds."""
    solved = [run["rows"][-1] for run in runs if run.get("solved")]
    if not solved:
        return runs[-1].get("note", "not solved")
    frames, _, seconds = (
        statistics.median(column) for column in zip(*solved, strict=True)
    )
    return f"solved by {len(solved)} of {len(runs)} seeds, {seconds:.1f} s, {frames:,.0f} frames"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ppo_on_device", description=__doc__
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--envs", type=int, default=4096)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--total-frames", type=int, default=20_000_000, help="at most")
    parser.add_argument(
        "--output", type=Path, help="default: the results, for a CUDA device"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    device, envs, frames = options.device, options.envs, options.total_frames
    systems = dict(SYSTEMS)
    if device == "cpu":
        del systems["Muster, capture=True"]
    for system in systems.values():  # loads kernels
        measure(system, device, envs, 2 * envs * T, 0)
    runs: dict[str, list[Any]] = {name: [] for name in systems}
    results = {
        "machine": machine(),
        "card": card_of(device),
        "envs": envs,
        "runs": runs,
    }
    output = options.output
    if output is None and device != "cpu":
        output = RESULTS / "ppo_on_device.json"
    for seed in range(1, options.seeds + 1):
        for name, system in systems.items():
            print(f"{name}, seed {seed}", flush=True)
            runs[name].append(measure(system, device, envs, frames, seed))
        if output is not None:
            output.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps(results).replace('{"seed"', '\n{"seed"')
            output.write_text(text + "\n")
    for name, done in runs.items():
        print(f"{name:24} {summary(done)}", flush=True)


if __name__ == "__main__":
    main()
