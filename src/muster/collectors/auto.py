"""``num_workers="auto"``: the number of workers that keeps the cores busy, measured for about a
second.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from muster.collectors.collector import Collector
from muster.collectors.multi_options import PoolOptions
from muster.collectors.options import CollectorOptions
from muster.collectors.setup import factories_of, keywords_of
from muster.restore.pickling import MAKE_POLICY, dumps, loads
from muster.rng import GroupRng
from muster.utils.containers import is_several
from muster.utils.cpus import read, usable_cores

SECONDS = 1.0  # duration of a measurement
ROWS = 32  # rows of each measured rollout
MOST_WORKERS = 64
WAITING = 0.5  # environments with a smaller CPU share count as waiting


@dataclass(frozen=True)
class Load:
    """Measured use of a core by one worker.

    Attributes:
        cpu_share: CPU time divided by wall time of rollouts, in (0, 1]. A small share: the
            environment waits for a simulator, a network or a timer, and leaves its core to other
            workers.
        env_batch: number of environments that one entry of ``create_env_fn`` makes, e.g. a vector
            environment.
    """

    cpu_share: float
    env_batch: int = 1

    @property
    def waits(self) -> bool:
        return self.cpu_share < WAITING


def auto_workers(
    create_env_fn: Any, policy: Any, options: PoolOptions, *, alone: bool
) -> int:
    """Return the number of workers that keeps the cores of this machine busy, from a measurement of
    the first group.
    """
    load = measure(create_env_fn, policy, options, SECONDS)
    groups = len(create_env_fn) if is_several(create_env_fn) else None
    return choose_workers(load, options, groups, usable_cores(), alone=alone)


def choose_workers(
    load: Load, options: PoolOptions, groups: int | None, cores: float, *, alone: bool
) -> int:
    """Return the number of workers for a measured load.

    ``groups``: their number; None: as many as workers.
    """
    B = load.env_batch if load.env_batch > 1 else options.num_envs or 1
    # at least one step for each environment
    most = groups or (MOST_WORKERS if alone else max(1, options.frames // B))
    return min(most, busy_workers(load, 1.0 if options.in_threads else cores))


def busy_workers(load: Load, cores: float) -> int:
    """Return the number of workers that together use all cores, at most ``MOST_WORKERS``."""
    return min(MOST_WORKERS, max(1, math.floor(cores / load.cpu_share + 0.1)))


def measure(
    create_env_fn: Any, policy: Any, options: CollectorOptions, seconds: float
) -> Load:
    """Measure rollouts of the first group, or of one environment of it, for about ``seconds``.

    The environments are made for it and closed. It acts with a copy of the policy, and changes no
    random stream.
    """
    factories = factories_of(create_env_fn)
    end = 0.0
    over = SimpleNamespace(collection_stopped=lambda: time.perf_counter() >= end)
    factory = next(iter(options.factories), None)
    copied = (
        loads(dumps(policy, "policy", MAKE_POLICY), "policy")
        if factory is None
        else factory()
    )
    with (
        GroupRng(0).as_global(),
        # the options that change how long a step takes
        Collector(
            factories[0],
            copied,
            interruptor=over,
            create_env_kwargs=keywords_of(options.create_env_kwargs, len(factories))[0],
            num_envs=None if options.num_envs is None else 1,
            num_threads=options.num_sub_threads
            if isinstance(options, PoolOptions)
            else None,
            device=options.device,
            policy_device=options.policy_device,
            env_device=options.env_device,
            exploration_type=options.exploration_type,
            trust_policy=options.trust_policy,
            compile_policy=options.compile_policy,
            cudagraph_policy=options.cudagraph_policy,
            max_frames_per_traj=options.max_frames_per_traj,
            obs_dtype=options.obs_dtype,
            validate=options.validate,
            traj_done_key=options.traj_done_key,
            info=options.info,
            prev_action_reward=options.prev_action_reward,
            timeouts=options.timeouts,
            execution=options.execution,
        ) as collector,
    ):
        env_batch = collector._engine.num_envs

        def run(seconds: float) -> None:
            nonlocal end
            end = time.perf_counter() + seconds
            while not over.collection_stopped():
                collector.collect(n_step=ROWS * env_batch)

        run(0.1 * seconds)  # the first reset and the first policy calls are slower
        wall, cpu, waited = time.perf_counter(), time.process_time(), _queued_s()
        run(0.9 * seconds)
        cpu = time.process_time() - cpu
        wall = time.perf_counter() - wall - (_queued_s() - waited)
    return Load(min(1.0, max(1e-3, cpu / max(wall, 1e-9))), env_batch)


def _queued_s() -> float:
    """Return the seconds for which this thread has waited for a core that other programs used; 0 if
    this is unknown.
    """
    text = read(Path("/proc/thread-self/schedstat")).split()
    return int(text[1]) * 1e-9 if len(text) > 1 else 0.0
