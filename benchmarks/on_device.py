"""``python -m benchmarks.on_device``: environments on a GPU, stepped by hand, by Muster and by
TorchRL's collector.

All systems step the same batch of CartPoles on tensors with the same network, and take turns. Wall
time, and each turn ends when the device has finished. Ratios are formed within a round, then the
median. ``--device cpu`` for a look.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from benchmarks.report import RESULTS, machine
from muster import Collector, policies
from muster.testing import TorchCartPole


def network(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)
    ).to(device)


def sample(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Actions and their log-probabilities, without waiting for the device (``torch.multinomial``
    would).
    """
    log_prob = logits.log_softmax(-1)
    action = (log_prob - torch.empty_like(log_prob).exponential_().log()).argmax(-1)
    return action, log_prob.gather(-1, action[:, None])[:, 0]


class Sampling(nn.Module):
    """A plain module: an action and its log-probability."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        action, log_prob = sample(self.net(obs))
        return action, {"action_log_prob": log_prob}


class ForTensorDict(nn.Module):
    """The same for a ``TensorDictModule``."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return sample(self.net(obs))


def by_hand(B: int, T: int, device: str, *, stored: bool) -> Callable[[], Any]:
    """The loop that a user writes: with ``stored`` it keeps all columns of a batch in tensors made
    before.
    """
    env, net = TorchCartPole(B, device), network(device)
    obs, _ = env.reset(seed=0)
    rows = {
        "observation": torch.empty(T, B, 4, device=device),
        "next_observation": torch.empty(T, B, 4, device=device),
        "action": torch.empty(T, B, dtype=torch.int64, device=device),
        "log_prob": torch.empty(T, B, device=device),
        "reward": torch.empty(T, B, device=device),
        "terminated": torch.empty(T, B, dtype=torch.bool, device=device),
        "truncated": torch.empty(T, B, dtype=torch.bool, device=device),
    }

    def run() -> Any:
        nonlocal obs
        with torch.inference_mode():
            for t in range(T):
                action, log_prob = sample(net(obs))
                after, reward, terminated, truncated, info = env.step(action)
                if stored:
                    given = (
                        obs,
                        info["final_obs"],
                        action,
                        log_prob,
                        reward,
                        terminated,
                        truncated,
                    )
                    for row, value in zip(rows.values(), given, strict=True):
                        row[t].copy_(value)
                obs = after
        return {key: value.clone() for key, value in rows.items()} if stored else None

    return run


def muster(B: int, T: int, device: str, policy: Any, **options: Any) -> Callable[[], Any]:
    collector = Collector(
        partial(TorchCartPole, B, device), policy, frames_per_batch=T * B, seed=0, **options
    )
    return iter(collector).__next__


def torchrl(B: int, T: int, device: str) -> Callable[[], Any]:
    """TorchRL's collector; its environments are reset through ``maybe_reset``, with a mask."""
    from torchrl.collectors import Collector as TorchRLCollector
    from torchrl.data import Binary, Categorical, Composite, Unbounded
    from torchrl.envs import EnvBase

    class CartPoles(EnvBase):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(device=device, batch_size=(B,))
            self.made = TorchCartPole(B, device)
            self.made.metadata = {"autoreset_mode": None}  # TorchRL resets
            self.observation_spec = Composite(
                observation=Unbounded((B, 4), device=device), shape=(B,)
            )
            self.action_spec = Categorical(2, (B,), device=device)
            self.reward_spec = Unbounded((B, 1), device=device)
            flags = {
                name: Binary(1, (B, 1), dtype=torch.bool, device=device)
                for name in ("done", "terminated", "truncated")
            }
            self.done_spec = Composite(flags, shape=(B,))

        def _reset(self, td: Any = None, **_: Any) -> Any:
            mask = None if td is None else td.get("_reset", None)
            obs, _info = self.made.reset(
                options=None if mask is None else {"reset_mask": mask.reshape(B)}
            )
            flags = {
                name: torch.zeros(B, 1, dtype=torch.bool, device=device)
                for name in ("done", "terminated", "truncated")
            }
            return TensorDict({"observation": obs, **flags}, (B,), device=device)

        def _step(self, td: Any) -> Any:
            obs, reward, terminated, truncated, _info = self.made.step(td["action"])
            flags = {"terminated": terminated[:, None], "truncated": truncated[:, None]}
            return TensorDict(
                {
                    "observation": obs,
                    "reward": reward[:, None],
                    "done": flags["terminated"] | flags["truncated"],
                    **flags,
                },
                (B,),
                device=device,
            )

        def _set_seed(self, seed: int | None) -> None:
            self.made.reset(seed=seed)

    collector = TorchRLCollector(
        CartPoles(), td_policy(device), frames_per_batch=T * B, total_frames=-1, device=device
    )
    return iter(collector).__next__


def td_policy(device: str) -> TensorDictModule:
    return TensorDictModule(
        ForTensorDict(network(device)), ["observation"], ["action", "action_log_prob"]
    )


def systems(B: int, T: int, device: str) -> dict[str, Callable[[], Callable[[], Any]]]:
    made: dict[str, Callable[[], Callable[[], Any]]] = {
        "loop, nothing stored": lambda: by_hand(B, T, device, stored=False),
        "loop, batch stored": lambda: by_hand(B, T, device, stored=True),
        "muster, random": lambda: muster(B, T, device, None),
        "muster, head": lambda: muster(B, T, device, policies.categorical(network(device))),
        "muster, plain module": lambda: muster(B, T, device, Sampling(network(device))),
        "muster, TensorDictModule": lambda: muster(B, T, device, td_policy(device)),
        "torchrl": lambda: torchrl(B, T, device),
    }
    if device != "cpu":
        made["muster, TensorDictModule, CUDA graph"] = lambda: muster(
            B, T, device, td_policy(device), cudagraph_policy=True
        )
    return made


def wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def measure(B: int, T: int, device: str, rounds: int) -> dict[str, Any]:
    runs: dict[str, Callable[[], Any]] = {}
    result: dict[str, Any] = {}
    for name, make in systems(B, T, device).items():
        try:
            runs[name] = make()
            for _ in range(3):
                runs[name]()
        except Exception as error:
            runs.pop(name, None)
            result[name] = {"note": f"{type(error).__name__}: {error}"[:300]}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            wait(device)
            begin = time.perf_counter()
            run()
            wait(device)
            times[name].append(time.perf_counter() - begin)
    loop = times["loop, batch stored"]
    for name, series in times.items():
        result[name] = {
            "frames_per_s": round(T * B / statistics.median(series)),
            "us_per_step": round(statistics.median(series) / T * 1e6, 1),
            "of_loop": round(
                statistics.median(a / b for a, b in zip(loop, series, strict=True)), 3
            ),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.on_device", description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--envs", type=int, nargs="+", default=[64, 1024, 16_384, 131_072])
    parser.add_argument("--steps", type=int, default=64, help="steps per batch")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path, default=RESULTS / "on_device.json")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    card = torch.cuda.get_device_name() if options.device != "cpu" else "CPU"
    results: dict[str, Any] = {
        "machine": machine(),
        "card": card,
        "steps": options.steps,
        "rounds": options.rounds,
    }
    for B in options.envs:
        results[str(B)] = found = measure(B, options.steps, options.device, options.rounds)
        print(f"{B} environments, {options.steps} steps per batch, {card}", flush=True)
        for name, row in found.items():
            if "note" in row:
                print(f"  {name:40} {row['note']}", flush=True)
            else:
                fps, us, share = row["frames_per_s"], row["us_per_step"], row["of_loop"]
                print(
                    f"  {name:40} {fps:14,} frames/s {us:9.1f} us/step {share:7.3f} of the loop",
                    flush=True,
                )
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
