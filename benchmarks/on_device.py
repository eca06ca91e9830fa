"""``python -m benchmarks.on_device``: environments on a GPU, stepped by hand, by Muster and by
TorchRL's collector; rollouts as one CUDA graph, by hand and by ``capture=True``.

All systems step the same batch of CartPoles on tensors with the same network, and take turns. Wall
time of a few batches, which ends when the device has finished. Ratios are formed within a round,
then the median. At most four minutes for all sizes. ``--device cpu --quick`` for a look.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
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

    def forward(
        self, obs: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        action, log_prob = sample(self.net(obs))
        return action, {"action_log_prob": log_prob}


class ForTensorDict(nn.Module):
    """The same for a ``TensorDictModule``."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return sample(self.net(obs))


class Loop:
    """The loop that a user writes: rows are allocated once, and keep all columns of a batch.

    Args:
        stored: False stores nothing.
        compiled: the environment's step is compiled.
    """

    def __init__(
        self,
        B: int,
        T: int,
        device: str,
        *,
        stored: bool = True,
        compiled: bool = False,
    ) -> None:
        self.T = T
        self.stored = stored
        self.env = TorchCartPole(B, device)
        self.step = torch.compile(self.env.step) if compiled else self.env.step
        self.net = network(device)
        self.obs, _ = self.env.reset(seed=0)
        self.rows = {
            "observation": torch.empty(T, B, 4, device=device),
            "next_observation": torch.empty(T, B, 4, device=device),
            "action": torch.empty(T, B, dtype=torch.int64, device=device),
            "log_prob": torch.empty(T, B, device=device),
            "reward": torch.empty(T, B, device=device),
            "terminated": torch.empty(T, B, dtype=torch.bool, device=device),
            "truncated": torch.empty(T, B, dtype=torch.bool, device=device),
        }

    def fill(self) -> None:
        with torch.inference_mode():
            for t in range(self.T):
                action, log_prob = sample(self.net(self.obs))
                after, reward, terminated, truncated, info = self.step(action)
                if self.stored:
                    last = info["final_obs"]
                    given = (
                        self.obs,
                        last,
                        action,
                        log_prob,
                        reward,
                        terminated,
                        truncated,
                    )
                    for row, value in zip(self.rows.values(), given, strict=True):
                        row[t].copy_(value)
                self.obs = after

    def batch(self) -> Any:
        """Fill the rows; return a copy, which is the user's."""
        self.fill()
        return (
            {key: value.clone() for key, value in self.rows.items()}
            if self.stored
            else None
        )


class Recorded:
    """The same loop as one CUDA graph.

    The environment replaces its state in each step: it is copied back into the tensor that the
    graph reads.
    """

    def __init__(self, B: int, T: int, device: str, *, compiled: bool = False) -> None:
        self.loop = loop = Loop(B, T, device, compiled=compiled)
        begin = time.perf_counter()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                loop.fill()
        stream.synchronize()
        warm = time.perf_counter()
        with torch.inference_mode():
            loop.obs = loop.obs.clone()
            loop.env.state = loop.env.state.clone()
            held = (loop.obs, loop.env.state)
            self.graph = torch.cuda.CUDAGraph()
            self.graph.register_generator_state(loop.env._generator)
            with torch.cuda.graph(self.graph):
                loop.fill()
                held[0].copy_(loop.obs)
                held[1].copy_(loop.env.state)
        loop.obs, loop.env.state = held
        wait(device)
        self.recording_s = time.perf_counter() - warm
        self.warming_s = warm - begin

    def batch(self) -> Any:
        self.graph.replay()
        return {key: value.clone() for key, value in self.loop.rows.items()}


def collector(B: int, T: int, device: str, policy: Any, **options: Any) -> Collector:
    make = partial(TorchCartPole, B, device)
    return Collector(make, policy, frames_per_batch=T * B, seed=0, **options)


def torchrl(B: int, T: int, device: str) -> Running:
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
        CartPoles(),
        td_policy(device),
        frames_per_batch=T * B,
        total_frames=-1,
        device=device,
    )
    return plain(iter(collector).__next__, collector.shutdown)


def td_policy(device: str) -> TensorDictModule:
    return TensorDictModule(
        ForTensorDict(network(device)), ["observation"], ["action", "action_log_prob"]
    )


@dataclass
class Running:
    """A system that is ready to be measured.

    Attributes:
        batch: makes a batch.
        recording_s: seconds of the longest batch after the first, which has recorded; of the loop:
            seconds of the recording alone.
        graphs: number of graphs.
        memory_mib: memory that the system has taken from the device.
    """

    batch: Callable[[], Any]
    recording_s: float | None = None
    graphs: int | None = None
    memory_mib: float | None = None
    close: Callable[[], object] = lambda: None


def plain(
    run: Callable[[], Any], close: Callable[[], object] = lambda: None
) -> Running:
    for _ in range(3):
        run()
    return Running(run, close=close)


def recorded(B: int, T: int, device: str, *, compiled: bool) -> Running:
    made = Recorded(B, T, device, compiled=compiled)
    made.batch()
    return Running(made.batch, made.recording_s, 1)


def captured(made: Collector, device: str) -> Running:
    """Collect until rollouts are replays.

    Raises:
        RuntimeError: they do not become replays.
    """
    times = []
    batch = iter(made).__next__
    for _ in range(12):
        wait(device)
        begin = time.perf_counter()
        batch()
        wait(device)
        times.append(time.perf_counter() - begin)
        capture = made.stats().capture
        if capture is not None and capture.state == "refused":
            raise RuntimeError(f"not recorded: {capture.reason}")
        if capture is not None and capture.replays >= 2:
            return Running(batch, max(times[1:]), capture.graphs, close=made.shutdown)
    raise RuntimeError("no rollout was replayed in 12 batches")


def systems(B: int, T: int, device: str) -> dict[str, Callable[[], Running]]:
    """How each system is made. Those that need a CUDA device are left out without one."""
    head = lambda: policies.categorical(network(device))  # noqa: E731
    module = lambda: Sampling(network(device))  # noqa: E731

    def muster(policy: Any, **options: Any) -> Running:
        made = collector(B, T, device, policy, **options)
        return plain(iter(made).__next__, made.shutdown)

    def capture(policy: Any, **options: Any) -> Running:
        return captured(
            collector(B, T, device, policy, capture=True, **options), device
        )

    made: dict[str, Callable[[], Running]] = {
        BY_HAND: lambda: plain(Loop(B, T, device).batch),
        "loop, nothing stored": lambda: plain(Loop(B, T, device, stored=False).batch),
        "muster, random": lambda: muster(None),
        "muster, head": lambda: muster(head()),
        "muster, plain module": lambda: muster(module()),
        "muster, TensorDictModule": lambda: muster(td_policy(device)),
        "torchrl": lambda: torchrl(B, T, device),
    }
    if device == "cpu":
        return made
    made |= {
        "loop, a graph": lambda: recorded(B, T, device, compiled=False),
        "loop, a graph, step compiled": lambda: recorded(B, T, device, compiled=True),
        CAPTURED: lambda: capture(head()),
        "muster, plain module, capture": lambda: capture(module()),
        "muster, TensorDictModule, capture": lambda: capture(td_policy(device)),
        COMPILED: lambda: capture(head(), compile_env=True),
        "muster, TensorDictModule, cudagraph_policy": lambda: muster(
            td_policy(device), cudagraph_policy=True
        ),
    }
    return made


BY_HAND = "loop, batch stored"
CAPTURED = "muster, head, capture"
COMPILED = "muster, head, capture, step compiled"
EAGER = ("muster, head", "muster, plain module", "muster, TensorDictModule")
LEAST_SHARE = 0.95  # of the loop by hand, without capture
MOST_US = {  # per time step
    CAPTURED: {64: 125, 1024: 130, 16_384: 145, 131_072: 340},
    COMPILED: {64: 70, 1024: 75, 16_384: 80, 131_072: 260},
}
MOST_RECORDING_S = 1.0
BATCHES = 3  # of a turn
LEAST_ROUNDS = 3
SECONDS = 48.0  # of a size, with compilation


def wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def memory_mib(device: str) -> float:
    """Memory of the device in use, with what belongs to graphs, without unused blocks."""
    if device == "cpu":
        return 0.0
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved() / 2**20


def card_of(device: str) -> str:
    return "CPU" if device == "cpu" else torch.cuda.get_device_name()


def measure(B: int, T: int, device: str, rounds: int) -> dict[str, Any]:
    end = time.perf_counter() + SECONDS
    torch.compiler.reset()  # else steps of several sizes are compiled for sizes that vary, or not
    running: dict[str, Running] = {}
    result: dict[str, Any] = {}
    for name, make in systems(B, T, device).items():
        before = memory_mib(device)
        try:
            running[name] = make()
        except Exception as error:
            result[name] = {"note": f"{type(error).__name__}: {error}"[:300]}
            continue
        running[name].memory_mib = memory_mib(device) - before
    times: dict[str, list[float]] = {name: [] for name in running}
    for number in range(rounds):
        if number >= LEAST_ROUNDS and time.perf_counter() > end:
            break
        for name, system in running.items():
            wait(device)
            begin = time.perf_counter()
            for _ in range(BATCHES):
                system.batch()
            wait(device)
            times[name].append((time.perf_counter() - begin) / BATCHES)
    for name, series in times.items():
        result[name] = row(running[name], series, times[BY_HAND], B, T)
        running[name].close()
    return result


def row(
    system: Running, series: list[float], loop: list[float], B: int, T: int
) -> dict[str, Any]:
    shares = [a / b for a, b in zip(loop, series, strict=True)]
    median = statistics.median(series)
    found: dict[str, Any] = {
        "frames_per_s": round(T * B / median),
        "us_per_step": round(median / T * 1e6, 1),
        "of_loop": round(statistics.median(shares), 3),
    }
    if system.memory_mib:
        found["memory_mib"] = round(system.memory_mib)
    if system.recording_s is not None:
        found["recording_s"] = round(system.recording_s, 2)
        found["graphs"] = system.graphs
    return found


def gates(found: dict[str, Any], B: int) -> list[dict[str, Any]]:
    """The goals for ``B`` environments: what was wanted and measured, and whether it was met.

    A system without a measurement has not met its goals.
    """
    rows = []

    def add(name: str, what: str, limit: float, *, least: bool) -> None:
        value = found[name].get(what)
        met = value is not None and (value >= limit if least else value <= limit)
        rows.append(
            {"system": name, "what": what, "goal": limit, "measured": value, "met": met}
        )

    for name in EAGER:
        add(name, "of_loop", LEAST_SHARE, least=True)
    for name, most in MOST_US.items():
        if B in most:
            add(name, "us_per_step", most[B], least=False)
    for name, measured in found.items():
        if name.startswith("muster") and "capture" in name and "note" not in measured:
            add(name, "recording_s", MOST_RECORDING_S, least=False)
    return rows


def show(B: int, found: dict[str, Any], goals: list[dict[str, Any]]) -> None:
    for name, values in found.items():
        if "note" in values:
            print(f"  {name:44} {values['note']}", flush=True)
            continue
        fps = values["frames_per_s"]
        us = values["us_per_step"]
        more = "".join(
            f"  {unit} {values[key]}"
            for key, unit in (("memory_mib", "MiB"), ("recording_s", "recording s"))
            if key in values
        )
        print(
            f"  {name:44} {fps:14,} frames/s {us:9.1f} us/step {values['of_loop']:7.3f} of the"
            f" loop{more}",
            flush=True,
        )
    for goal in goals:
        verdict = "met" if goal["met"] else "MISSED"
        print(
            f"  {verdict:6} {goal['system']}: {goal['what']} {goal['measured']},"
            f" goal {goal['goal']}",
            flush=True,
        )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.on_device", description=__doc__
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--envs", type=int, nargs="+", default=[64, 1024, 16_384, 131_072]
    )
    parser.add_argument("--steps", type=int, default=64, help="steps per batch")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--quick", action="store_true", help="one small size, two rounds of 8 steps"
    )
    parser.add_argument(
        "--output", type=Path, help="default: the results, for a CUDA device"
    )
    options = parser.parse_args(arguments)
    if options.quick:
        options.envs, options.steps, options.rounds = [64], 8, 2
    output = options.output
    if output is None and options.device != "cpu" and not options.quick:
        output = RESULTS / "on_device.json"
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    card = card_of(options.device)
    begin = time.perf_counter()
    results: dict[str, Any] = {
        "machine": machine(),
        "card": card,
        "steps": options.steps,
        "rounds": options.rounds,
    }
    missed = 0
    for B in options.envs:
        found = measure(B, options.steps, options.device, options.rounds)
        goals = [] if options.device == "cpu" else gates(found, B)
        missed += sum(not goal["met"] for goal in goals)
        results[str(B)] = found | {"goals": goals}
        print(f"{B} environments, {options.steps} steps per batch, {card}", flush=True)
        show(B, found, goals)
        if (
            output is not None
        ):  # after each size: what is measured is kept if a later one fails
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(json.dumps(results, indent=1) + "\n")
    print(f"{missed} goals missed; {time.perf_counter() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
