"""rlpyt's collectors: the names and the protocol of its samplers, with Muster's loop."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from muster.compat.base import GroupRunner, borrowed
from muster.compat.rlpyt.actors import (
    AGENT_INFO,
    EvaluationStopped,
    LocalAgent,
    RlpytActor,
    Server,
)
from muster.compat.rlpyt.envs import ENV_INFO, RlpytEnvs
from muster.compat.rlpyt.trees import BufferPart, leaves, mapped, overwrite
from muster.envs.previous import PREV_ACTION, PREV_REWARD, with_previous
from muster.errors import BadOption, MusterError
from muster.keys import ACTION, DONE, OBSERVATION, REWARD, Key, dotted, next_of
from muster.memory.slots import Lane
from muster.rng import GroupRng
from muster.utils.tracebacks import trimmed

NEEDED = ("env", "observation"), ("env", "reward"), ("env", "done"), ("agent", "action")
OPTIONAL = (
    ("env", "prev_reward"),
    ("env", "env_info"),
    ("agent", "prev_action"),
    ("agent", "agent_info"),
)
ROWS = 32  # of memory, which an evaluation reuses

log = logging.getLogger(__name__)


class AgentInputs(NamedTuple):
    """The inputs of an agent, ``[B, ...]`` each: views of the first rows of the next batch."""

    observation: Any
    prev_action: Any
    prev_reward: Any


class RlpytRunner(GroupRunner):
    """Runs environments some rows at a time; ``inputs`` are the next inputs of the agent.

    Args:
        mid_batch_reset: reset finished environments at once; else they wait for the next batch.
        decorrelation: maximum of random steps before the first row.
    """

    def __init__(
        self,
        envs: RlpytEnvs,
        *,
        rank: int,
        env_ranks: Sequence[int] | None = None,
        global_B: int = 1,
        mid_batch_reset: bool = True,
        decorrelation: int = 0,
    ) -> None:
        options = borrowed(
            reset_when_done=mid_batch_reset,
            max_decorrelation_steps=decorrelation,
            traj_done_key="traj_done",
            prev_action_reward=True,
            compact_obs=True,
        )
        ranks = (
            np.arange(envs.spec.num_envs)
            if env_ranks is None
            else np.asarray(env_ranks, np.int64)
        )
        seed = int(np.random.randint(2**31)) if decorrelation else 0
        total_envs = max(global_B, int(ranks.max()) + 1)
        super().__init__(
            with_previous(envs),
            options,
            rng=GroupRng(seed, rank),
            env_ids=ranks,
            total_envs=total_envs,
        )
        self.envs = envs
        carry = {key: row[0] for key, row in self.group.carry.items()}
        prev_action = envs.action.over(carry, (PREV_ACTION,))
        self.inputs = AgentInputs(
            envs.observation.over(carry), prev_action, carry[PREV_REWARD]
        )


def envs_of(
    samples: Any, T: int, envs: Sequence[Any], TrajInfoCls: Any
) -> tuple[RlpytEnvs, BufferPart | None]:
    """Return the environments with the columns of ``samples``, and the buffer of ``agent_info``; or
    ``BadOption``.
    """
    for side, name in (*NEEDED, *OPTIONAL):
        tree = getattr(getattr(samples, side, None), name, None)
        if tree is None and (side, name) in NEEDED:
            raise BadOption(
                f"samples_np has no {side}.{name}, which every batch is written to"
            )
        for key, leaf in leaves(tree, (side, name)).items():
            if np.shape(leaf)[:2] != (T, len(envs)):
                raise BadOption(
                    f"samples_np.{dotted(key)} is {np.shape(leaf)}, expected ({T}, {len(envs)},"
                    f" ...): batch_T={T} rows for {len(envs)} environments. A worker gets its own"
                    " part of the sampler's buffer."
                )
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


def store(lane: Lane, samples: Any) -> None:
    """Copy a batch into rlpyt's buffers.

    If ``prev_action`` and ``action`` (or the rewards) share memory, as in rlpyt's samplers, only
    the first row is written, and the others are the actions of the row before, even if the agent
    got other inputs.
    """
    env = samples.env
    agent = samples.agent
    _copy(lane, env.observation, OBSERVATION)
    _copy(lane, env.reward, REWARD)
    _copy(lane, env.done, next_of(DONE))
    _copy(lane, getattr(env, "env_info", None), ENV_INFO)
    _copy(lane, agent.action, ACTION)
    _copy(lane, getattr(agent, "agent_info", None), AGENT_INFO)
    _copy(lane, getattr(env, "prev_reward", None), PREV_REWARD, shares_with=env.reward)
    _copy(
        lane,
        getattr(agent, "prev_action", None),
        (PREV_ACTION,),
        shares_with=agent.action,
    )


def _copy(lane: Lane, buffer: Any, root: Key, shares_with: Any = None) -> None:
    others = leaves(shares_with, root) if shares_with is not None else {}
    for key, leaf in leaves(buffer, root).items():
        rows = 1 if key in others and np.may_share_memory(leaf, others[key]) else lane.T
        leaf[:rows] = lane.arrays[key][:rows]


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
        self.rank = rank
        self.envs = envs
        self.samples_np = samples_np
        self.batch_T = batch_T
        self.TrajInfoCls = TrajInfoCls
        self.agent = agent
        self.sync = sync
        self.step_buffer_np = step_buffer_np
        self.global_B = global_B
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

    def start_envs(
        self, max_decorrelation_steps: int = 0
    ) -> tuple[AgentInputs, list[Any]]:
        """Reset every environment, and execute 1 to ``max_decorrelation_steps`` random steps in
        each; 0: none.

        The records include these steps. Episodes that end in these steps are not delivered.

        Raises:
            BadOption: ``samples_np`` does not fit the environments.
        """
        envs, agent_info = envs_of(
            self._next_samples(), self.batch_T, self.envs, self.TrajInfoCls
        )
        self._runner = runner = RlpytRunner(
            envs,
            rank=self.rank,
            env_ranks=self.env_ranks,
            global_B=self.global_B,
            mid_batch_reset=self.mid_batch_reset,
            decorrelation=max_decorrelation_steps,
        )
        runner.begin_episodes()
        if self._acts is not None:
            self._actor = self._acts(self, envs, agent_info)
            self._lane = runner.lane(self._actor, self.batch_T)
            if self.mid_batch_reset:
                envs.when_done(self._actor.begin_episode)
        if self.step_buffer_np is not None:
            for name, row in zip(
                ("observation", "action", "reward"), runner.inputs, strict=True
            ):
                overwrite(getattr(self.step_buffer_np, name), row)
        return runner.inputs, envs.traj_infos

    @trimmed
    def collect_batch(
        self, agent_inputs: Any, traj_infos: list[Any], itr: int = 0
    ) -> tuple[AgentInputs, list[Any], list[Any]]:
        if self._acts is None:
            raise NotImplementedError(
                f"{type(self).__name__} does not say who acts; define collect_batch"
            )
        runner, envs, lane, samples = (
            self._started(),
            self._started().envs,
            self._lane,
            self._next_samples(),
        )
        self.reset_if_needed(agent_inputs)
        if agent_inputs is not None and agent_inputs is not runner.inputs:
            overwrite(runner.inputs, agent_inputs)
        completed: list[Any] = []
        envs.record(traj_infos, completed.append)
        self._actor.begin(itr)
        runner.run(self._actor, lane)
        with runner.group.contexts.usual:
            self._actor.finish(
                lane,
                lane.T - lane.done_steps,
                getattr(samples.agent, "bootstrap_value", None),
            )
        store(lane, samples)
        return runner.inputs, traj_infos, completed

    def reset_if_needed(self, agent_inputs: Any) -> None:
        """Do the deferred resets of environments, and reset the agent in those whose episode has
        ended.
        """
        if self.mid_batch_reset or self._runner is None:
            return
        self._runner.begin_episodes()
        ended = np.flatnonzero(self._runner.envs.done).tolist()
        for b in ended:
            self._actor.begin_episode(b)
        self._runner.envs.done[:] = False
        if agent_inputs is not None and agent_inputs is not self._runner.inputs:
            overwrite(agent_inputs, self._runner.inputs, ended)

    def _started(self) -> RlpytRunner:
        if self._runner is None:
            raise MusterError(
                f"{type(self).__name__}.collect_batch() comes after start_envs()"
            )
        return self._runner

    def _next_samples(self) -> Any:
        samples = self.samples_np
        double = not hasattr(samples, "agent") and hasattr(self.sync, "db_idx")
        return samples[self.sync.db_idx.value] if double else samples


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
        self.rank = rank
        self.envs = envs
        self.TrajInfoCls = TrajInfoCls
        self.max_T = max_T
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
        actor.finish(lane)
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
            buffer = self.step_buffer_np
            first = self.envs[0]
            resets = {} if served else {0: mapped(np.copy, first.reset())}
            shown = (
                (buffer.observation, buffer.action)
                if served
                else (resets[0], first.action_space.null_value())
            )
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

    def _evaluate_into_queue(self, itr: int) -> None:
        if getattr(self.sync, "stop_eval", None) is None:
            raise BadOption(
                f"{type(self).__name__} got no sync.stop_eval, by which its sampler ends an"
                " evaluation"
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

    def collect_evaluation(self, itr: int = 0) -> list[Any]:
        """Run an evaluation, and return the records of episodes in the order of their ends."""
        completed: list[Any] = []
        most = self.max_trajectories
        self._evaluate(
            itr, completed.append, lambda: most is not None and len(completed) >= most
        )
        return completed
