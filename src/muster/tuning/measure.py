"""What environments and policies cost here, found out by Muster's own loop in a few seconds.

Environments are watched while the policy acts in them. Then it acts for different numbers of environments in which
nothing happens, which leaves what it and the loop cost. All of it with a copy of the policy and random streams of its
own: neither the policy nor anybody's generators notice.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from muster.columns import RolloutOptions, lane_columns
from muster.envs.build import BuiltEnv
from muster.memory.slots import Lane, Layout, Slot
from muster.policies.adapt import place
from muster.protocols import EnvBatch, Policy, Step
from muster.rng import GroupRng
from muster.rollout import rollout
from muster.sources.build import WorkerOptions, build_envs, build_policy, make_group
from muster.sources.pickling import dumps, loads
from muster.tuning.machine import CoreQueue, free_bytes, own_bytes, usable_cores
from muster.tuning.model import Costs

if TYPE_CHECKING:
    import torch

Result = TypeVar("Result")
ROWS = 128  # of a rollout
SIZES = (1, 8, 64)  # environments that the policy is asked to act for
SHARE = 0.5  # of the time, for environments
_PLAIN: dict[str, Any] = {  # rollouts that go on and on, of environments that draw from streams that are there already
    "interruptor": None,
    "own_rng": False,
    "reset_when_done": True,
    "reset_at_each_iter": False,
    "max_decorrelation_steps": 0,
}


class _StandIn:
    """Implements ``EnvBatch``; what is not said otherwise is as in ``env``."""

    bypasses = False

    def __init__(self, env: EnvBatch) -> None:
        self._env = env

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)


class Watched(_StandIn):
    """An env batch whose steps and resets are timed.

    Args:
        queue: where this thread waits for a core.

    Attributes:
        steps: ``(seconds, seconds of CPU time)`` of each time step.
        resets: the same of each reset but the first, for each environment that was reset.
    """

    def __init__(self, env: EnvBatch, queue: CoreQueue) -> None:
        super().__init__(env)
        self._waited = queue.waited_s
        self._begun = False
        self._looking_s = min(_looking() for _ in range(100))
        self.steps: list[tuple[float, float]] = []
        self.resets: list[tuple[float, float]] = []

    def reset(self, arrays: Mapping[Any, Any], row: int, which: Sequence[int], seeds: Sequence[int] | None) -> None:
        took = self._timed(lambda: self._env.reset(arrays, row, which, seeds))[1:]
        if self._begun:
            self.resets += [(took[0] / len(which), took[1] / len(which))] * len(which)

    def start(self, lane: Lane) -> Step:
        step = self._env.start(lane)
        self._begun = True

        def watched(t: int) -> Sequence[int] | None:
            finished, *took = self._timed(partial(step, t))
            self.steps.append((took[0], took[1]))
            return finished

        return watched

    def _timed(self, call: Callable[[], Result]) -> tuple[Result, float, float]:
        """What it returns, its seconds (without those in which others had the core), and those of CPU time."""
        waited, cpu, began = self._waited(), time.process_time(), time.perf_counter()
        result = call()
        took = time.perf_counter() - began
        computed = time.process_time() - cpu - self._looking_s
        return result, max(0.0, took - self._waited() + waited), max(0.0, computed)

    def costs(self) -> Costs:
        """What has been seen."""
        B = self.num_envs
        first = min(len(self.steps) - 1, len(self.steps) // 50)  # caches fill, and wrappers look closely at first
        wall, cpu = np.array(self.steps[first:]).T / B
        usual = np.clip(wall, *np.quantile(wall, [0.01, 0.99])) if len(wall) >= 100 else wall
        resets = np.array(self.resets or [(0.0, 0.0)])
        return Costs(
            step_s=float(usual.mean()),
            step_cpu_s=float(cpu.mean()),
            step_sd_s=float(usual.std()) * math.sqrt(B),
            step_tail_s=float(np.quantile(wall, 0.99)),
            reset_s=float(resets[:, 0].mean()),
            reset_cpu_s=float(resets[:, 1].mean()),
            episode_length=len(self.steps) * B / len(self.resets) if self.resets else math.inf,
        )


class Still(_StandIn):
    """So many environments of one kind in which nothing happens.

    Args:
        env: of that kind.
        num_envs: how many.
        seen: what the policy sees all the time: one row, by key.
    """

    def __init__(self, env: EnvBatch, num_envs: int, seen: Mapping[Any, Any]) -> None:
        super().__init__(env)
        self.num_envs, self._seen = num_envs, seen

    def reset(self, arrays: Mapping[Any, Any], row: int, which: Sequence[int], seeds: Sequence[int] | None) -> None:
        for key, seen in self._seen.items():
            arrays[key][row] = seen[:1]

    def start(self, lane: Lane) -> Step:
        if self not in lane.cache:
            lane.data[self.reward_key][...] = 0
            for key, seen in self._seen.items():
                lane.data[key][...] = seen[:1]
        return lane.cache.setdefault(self, _nothing)  # type: ignore[no-any-return]


class _TimeIsUp:
    """An interruptor that stops rollouts at a point in time."""

    def __init__(self, seconds: float) -> None:
        self._end = time.perf_counter() + seconds

    def collection_stopped(self) -> bool:
        return time.perf_counter() >= self._end


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is measured: environments and a policy as ``create_env_fn`` and ``policy`` of a collector give them.

    Attributes:
        maker: of one group's environments.
        kwargs: for it.
        policy: None is random.
        told: its ``num_envs`` is 1, or None for one environment without a batch.
    """

    maker: Any
    kwargs: Mapping[str, Any] | None
    policy: Any
    told: WorkerOptions


def measure(subject: Subject, seconds: float, *, stacked: int = 1) -> Costs:
    """Costs of environments and policy; what is about collectors and workers has its default values.

    Args:
        seconds: for all of it, about, without the making of environments.
        stacked: look at so many environments that are stepped together, too, if they can be: to tell what every one of
            them costs from what happens once in a time step.

    Raises:
        MusterError: what making environments, or the policy, raised; all is closed.
    """
    rng = GroupRng(0)
    with ExitStack() as made, rng.as_global():
        told = dataclasses.replace(subject.told, rollout=dataclasses.replace(subject.told.rollout, **_PLAIN))
        policy, device = place(loads(dumps(subject.policy, "policy"), "policy"), told.policy_device)
        queue, started = CoreQueue(), time.perf_counter()
        made.callback(queue.close)
        lab = _Lab(policy, device, told, rng, queue)
        built, env_bytes, making_s = _build(subject, told, made)
        together = built.env.num_envs
        plain = built.batch_shape == (together,)
        more = stacked > 1 and plain and together == 1 and making_s * stacked < seconds
        one, seen = lab.environments(built, seconds * SHARE / (1 + more))
        costs, disturbed = one, 0.0
        if more:
            several, env_bytes, _ = _build(subject, dataclasses.replace(told, num_envs=stacked), made)
            costs, _ = lab.environments(several, seconds * SHARE / 2)
            disturbed = (one.step_cpu_s - costs.step_cpu_s) * stacked / (stacked - 1)
        sizes = [n * together for n in SIZES] if plain else [together]
        each = seconds * (1 - SHARE) / len(sizes) / 2
        loop = [lab.acting(built, n, seen, each, alone=True) for n in sizes]
        both = [lab.acting(built, n, seen, each) for n in sizes] if policy is not None else loop
        fixed, slope = _line(sizes, [max(0.0, b - a) for a, b in zip(loop, both, strict=True)])
        # A policy empties the environments' caches: once in a time step, however many they are.
        disturbed = min(max(0.0, disturbed), fixed)
        return dataclasses.replace(
            costs,
            step_s=costs.step_s - disturbed / stacked,
            step_cpu_s=costs.step_cpu_s - disturbed / stacked,
            loop_s=_line(sizes, loop),
            policy_s=(fixed + disturbed, slope),
            env_batch=together,
            env_bytes=env_bytes,
            cores=usable_cores(),
            memory_bytes=free_bytes(),
            crowded=queue.waited_s() / (time.perf_counter() - started),
        )


def _build(subject: Subject, told: WorkerOptions, made: ExitStack) -> tuple[BuiltEnv, float, float]:
    """Environments, the bytes that each of them takes, and how long it took to make them."""
    before, began = own_bytes(), time.perf_counter()
    (built,) = build_envs([subject.maker], [subject.kwargs], told, made)
    took = time.perf_counter() - began
    return built, max(0.0, own_bytes() - before) / built.env.num_envs, took


@dataclasses.dataclass
class _Lab:
    """Where environments and policy are looked at."""

    policy: Any
    device: torch.device | None  # of the policy
    told: WorkerOptions
    rng: GroupRng
    queue: CoreQueue

    def environments(self, built: BuiltEnv, seconds: float) -> tuple[Costs, dict[Any, Any]]:
        """Costs of environments, and what the policy sees of them, one row by key."""
        env = Watched(built.env, self.queue)
        options = dataclasses.replace(self.told.rollout, interruptor=_TimeIsUp(seconds))
        run = _Run(BuiltEnv(cast(EnvBatch, env), built.batch_shape), self, self.policy, options, ROWS)
        run()
        while not options.interruptor.collection_stopped():
            run()
        return env.costs(), {key: row[0] for key, row in run.group.carry.items()}

    def acting(self, built: BuiltEnv, n: int, seen: Any, seconds: float, *, alone: bool = False) -> float:
        """Seconds of one time step of ``n`` environments that cost nothing: the median of rollouts.

        Args:
            alone: without the policy.
        """
        shape = (n,) if built.batch_shape == (built.env.num_envs,) else built.batch_shape
        still = BuiltEnv(cast(EnvBatch, Still(built.env, n, seen)), shape)
        policy = None if alone else self.policy
        began = time.perf_counter()
        run = _Run(still, self, policy, self.told.rollout, 4)
        run()
        rough = run() / 4
        rows = max(4, min(ROWS, int(seconds / 4 / max(rough, 1e-9))))
        run = _Run(still, self, policy, self.told.rollout, rows)
        took = [run()]
        while len(took) < 3 or time.perf_counter() - began < seconds:
            took.append(run())
        return float(np.median(took)) / rows


class _Run:
    """Makes rollouts of a group and times them, without the time in which others had the core."""

    def __init__(self, built: BuiltEnv, lab: _Lab, policy: Any, options: RolloutOptions, T: int) -> None:
        B, self._waited = built.env.num_envs, lab.queue.waited_s
        self.group = make_group(built, 0, 0, B, options, lab.rng, shared=True)
        self._policy: Policy = build_policy(policy, lab.told, self.group, lab.device)
        self.group.prime(self._policy)
        columns = lane_columns(built.env, self._policy.columns(), options)
        self._lane = Slot(Layout(T, B, columns, batch_shape=built.batch_shape), built.env.device or "heap").lanes[0]

    def __call__(self) -> float:
        self._lane.done_steps, self._lane.stopped = 0, False
        waited, began = self._waited(), time.perf_counter()
        rollout(self.group, self._policy, self._lane)
        took = time.perf_counter() - began
        return took - min(took, self._waited() - waited)


def _line(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """The line through the points that misses each by a small share of it; neither part is negative."""
    x, y = np.array(sizes, float), np.array(seconds)
    if len(x) < 2 or not y.any():
        return float(y[0]), 0.0
    weights = 1 / np.maximum(y, y.max() * 1e-3)
    slope, fixed = np.polyfit(x, y, 1, w=weights)
    if slope < 0:
        return float(y.mean()), 0.0
    if fixed < 0:
        return 0.0, float((weights**2 * x * y).sum() / (weights**2 * x**2).sum())
    return float(fixed), float(slope)


def _looking() -> float:
    """What it takes to look at the clock of CPU time."""
    return -(time.process_time() - time.process_time())


def _nothing(t: int) -> None:
    pass
