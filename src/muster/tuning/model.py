"""How fast a collector will be, from what its parts cost: plain arithmetic, no clocks.

One time step of a group is ``B`` environment steps one after another and one pass of the loop, which calls the policy::

    group(B) = B * frame + act(B)        frame = step + reset / episode length        act(B) = fixed + B * per env

A batch of ``T`` time steps then takes

====================  ============================================================================================
in this process       ``T * groups * group(B) + batch``
inference in workers  ``T * span(rounds * group(B), all CPU time) + late(T) + batch + workers * order``
server                ``T * (span(rounds * (B * frame + loop(B)), all CPU time) + late(1) + wake + infer(N)) + ...``
server, alternating   ``T * max(stepping + inferring of one half, inferring of both, all CPU time / cores) + ...``
====================  ============================================================================================

where ``N`` are all environments, ``rounds`` is how many groups the busiest worker has, and ``infer`` a policy call and
what a server does around it. ``span`` is what a worker computes, and two kinds of waiting that overlap in part: its
environments', and that for a core, which all share. Threads share one core, the interpreter's. ``late(n)`` is how much
later than the average the last worker is: a sum of ``n`` steps spreads by ``sqrt(n)`` deviations of one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal

GOOD_ENOUGH = 0.95  # of the best rate: with fewer workers, if they reach that
WAITS = 0.5  # of its time at most on a core: an environment that threads can step side by side
MOST_WORKERS = 64
MEMORY_SHARE = 0.5  # of what is free, for workers


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What one machine, environment and policy take. Seconds, unless the name says otherwise.

    Attributes:
        step_s: one step of one environment, by the clock.
        step_cpu_s: CPU time of that; less where the environment waits.
        step_sd_s: standard deviation of ``step_s``, without the outermost hundredth.
        step_tail_s: of hundred steps the slowest takes so long.
        reset_s, reset_cpu_s: the same of a reset.
        episode_length: steps between two resets; infinite if none ended.
        env_batch: environments that come together, such as a vector environment's; 1: any number can be stacked.
        policy_s: ``(fixed, per environment)`` of one policy call.
        loop_s: the same for all else in a time step: Muster's own.
        batch_s: handing over a batch, besides the rollouts.
        order_s: for each worker that takes part in it.
        wake_s: waking up another process and being woken up by it.
        serve_s: what a server does in a time step besides the policy: ``(fixed, per worker, per environment)``. A
            question costs the worker that asks as much as the second.
        slowdown: how many times longer computing takes while all cores compute.
        cores: that this process may use; a container's share can be a fraction.
        env_bytes, worker_bytes: memory of one environment, and of a worker process without any.
        memory_bytes: that is free.
        crowded: share of the time in which others had the core that we wanted, while this was measured. Nothing is
            predicted from it.
    """

    step_s: float
    step_cpu_s: float
    step_sd_s: float = 0.0
    step_tail_s: float = math.inf
    reset_s: float = 0.0
    reset_cpu_s: float = 0.0
    episode_length: float = math.inf
    env_batch: int = 1
    policy_s: tuple[float, float] = (0.0, 0.0)
    loop_s: tuple[float, float] = (2e-6, 0.2e-6)
    batch_s: float = 400e-6
    order_s: float = 150e-6
    wake_s: float = 25e-6
    serve_s: tuple[float, float, float] = (90e-6, 28e-6, 2e-6)
    slowdown: float = 1.0
    cores: float = 1.0
    env_bytes: float = 0.0
    worker_bytes: float = 150e6
    memory_bytes: float = math.inf
    crowded: float = 0.0

    @property
    def frame_s(self) -> float:
        """One step and its share of a reset."""
        return self.step_s + self.reset_s / self.episode_length

    @property
    def frame_cpu_s(self) -> float:
        return self.step_cpu_s + self.reset_cpu_s / self.episode_length

    @property
    def frame_sd_s(self) -> float:
        """Deviation of ``frame_s``: a reset now and then spreads it, too."""
        p = 1 / self.episode_length
        return math.sqrt(self.step_sd_s**2 + p * (1 - p) * self.reset_s**2)

    @property
    def waits(self) -> bool:
        """The environment leaves its core free most of the time."""
        return self.frame_cpu_s < WAITS * self.frame_s


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A way to collect.

    Attributes:
        num_envs: B, in each group.
        together: environments that come as one, such as a vector environment, which nobody has to stack.
        groups: in all.
        T: time steps in a batch.
        workers: processes or threads; 0: none, this process collects.
        backend: of workers.
        inference: where the policy runs: in every worker, or once in this process.
        alternating: one half of the workers steps while the policy acts for the other.
        asynchronous: nobody waits for the others.
    """

    num_envs: int
    together: bool = False
    groups: int = 1
    T: int = 128
    workers: int = 0
    backend: Literal["processes", "threads"] = "processes"
    inference: Literal["worker", "server"] = "worker"
    alternating: bool = False
    asynchronous: bool = False

    @property
    def frames(self) -> int:
        """Of one rollout of all groups."""
        return self.groups * self.num_envs * self.T

    @property
    def kind(self) -> str:
        """In words, without numbers."""
        if not self.workers:
            return "in process"
        return f"{self.backend}, {'alternating ' * self.alternating}{self.inference}"

    def options(self) -> dict[str, Any]:
        """Keywords for a collector, those that are not its defaults."""
        chosen = {"num_workers": self.workers} if self.workers and self.workers != self.groups else {}
        frames = self.frames // (self.groups if self.asynchronous else 1)  # there every group fills batches of its own
        chosen |= {} if self.together else {"num_envs": self.num_envs}
        chosen["frames_per_batch"] = frames
        plain = Setup(num_envs=1)
        names = ("backend", "inference", "alternating") if self.workers else ()
        return chosen | {name: getattr(self, name) for name in names if getattr(self, name) != getattr(plain, name)}


def predict(costs: Costs, setup: Setup) -> float:
    """Frames per second."""
    c, s = costs, setup
    if not s.workers:
        own = _act(c, s.num_envs)
        step = max(s.groups * (s.num_envs * c.frame_s + own), _all_cpu(c, s, own) / c.cores)
        return s.frames / (s.T * step + c.batch_s)
    rounds = math.ceil(s.groups / s.workers)
    handing = c.batch_s + s.workers * c.order_s
    if s.inference == "server":
        return s.frames / (s.T * _served_step(c, s, rounds) + handing)
    own = _act(c, s.num_envs)
    step = _span(c, s, rounds * (s.num_envs * c.frame_s + own), _all_cpu(c, s, own), s.workers)
    return s.frames / (s.T * step + _late(c, s, rounds * s.num_envs * s.T, s.workers) + handing)


def _served_step(c: Costs, s: Setup, rounds: int) -> float:
    """One time step of all groups with the policy on a server."""
    halves = 2 if s.alternating else 1
    part = dataclasses.replace(s, groups=math.ceil(s.groups / halves))
    stepping = math.ceil(s.workers / halves)
    own = _line(c.loop_s, s.num_envs) + c.serve_s[1]
    cpu = _all_cpu(c, part, own)
    step = _span(c, s, rounds * (s.num_envs * c.frame_s + own), cpu, stepping)
    step += _late(c, s, rounds * s.num_envs, stepping) + c.wake_s
    fixed, per_worker, per_env = c.serve_s
    infer = _line(c.policy_s, part.groups * s.num_envs) + fixed + stepping * per_worker
    infer += part.groups * s.num_envs * per_env
    if not s.alternating:
        return step + infer
    return max(step + infer, 2 * infer, 2 * (cpu + infer) / _cores(c, s))


def _act(c: Costs, B: int) -> float:
    return _line(c.policy_s, B) + _line(c.loop_s, B)


def _line(fixed_and_slope: tuple[float, float], n: float) -> float:
    fixed, slope = fixed_and_slope
    return fixed + slope * n


def _cores(c: Costs, s: Setup) -> float:
    """What Python code of all workers runs on."""
    return min(1.0, c.cores) if s.backend == "threads" else c.cores


def _all_cpu(c: Costs, s: Setup, own: float) -> float:
    """CPU time of one time step of all groups, each with ``own`` besides its environments."""
    return s.groups * (s.num_envs * c.frame_cpu_s + own)


def _span(c: Costs, s: Setup, wall: float, cpu: float, workers: int) -> float:
    """How long it takes workers of which the busiest needs ``wall``, and all together so much CPU time."""
    cores = _cores(c, s)
    computing = min(wall, cpu / workers)
    busy = min(cores, cpu / wall) if wall else 0.0  # cores, on average
    share = min(1.0, max(0.0, busy - 1) / (cores - 1)) if cores > 1 else 0.0
    slower = 1 + (c.slowdown - 1) * share
    queueing = max(0.0, cpu / cores - computing)
    return (computing + math.hypot(wall - computing, queueing)) * slower


def _late(c: Costs, s: Setup, n: int, workers: int) -> float:
    """How much later than the average the last worker is, of those that make ``n`` environment steps each."""
    if s.asynchronous or workers < 2:
        return 0.0
    of_normals = NormalDist().inv_cdf((workers - 0.375) / (workers + 0.25))  # expected maximum (Blom 1958)
    return min(of_normals * c.frame_sd_s * math.sqrt(n), n * max(0.0, c.step_tail_s - c.step_s))


def propose(costs: Costs, totals: Sequence[int], frames: int, *, groups: int | None = None) -> list[Setup]:
    """Setups worth a thought.

    Args:
        totals: numbers of environments, over all groups.
        frames: per batch, about.
        groups: that are given by the user; None: one for each worker.
    """
    kinds: list[dict[str, Any]] = [{"inference": "worker"}]
    if any(costs.policy_s):  # random actions need no server
        kinds += [{"inference": "server"}, {"inference": "server", "alternating": True}]
    backends: list[Literal["processes", "threads"]] = ["processes", "threads"] if costs.waits else ["processes"]
    found = []
    for total in dict.fromkeys(totals):
        T = max(1, round(frames / total))
        for workers in [0, *worker_numbers(costs, groups or max(1, total // costs.env_batch))]:
            n = groups or workers or 1
            if total % n or costs.env_batch not in (1, total // n):
                continue
            together = costs.env_batch > 1
            setup = Setup(num_envs=total // n, together=together, groups=n, T=T, workers=workers)
            possible = [k for k in kinds if workers > 1 or not k.get("alternating")]
            pairs = [(b, k) for b in backends for k in possible] if workers else [(setup.backend, kinds[0])]
            found += [dataclasses.replace(setup, backend=backend, **kind) for backend, kind in pairs]
    return [setup for setup in found if _fits(costs, setup)]


def worker_numbers(costs: Costs, most: int) -> list[int]:
    """Numbers of workers to think about: few, and about as many as there are cores, and as can be where they wait."""
    cores = max(1, math.floor(costs.cores))
    numbers = {2**k for k in range(12)} | {cores, 2 * cores, most}
    top = MOST_WORKERS if costs.waits else 2 * cores
    return sorted(n for n in numbers if n <= min(most, max(top, 1)))


def fewest(costs: Costs, setups: Sequence[Setup]) -> Setup:
    """The setup with the fewest workers that is nearly as fast as the fastest."""
    rates = {setup: predict(costs, setup) for setup in setups}
    best = max(rates.values())
    return min((s for s in setups if rates[s] >= GOOD_ENOUGH * best), key=lambda s: s.workers)


def _fits(c: Costs, s: Setup) -> bool:
    """It has the memory that it needs."""
    own = s.workers * c.worker_bytes if s.backend == "processes" else 0.0
    return own + s.groups * s.num_envs * c.env_bytes <= MEMORY_SHARE * c.memory_bytes or not s.workers
