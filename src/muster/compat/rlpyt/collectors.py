"""rlpyt's collectors: the names and the protocol of its samplers, with Muster's loop."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from muster.compat.rlpyt.actors import (
    AGENT_INFO,
    EvaluationStopped,
    LocalAgent,
    RlpytActor,
    Server,
)
from muster.compat.rlpyt.arguments import (
    check_envs,
    check_record_class,
    check_records,
    ranks_of,
)
from muster.compat.rlpyt.batches import Batches, explain
from muster.compat.rlpyt.buffers import Buffers
from muster.compat.rlpyt.envs import ENV_INFO, RlpytEnvs
from muster.compat.rlpyt.runner import AgentInputs, RlpytRunner
from muster.compat.rlpyt.trees import (
    BufferPart,
    example_problem,
    mapped,
    overwrite,
    overwrite_problem,
)
from muster.envs.checks import call
from muster.errors import BadEnvOutput, BadOption, MusterError
from muster.keys import ACTION, OBSERVATION
from muster.memory.slots import Lane
from muster.utils.integers import integer
from muster.utils.tracebacks import trimmed

ROWS = 32  # of memory, which an evaluation reuses
# what follows from an error in an evaluation
NEXT_EVALUATION = "This evaluation has ended; the next one resets all environments."

log = logging.getLogger(__name__)


def envs_of(
    samples: Any, envs: Sequence[Any], TrajInfoCls: Any
) -> tuple[RlpytEnvs, BufferPart | None]:
    """Return the environments with the columns of ``samples``, and the buffer of ``agent_info``."""
    env = samples.env
    agent = samples.agent
    return RlpytEnvs(
        envs,
        TrajInfoCls,
        observation=BufferPart(env.observation, OBSERVATION, 2),
        action=BufferPart(agent.action, ACTION, 2),
        env_info=BufferPart(env.env_info, ENV_INFO, 2)
        if hasattr(env, "env_info")
        else None,
        reward_dtype=env.reward.dtype,
    ), (
        BufferPart(agent.agent_info, AGENT_INFO, 2)
        if hasattr(agent, "agent_info")
        else None
    )


class BaseCollector(ABC):
    """Steps environments for a sampler, which makes it and calls it::

        agent_inputs, traj_infos = collector.start_envs(max_decorrelation_steps)
        collector.start_agent()
        while True:
            collector.reset_if_needed(agent_inputs)
            agent_inputs, traj_infos, completed = collector.collect_batch(agent_inputs, traj_infos, itr)

    Args:
        rank: rank of the worker.
        envs: environments of this worker; the sampler closes them.
        samples_np: buffer for batches, ``[batch_T, len(envs), ...]``; or two buffers, of which
            ``sync.db_idx`` is the index of the next.
        batch_T: time steps per batch.
        TrajInfoCls: class of the record of an episode; see ``TrajInfo``.
        agent: the agent that acts, under ``SerialSampler`` and ``CpuSampler``.
        sync, step_buffer_np: the connection to the action server, under ``GpuSampler`` and
            ``AlternatingSampler``.
        global_B: number of environments of all workers.
        env_ranks: ranks of this worker's environments.
    """

    mid_batch_reset: ClassVar[bool]
    _acts: ClassVar[type[RlpytActor] | None] = None

    def __init__(
        self,
        rank: int,
        envs: Sequence[Any],
        samples_np: Any,
        batch_T: int,
        TrajInfoCls: Any,
        agent: Any = None,
        sync: Any = None,
        step_buffer_np: Any = None,
        global_B: int = 1,
        env_ranks: Sequence[int] | None = None,
    ) -> None:
        name = type(self).__name__
        check_envs(name, envs)
        check_record_class(name, TrajInfoCls)
        ranks_of(name, env_ranks, len(envs))
        self.rank = rank
        self.envs = envs
        self.samples_np = samples_np
        self.batch_T = integer("batch_T", batch_T, of=name)
        self.TrajInfoCls = TrajInfoCls
        self.agent = agent
        self.sync = sync
        self.step_buffer_np = step_buffer_np
        self.global_B = integer("global_B", global_B, of=name)
        self.env_ranks = env_ranks
        if self._acts is not None:
            self._acts.check(self)

    @abstractmethod
    def start_envs(self, max_decorrelation_steps: int = 0) -> tuple[Any, list[Any]]:
        """Reset all environments; returns the first inputs of the agent, and a new record for each
        environment.
        """

    def start_agent(self) -> None:
        """Initialize the agent, if there is one, with the ranks of its environments, and reset it."""
        if self.agent is not None:
            self.agent.collector_initialize(
                global_B=self.global_B, env_ranks=self.env_ranks
            )
            self.agent.reset()
            self.agent.sample_mode(itr=0)

    @abstractmethod
    def collect_batch(
        self, agent_inputs: Any, traj_infos: list[Any], itr: int = 0
    ) -> tuple[Any, list[Any], list[Any]]:
        """Fill ``samples_np``.

        After an error of the agent, the next call completes the same batch: it begins with the row
        in which the error was raised, and ignores ``agent_inputs``. After an error of an
        environment, the next call resets all environments and begins another batch; the rows of the
        first are dropped.

        Args:
            agent_inputs, traj_infos: results of the last call of this or ``start_envs``.
            itr: iteration of the algorithm, for the agent's ``sample_mode``.

        Returns:
            the next inputs of the agent, the records of running episodes, and those of episodes
            that ended.
        """

    def reset_if_needed(self, agent_inputs: Any) -> None:
        """Do the resets that were deferred to the end of the batch, if any."""
        return


class DecorrelatingStartCollector(BaseCollector):
    """A collector that can start with random steps, to decorrelate the states in a batch.

    Its subclasses below define when environments are reset, and whether an agent or an action
    server acts.

    Attributes:
        max_wait_s: maximum seconds for an answer of the action server.
    """

    mid_batch_reset = True
    max_wait_s: ClassVar[float] = 300.0
    _runner: RlpytRunner | None = None
    _batches: Batches | None = None

    def start_envs(
        self, max_decorrelation_steps: int = 0
    ) -> tuple[AgentInputs, list[Any]]:
        """Reset every environment, and execute 1 to ``max_decorrelation_steps`` random steps in
        each; 0: none.

        The records include these steps. Episodes that end in these steps are not delivered.

        Raises:
            BadOption: ``samples_np`` does not fit the environments.
        """
        buffers = Buffers(self.batch_T, len(self.envs))
        for samples in self._every_samples():
            buffers.check(samples)
        envs, agent_info = envs_of(self._next_samples(), self.envs, self.TrajInfoCls)
        runner = RlpytRunner(
            envs,
            rank=self.rank,
            ranks=ranks_of(type(self).__name__, self.env_ranks, len(self.envs)),
            global_B=self.global_B,
            mid_batch_reset=self.mid_batch_reset,
            decorrelation=max_decorrelation_steps,
        )
        batches = None
        if self._acts is not None:
            actor = self._acts(self, envs, agent_info)
            for samples in self._every_samples():
                actor.check_values(getattr(samples.agent, "bootstrap_value", None))
            batches = Batches(runner, actor, self.batch_T)
            if self.mid_batch_reset:
                envs.when_done(actor.begin_episode)
        self._runner = (
            None  # if a reset fails, no earlier one goes on with the environments
        )
        runner.begin_episodes()
        self._runner = runner
        self._batches = batches
        self._buffers = buffers
        if self.step_buffer_np is not None:
            self._show_to_server(runner.inputs)
        return runner.inputs, envs.traj_infos

    @trimmed
    def collect_batch(
        self, agent_inputs: Any, traj_infos: list[Any], itr: int = 0
    ) -> tuple[AgentInputs, list[Any], list[Any]]:
        if self._acts is None:
            raise NotImplementedError(
                f"{type(self).__name__} does not say who acts; define collect_batch"
            )
        runner, batches = self._started()
        samples = self._next_samples()
        self._buffers.check(samples)
        check_records(traj_infos, len(self.envs))
        if not batches.is_under_way:
            self.reset_if_needed(agent_inputs)
            if agent_inputs is not None and agent_inputs is not runner.inputs:
                _check_inputs(runner.inputs, agent_inputs)
                overwrite(runner.inputs, agent_inputs)
            batches.begin(traj_infos)
        completed = batches.complete(samples, itr)
        return runner.inputs, runner.envs.traj_infos, completed

    def reset_if_needed(self, agent_inputs: Any) -> None:
        """Do the deferred resets of environments, and reset the agent in those whose episode has
        ended.
        """
        runner = self._runner
        batches = self._batches
        if self.mid_batch_reset or runner is None:
            return
        if batches is not None and batches.is_under_way:
            return  # its environments wait for its end
        runner.begin_episodes()
        ended = np.flatnonzero(runner.envs.done).tolist()
        for b in ended:
            if batches is not None:
                batches.actor.begin_episode(b)
        runner.envs.done[:] = False
        if agent_inputs is not None and agent_inputs is not runner.inputs:
            _check_inputs(runner.inputs, agent_inputs)
            overwrite(agent_inputs, runner.inputs, ended)

    def _show_to_server(self, inputs: AgentInputs) -> None:
        for name, row in zip(("observation", "action", "reward"), inputs, strict=True):
            place = getattr(self.step_buffer_np, name)
            problem = overwrite_problem(place, row)
            if problem is not None:
                raise BadOption(
                    f"step_buffer_np.{name} does not fit samples_np, which {problem}"
                )
            overwrite(place, row)

    def _started(self) -> tuple[RlpytRunner, Batches]:
        if self._runner is None or self._batches is None:
            raise MusterError(
                f"{type(self).__name__}.collect_batch() comes after start_envs()"
            )
        return self._runner, self._batches

    def _every_samples(self) -> Sequence[Any]:
        samples = self.samples_np
        return samples if self._has_two_buffers else [samples]

    @property
    def _has_two_buffers(self) -> bool:
        return not hasattr(self.samples_np, "agent") and hasattr(self.sync, "db_idx")

    def _next_samples(self) -> Any:
        samples = self.samples_np
        return samples[self.sync.db_idx.value] if self._has_two_buffers else samples


def _check_inputs(own: AgentInputs, given: Any) -> None:
    problem = overwrite_problem(own, given)
    if problem is not None:
        raise BadOption(
            f"agent_inputs {problem}: pass what the last call or start_envs() has returned, or a"
            " copy of it"
        )


class CpuResetCollector(DecorrelatingStartCollector):
    """The agent acts in this process; finished environments are reset at once: ``SerialSampler``,
    ``CpuSampler``.

    An environment is finished if ``env_info.traj_done`` (default: ``done``) is true. The agent is
    reset by ``done``.
    """

    _acts = LocalAgent


class CpuWaitResetCollector(DecorrelatingStartCollector):
    """The agent acts in this process; an environment that is done waits for the next batch: rows
    are zero, and done.
    """

    mid_batch_reset = False
    _acts = LocalAgent


class GpuResetCollector(DecorrelatingStartCollector):
    """An action server acts (``GpuSampler``, ``AlternatingSampler``); finished environments are
    reset at once.
    """

    _acts = Server


class GpuWaitResetCollector(DecorrelatingStartCollector):
    """An action server acts, and an environment that is done waits for the next batch."""

    mid_batch_reset = False
    _acts = Server


class BaseEvalCollector(ABC):
    """Evaluates the agent in separate environments, which are reset for every evaluation.

    Args:
        rank: rank of the worker.
        envs: environments of this worker; the sampler closes them.
        TrajInfoCls: class of the record of an episode; see ``TrajInfo``.
        traj_infos_queue: receives the record of every episode when it ends, and None after the
            last.
        max_T: time steps per evaluation.
        agent: the agent that acts, under ``CpuSampler``.
        sync: its ``stop_eval`` ends an evaluation early; under ``GpuSampler`` also signals to the
            action server.
        step_buffer_np: buffer for the action server.

    Attributes:
        max_wait_s: maximum seconds for an answer of the action server.
        unfinished_infos: records of episodes that were running when the last evaluation ended. They
            are not delivered, so the delivered records favour short episodes.
    """

    max_wait_s: ClassVar[float] = 300.0
    _acts: ClassVar[type[RlpytActor] | None] = None

    def __init__(
        self,
        rank: int,
        envs: Sequence[Any],
        TrajInfoCls: Any,
        traj_infos_queue: Any,
        max_T: int,
        agent: Any = None,
        sync: Any = None,
        step_buffer_np: Any = None,
    ) -> None:
        name = type(self).__name__
        check_envs(name, envs)
        check_record_class(name, TrajInfoCls)
        self.rank = rank
        self.envs = envs
        self.TrajInfoCls = TrajInfoCls
        self.max_T = integer("max_T", max_T, of=name)
        self.traj_infos_queue = traj_infos_queue
        self.agent = agent
        self.sync = sync
        self.step_buffer_np = step_buffer_np
        self.unfinished_infos: list[Any] = []
        self._parts: tuple[RlpytRunner, RlpytActor, Lane] | None = None
        if self._acts is not None:
            self._acts.check(self)

    @abstractmethod
    def collect_evaluation(self, itr: int = 0) -> Any:
        """Run the environments for at most ``max_T`` time steps each."""

    def _evaluate(
        self, itr: int, deliver: Callable[[Any], None], enough: Callable[[], Any]
    ) -> None:
        """Run one evaluation; calls ``deliver`` with each record, and ``enough`` after every time
        step, to stop.
        """
        runner, actor, lane = self._start()
        envs = runner.envs
        left = self.max_T

        def watch(lane: Lane, t: int) -> None:
            nonlocal left
            left = 0 if enough() else left - 1
            if left <= 0:
                lane.stop()

        envs.record([self.TrajInfoCls() for _ in self.envs], deliver)
        envs.begun[:] = False
        runner.group.reset()
        actor.begin(itr, evaluates=True)
        try:
            while left > 0:
                runner.run(actor, lane, watch=watch)
        except EvaluationStopped:
            pass
        except MusterError as error:
            explain(error, NEXT_EVALUATION)
            raise
        actor.conclude(actor.last_inputs(lane))
        self.unfinished_infos = [
            info
            for info, begun in zip(envs.traj_infos, envs.begun, strict=True)
            if begun
        ]
        lost = len(self.unfinished_infos)
        log.info(
            "evaluation %s, worker %s: %s episodes were not finished, and do not count",
            itr,
            self.rank,
            lost,
        )

    def _start(self) -> tuple[RlpytRunner, RlpytActor, Lane]:
        """Make environments and actor.

        Without a step buffer, resets one environment to find its observations.
        """
        if self._parts is None:
            served = self._acts is Server
            resets = {} if served else {0: self._first_reset()}
            if served:
                buffer = self.step_buffer_np
                shown = buffer.observation, buffer.action
            else:
                shown = resets[0], self._null_action()
            observation, action = (
                BufferPart(part, key, int(served))
                for part, key in zip(shown, (OBSERVATION, ACTION), strict=True)
            )
            envs = RlpytEnvs(
                self.envs,
                self.TrajInfoCls,
                observation=observation,
                action=action,
                resets_made=resets,
            )
            assert self._acts is not None, "only collectors of this module evaluate"
            actor = self._acts(self, envs, None)
            envs.when_done(actor.begin_episode)
            runner = RlpytRunner(envs, rank=self.rank)
            self._parts = runner, actor, runner.lane(actor, ROWS)
        return self._parts

    def _first_reset(self) -> Any:
        """Reset the first environment, and return a copy of the observation."""
        env = self.envs[0]
        name = f"{type(env).__name__}[0]"
        observation = call(env, "reset", name, index=0)
        problem = example_problem(observation)
        if problem is not None:
            raise BadEnvOutput(
                f"what {name}.reset returned {problem}. rlpyt's environments return the observation"
                " alone"
            )
        return mapped(np.copy, observation)

    def _null_action(self) -> Any:
        """The action before the first one, which shows what actions are."""
        env = self.envs[0]
        space = getattr(env, "action_space", None)
        name = type(env).__name__
        if not callable(getattr(space, "null_value", None)):
            raise BadOption(
                f"{name}[0].action_space has no null_value, which shows what actions are: wrap"
                " Gym's environments in rlpyt's GymEnvWrapper"
            )
        action = call(space, "null_value", f"{name}[0].action_space", index=0)
        problem = example_problem(action)
        if problem is not None:
            raise BadEnvOutput(
                f"what {name}[0].action_space.null_value returned {problem}"
            )
        return action

    def _evaluate_into_queue(self, itr: int) -> None:
        if getattr(self.sync, "stop_eval", None) is None:
            raise BadOption(
                f"{type(self).__name__} got no sync.stop_eval, by which its sampler ends an"
                " evaluation"
            )
        if not callable(getattr(self.traj_infos_queue, "put", None)):
            raise BadOption(
                f"{type(self).__name__}(traj_infos_queue={self.traj_infos_queue!r}): expected a"
                " queue, which gets the records of episodes"
            )
        served = (
            self._acts is Server
        )  # it checks before the step, as the server expects
        self._evaluate(
            itr,
            self.traj_infos_queue.put,
            lambda: not served and self.sync.stop_eval.value,
        )
        self.traj_infos_queue.put(None)


class CpuEvalCollector(BaseEvalCollector):
    """The agent acts in this process: ``CpuSampler``.

    ``sync.stop_eval`` is checked after every time step.
    """

    _acts = LocalAgent

    def collect_evaluation(self, itr: int = 0) -> None:
        self._evaluate_into_queue(itr)


class GpuEvalCollector(BaseEvalCollector):
    """An action server acts: ``GpuSampler``, ``AlternatingSampler``.

    It also stops the evaluation, with an answer.
    """

    _acts = Server

    def collect_evaluation(self, itr: int = 0) -> None:
        self._evaluate_into_queue(itr)


class SerialEvalCollector(BaseEvalCollector):
    """The agent acts in this process: ``SerialSampler``.

    Args:
        max_trajectories: stop after the time step at which this number of episodes has ended; it
            may end more.
    """

    _acts = LocalAgent

    def __init__(
        self,
        envs: Sequence[Any],
        agent: Any,
        TrajInfoCls: Any,
        max_T: int,
        max_trajectories: int | None = None,
    ) -> None:
        super().__init__(0, envs, TrajInfoCls, None, max_T, agent)
        self.max_trajectories = max_trajectories
        if max_trajectories is not None:
            self.max_trajectories = integer(
                "max_trajectories",
                max_trajectories,
                of=type(self).__name__,
                or_else="None: no limit",
            )

    def collect_evaluation(self, itr: int = 0) -> list[Any]:
        """Run an evaluation, and return the records of episodes in the order of their ends."""
        completed: list[Any] = []
        most = self.max_trajectories
        self._evaluate(
            itr, completed.append, lambda: most is not None and len(completed) >= most
        )
        return completed
