"""The scale curves: collectors at growing sizes. ``benchmarks.scale`` measures and judges them."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks import schedule_simulation
from benchmarks.scale_measure import (
    Point,
    Subject,
    family_clock,
    in_turns,
    measure,
    one_by_one,
    slot_kib,
)
from benchmarks.workers_envs import FLOATS, PlainEnv
from benchmarks.workers_family import cpu_seconds, pss_mib
from muster import Collector, MultiAsyncCollector, MultiSyncCollector, Watch, policies

ENVS = 8  # in a group, where the number of environments does not grow
MB = 10**6


def bare_loop(
    make: Callable[[], PlainEnv], envs: int, steps: int
) -> Callable[[], object]:
    """As many steps of as many environments, with resets and nothing stored."""
    made = [make() for _ in range(envs)]

    def run() -> None:
        for _ in range(steps):
            for env in made:
                if env.step(0)[2]:
                    env.reset()

    for env in made:
        env.reset()
    return run


def bare_copies(make: Callable[[], PlainEnv], steps: int) -> Callable[[], object]:
    """Steps of an environment whose observations are copied twice, as those of a batch with
    ``next`` are.
    """
    env = make()
    size = env.observation_space.shape[0]
    now, following = (
        np.zeros((steps + 1, size), np.float32),
        np.zeros((steps, size), np.float32),
    )

    def run() -> None:
        for t in range(steps):
            now[t + 1] = env.step(0)[0]
        following[:] = now[1:]

    return run


def bare_threads(
    make: Callable[[], PlainEnv], threads: int, steps: int
) -> Callable[[], object]:
    """``bare_loop`` of an environment in each of so many threads, which wait for each other at the
    end.
    """
    pool = ThreadPoolExecutor(threads)
    loops = [bare_loop(make, 1, steps) for _ in range(threads)]
    return lambda: wait([pool.submit(loop) for loop in loops])


def head(floats: int = FLOATS) -> Any:
    """Two actions and their probabilities, by a small network."""
    torch.manual_seed(0)
    return policies.categorical(
        nn.Sequential(nn.Linear(floats, 16), nn.Tanh(), nn.Linear(16, 2))
    )


# --- in process -----------------------------------------------------------------------------------


@contextmanager
def in_process(
    x: float,
    make: Any,
    policy: Any = None,
    *,
    envs: int,
    T: int,
    groups: int = 0,
    bare: Any = None,
    **options: Any,
) -> Iterator[Subject]:
    """``Collector`` with so many environments (in each of its groups), and the bare loop."""
    frames = envs * T * max(groups, 1)
    envs_fn = [make] * groups if groups else make
    with Collector(
        envs_fn, policy, num_envs=envs, frames_per_batch=frames, seed=0, **options
    ) as collector:
        batches = iter(collector)
        yield Subject(
            x,
            lambda: next(batches),
            frames,
            bare or bare_loop(make, envs * max(groups, 1), T),
        )


def envs_curve(policy: Callable[[], Any], size: int) -> Any:
    return in_process(size, PlainEnv, policy(), envs=size, T=16)


def groups_curve(size: int) -> Any:
    return in_process(size, PlainEnv, envs=1, T=16, groups=size)


def observation_curve(size: int) -> Any:
    make, T = partial(PlainEnv, size // 4), 16
    return in_process(size, make, envs=1, T=T, bare=bare_copies(make, T))


def leaves_curve(size: int) -> Any:
    return in_process(size, partial(PlainEnv, leaves=size), envs=1, T=64)


def length_curve(size: int) -> Any:
    return in_process(size, PlainEnv, envs=ENVS, T=size)


def episodes_curve(options: dict[str, Any], size: int) -> Any:
    """``size``: episodes per 1,024 steps of an environment."""
    return in_process(
        size, partial(PlainEnv, length=1024 // size), envs=ENVS, T=256, **options
    )


# --- with workers ---------------------------------------------------------------------------------


@contextmanager
def in_workers(kind: Any, options: dict[str, Any], x: int) -> Iterator[Subject]:
    """So many worker processes with a group each."""
    T, ahead = 64, kind is MultiAsyncCollector

    def made(workers: int) -> Any:
        frames = ENVS * T * (1 if ahead else workers)
        return kind(
            [PlainEnv] * workers,
            head(),
            num_envs=ENVS,
            frames_per_batch=frames,
            seed=0,
            **options,
        )

    with (
        made(1) as collector
    ):  # the first one of a program starts the fork server, which imports torch
        next(iter(collector))
    memory, before = pss_mib(os.getpid()), cpu_seconds(os.getpid())
    with made(x) as collector:
        batches = iter(collector)
        first = next(batches)
        found = {
            "start_cpu_s": (cpu_seconds(os.getpid()) - before) / x,
            "worker_mib": (pss_mib(os.getpid()) - memory) / x,
            "slot_kib": slot_kib(first),
        }
        del first
        rounds = x if ahead else 1

        def run() -> Any:
            for _ in range(rounds):
                batch = next(batches)
            return batch

        yield Subject(
            x, run, ENVS * T * x, clock=family_clock(), ahead=ahead, found=found
        )


@contextmanager
def groups_in_workers(x: int) -> Iterator[Subject]:
    """So many groups of one environment in two workers."""
    collector = MultiSyncCollector(
        [PlainEnv] * x, None, num_workers=2, num_envs=1, frames_per_batch=16 * x, seed=0
    )
    with collector:
        batches = iter(collector)
        found = {"slot_kib": slot_kib(next(batches))}
        yield Subject(
            x, lambda: next(batches), 16 * x, clock=family_clock(), found=found
        )


@contextmanager
def in_threads(x: int) -> Iterator[Subject]:
    """So many threads, each with an environment that waits 100 ms per step."""
    make, T = partial(PlainEnv, sleep_s=0.1), 4
    with MultiSyncCollector(
        [make] * x, None, backend="threads", frames_per_batch=T * x, seed=0
    ) as collector:
        batches = iter(collector)
        found = {"slot_kib": slot_kib(next(batches))}
        yield Subject(
            x, lambda: next(batches), T * x, bare_threads(make, x, T), found=found
        )


# --- weights --------------------------------------------------------------------------------------


class Weights(nn.Module):
    """A policy with so many parameters, of which a call uses one."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(max(1, size // 4)))

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return (obs[..., 0] > self.values[0]).long()


@contextmanager
def publishing(x: int, size: int, workers: int) -> Iterator[Subject]:
    """A publish, and a batch of a step for which all workers take the weights."""
    policy = Weights(size)
    before = pss_mib(os.getpid())
    with MultiSyncCollector(
        [PlainEnv] * workers, policy, frames_per_batch=workers, seed=0
    ) as collector:
        batches = iter(collector)
        next(batches)

        def run() -> Any:
            collector.update_policy_weights_()
            return next(batches)

        run()
        found = {"mib": pss_mib(os.getpid()) - before}
        yield Subject(x, run, workers, clock=family_clock(), found=found)


# --- hooks ----------------------------------------------------------------------------------------

HOOKS: dict[str, Callable[[str], dict[str, Any]]] = {
    "none": lambda folder: {},
    "on_batch": lambda folder: {"on_batch": lambda batch: None},
    "postproc": lambda folder: {"postproc": lambda batch: None},
    "pre and post collect": lambda folder: {
        "pre_collect_hook": int,
        "post_collect_hook": lambda batch: None,
    },
    "on_step": lambda folder: {"on_step": lambda step: None},
    "on_episode_done": lambda folder: {"on_episode_done": lambda episode: None},
    "logger": lambda folder: {"logger": lambda metrics, step: None},
    "watch": lambda folder: {"watch": Watch(folder, None)},
    "record": lambda folder: {"record": folder},
}


def hooks(sizes: Sequence[int], *, rounds: int, seconds: float) -> list[Point]:
    """Each hook by itself, on episodes of 64 steps; ``of_none`` is CPU time relative to no hook."""
    names = [list(HOOKS)[x] for x in sizes]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        subjects = []
        for x, name in enumerate(names):
            options = HOOKS[name](str(Path(folder) / str(x)))
            made = in_process(
                x, partial(PlainEnv, length=64), envs=ENVS, T=256, **options
            )
            subjects.append(stack.enter_context(made))
        points = measure(subjects, rounds=rounds, seconds=seconds)
    return [
        {"hook": name, "of_none": point["cost_us"] / points[0]["cost_us"]} | point
        for name, point in zip(names, points, strict=True)
    ]


# --- nodes ----------------------------------------------------------------------------------------


def nodes(
    sync: bool, sizes: Sequence[int], *, rounds: int, seconds: float
) -> list[Point]:
    """CPU time of the main process for one rollout of each of so many nodes, which another process
    plays.
    """
    case = "cartpole-1k"
    with tempfile.TemporaryDirectory() as folder:
        recorded = Path(folder) / case
        recorded.write_bytes(
            pickle.dumps(schedule_simulation.record(schedule_simulation.CASES[case]))
        )
        found = schedule_simulation.run(recorded, case, tuple(sizes), 4.0, sync=sync)[
            "points"
        ]  # 8 batches of 256
    frames = schedule_simulation.CASES[case].frames
    points = []
    for point in found:
        cost = point["main_us_per_batch"] * (1 if sync else point["nodes"])
        points.append(
            {
                "x": point["nodes"],
                "cost_us": cost,
                "us_per_frame": cost / point["nodes"] / frames,
            }
        )
    return points


# --- all of them ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """What grows, and what may not grow faster.

    Attributes:
        grows: what x is.
        cost: of what the CPU time is judged.
        sizes: x of all points.
        points: measures them.
        judged: whether sizes double, so that growth can be judged.
    """

    grows: str
    cost: str
    sizes: tuple[int, ...]
    points: Callable[..., list[Point]]
    judged: bool = True


def doublings(first: int, last: int) -> tuple[int, ...]:
    """``first``, twice that, and so on; ``last`` at the end."""
    sizes = [first]
    while sizes[-1] * 2 < last:
        sizes.append(sizes[-1] * 2)
    return (*sizes, last)


ROWS = "16 time steps of all environments"
CURVES = {
    "envs": Curve(
        "environments in a process, random actions",
        ROWS,
        doublings(1, 4096),
        partial(in_turns, partial(envs_curve, lambda: None)),
    ),
    "envs-head": Curve(
        "environments in a process, a head",
        ROWS,
        doublings(1, 4096),
        partial(in_turns, partial(envs_curve, head)),
    ),
    "groups": Curve(
        "groups of an environment in a process",
        ROWS,
        doublings(1, 512),
        partial(in_turns, groups_curve),
    ),
    "observation": Curve(
        "bytes of an observation",
        "16 time steps",
        doublings(4, 4 * MB),
        partial(in_turns, observation_curve),
    ),
    "leaves": Curve(
        "entries of an observation",
        "64 time steps",
        doublings(1, 200),
        partial(in_turns, leaves_curve),
    ),
    "T": Curve(
        "time steps in a batch",
        "a batch",
        doublings(1, 16384),
        partial(in_turns, length_curve),
    ),
    "episodes": Curve(
        "episodes in 1,024 steps",
        "2,048 frames",
        doublings(1, 1024),
        partial(in_turns, partial(episodes_curve, {})),
    ),
    "episodes-hook": Curve(
        "episodes in 1,024 steps, on_episode_done",
        "2,048 frames",
        doublings(1, 1024),
        partial(
            in_turns, partial(episodes_curve, {"on_episode_done": lambda episode: None})
        ),
    ),
    "workers": Curve(
        "worker processes with a policy",
        "64 time steps of each",
        doublings(1, 64),
        partial(one_by_one, partial(in_workers, MultiSyncCollector, {})),
    ),
    "workers-first-ready": Curve(
        "worker processes, first ready",
        "64 time steps of each",
        doublings(1, 64),
        partial(one_by_one, partial(in_workers, MultiAsyncCollector, {})),
    ),
    "workers-server": Curve(
        "worker processes without torch, inference on a server",
        "64 time steps of each",
        doublings(1, 64),
        partial(
            one_by_one, partial(in_workers, MultiSyncCollector, {"inference": "server"})
        ),
    ),
    "groups-workers": Curve(
        "groups of an environment in two worker processes",
        ROWS,
        doublings(2, 512),
        partial(one_by_one, groups_in_workers),
    ),
    "threads": Curve(
        "threads with an environment that waits",
        "4 time steps of all environments",
        (1, 4, 16, *doublings(64, 1024)),
        partial(one_by_one, in_threads),
    ),
    "weights": Curve(
        "bytes of weights for two workers",
        "a publish",
        (1000, 8000, *doublings(64_000, 500 * MB)),
        partial(one_by_one, lambda x: publishing(x, x, 2)),
    ),
    "weights-workers": Curve(
        "workers that take 1 MB of weights",
        "a publish",
        doublings(1, 16),
        partial(one_by_one, lambda x: publishing(x, MB, x)),
    ),
    "weights-workers-large": Curve(
        "workers that take 64 MB of weights",
        "a publish",
        doublings(1, 16),
        partial(one_by_one, lambda x: publishing(x, 64 * MB, x)),
    ),
    "nodes": Curve(
        "simulated nodes",
        "a rollout of each, in the main process",
        doublings(1, 256),
        partial(nodes, True),
    ),
    "nodes-first-ready": Curve(
        "simulated nodes, first ready",
        "a rollout of each, in the main process",
        doublings(1, 256),
        partial(nodes, False),
    ),
    "hooks": Curve(
        "hooks", "2,048 frames", tuple(range(len(HOOKS))), hooks, judged=False
    ),
}
