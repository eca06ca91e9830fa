"""rlpyt's evaluation collectors, which return records of episodes only."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from muster.compat.rlpyt.actors import EvaluationStopped, RlpytActor, actor_of, check_actor
from muster.compat.rlpyt.envs import RlpytEnvs
from muster.compat.rlpyt.sampling import RlpytRunner, options
from muster.compat.rlpyt.trees import BufferPart
from muster.errors import BadOption
from muster.keys import ACTION, OBSERVATION
from muster.memory.slots import Lane

ROWS = 32  # of memory, which an evaluation reuses

log = logging.getLogger(__name__)


class BaseEvalCollector(ABC):
    """Evaluates the agent in separate environments, which are reset for every evaluation.

    Args:
        rank: rank of the worker.
        envs: environments of this worker; the sampler closes them.
        TrajInfoCls: class of the record of an episode; see ``TrajInfo``.
        traj_infos_queue: receives the record of every episode when it ends, and None after the last.
        max_T: time steps per evaluation.
        agent: the agent that acts, under ``CpuSampler``.
        sync: its ``stop_eval`` ends an evaluation early; under ``GpuSampler`` also signals to the action server.
        step_buffer_np: buffer for the action server.

    Attributes:
        max_wait_s: maximum seconds for an answer of the action server.
        unfinished_infos: records of episodes that were running when the last evaluation ended. They are not
            delivered, so the delivered records favour short episodes.
    """

    max_wait_s: ClassVar[float] = 300.0
    _acts: ClassVar[str] = ""  # "agent" or "server"

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
        self.rank, self.envs, self.TrajInfoCls, self.max_T = rank, envs, TrajInfoCls, max_T
        self.traj_infos_queue = traj_infos_queue
        self.agent, self.sync, self.step_buffer_np = agent, sync, step_buffer_np
        self.unfinished_infos: list[Any] = []
        self._parts: tuple[RlpytRunner, RlpytActor, Lane] | None = None
        check_actor(self, self._acts)

    @abstractmethod
    def collect_evaluation(self, itr: int = 0) -> Any:
        """Run the environments for at most ``max_T`` time steps each."""

    def _evaluate(self, itr: int, deliver: Callable[[Any], None], enough: Callable[[], Any]) -> None:
        """Run one evaluation; calls ``deliver`` with each record, and ``enough`` after every time step, to stop."""
        runner, actor, lane = self._start()
        envs = runner.envs
        envs.traj_infos = [self.TrajInfoCls() for _ in self.envs]
        envs.deliver, self._enough, self._left = deliver, enough, self.max_T
        envs.done[:] = envs.begun[:] = False
        runner.group.reset()
        actor.begin_evaluation(itr)
        try:
            while self._left > 0:
                runner.run(actor, lane)
        except EvaluationStopped:
            pass
        actor.finish(lane)
        self.unfinished_infos = [info for info, begun in zip(envs.traj_infos, envs.begun, strict=True) if begun]
        lost = len(self.unfinished_infos)
        log.info("evaluation %s, worker %s: %s episodes were not finished, and do not count", itr, self.rank, lost)

    def _start(self) -> tuple[RlpytRunner, RlpytActor, Lane]:
        """Make environments and actor. Without a step buffer, resets one environment to find its observations."""
        if self._parts is None:
            served, buffer, first = self._acts == "server", self.step_buffer_np, self.envs[0]
            resets = {} if served else {0: first.reset()}
            shown = (buffer.observation, buffer.action) if served else (resets[0], first.action_space.null_value())
            observation, action = (
                BufferPart(part, key, int(served)) for part, key in zip(shown, (OBSERVATION, ACTION), strict=True)
            )
            envs = RlpytEnvs(self.envs, self.TrajInfoCls, observation=observation, action=action)
            envs.resets_made = resets
            actor = actor_of(self, self._acts, envs, stops=True)
            envs.after_done = actor.begin_episode
            runner = RlpytRunner(envs, options(interruptor=self), rank=self.rank)
            self._parts = runner, actor, runner.lane(actor, ROWS)
        return self._parts

    def collection_stopped(self) -> bool:
        """Whether the evaluation is over; the loop calls this after every time step."""
        self._left = 0 if self._enough() else self._left - 1
        return self._left <= 0

    def _evaluate_into_queue(self, itr: int) -> None:
        if getattr(self.sync, "stop_eval", None) is None:
            raise BadOption(f"{type(self).__name__} got no sync.stop_eval, by which its sampler ends an evaluation")
        served = self._acts == "server"  # it checks before the step, as the server expects
        self._evaluate(itr, self.traj_infos_queue.put, lambda: not served and self.sync.stop_eval.value)
        self.traj_infos_queue.put(None)


class CpuEvalCollector(BaseEvalCollector):
    """The agent acts in this process: ``CpuSampler``. ``sync.stop_eval`` is checked after every time step."""

    _acts = "agent"

    def collect_evaluation(self, itr: int = 0) -> None:
        self._evaluate_into_queue(itr)


class GpuEvalCollector(BaseEvalCollector):
    """An action server acts: ``GpuSampler``, ``AlternatingSampler``. It also stops the evaluation, with an answer."""

    _acts = "server"

    def collect_evaluation(self, itr: int = 0) -> None:
        self._evaluate_into_queue(itr)


class SerialEvalCollector(BaseEvalCollector):
    """The agent acts in this process: ``SerialSampler``.

    Args:
        max_trajectories: stop after the time step at which this number of episodes has ended; it may end more.
    """

    _acts = "agent"

    def __init__(
        self, envs: Sequence[Any], agent: Any, TrajInfoCls: Any, max_T: int, max_trajectories: int | None = None
    ) -> None:
        super().__init__(0, envs, TrajInfoCls, None, max_T, agent)
        self.max_trajectories = max_trajectories

    def collect_evaluation(self, itr: int = 0) -> list[Any]:
        """Run an evaluation, and return the records of episodes in the order of their ends."""
        completed: list[Any] = []
        most = self.max_trajectories
        self._evaluate(itr, completed.append, lambda: most is not None and len(completed) >= most)
        return completed
