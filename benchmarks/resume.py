"""``python -m benchmarks.resume``: is resuming exact, and what do autosave and the timeline cost?

Save points are random steps of random collections; what a new collector gives after loading is
compared with what the old one gave, bit by bit.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.report import RESULTS, machine
from muster import Autosave, Collector, load_state, policies, save_state

ENVS = ("CartPole-v1", "Pendulum-v1", "Acrobot-v1", "HalfCheetah-v5", "Hopper-v5")


class Float(nn.Module):
    """MuJoCo's observations are float64."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.float()


def actor(env: str) -> Any:
    """A stochastic head of the right size."""
    import gymnasium

    made = gymnasium.make(env)
    torch.manual_seed(0)
    obs, space = made.observation_space.shape[0], made.action_space
    discrete = hasattr(space, "n")
    out = int(space.n) if discrete else space.shape[0]
    net = nn.Sequential(Float(), nn.Linear(obs, 32), nn.Tanh(), nn.Linear(32, out))
    made.close()
    return (
        policies.categorical(net) if discrete else policies.gaussian(net, log_std=-0.5)
    )


def differing_bits(env: str, point: int, seed: int) -> tuple[int, int]:
    """Bits that differ in the 200 steps after a save at step ``point``, and bits compared."""

    def make() -> Collector:
        return Collector(
            env, actor(env), num_envs=2, frames_per_batch=2 * point, seed=seed
        )

    with make() as first, tempfile.TemporaryDirectory() as folder:
        first.rollout()
        save_state(Path(folder) / "state", first.state_dict())
        expected = [first.rollout().clone() for _ in range(-(-200 // point))]
        with Collector(
            env, actor(env), num_envs=2, frames_per_batch=2 * point
        ) as second:
            report = second.load_state_dict(
                load_state(Path(folder) / "state"), trust=True
            )
            assert report.exact, report
            got = [second.rollout() for _ in expected]
            wrong = compared = 0
            for a, b in zip(expected, got, strict=True):
                assert set(a.keys(True, True)) == set(b.keys(True, True))
                for key in a.keys(True, True):
                    x, y = (
                        t.get(key).contiguous().reshape(-1).view(torch.uint8).int()
                        for t in (a, b)
                    )
                    wrong += sum(int(v).bit_count() for v in (x ^ y)[x != y])
                    compared += 8 * x.numel()
    return wrong, compared


def share_of_saving(env: str, rounds: int, every: float, **options: Any) -> float:
    """Median share of time that autosave takes, over rounds of collecting with and without it in
    turns.
    """
    shares = []
    with tempfile.TemporaryDirectory() as folder:
        common: dict[str, Any] = {
            "num_envs": 8,
            "frames_per_batch": 2048,
            "seed": 0,
            **options,
        }
        with (
            Collector(env, actor(env), **common) as plain,
            Collector(
                env, actor(env), **common, autosave=Autosave(folder, every=every)
            ) as saving,
        ):
            iterators = [iter(plain), iter(saving)]
            for iterator in iterators:
                next(iterator)
            batches = max(4, _batches_in(iterators[0], 2 * every))
            for _ in range(rounds):
                seconds = [_time(iterator, batches) for iterator in iterators]
                shares.append(seconds[1] / seconds[0] - 1)
    return statistics.median(shares)


def seconds_per_save(env: str) -> tuple[float, int]:
    """Median seconds for one save, and its size in bytes."""
    with Collector(
        env, actor(env), num_envs=8, frames_per_batch=2048, seed=0
    ) as collector:
        collector.rollout()
        with tempfile.TemporaryDirectory() as folder:
            path, times = Path(folder) / "state", []
            for _ in range(15):
                begin = time.perf_counter()
                save_state(path, collector.state_dict())
                times.append(time.perf_counter() - begin)
            return statistics.median(times), path.stat().st_size


def share_of_timeline(env: str, rounds: int) -> float:
    """Median share of time that a running timeline takes."""
    shares = []
    with Collector(
        env, actor(env), num_envs=8, frames_per_batch=2048, seed=0
    ) as collector:
        iterator = iter(collector)
        next(iterator)
        for _ in range(rounds):
            collector.timeline.stop()
            off = _time(iterator, 4)
            collector.timeline.start()
            shares.append(_time(iterator, 4) / off - 1)
    return statistics.median(shares)


def _batches_in(iterator: Any, seconds: float) -> int:
    return round(seconds / _time(iterator, 3) * 3)


def _time(iterator: Any, batches: int) -> float:
    begin = time.process_time()
    for _ in range(batches):
        next(iterator)
    return time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.resume", description=__doc__
    )
    parser.add_argument("--points", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path, default=RESULTS / "resume.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rng = random.Random(0)
    result: dict[str, Any] = {
        "machine": machine(),
        "save_points": options.points,
        "differing_bits": {},
    }
    for number in range(options.points):
        env = ENVS[number % len(ENVS)]
        wrong, compared = differing_bits(
            env, rng.randrange(1, 300), rng.randrange(10_000)
        )
        entry = result["differing_bits"].setdefault(
            env, {"points": 0, "bits": 0, "differing": 0}
        )
        entry["points"] += 1
        entry["bits"] += compared
        entry["differing"] += wrong
    print(json.dumps(result["differing_bits"], indent=1))
    result["save"] = {}
    for env in ("CartPole-v1", "HalfCheetah-v5", "Humanoid-v5"):
        seconds, size = seconds_per_save(env)
        result["save"][env] = {
            "ms": round(seconds * 1e3, 2),
            "bytes": size,
            "share_at_1_per_s": round(seconds, 4),
        }
    result["autosave_share_at_1_per_s"] = {
        env: round(share_of_saving(env, options.rounds, 1.0), 4)
        for env in ("CartPole-v1", "HalfCheetah-v5")
    }
    result["timeline_share"] = {
        env: round(share_of_timeline(env, 4 * options.rounds), 4) for env in ENVS[:2]
    }
    for key in ("save", "autosave_share_at_1_per_s", "timeline_share"):
        print(key, result[key])
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
