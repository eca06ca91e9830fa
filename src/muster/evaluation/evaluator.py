"""``Evaluator``: evaluates a policy with frozen weights on an exact number of episodes, now or in
the background.
"""

from __future__ import annotations

import copy
import itertools
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from typing_extensions import Self

from muster.collectors import Collector, MultiSyncCollector
from muster.collectors.multi_options import MultiOptions
from muster.collectors.setup import factories_of, keywords_of
from muster.collectors.signatures import passes_on
from muster.envs.build import EpisodeSeeds, SeedingFactory, is_environment, is_single
from muster.envs.checks import close_all
from muster.episodes.rules import Rule, RuleName, part_of
from muster.errors import (
    BadOption,
    BadWeights,
    CollectorBusy,
    CollectorClosed,
    CollectorTimeout,
    EnvError,
    MusterError,
    UnsupportedEnv,
    WorkerDied,
    WorkerHung,
)
from muster.evaluation.result import Evaluation, EvaluatorStats
from muster.evaluation.run import Plan, Run
from muster.evaluation.video import Tape
from muster.keys import AGENT, TRAJ_IDS
from muster.restore.pickling import MAKE_POLICY, dumps, loads
from muster.rng import GroupRng
from muster.rollout.options import Execution
from muster.utils.attributes import name_of
from muster.utils.checked import check_choice, list_of_seeds
from muster.utils.containers import is_several
from muster.utils.forks import Owner
from muster.utils.integers import integer
from muster.utils.interrupts import postponed
from muster.utils.tracebacks import trimmed
from muster.weights.coverage import taken
from muster.weights.names import (
    Weights,
    acting_modules,
    each_once,
    named_tensors,
    named_weights,
    weight_bearer,
)
from muster.workers.requests import Call
from muster.workers.worker import env_attributes

if TYPE_CHECKING:
    from tensordict import TensorDict

    from muster.collectors.base import BaseCollector
    from muster.collectors.engine import CollectedRollout
    from muster.keys import Key
    from muster.memory.specs import Array

ATTEMPTS = 3
# time steps per rollout: few, to end soon after the last episode on a device; enough for a small
# overhead
ROWS = 32
PASSED_ON = (
    *(
        "device",
        "env_device",
        "policy_device",
        "execution",
        "compile_policy",
        "cudagraph_policy",
    ),
    *("inference", "start_method", "num_sub_threads", "timeouts", "policy_factory"),
    *(
        "info",
        "max_frames_per_traj",
        "obs_dtype",
        "prev_action_reward",
        "traj_done_key",
        "validate",
    ),
    "episode_seeds",
    *("crash_dir", "trust_policy"),
)
OF_EVALUATOR = (
    "Call evaluate() to evaluate the policy that the evaluator was made with, or give the weights"
    " of all of it"
)
WhenBusy = Literal["queue", "skip", "raise"]
OnFailure = Literal["raise", "restart"]
Progress = Callable[[int, int], object]


class Evaluator:
    """Evaluates a policy on an exact number of complete episodes, without a bias to short ones.

    ::

        with Evaluator("CartPole-v1", policy, episodes=20, num_envs=8) as evaluator:
            evaluation = evaluator.evaluate()
            print(evaluation.mean, evaluation.confidence_interval())

    It has its own environments, random streams and copy of the policy (in evaluation mode), and
    does not influence training. Every ``evaluate()`` starts with resets. Episode k of environment i
    is reset with ``seed + i + k * (number of environments)``. With ``rule="per_env"`` these are the
    first ``episodes`` seeds, however many environments and workers share them. There are no more
    resets and steps than the episodes need. (Batches that reset themselves, such as vector
    environments, are seeded only once, and go on until the last episode ends; see
    ``Evaluation.started``.) ``episode_seeds=[3, 14, 15]`` replaces these seeds by the entries of
    your list, in the same order.

    ``trigger()`` evaluates a copy of the present weights in the background, in worker processes::

        with Evaluator("CartPole-v1", policy, num_envs=8, num_workers=1) as evaluator:
            for batch in collector:
                learn(batch)
                evaluator.trigger()
                if (evaluation := evaluator.poll()) is not None:
                    log(evaluation.version, evaluation.mean)

    Args:
        create_env_fn: see ``Collector``. With workers, environment objects are refused.
        policy: see ``Collector``. ``evaluate()`` copies its weights by default. Without workers
            ``policy_factory`` is called twice, for this policy and for the copy that acts.
        episodes: number of episodes. None: all that end before another limit is reached.
        max_frames: maximum number of environment steps, over all environments; the evaluation ends
            if it does not allow another step of those that are still stepped. Episodes open at this
            point are ``unfinished``.
        max_T: maximum number of time steps of each environment.
        max_trajectories: end after the time step at which this number of episodes is complete.
        num_envs: number of environments that each worker steps together; fewer if there are fewer
            episodes. None: one, without a batch dimension.
        num_workers: number of worker processes, each with ``num_envs`` environments. 0: evaluate in
            this process.
        rule: which episodes count. "per_env": a number fixed in advance from each environment.
            "fair": the same number from each, and the rest from the first ones to end one more.
            "last_even": the first to start. "first_done": the first to end, which is biased towards
            short episodes. Without ``episodes``, all count as they end ("first_done").
        exploration_type: "deterministic", or "random" to sample as in training; see ``Collector``.
        seed: seed of the episodes, which are the same in every evaluation. None: different ones
            each time.
        reseed: use different episodes each time, derived from ``seed``.
        create_env_kwargs: see ``Collector``.
        on_failure: reaction to a worker that dies or hangs, or to an error of an environment.
            "raise": raise it. "restart": repeat the evaluation with new workers and environments,
            at most twice.
        when_busy: reaction of ``trigger()`` to a running evaluation. "queue": wait, each with a
            copy of its weights. "skip": do nothing. "raise": raise ``CollectorBusy``.
        record_actions: record actions for ``Evaluation.video``.
        **options: some of the options of ``Collector``, and with workers of ``MultiSyncCollector``:
            ``max_frames_per_traj`` (for environments that may never end), ``info`` (for action masks
            there), ``inference``, devices, ``timeouts``, and others.

    Raises:
        BadOption, UnknownOption: an option is wrong.
        UnsupportedEnv, EnvError: making the environments failed, or their agents take turns.
    """

    @passes_on(MultiOptions, names=PASSED_ON)
    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        episodes: int | None = 10,
        max_frames: int | None = None,
        max_T: int | None = None,
        max_trajectories: int | None = None,
        num_envs: int | None = None,
        num_workers: int = 0,
        rule: RuleName = "per_env",
        exploration_type: Any = "deterministic",
        seed: int | None = 0,
        reseed: bool = False,
        create_env_kwargs: Any = None,
        on_failure: OnFailure = "raise",
        when_busy: WhenBusy = "queue",
        record_actions: bool = True,
        **options: Any,
    ) -> None:
        check_choice("on_failure", on_failure, ("raise", "restart"))
        check_choice("when_busy", when_busy, ("queue", "skip", "raise"))
        num_workers = integer("num_workers", num_workers, 0)
        seed = None if seed is None else integer("seed", seed, 0, or_else="None")
        num_envs = (
            None if num_envs is None else integer("num_envs", num_envs, or_else="None")
        )
        self.plan = Plan(episodes, max_frames, max_T, max_trajectories, rule)
        self.num_workers = num_workers
        self.on_failure = on_failure
        self.when_busy = when_busy
        self.seed = seed
        self.reseed = reseed
        execution = options.get("execution", Execution())
        if not execution.own_rng:
            raise BadOption(
                "Execution(own_rng=False): an evaluation always draws from generators of its own"
            )
        self._served = options.get("inference", "worker") != "worker"
        factory = self._factory = options.pop("policy_factory", None)
        if factory is not None and policy is not None:
            raise BadOption(
                "policy_factory cannot be used with policy: give one of them"
            )
        policy = self._policy = policy if factory is None else factory()
        options |= {"exploration_type": exploration_type, "num_envs": num_envs}
        options |= {"execution": replace(execution, policy_mode="eval")}
        options |= (
            {}
            if create_env_kwargs is None
            else {"create_env_kwargs": create_env_kwargs}
        )
        several, factories = is_several(create_env_fn), factories_of(create_env_fn)
        self._factories = factories if several else factories * max(1, num_workers)
        self._stacked = several or num_workers > 0
        self._num_envs = len(self._factories) * (num_envs or 1)
        self._record = record_actions
        self._options = options
        self._chosen = options.get("episode_seeds")
        if self._chosen is not None:
            if reseed:
                raise BadOption(
                    "episode_seeds are the same in each evaluation, and reseed takes others: give"
                    " one of them"
                )
            self._chosen = list_of_seeds("episode_seeds", self._chosen)
        self._unused: list[Any] = []  # environments that take no part
        self._leave_out_groups()
        self.plan.check(self._num_envs)
        self._own = _private_copy(policy) if factory is None else factory()
        # it could not be copied
        self._shared = num_workers == 0 and _share_modules(self._own, policy)
        self._collector: BaseCollector | None = None
        self._seeded = False  # see ``Run``
        self._number = 0
        self._owner = Owner("evaluator", "workers") if num_workers else None
        self._stats, self._counting = EvaluatorStats(), threading.Lock()
        self._closed = False
        self._executor = ThreadPoolExecutor(1, f"muster-eval-{id(self):x}")
        self._triggered: deque[Future[Evaluation]] = (
            deque()
        )  # whose results were not returned yet
        self._open()

    # --- evaluating -------------------------------------------------------------------------------

    def evaluate(
        self,
        policy_or_weights: Any = None,
        *,
        version: int | str | None = None,
        progress: Progress | None = None,
    ) -> Evaluation:
        """Evaluate the current weights now.

        Args:
            policy_or_weights: source of the weights: a policy, its network, a TensorDict or dict of
                tensors. None: the evaluator's policy.
            version: version for the result. None: the number of this evaluation, from 1.
            progress: function called after every few time steps with the numbers of episodes and
                frames so far. If it returns False, the evaluation ends.

        Raises:
            CollectorBusy: an evaluation is running in the background.
            BadWeights: the weights do not fit.
            WorkerDied, WorkerHung, EnvError, PolicyError, ...: see ``on_failure``.
        """
        self._check_open()
        if self.is_running():
            raise CollectorBusy(
                "an evaluation is going on in the background: wait() for it, or trigger()"
                " another one"
            )
        with trimmed:
            weights, number = self._next(policy_or_weights, copied=False)
            return self._evaluate(weights, number, version, progress)

    def trigger(
        self, policy_or_weights: Any = None, version: int | str | None = None
    ) -> int:
        """Evaluate a copy of the weights in the background. Returns at once.

        At the end of a program without ``shutdown()``, Python waits for the triggered evaluations.

        Args: see ``evaluate``.

        Returns:
            the number of the evaluation; 0 if it was skipped.

        Raises:
            BadOption: there are no worker processes, or ``inference="server"``: the policy would
                act in this process, and draw from the random generators of the training.
            CollectorBusy: an evaluation is running, with ``when_busy="raise"``.
        """
        self._check_open()
        if self.num_workers == 0:
            raise BadOption(
                "evaluating in the background takes a process: make the Evaluator with"
                " num_workers=1"
            )
        if self._served:
            raise BadOption(
                "inference='server' acts in this process, and not beside your training: leave"
                " it out"
            )
        if self.is_running() and self.when_busy == "raise":
            raise CollectorBusy(
                "an evaluation is going on: poll() or wait() first, or use when_busy='queue' or"
                " 'skip'"
            )
        if self.is_running() and self.when_busy == "skip":
            self._count(skipped=1)
            return 0
        weights, number = self._next(policy_or_weights, copied=True)
        self._triggered.append(
            self._executor.submit(
                self._evaluate, weights, number, version, lambda *_: not self._closed
            )
        )
        return number

    def poll(self) -> Evaluation | None:
        """Return the oldest complete result that was not returned yet, or None.

        Raises the error of its evaluation.
        """
        self._check_here()
        return self._fetch() if self._triggered and self._triggered[0].done() else None

    def wait(self, timeout: float | None = None) -> Evaluation:
        """Wait for the oldest evaluation whose result was not returned yet, and return it as
        ``poll`` does.

        Raises:
            CollectorTimeout: it is not complete after ``timeout`` seconds. It continues.
            BadOption: no result is left to wait for.
        """
        self._check_open()
        if not self._triggered:
            raise BadOption(
                "there is nothing to wait for: every result was taken, so trigger() another one"
            )
        if not wait([self._triggered[0]], timeout).done:
            raise CollectorTimeout(
                f"the evaluation is not done after {timeout} s; it goes on: wait() again"
            )
        return self._fetch()

    def is_running(self) -> bool:
        """Return whether an evaluation is running or waiting in the background."""
        return self._waiting() > 0

    def stats(self) -> EvaluatorStats:
        """Return a snapshot of all counters. It is cheap, and available after ``shutdown``."""
        return replace(self._stats, waiting=self._waiting())

    def shutdown(self, timeout: float | None = 10.0) -> None:
        """Close the environments, and end the workers and the background thread.

        May be called again.

        Args:
            timeout: seconds for the current rollout in the background, after which its workers are
                killed.
        """
        if self._closed:
            return
        self._closed = True
        # a fork must not end its parent's workers
        if self._owner is not None and not self._owner.is_here():
            return
        self._triggered = deque(
            future for future in self._triggered if not future.cancel()
        )
        if wait(self._triggered, timeout).not_done:
            for handle in (
                ()
                if self._collector is None
                else self._collector._engine.source.pool.handles
            ):
                handle.kill()
        self._executor.shutdown()
        self._close()

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "busy" if self.is_running() else "idle"
        names = ", ".join(
            sorted({m if isinstance(m, str) else name_of(m) for m in self._factories})
        )
        return (
            f"Evaluator({names}, episodes={self.plan.episodes}, rule={self.plan.rule_name!r},"
            f" {state})"
        )

    # --- parts ------------------------------------------------------------------------------------

    def _fetch(self) -> Evaluation:
        with trimmed:
            return self._triggered.popleft().result()

    def _next(self, source: Any, *, copied: bool) -> tuple[Weights | None, int]:
        """Return the weights and the number of the next evaluation."""
        if self._shared and source is not None:
            raise BadWeights(
                f"the policy ({name_of(self._policy)}) could not be copied, so weights given to it"
                " would be yours: evaluate() without any, or make the policy a module"
            )
        weights = None if self._shared else self._weights_of(source, copied=copied)
        self._number += 1
        return weights, self._number

    def _weights_of(self, source: Any, *, copied: bool) -> Weights | None:
        """Return weights for the whole policy, ``copied`` or shared; None if it has none."""
        own = weight_bearer(self._policy)
        if own is None:
            return None if source is None else named_weights(source)  # which do not fit
        each_once(own)  # raises for lazy layers
        weights = taken(source, own, own, None, OF_EVALUATOR).weights
        return (
            {name: tensor.detach().clone() for name, tensor in weights.items()}
            if copied
            else weights
        )

    def _waiting(self) -> int:
        return sum(not future.done() for future in [*self._triggered])

    def _evaluate(
        self,
        weights: Weights | None,
        number: int,
        version: int | str | None,
        progress: Progress | None,
    ) -> Evaluation:
        lost, seed = 0, self._seed_of(number)
        version = number if version is None else version
        for attempt in range(1, ATTEMPTS + 1):
            before = self._executed
            try:
                done = self._play(weights, seed, version, progress)
            except BadWeights:
                raise  # nothing was started
            except BaseException as error:
                executed = self._executed - before
                lost += executed
                self._close(objects=False)  # an interrupted rollout cannot be continued
                again = (
                    isinstance(error, (WorkerDied, WorkerHung, EnvError))
                    and self.on_failure == "restart"
                )
                again = again and attempt < ATTEMPTS and not self._closed
                self._count(frames=executed, restarts=int(again))
                if not again:
                    raise
            else:
                executed = self._executed - before
                self._count(
                    evaluations=1,
                    episodes=len(done.records),
                    frames=executed,
                    seconds=done.seconds,
                    last=done,
                )
                return (
                    replace(done, discarded=done.discarded | {"restarted": lost})
                    if lost
                    else done
                )
        raise AssertionError("the last attempt has returned or raised")

    def _play(
        self,
        weights: Weights | None,
        seed: int,
        version: int | str,
        progress: Progress | None,
    ) -> Evaluation:
        began = time.perf_counter()
        collector = self._open()
        info = collector._engine.source.pool.counters[0].info
        num_envs = self._num_envs
        if weights is not None:
            function = self.num_workers == 0 and not isinstance(
                self._own, torch.nn.Module
            )
            collector._weights.publish(
                weights, model=weight_bearer(self._own) if function else None
            )
        collector.set_seed(seed)
        run = Run(
            self.plan,
            num_envs,
            seed=seed,
            seeded=self._seeded,
            version=version,
            chosen=self._chosen,
        )
        apart = len(collector._engine.source.pool.counters) > 1
        tape = None
        if self._record:
            kwargs = keywords_of(
                self._options.get("create_env_kwargs"), len(self._factories)
            )
            tape = Tape(
                info.name,
                list(zip(self._factories, kwargs, strict=True)),
                info.num_envs,
            )
        while not run.stopped_by:
            rollout = self._rollout(collector, run, apart=apart)
            batch = rollout.batch
            rewards = np.full((len(batch), num_envs), np.nan)
            if info.reward_key in batch.keys(True):
                rewards = _rows(batch, info.reward_key, num_envs)[..., 0]
            if tape is not None:
                tape.begins.append(run.t)
                tape.rollouts.append(
                    {
                        key: _rows(batch, key, num_envs).copy()
                        for key in info.action_specs
                    }
                )
            run.add(rollout.episodes, rewards, _rows(batch, TRAJ_IDS, num_envs))
            if progress is not None and progress(len(run.records), run.frames) is False:
                run.stop("progress")
        return run.result(info.name, time.perf_counter() - began, tape)

    def _rollout(
        self, collector: BaseCollector, run: Run, *, apart: bool
    ) -> CollectedRollout:
        """Collect the next time steps.

        A rollout ends with the last episode that counts, if a group can know it.
        """
        counters = collector._engine.source.pool.counters

        def rule(group: int) -> Rule:
            return (
                part_of(run.rule, counters[group].env_ids.tolist())
                if apart
                else copy.deepcopy(run.rule)
            )

        with collector._exclusively(), postponed():
            return collector._engine.collect(
                None, rows=run.rows(ROWS, apart=apart), rule=rule
            )

    def _leave_out_groups(self) -> None:
        """Leave out environments that take no part, which then need not be made.

        All groups keep the same size.
        """
        num_envs = self._options["num_envs"]
        each, wanted = num_envs or 1, self.plan.taking_part(self._num_envs)
        if wanted == self._num_envs:
            return
        kwargs = keywords_of(
            self._options.get("create_env_kwargs"), len(self._factories)
        )
        first = self._factories[0], kwargs[0]
        alike = all(
            made[0] is first[0] and made[1] == first[1]
            for made in zip(self._factories, kwargs, strict=True)
        )
        size = max(
            n
            for n in range(1, each + 1)
            if wanted % n == 0 and (alike or each % n == 0)
        )
        places = [
            place for place in range(len(self._factories)) for _ in range(each // size)
        ][: wanted // size]
        places = [0] * (wanted // size) if alike else places
        self._unused = [
            env for env in self._factories[places[-1] + 1 :] if is_environment(env)
        ]
        self._factories = [self._factories[place] for place in places]
        if self._options.get("create_env_kwargs") is not None:
            self._options["create_env_kwargs"] = [kwargs[place] for place in places]
        self._options["num_envs"] = None if num_envs is None else size
        self._num_envs, self.num_workers = wanted, min(self.num_workers, len(places))

    def _open(self) -> BaseCollector:
        """Return the collector. It is made if there is none."""
        if self._collector is None:
            # environments may draw
            undisturbed = nullcontext() if self.num_workers else GroupRng(0).as_global()
            with undisturbed, warnings.catch_warnings():
                warnings.filterwarnings("ignore", "frames_per_batch=")
                # is meant: no noise
                warnings.filterwarnings("ignore", "the policy has layers of the class")
                self._collector = self._make()
                # a factory makes several
                if (found := self._collector._engine.num_envs) != self._num_envs:
                    self._num_envs = found
                    self._close(objects=False)
                    self._collector = self._make()
                self._check_agents(self._collector)
                self._seeded = _has_seeds(self._collector)
        return self._collector

    def _check_agents(self, collector: BaseCollector) -> None:
        for counts in collector._engine.source.pool.counters:
            if AGENT in counts.info.observation_specs:
                self._close()
                raise UnsupportedEnv(
                    f"{counts.info.name}: its agents take turns, and each has episodes of its own."
                    " Evaluator counts those of environments: use Collector, and"
                    " collector.episodes"
                )

    def _make(self) -> BaseCollector:
        sources = self._factories
        if self._chosen is None:
            sources = [_seeding(factory, self._num_envs) for factory in self._factories]
        options = self._options | {
            "frames_per_batch": ROWS * self._num_envs,
            "layout": "time_major",
        }
        if self.num_workers:
            policy = (
                {"policy": self._own}
                if self._factory is None
                else {"policy_factory": self._factory}
            )
            return MultiSyncCollector(
                sources, num_workers=self.num_workers, **policy, **options
            )
        return Collector(sources if self._stacked else sources[0], self._own, **options)

    def _close(self, *, objects: bool = True) -> None:
        """End workers and close environments; those given as objects only if ``objects``."""
        if objects:
            close_all([env.close for env in self._unused])
            self._unused = []
        collector, self._collector = self._collector, None
        if collector is not None:
            collector.shutdown(
                close_env=objects or not any(map(is_environment, self._factories)),
                raise_on_error=False,
            )

    @property
    def _executed(self) -> int:
        return 0 if self._collector is None else self._collector.stats().executed

    def _seed_of(self, number: int) -> int:
        if self.seed is not None and not self.reseed:
            return self.seed
        words = np.random.SeedSequence(
            None if self.seed is None else [self.seed, number]
        )
        # small enough that sums with it are 32-bit numbers
        return int(words.generate_state(1)[0]) >> 2

    def _count(self, *, last: Evaluation | None = None, **more: float) -> None:
        with self._counting:  # called from two threads
            changed: dict[str, Any] = {
                name: getattr(self._stats, name) + n for name, n in more.items()
            }
            if last is not None:
                changed |= {"version": last.version, "mean": last.mean}
            self._stats = replace(self._stats, **changed)

    def _check_here(self) -> None:
        if self._owner is not None:
            self._owner.check()

    def _check_open(self) -> None:
        self._check_here()
        if self._closed:
            raise CollectorClosed("this evaluator was shut down; make a new one")


def _rows(batch: TensorDict, key: Key, num_envs: int) -> Array:
    """Return a column as ``[T, num_envs, *shape]``."""
    array: Array = batch.get(key).detach().cpu().numpy()
    return array.reshape(len(batch), num_envs, *array.shape[batch.ndim :])


def _seeding(factory: Any, num_envs: int) -> Any:
    """Return the factory or environment with a seed for every episode, if that is possible."""
    if is_environment(factory):
        return EpisodeSeeds(factory, num_envs) if is_single(factory) else factory
    return (
        SeedingFactory(factory, num_envs)
        if isinstance(factory, str) or callable(factory)
        else factory
    )


def _has_seeds(collector: BaseCollector) -> bool:
    try:
        return all(
            itertools.chain(
                *collector._engine.source.pool.call(
                    Call(env_attributes, ("seeds_episodes",))
                )
            )
        )
    except (AttributeError, MusterError):  # raised by environments of other kinds
        return False


def _private_copy(policy: Any) -> Any:
    """Copy a policy, with its modules in evaluation mode.

    ``BadWeights`` or ``BadOption`` if it cannot be copied.

    Modules that a function of an importable file accesses by name cannot be copied: they stay the
    user's, unchanged.
    """
    if policy is None:
        return None
    named_tensors(policy)  # raises for lazy layers
    try:
        own = copy.deepcopy(policy) if isinstance(policy, torch.nn.Module) else None
    except (RuntimeError, TypeError):
        own = None
    if own is None:
        own = loads(dumps(policy, "policy", MAKE_POLICY), "policy")
    for module in acting_modules(own):
        if not _share_modules(module, policy):
            module.eval()
    return own


def _share_modules(policy: Any, other: Any) -> bool:
    """Return whether the two share a module."""
    others = {id(module) for module in acting_modules(other)}
    return any(id(module) in others for module in acting_modules(policy))
