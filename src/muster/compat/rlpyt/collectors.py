"""rlpyt's training collectors: the names and the protocol of its samplers, with Muster's loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from muster.compat.rlpyt.actors import actor_of, check_actor
from muster.compat.rlpyt.sampling import AgentInputs, RlpytRunner, envs_of, options, store
from muster.compat.rlpyt.trees import overwrite
from muster.errors import MusterError
from muster.utils.tracebacks import trimmed


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
        samples_np: buffer for batches, ``[batch_T, len(envs), ...]``; or two buffers, of which ``sync.db_idx`` is the
            index of the next.
        batch_T: time steps per batch.
        TrajInfoCls: class of the record of an episode; see ``TrajInfo``.
        agent: the agent that acts, under ``SerialSampler`` and ``CpuSampler``.
        sync, step_buffer_np: the connection to the action server, under ``GpuSampler`` and ``AlternatingSampler``.
        global_B: number of environments of all workers.
        env_ranks: ranks of this worker's environments.
    """

    mid_batch_reset: ClassVar[bool]
    _acts: ClassVar[str] = ""  # "agent" or "server"

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
        self.rank, self.envs, self.samples_np, self.batch_T = rank, envs, samples_np, batch_T
        self.TrajInfoCls, self.agent, self.sync, self.step_buffer_np = TrajInfoCls, agent, sync, step_buffer_np
        self.global_B, self.env_ranks = global_B, env_ranks
        check_actor(self, self._acts)

    @abstractmethod
    def start_envs(self, max_decorrelation_steps: int = 0) -> tuple[Any, list[Any]]:
        """Reset all environments; returns the first inputs of the agent, and a new record for each environment."""

    def start_agent(self) -> None:
        """Initialize the agent, if there is one, with the ranks of its environments, and reset it."""
        if self.agent is not None:
            self.agent.collector_initialize(global_B=self.global_B, env_ranks=self.env_ranks)
            self.agent.reset()
            self.agent.sample_mode(itr=0)

    @abstractmethod
    def collect_batch(self, agent_inputs: Any, traj_infos: list[Any], itr: int = 0) -> tuple[Any, list[Any], list[Any]]:
        """Fill ``samples_np``.

        Args:
            agent_inputs, traj_infos: results of the last call of this or ``start_envs``.
            itr: iteration of the algorithm, for the agent's ``sample_mode``.

        Returns:
            the next inputs of the agent, the records of running episodes, and those of episodes that ended.
        """

    def reset_if_needed(self, agent_inputs: Any) -> None:
        """Do the resets that were deferred to the end of the batch, if any."""
        return


class DecorrelatingStartCollector(BaseCollector):
    """A collector that can start with random steps, to decorrelate the states in a batch.

    Its subclasses below define when environments are reset, and whether an agent or an action server acts.

    Attributes:
        max_wait_s: maximum seconds for an answer of the action server.
    """

    mid_batch_reset = True
    max_wait_s: ClassVar[float] = 300.0
    _runner: RlpytRunner | None = None

    def start_envs(self, max_decorrelation_steps: int = 0) -> tuple[AgentInputs, list[Any]]:
        """Reset every environment, and execute 1 to ``max_decorrelation_steps`` random steps in each; 0: none.

        The records include these steps. Episodes that end in these steps are not delivered.

        Raises:
            BadOption: ``samples_np`` does not fit the environments.
        """
        envs, agent_info = envs_of(self._next_samples(), self.batch_T, self.envs, self.TrajInfoCls)
        self._runner = runner = RlpytRunner(
            envs,
            options(mid_batch_reset=self.mid_batch_reset, decorrelation=max_decorrelation_steps),
            rank=self.rank,
            env_ranks=self.env_ranks,
            global_B=self.global_B,
        )
        runner.group.begin()
        if self._acts:
            self._actor = actor_of(self, self._acts, envs, agent_info)
            self._lane = runner.lane(self._actor, self.batch_T)
            if self.mid_batch_reset:
                envs.after_done = self._actor.begin_episode
        if self.step_buffer_np is not None:
            for name, row in zip(("observation", "action", "reward"), runner.inputs, strict=True):
                overwrite(getattr(self.step_buffer_np, name), row)
        return runner.inputs, envs.traj_infos

    @trimmed
    def collect_batch(
        self, agent_inputs: Any, traj_infos: list[Any], itr: int = 0
    ) -> tuple[AgentInputs, list[Any], list[Any]]:
        if not self._acts:
            raise NotImplementedError(f"{type(self).__name__} does not say who acts; define collect_batch")
        runner, envs, lane, samples = self._started(), self._started().envs, self._lane, self._next_samples()
        self.reset_if_needed(agent_inputs)
        if agent_inputs is not None and agent_inputs is not runner.inputs:
            overwrite(runner.inputs, agent_inputs)
        completed: list[Any] = []
        envs.traj_infos, envs.deliver = traj_infos, completed.append
        envs.done[:] = False
        self._actor.begin(itr)
        runner.run(self._actor, lane)
        with runner.group.context():
            self._actor.finish(lane, lane.T - lane.done_steps, getattr(samples.agent, "bootstrap_value", None))
        store(lane, samples)
        return runner.inputs, traj_infos, completed

    def reset_if_needed(self, agent_inputs: Any) -> None:
        """Do the deferred resets of environments, and reset the agent in those whose episode has ended."""
        if self.mid_batch_reset or self._runner is None:
            return
        self._runner.group.begin()
        ended = np.flatnonzero(self._runner.envs.done).tolist()
        for b in ended:
            self._actor.begin_episode(b)
        self._runner.envs.done[:] = False
        if agent_inputs is not None and agent_inputs is not self._runner.inputs:
            overwrite(agent_inputs, self._runner.inputs, ended)

    def _started(self) -> RlpytRunner:
        if self._runner is None:
            raise MusterError(f"{type(self).__name__}.collect_batch() comes after start_envs()")
        return self._runner

    def _next_samples(self) -> Any:
        samples = self.samples_np
        double = not hasattr(samples, "agent") and hasattr(self.sync, "db_idx")
        return samples[self.sync.db_idx.value] if double else samples


class CpuResetCollector(DecorrelatingStartCollector):
    """The agent acts in this process; finished environments are reset at once: ``SerialSampler``, ``CpuSampler``.

    An environment is finished if ``env_info.traj_done`` (default: ``done``) is true. The agent is reset by ``done``.
    """

    _acts = "agent"


class CpuWaitResetCollector(DecorrelatingStartCollector):
    """The agent acts in this process; an environment that is done waits for the next batch: rows are zero, and done."""

    mid_batch_reset = False
    _acts = "agent"


class GpuResetCollector(DecorrelatingStartCollector):
    """An action server acts (``GpuSampler``, ``AlternatingSampler``); finished environments are reset at once."""

    _acts = "server"


class GpuWaitResetCollector(DecorrelatingStartCollector):
    """An action server acts, and an environment that is done waits for the next batch."""

    mid_batch_reset = False
    _acts = "server"
