"""``Evaluator``: evaluates a policy with frozen weights on an exact number of episodes, now or in the background."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal

import numpy as np
from typing_extensions import Self

from muster.collectors.multi_options import MultiOptions
from muster.collectors.options import Execution, check_choice
from muster.collectors.signatures import passes_on
from muster.episodes.rules import RuleName
from muster.errors import (
    BadOption,
    BadWeights,
    CollectorBusy,
    CollectorClosed,
    CollectorTimeout,
    EnvError,
    WorkerDied,
    WorkerHung,
)
from muster.evaluation.result import Evaluation
from muster.evaluation.run import Plan, Progress
from muster.evaluation.stage import Stage, weights_of
from muster.utils.attributes import name_of
from muster.utils.forks import Owner
from muster.utils.integers import integer
from muster.utils.tracebacks import trimmed
from muster.weights.names import Weights

ATTEMPTS = 3
PASSED_ON = (
    *("device", "env_device", "policy_device", "execution", "compile_policy", "cudagraph_policy"),
    *("inference", "start_method", "num_sub_threads", "timeouts"),
    *("max_frames_per_traj", "obs_dtype", "prev_action_reward", "traj_done_key", "validate"),
    *("crash_dir", "trust_policy"),
)
WhenBusy = Literal["queue", "skip", "raise"]
OnFailure = Literal["raise", "restart"]


@dataclass(frozen=True)
class EvaluatorStats:
    """A snapshot of an evaluator.

    Attributes:
        evaluations: number of completed evaluations.
        episodes: number of episodes that counted in them.
        frames: number of all executed environment steps.
        seconds: duration of the completed evaluations.
        restarts: number of evaluations repeated after a failure.
        skipped: number of triggers skipped with ``when_busy="skip"``.
        waiting: number of triggers whose evaluation is not complete.
        version: version of the last evaluation's weights; None before the first.
        mean: mean return of the last evaluation; None before the first.
    """

    evaluations: int = 0
    episodes: int = 0
    frames: int = 0
    seconds: float = 0.0
    restarts: int = 0
    skipped: int = 0
    waiting: int = 0
    version: int | str | None = None
    mean: float | None = None


@dataclass(frozen=True)
class _Job:
    number: int
    weights: Weights | None
    version: int | str


class Evaluator:
    """Evaluates a policy on an exact number of complete episodes, without a bias to short ones.

    ::

        with Evaluator("CartPole-v1", policy, episodes=20, num_envs=8) as evaluator:
            evaluation = evaluator.evaluate()
            print(evaluation.mean, evaluation.confidence_interval())

    It has its own environments, random streams and copy of the policy (in evaluation mode), and does not influence
    training. Every ``evaluate()`` starts with resets. Episode k of environment i is reset with ``seed + i + k * (number
    of environments)``. With ``rule="per_env"`` these are the first ``episodes`` seeds, however many environments and
    workers share them. (Batches that reset themselves, such as vector environments, are seeded only once.)

    ``trigger()`` evaluates a copy of the present weights in the background, in worker processes::

        with Evaluator("CartPole-v1", policy, num_envs=8, num_workers=1) as evaluator:
            for batch in collector:
                learn(batch)
                evaluator.trigger()
                if (evaluation := evaluator.poll()) is not None:
                    log(evaluation.version, evaluation.mean)

    Args:
        create_env_fn: see ``Collector``. With workers, environment objects are refused.
        policy: see ``Collector``. ``evaluate()`` copies its weights by default.
        episodes: number of episodes. None: all that end before another limit is reached.
        max_frames: maximum number of environment steps, over all environments. Episodes open at this point are
            ``unfinished``.
        max_T: maximum number of time steps of each environment.
        max_trajectories: end after the time step at which this number of episodes is complete.
        num_envs: number of environments that each worker steps together. None: one, without a batch dimension.
        num_workers: number of worker processes, each with ``num_envs`` environments. 0: evaluate in this process.
        rule: which episodes count. "per_env": a number fixed in advance from each environment. "fair": the same number
            from each, and the rest from the first ones to end one more. "last_even": the first to start. "first_done":
            the first to end, which is biased towards short episodes. Without ``episodes``, all count as they end
            ("first_done").
        exploration_type: "deterministic", or "random" to sample as in training; see ``Collector``.
        seed: seed of the episodes, which are the same in every evaluation. None: different ones each time.
        reseed: use different episodes each time, derived from ``seed``.
        create_env_kwargs: see ``Collector``.
        on_failure: reaction to a worker that dies or hangs, or to an error of an environment. "raise": raise it.
            "restart": repeat the evaluation with new workers and environments, at most twice.
        when_busy: reaction of ``trigger()`` to a running evaluation. "queue": wait, each with a copy of its weights.
            "skip": do nothing. "raise": raise ``CollectorBusy``.
        record_actions: record actions for ``Evaluation.video``.
        **options: some of the options of ``Collector``, and with workers of ``MultiSyncCollector``:
            ``max_frames_per_traj`` (for environments that may never end), ``inference``, devices, ``timeouts``, and
            others.

    Raises:
        BadOption, UnknownOption: an option is wrong.
        UnsupportedEnv, EnvError: making the environments failed.
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
        num_envs = None if num_envs is None else integer("num_envs", num_envs, or_else="None")
        self.plan = Plan(episodes, max_frames, max_T, max_trajectories, rule)
        self.num_workers, self.on_failure, self.when_busy = num_workers, on_failure, when_busy
        self.seed, self.reseed = seed, reseed
        if not options.get("execution", Execution()).own_rng:
            raise BadOption("Execution(own_rng=False): an evaluation always draws from generators of its own")
        self._served = options.get("inference", "worker") != "worker"
        self._policy = policy
        options |= {"exploration_type": exploration_type, "num_envs": num_envs}
        options |= {} if create_env_kwargs is None else {"create_env_kwargs": create_env_kwargs}
        rows, _ = self.plan.limit(num_envs or 1)
        self._stage = Stage(
            create_env_fn, policy, num_workers=num_workers, rows=rows, record=record_actions, options=options
        )
        self._number = 0
        self._owner = Owner("evaluator", "workers") if num_workers else None
        self._stats, self._counting = EvaluatorStats(), threading.Lock()
        self._closed = False
        self._executor = ThreadPoolExecutor(1, f"muster-eval-{id(self):x}")
        self._triggered: deque[Future[Evaluation]] = deque()  # whose results were not returned yet

    # --- evaluating -------------------------------------------------------------------------------

    def evaluate(
        self, policy_or_weights: Any = None, *, version: int | str | None = None, progress: Progress | None = None
    ) -> Evaluation:
        """Evaluate the current weights now.

        Args:
            policy_or_weights: source of the weights: a policy, its network, a TensorDict or dict of tensors. None: the
                evaluator's policy.
            version: version for the result. None: the number of this evaluation, from 1.
            progress: function called after every few time steps with the numbers of episodes and frames so far. If it
                returns False, the evaluation ends.

        Raises:
            CollectorBusy: an evaluation is running in the background.
            BadWeights: the weights do not fit.
            WorkerDied, WorkerHung, EnvError, PolicyError, ...: see ``on_failure``.
        """
        self._check_open()
        if self.is_running():
            raise CollectorBusy("an evaluation is going on in the background: wait() for it, or trigger() another one")
        with trimmed:
            return self._evaluate(self._job(policy_or_weights, version, copied=False), progress)

    def trigger(self, policy_or_weights: Any = None, version: int | str | None = None) -> int:
        """Evaluate a copy of the weights in the background. Returns at once.

        At the end of a program without ``shutdown()``, Python waits for the triggered evaluations.

        Args: see ``evaluate``.

        Returns:
            the number of the evaluation; 0 if it was skipped.

        Raises:
            BadOption: there are no worker processes, or ``inference="server"``: the policy would act in this process,
                and draw from the random generators of the training.
            CollectorBusy: an evaluation is running, with ``when_busy="raise"``.
        """
        self._check_open()
        if self.num_workers == 0:
            raise BadOption("evaluating in the background takes a process: make the Evaluator with num_workers=1")
        if self._served:
            raise BadOption("inference='server' acts in this process, and not beside your training: leave it out")
        if self.is_running() and self.when_busy == "raise":
            raise CollectorBusy("an evaluation is going on: poll() or wait() first, or use when_busy='queue' or 'skip'")
        if self.is_running() and self.when_busy == "skip":
            self._count(skipped=1)
            return 0
        job = self._job(policy_or_weights, version, copied=True)
        self._triggered.append(self._executor.submit(self._evaluate, job, lambda *_: not self._closed))
        return job.number

    def poll(self) -> Evaluation | None:
        """Return the oldest complete result that was not returned yet, or None. Raises the error of its evaluation."""
        self._check_here()
        return self._fetch() if self._triggered and self._triggered[0].done() else None

    def wait(self, timeout: float | None = None) -> Evaluation:
        """Wait for the oldest evaluation whose result was not returned yet, and return it as ``poll`` does.

        Raises:
            CollectorTimeout: it is not complete after ``timeout`` seconds. It continues.
            BadOption: no result is left to wait for.
        """
        self._check_open()
        if not self._triggered:
            raise BadOption("there is nothing to wait for: every result was taken, so trigger() another one")
        if not wait([self._triggered[0]], timeout).done:
            raise CollectorTimeout(f"the evaluation is not done after {timeout} s; it goes on: wait() again")
        return self._fetch()

    def is_running(self) -> bool:
        """Return whether an evaluation is running or waiting in the background."""
        return self._waiting() > 0

    def stats(self) -> EvaluatorStats:
        """Return a snapshot of all counters. It is cheap, and available after ``shutdown``."""
        return replace(self._stats, waiting=self._waiting())

    def shutdown(self, timeout: float | None = 10.0) -> None:
        """Close the environments, and end the workers and the background thread. May be called again.

        Args:
            timeout: seconds for the current rollout in the background, after which its workers are killed.
        """
        if self._closed:
            return
        self._closed = True
        if self._owner is not None and not self._owner.is_here():  # a fork must not end its parent's workers
            return
        self._triggered = deque(future for future in self._triggered if not future.cancel())
        if wait(self._triggered, timeout).not_done:
            self._stage.kill()
        self._executor.shutdown()
        self._stage.close()

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "busy" if self.is_running() else "idle"
        names = ", ".join(sorted({m if isinstance(m, str) else name_of(m) for m in self._stage.factories}))
        return f"Evaluator({names}, episodes={self.plan.episodes}, rule={self.plan.rule_name!r}, {state})"

    # --- parts ------------------------------------------------------------------------------------

    def _fetch(self) -> Evaluation:
        with trimmed:
            return self._triggered.popleft().result()

    def _job(self, source: Any, version: int | str | None, *, copied: bool) -> _Job:
        if self._stage.shared and source is not None:
            raise BadWeights(
                f"the policy ({name_of(self._policy)}) could not be copied, so weights given to it would be yours: "
                f"evaluate() without any, or make the policy a module"
            )
        meant = self._policy if source is None else source
        weights = None if self._stage.shared else weights_of(meant, copied=copied)
        self._number += 1
        return _Job(self._number, weights, self._number if version is None else version)

    def _waiting(self) -> int:
        return sum(not future.done() for future in [*self._triggered])

    def _evaluate(self, job: _Job, progress: Progress | None) -> Evaluation:
        lost = 0
        seed = self._seed_of(job.number)
        for attempt in range(1, ATTEMPTS + 1):
            before = self._stage.executed
            try:
                done = self._stage.play(
                    self.plan, weights=job.weights, seed=seed, version=job.version, progress=progress
                )
            except BadWeights:
                raise  # nothing was started
            except BaseException as error:
                executed = self._stage.executed - before
                lost += executed
                self._stage.close(objects=False)  # an interrupted rollout cannot be continued
                again = isinstance(error, (WorkerDied, WorkerHung, EnvError)) and self.on_failure == "restart"
                again = again and attempt < ATTEMPTS and not self._closed
                self._count(frames=executed, restarts=int(again))
                if not again:
                    raise
            else:
                executed = self._stage.executed - before
                self._count(evaluations=1, episodes=len(done.records), frames=executed, seconds=done.seconds, last=done)
                return replace(done, discarded=done.discarded | {"restarted": lost}) if lost else done
        raise AssertionError("the last attempt has returned or raised")

    def _seed_of(self, number: int) -> int:
        if self.seed is not None and not self.reseed:
            return self.seed
        words = np.random.SeedSequence(None if self.seed is None else [self.seed, number])
        return int(words.generate_state(1)[0]) >> 2  # small enough that sums with it are 32-bit numbers

    def _count(self, *, last: Evaluation | None = None, **more: float) -> None:
        with self._counting:  # called from two threads
            changed: dict[str, Any] = {name: getattr(self._stats, name) + n for name, n in more.items()}
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
