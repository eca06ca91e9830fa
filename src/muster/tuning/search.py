"""``tune``: a grid of setups; times each of them once, then the fastest in turns."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

from muster.collectors.auto import MOST_WORKERS, Load, busy_workers, measure
from muster.collectors.base import BaseCollector
from muster.collectors.collector import Collector
from muster.collectors.multi import MultiSyncCollector
from muster.collectors.multi_options import CentralInference, MultiOptions
from muster.collectors.options import CollectorOptions
from muster.collectors.setup import factories_of
from muster.collectors.signatures import passes_on
from muster.envs.build import is_environment
from muster.errors import BadOption, UnsupportedEnv
from muster.restore.pickling import MAKE_POLICY, dumps, loads
from muster.utils.containers import is_several
from muster.utils.cpus import usable_cores

TOTALS = (8, 32)  # default numbers of environments
FINALISTS = 3
SLICES = 5  # slices of time per finalist, interleaved
# shares of the time; the finalists get the rest
MEASURING = 0.05
SURVEY = 0.45


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A configuration of a collector.

    Attributes:
        num_envs: B, the environments of each group.
        from_vector: the factory makes a vector environment, so the collector gets no option
            ``num_envs``.
        groups: number of groups.
        T: time steps per batch.
        workers: number of processes or threads; 0: this process collects.
        backend: kind of workers.
        inference: "worker": the policy runs in every worker; else once, in this process, see
            ``CentralInference``.
    """

    num_envs: int
    from_vector: bool = False
    groups: int = 1
    T: int = 128
    workers: int = 0
    backend: Literal["processes", "threads"] = "processes"
    inference: Literal["worker", "server"] | CentralInference = "worker"

    @property
    def frames(self) -> int:
        """Frames of one batch."""
        return self.groups * self.num_envs * self.T

    @property
    def kind(self) -> str:
        """The setup in words, without numbers."""
        if not self.workers:
            return "in process"
        return (
            f"{self.backend},"
            f" {self.inference if isinstance(self.inference, str) else 'alternating server'}"
        )

    @property
    def collector_class(self) -> type[Collector | MultiSyncCollector]:
        """The collector class for ``options()``."""
        return MultiSyncCollector if self.workers else Collector

    def options(self) -> dict[str, Any]:
        """Keyword arguments of the collector, without its defaults."""
        chosen: dict[str, Any] = (
            {"num_workers": self.workers}
            if self.workers not in (0, self.groups)
            else {}
        )
        if not self.from_vector:
            chosen["num_envs"] = self.num_envs
        chosen["frames_per_batch"] = self.frames
        if self.workers:
            defaults = Setup(num_envs=1)
            names = ("backend", "inference")
            chosen |= {
                n: getattr(self, n)
                for n in names
                if getattr(self, n) != getattr(defaults, n)
            }
        return chosen

    def make(
        self, create_env_fn: Any, policy: Any = None, **options: Any
    ) -> BaseCollector:
        """Make the collector. ``options`` are added to those of the setup, or replace them."""
        several = is_several(create_env_fn)
        factories = (
            [create_env_fn] * self.groups
            if self.workers and not several
            else create_env_fn
        )
        return self.collector_class(factories, policy, **{**self.options(), **options})


@dataclass(frozen=True)
class Candidate:
    """A setup and its rate.

    Attributes:
        rate: frames per second; None if the setup is refused.
        final: the rate is the median of several slices of time, interleaved with those of the other
            finalists.
        refused: why the collector cannot be made.
    """

    setup: Setup
    rate: float | None = None
    final: bool = False
    refused: str | None = None


@dataclass(frozen=True)
class Tuning:
    """The result of ``tune``.

    Attributes:
        candidates: all setups of the grid; finalists first, then by rate.
        cpu_share: CPU time divided by wall time of one worker: small if the environment waits.
        cores: number of cores that this process may use.
        groups_given: ``create_env_fn`` was a list, so the setups differ in workers and inference
            only.
    """

    candidates: tuple[Candidate, ...]
    cpu_share: float
    cores: float
    groups_given: bool = False

    @property
    def best(self) -> Candidate:
        """The fastest finalist."""
        return self.candidates[0]

    def constructor_call(
        self, env: str = "create_env_fn", policy: str = "policy", more: str = ""
    ) -> str:
        """Python code that makes the best collector.

        Args:
            env, policy: expressions; ``env`` is the ``create_env_fn`` of the call of ``tune``.
            more: further arguments, as Python code that begins with a comma.
        """
        setup = self.best.setup
        options = "".join(
            f", {name}={value!r}" for name, value in setup.options().items()
        )
        factories = (
            f"[{env}] * {setup.groups}"
            if setup.workers and not self.groups_given
            else env
        )
        return f"{setup.collector_class.__name__}({factories}, {policy}{options}{more})"

    @passes_on(MultiOptions)
    def make(
        self, create_env_fn: Any, policy: Any = None, **options: Any
    ) -> BaseCollector:
        """Make the best collector. ``options`` are added to those of its setup, or replace them."""
        return self.best.setup.make(create_env_fn, policy, **options)


@passes_on(CollectorOptions)
def tune(
    create_env_fn: Any,
    policy: Any = None,
    *,
    seconds: float = 20.0,
    num_envs: Sequence[int] | int | None = None,
    frames_per_batch: int = 2048,
    say: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> Tuning:
    """Find the fastest collector on this machine for these environments and this policy.

    ::

        tuning = muster.tune("CartPole-v1", policy)
        print(tuning.constructor_call('"CartPole-v1"'))
        collector = tuning.make("CartPole-v1", policy, total_frames=1_000_000)

    Runs every setup of a grid (number of environments, workers, processes or threads, central
    inference) once, then the fastest three in turns. Collects with a copy of the policy; global
    random generators are not changed.

    Args:
        create_env_fn: see ``Collector``; not an environment object. A list fixes the groups: then
            the setups differ in workers and inference only, and all of them collect the same data.
        policy: see ``Collector``.
        seconds: approximate total time of collecting; starting workers takes additional time.
        num_envs: total numbers of environments to try. None: 8 and 32 (a list: its own number;
            vector envs: multiples).
        frames_per_batch: approximate; rounded to whole time steps.
        say: called with lines of progress.
        **options: further options of the collector, for all setups.

    Raises:
        BadOption: an option is wrong, or the policy cannot be pickled.
        MusterError: environments or policy raised.
    """
    factories = factories_of(create_env_fn)
    groups = len(factories) if is_several(create_env_fn) else None
    if not seconds > 0:
        raise BadOption(f"seconds={seconds!r}: expected more than 0")
    _check_totals(num_envs, groups)
    if any(is_environment(factory) for factory in factories):
        raise BadOption(
            "create_env_fn is an environment: give an id, or a function that makes one"
        )
    checked = CollectorOptions(
        create_env_fn,
        **{**options, "frames_per_batch": frames_per_batch, "num_envs": 1},
    )
    if checked.record is not None:
        raise BadOption(
            "record: give it to the collector that tune finds; its trials would record into one"
            " directory"
        )
    if checked.policy_factory is None:
        copied = loads(dumps(policy, "policy", MAKE_POLICY), "policy")
    elif policy is not None:
        raise BadOption("policy_factory cannot be used with policy: give one of them")
    elif checked.factories[0]() is None:
        raise BadOption("policy_factory returned None, expected a policy")
    else:
        copied = None  # each collector makes its own
    cores = usable_cores()
    say("measuring how much the environment computes")
    load = measure(create_env_fn, copied, checked, seconds * MEASURING)
    totals = _totals(num_envs, groups, load.env_batch, cores)
    setups = grid(
        load,
        cores,
        totals,
        frames_per_batch,
        groups=groups,
        policy=policy is not None or checked.policy_factory is not None,
    )
    if not setups:
        raise BadOption(
            f"num_envs={num_envs}: environments come {load.env_batch} at a time; give a multiple of"
            " that"
        )
    candidates = []
    for n, setup in enumerate(setups, 1):
        say(
            f"{n} of {len(setups)}: {setup.kind}, {setup.groups} x {setup.num_envs} environments"
        )
        candidates.append(
            _timed(
                setup, create_env_fn, copied, options, seconds * SURVEY / len(setups)
            )
        )
    candidates.sort(key=lambda c: -(c.rate or 0.0))
    say(f"the fastest {FINALISTS}, in turns")
    finalists = [c.setup for c in candidates[:FINALISTS] if c.rate is not None]
    if not finalists:
        raise BadOption(
            "no setup can collect from this environment with these options:"
            f" {candidates[0].refused}"
        )
    final = _in_turns(
        finalists, create_env_fn, copied, options, seconds * (1 - MEASURING - SURVEY)
    )
    return Tuning(
        (*final, *candidates[len(final) :]), load.cpu_share, cores, groups is not None
    )


def grid(
    load: Load,
    cores: float,
    totals: Sequence[int],
    frames: int,
    *,
    groups: int | None,
    policy: bool,
) -> list[Setup]:
    """Return the setups to time, with ``frames`` frames per batch, for each total number of
    environments.

    They collect in process, or with 2 workers up to twice the cores, and with as many as keep the
    cores busy. Threads, which share one core, are in the grid if the environment waits. Central
    inference is in the grid with a policy.
    """
    wanted = {
        2,
        max(1, math.floor(cores)),
        2 * max(1, math.floor(cores)),
        busy_workers(load, cores),
    } - {1}
    backends: tuple[Literal["processes", "threads"], ...] = (
        ("processes", "threads") if load.waits else ("processes",)
    )
    inferences: list[Literal["worker", "server"] | CentralInference] = ["worker"]
    if policy:
        inferences += ["server", CentralInference(alternating=True)]
    found: list[Setup] = []
    for total in dict.fromkeys(totals):
        most = min(MOST_WORKERS, groups or max(1, total // load.env_batch))
        for workers in sorted({0} | {min(n, most) for n in wanted if most > 1}):
            n = groups or workers or 1
            if total % n or load.env_batch not in (1, total // n):
                continue
            common: dict[str, Any] = {
                "num_envs": total // n,
                "from_vector": load.env_batch > 1,
                "groups": n,
                "T": max(1, round(frames / total)),
                "workers": workers,
            }
            if not workers:
                found.append(Setup(**common))
                continue
            found += [
                Setup(**common, backend=backend, inference=inference)
                for backend in backends
                for inference in inferences
            ]
    return found


def _check_totals(num_envs: Sequence[int] | int | None, groups: int | None) -> None:
    for total in (
        ()
        if num_envs is None
        else [num_envs]
        if isinstance(num_envs, int)
        else num_envs
    ):
        if (
            isinstance(total, bool)
            or not isinstance(total, int)
            or total < 1
            or total % (groups or 1)
        ):
            of = (
                f"multiples of the {groups} groups"
                if groups
                else "integers of at least 1"
            )
            raise BadOption(f"num_envs={num_envs!r}: expected {of}")


def _totals(
    num_envs: Sequence[int] | int | None,
    groups: int | None,
    env_batch: int,
    cores: float,
) -> list[int]:
    if num_envs is not None:
        return [num_envs] if isinstance(num_envs, int) else list(num_envs)
    if groups:
        return [groups * env_batch]
    if env_batch > 1:
        return [env_batch * n for n in range(1, 1 + max(1, int(2 * cores)))]
    return list(TOTALS)


def _timed(
    setup: Setup,
    create_env_fn: Any,
    policy: Any,
    options: dict[str, Any],
    seconds: float,
) -> Candidate:
    try:
        with setup.make(create_env_fn, policy, **options) as collector:
            collector.rollout()  # first calls take longer
            return Candidate(setup, _rate(collector, seconds))
    except (BadOption, UnsupportedEnv) as error:
        return Candidate(setup, refused=str(error))


def _in_turns(
    setups: Sequence[Setup],
    create_env_fn: Any,
    policy: Any,
    options: dict[str, Any],
    seconds: float,
) -> list[Candidate]:
    """Time the setups in turns, so that other load slows all of them; return them with rates, the
    fastest first.
    """
    with ExitStack() as made:
        collectors = [
            made.enter_context(setup.make(create_env_fn, policy, **options))
            for setup in setups
        ]
        for collector in collectors:
            collector.rollout()
        rates = [
            [
                _rate(collector, seconds / SLICES / len(collectors))
                for collector in collectors
            ]
            for _ in range(SLICES)
        ]
    medians = [statistics.median(of_one) for of_one in zip(*rates, strict=True)]
    found = [
        Candidate(setup, rate, final=True)
        for setup, rate in zip(setups, medians, strict=True)
    ]
    return sorted(found, key=lambda c: -(c.rate or 0.0))


def _rate(collector: BaseCollector, seconds: float) -> float:
    frames, began = collector.stats().executed, time.perf_counter()
    while True:
        collector.rollout()
        took = time.perf_counter() - began
        if took >= seconds:
            return (collector.stats().executed - frames) / took
