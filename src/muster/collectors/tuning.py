"""``tune``: measures, predicts, and tries what is predicted to be fastest."""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from muster.collectors.base import BaseCollector
from muster.collectors.collector import Collector
from muster.collectors.multi import MultiAsyncCollector, MultiSyncCollector
from muster.collectors.options import CollectorOptions
from muster.collectors.setup import keywords_of, makers_of, worker_options
from muster.envs.build import is_environment
from muster.errors import BadOption, UnsupportedEnv
from muster.sources.pickling import dumps, loads
from muster.tuning.machine import computed_s, own_bytes
from muster.tuning.measure import Subject, measure
from muster.tuning.model import Costs, Setup, predict, propose
from muster.tuning.wakeup import wake_up_s

TOTALS = (8, 16, 32, 64)  # environments
TRIED = 3
STACKED = 8  # environments that are looked at together
ALIKE = 2  # at most so many of those are of one kind
MOST_TIMES = 4.0  # the usual costs of a server
SLICES = 4  # in which those that are tried take turns
MEASURING, RUNNING = 0.25, 0.2  # shares of the time; the rest is for trying

Say = Callable[[str], None]


@dataclass(frozen=True)
class Candidate:
    """A setup and its rate.

    Attributes:
        predicted, measured: frames per second; ``measured`` is None where it was not tried.
        refused: why it could not be tried.
    """

    setup: Setup
    predicted: float
    measured: float | None = None
    refused: str | None = None


@dataclass(frozen=True)
class Tuning:
    """What ``tune`` has found.

    Attributes:
        costs: what was measured.
        candidates: all setups that were thought of, the fastest by prediction first.
        best: the fastest of those that were tried.
    """

    costs: Costs
    candidates: tuple[Candidate, ...]
    best: Candidate
    given: bool = False  # groups, by a list

    def constructor_call(self, env: str = "create_env_fn", policy: str = "policy", more: str = "") -> str:
        """Python that makes the best collector.

        Args:
            env, policy: expressions; ``env`` is what was given as ``create_env_fn``.
            more: further arguments, as Python.
        """
        setup = self.best.setup
        options = "".join(f", {name}={value!r}" for name, value in setup.options().items() if value is not None)
        makers = f"[{env}] * {setup.groups}" if setup.workers and not self.given else env
        return f"{collector_class(setup).__name__}({makers}, {policy}{options}{more})"

    def make(self, create_env_fn: Any, policy: Any = None, **options: Any) -> BaseCollector:
        """The best collector. ``options`` are further ones, and may replace those of the setup."""
        return make(self.best.setup, create_env_fn, policy, **options)


def tune(
    create_env_fn: Any,
    policy: Any = None,
    *,
    seconds: float = 20.0,
    num_envs: Sequence[int] | int | None = None,
    frames_per_batch: int = 2048,
    say: Say = lambda text: None,
    **options: Any,
) -> Tuning:
    """Find the fastest way to collect, on this machine, from these environments with this policy.

    ::

        tuning = muster.tune("CartPole-v1", policy)
        print(tuning.constructor_call('"CartPole-v1"'))
        collector = tuning.make("CartPole-v1", policy, total_frames=1_000_000)

    Measures what environments, policy and wake-ups cost (docs/tuning.md), predicts a rate for every setup, and runs the
    best three in turns. The policy is copied and environments are made by ``create_env_fn``: nobody's random streams
    move.

    Args:
        create_env_fn: see ``Collector``; no environment object. A list says what the groups are: then only the number
            of workers and what they do is chosen, and data does not depend on it.
        policy: see ``Collector``.
        seconds: for all of it, about, without the starts of workers.
        num_envs: numbers of environments to think about, over all groups. None: 8 to 64.
        frames_per_batch: about; rounded to what the environments can share.
        say: is told what goes on.
        **options: further ones of the collector, for all setups.

    Raises:
        BadOption: of an option, or a policy that cannot be pickled.
        MusterError: what environments or policy raised.
    """
    makers = makers_of(create_env_fn)
    given = len(makers) if isinstance(create_env_fn, (list, tuple)) else None
    totals = _totals(num_envs, given)
    if not seconds > 0:
        raise BadOption(f"seconds={seconds!r}: expected more than 0")
    for maker in makers:
        if is_environment(maker):
            raise BadOption("create_env_fn is an environment: give an id, or a function that makes one")
    wanted = {**options, "frames_per_batch": frames_per_batch}
    checked = CollectorOptions.parse({**wanted, "num_envs": 1})
    if checked.policy_factory is not None:
        raise BadOption("policy_factory: give tune the policy that it makes")
    kwargs = keywords_of(checked.create_env_kwargs, len(makers))[0]
    copied = loads(dumps(policy, "policy"), "policy")
    say("measuring environments and policy")
    costs = measure(
        Subject(makers[0], kwargs, copied, worker_options(checked, copied)), seconds * MEASURING, stacked=STACKED
    )
    say("measuring wake-ups and workers")
    costs = dataclasses.replace(costs, wake_s=wake_up_s(0.01 * seconds))
    costs = _with_workers(costs, create_env_fn, copied, options, seconds * RUNNING)
    if costs.env_batch > 1 and num_envs is None:
        totals = [costs.env_batch * n for n in range(1, 1 + max(1, int(2 * costs.cores)))]
    setups = propose(costs, totals, frames_per_batch, groups=given)
    if not setups:
        raise BadOption(f"num_envs={num_envs}: nothing fits; environments come {costs.env_batch} at a time")
    candidates = sorted((Candidate(s, predict(costs, s)) for s in setups), key=lambda c: -c.predicted)
    tried = _try(candidates, create_env_fn, copied, options, seconds * (1 - MEASURING - RUNNING), say)
    by_setup = {candidate.setup: candidate for candidate in tried}
    candidates = [by_setup.get(candidate.setup, candidate) for candidate in candidates]
    best = max((c for c in candidates if c.measured is not None), key=lambda c: c.measured or 0.0)
    return Tuning(costs, tuple(candidates), best, given is not None)


def make(setup: Setup, create_env_fn: Any, policy: Any = None, **options: Any) -> BaseCollector:
    """The collector of a setup. ``options`` are further ones, and may replace those of the setup."""
    several = isinstance(create_env_fn, (list, tuple))
    makers = [create_env_fn] * setup.groups if setup.workers and not several else create_env_fn
    return collector_class(setup)(makers, policy, **{**setup.options(), **options})


def collector_class(setup: Setup) -> type[BaseCollector]:
    """Whose constructor takes the setup's options."""
    if not setup.workers:
        return Collector
    return MultiAsyncCollector if setup.asynchronous else MultiSyncCollector


def _totals(num_envs: Sequence[int] | int | None, groups: int | None) -> list[int]:
    if num_envs is None:
        return [groups] if groups else list(TOTALS)
    totals = [num_envs] if isinstance(num_envs, int) else list(num_envs)
    for total in totals:
        if isinstance(total, bool) or not isinstance(total, int) or total < 1 or total % (groups or 1):
            of = f"multiples of the {groups} groups" if groups else "integers of at least 1"
            raise BadOption(f"num_envs={num_envs!r}: expected {of}")
    return totals


def _with_workers(costs: Costs, create_env_fn: Any, policy: Any, options: dict[str, Any], seconds: float) -> Costs:
    """What batches cost, and what it costs that others work on the same machine: seen in two collectors."""
    maker = makers_of(create_env_fn)[0]
    B = costs.env_batch if costs.env_batch > 1 else 8
    frame_s = max(costs.frame_s, 1e-9)  # on a busy machine a short measurement finds nothing
    T = max(1, min(64, int(seconds / 8 / (B * frame_s))))
    alone = Setup(num_envs=B, together=costs.env_batch > 1, T=T)
    with make(alone, maker, policy, **options) as collector:
        here = _Pace(collector, seconds * 0.3)
    workers = max(1, int(costs.cores))
    with make(dataclasses.replace(alone, groups=workers, workers=workers), maker, policy, **options) as collector:
        there = _Pace(collector, seconds * 0.4)
        sizes = [own_bytes(worker.pid) for worker in collector.stats().workers]
    costs = dataclasses.replace(
        costs,
        batch_s=here.rest_s,
        order_s=max(0.0, there.rest_s - here.rest_s) / workers,
        slowdown=max(1.0, there.computing_s / here.computing_s) if workers > 1 and not costs.waits else 1.0,
        worker_bytes=max(0.0, statistics.median(sizes) - B * costs.env_bytes),
    )
    if not any(costs.policy_s):
        return costs
    served = dataclasses.replace(alone, groups=max(2, workers), workers=max(2, workers), inference="server")
    try:
        with make(served, maker, policy, **options) as collector:
            return with_server(costs, served, _Pace(collector, seconds * 0.3).here_s)
    except (BadOption, UnsupportedEnv):  # not with such an environment or policy
        return costs


def with_server(costs: Costs, setup: Setup, spent_s: float) -> Costs:
    """What a server costs: in proportion as usual, in all what this process spends on a batch besides the policy."""
    N, (fixed, per_worker, per_env) = setup.groups * setup.num_envs, costs.serve_s
    seen_s = (spent_s - costs.batch_s) / setup.T - costs.policy_s[0] - N * costs.policy_s[1]
    times = seen_s / (fixed + setup.workers * per_worker + N * per_env)
    times = min(MOST_TIMES, max(1 / MOST_TIMES, times))
    return dataclasses.replace(costs, serve_s=(times * fixed, times * per_worker, times * per_env))


class _Pace:
    """Runs a collector for a while. What other programs do meanwhile does not count, as far as that can be.

    Attributes:
        here_s: CPU time of this process for a batch.
        rest_s: seconds of a batch in which nobody makes a rollout.
        computing_s: CPU time of a rollout, or how long it takes if the system does not say.
    """

    def __init__(self, collector: BaseCollector, seconds: float) -> None:
        collector.rollout()
        pids = [worker.pid for worker in collector.stats().workers] or [os.getpid()]
        before = [computed_s(pid) for pid in pids]
        end = time.perf_counter() + seconds
        inside: list[float] = []
        rest: list[float] = []
        here = time.process_time()
        while len(rest) < 4 or time.perf_counter() < end:
            began, so_far = time.perf_counter(), _in_rollouts(collector)
            collector.rollout()
            took = [after - b for after, b in zip(_in_rollouts(collector), so_far, strict=True)]
            inside += took
            rest.append(time.perf_counter() - began - max(took))
        self.here_s = (time.process_time() - here) / len(rest)
        self.rest_s = max(0.0, sorted(rest)[len(rest) // 10])
        self.computing_s = statistics.median(inside)
        spent = [after - b for pid, b in zip(pids, before, strict=True) if b and (after := computed_s(pid))]
        if spent:
            self.computing_s = statistics.fmean(spent) / len(rest)


def _in_rollouts(collector: BaseCollector) -> list[float]:
    """Seconds that each worker, or this process, has spent in rollouts."""
    stats = collector.stats()
    if stats.workers:
        return [worker.busy_s for worker in stats.workers]
    return [stats.env_s + stats.policy_s + stats.copy_s + stats.rest_s]


def _try(
    candidates: Sequence[Candidate], create_env_fn: Any, policy: Any, options: dict[str, Any], seconds: float, say: Say
) -> list[Candidate]:
    """Run the first that can be run, in turns."""
    with ExitStack() as made:
        refused, chosen = [], list[tuple[Candidate, BaseCollector]]()
        for candidate in candidates:
            if not worth_trying(candidate.setup, [c.setup for c, _ in chosen]):
                continue
            say(f"trying {candidate.setup.kind}, {candidate.setup.groups} x {candidate.setup.num_envs} environments")
            try:
                collector = made.enter_context(make(candidate.setup, create_env_fn, policy, **options))
            except (BadOption, UnsupportedEnv) as error:
                if not candidate.setup.workers and not chosen:
                    raise
                refused.append(dataclasses.replace(candidate, refused=str(error)))
                continue
            collector.rollout()  # first calls take longer
            chosen.append((candidate, collector))
        rates: list[list[float]] = [[] for _ in chosen]
        for _ in range(SLICES):
            for (_, collector), kept in zip(chosen, rates, strict=True):
                kept.append(_rate(collector, seconds / SLICES / len(chosen)))
    measured = [dataclasses.replace(c, measured=statistics.median(r)) for (c, _), r in zip(chosen, rates, strict=True)]
    return [*measured, *refused]


def worth_trying(setup: Setup, tried: Sequence[Setup]) -> bool:
    """Besides those; a prediction that is wrong of one kind is wrong of all setups of that kind."""
    return len(tried) < TRIED and sum(other.kind == setup.kind for other in tried) < ALIKE


def _rate(collector: BaseCollector, seconds: float) -> float:
    """Frames per second."""
    frames, began = collector.stats().executed, time.perf_counter()
    while True:
        collector.rollout()
        took = time.perf_counter() - began
        if took >= seconds:
            return (collector.stats().executed - frames) / took
