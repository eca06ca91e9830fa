"""``python -m benchmarks.torchrl_envs``: a TensorDict policy on TorchRL envs, in its Collector and
Muster's.

One process, one torch thread, slices in turn; CPU time of the process; ratios per round, then the
median.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tensordict.nn import TensorDictModule
from torch import nn

from benchmarks.report import RESULTS, machine

SIZES = {"CartPole-v1": (4, 2), "Pendulum-v1": (3, 1)}
TARGETS = {"TorchRL env": 3.0, "Gymnasium env": 10.0}


def policy(name: str, env: Any) -> Any:
    """A 64-64 network: one-hot samples with log-probabilities for CartPole, a plain action for
    Pendulum.
    """
    from torchrl.modules import OneHotCategorical, ProbabilisticActor

    torch.manual_seed(0)
    obs, out = SIZES[name]
    net = nn.Sequential(
        nn.Linear(obs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, out)
    )
    if name == "Pendulum-v1":
        return TensorDictModule(net, ["observation"], ["action"])
    return ProbabilisticActor(
        TensorDictModule(net, ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=OneHotCategorical
        if env == "TorchRL env"
        else torch.distributions.Categorical,
        return_log_prob=True,
    )


def systems(
    name: str, envs: int, frames: int, *, transformed: bool
) -> dict[str, Iterator[Any]]:
    """Endless iterators of batches of ``frames``."""
    from torchrl.collectors import Collector as TorchRLCollector
    from torchrl.envs import (
        Compose,
        GymEnv,
        RewardSum,
        SerialEnv,
        StepCounter,
        TransformedEnv,
    )

    from muster import Collector
    from muster.compat.torchrl import Collector as Compat

    def one() -> Any:
        env = GymEnv(name)
        return (
            TransformedEnv(env, Compose(RewardSum(), StepCounter()))
            if transformed
            else env
        )

    def torchrl_env() -> Any:
        return one() if envs == 1 else SerialEnv(envs, one)

    actor = policy(name, "TorchRL env")
    options: dict[str, Any] = {"frames_per_batch": frames, "total_frames": -1}
    made: dict[str, Any] = {
        "torchrl": TorchRLCollector(torchrl_env(), actor, **options),
        "muster, TorchRL env": Collector(torchrl_env, actor, **options),
        "muster compat layer, TorchRL env": Compat(torchrl_env(), actor, **options),
        "muster, Gymnasium env": Collector(
            name,
            policy(name, "Gymnasium env"),
            num_envs=None if envs == 1 else envs,
            **options,
        ),
    }
    return {label: iter(collector) for label, collector in made.items()}


def env_alone(name: str, frames: int) -> Callable[[], None]:
    """TorchRL's environment by itself, stepped with one action."""
    from torchrl.envs import GymEnv

    env = GymEnv(name)
    action = env.rand_action(env.reset())

    def run() -> None:
        for _ in range(frames):
            if env.step(action)["next", "done"].item():
                env.reset()

    return run


def measure(
    name: str, envs: int, rounds: int, frames: int, *, transformed: bool
) -> dict[str, Any]:
    iterators = systems(name, envs, frames, transformed=transformed)
    alone = env_alone(name, frames)
    runs: dict[str, Callable[[], Any]] = {
        label: (lambda it=it: next(it)) for label, it in iterators.items()
    }
    runs["torchrl's env.step alone"] = alone
    for run in runs.values():
        run(), run()
    times: dict[str, list[float]] = {label: [] for label in runs}
    for _ in range(rounds):
        for label, run in runs.items():
            begin = time.process_time()
            run()
            times[label].append((time.process_time() - begin) / frames * 1e6)
    result: dict[str, Any] = {
        label: {
            "us_per_frame": round(statistics.median(series), 1),
            "times_torchrl": round(
                statistics.median(
                    t / own for t, own in zip(times["torchrl"], series, strict=True)
                ),
                2,
            ),
        }
        for label, series in times.items()
    }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.torchrl_envs", description=__doc__
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--frames", type=int, default=800)
    parser.add_argument("--output", type=Path, default=RESULTS / "torchrl_envs.json")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    results: dict[str, Any] = {"machine": machine()}
    for name in SIZES:
        for envs, transformed in ((1, False), (8, False), (1, True)):
            title = f"{name} x {envs}" + transformed * ", RewardSum and StepCounter"
            found = measure(
                name, envs, options.rounds, options.frames, transformed=transformed
            )
            results[title] = found
            print(title)
            for label, numbers in found.items():
                print(
                    f"  {label:32} {numbers['us_per_frame']:8.1f} us/frame  {numbers['times_torchrl']:6.2f} x torchrl"
                )
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(results, indent=1) + "\n")
    print(
        f"asked: {TARGETS['TorchRL env']} with TorchRL's env, {TARGETS['Gymnasium env']} with Gymnasium's x 8"
    )


if __name__ == "__main__":
    main()
