"""rlpyt's evaluation collectors: records of episodes, and nothing else."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from muster.compat.rlpyt.actors import EvaluationStopped, actor_of, check_actor
from muster.compat.rlpyt.envs import RlpytEnvs
from muster.compat.rlpyt.sampling import RlpytRunner, options
from muster.compat.rlpyt.trees import BufferPart
from muster.errors import BadOption
from muster.keys import ACTION, OBSERVATION

ROWS = 32  # of memory; an evaluation goes through it as often as it needs

log = logging.getLogger(__name__)


class BaseEvalCollector(ABC):
    """Evaluates the agent in environments of its own, which begin anew every time.

    Args:
        rank: of the worker.
        envs: this worker's; the sampler closes them.
        TrajInfoCls: makes the record of an episode; see ``TrajInfo``.
        traj_infos_queue: gets the record of every episode when it ends, and None after the last.
        max_T: time steps per evaluation.
        agent: who acts, under ``CpuSampler``.
        sync: its ``stop_eval`` ends an evaluation early; under ``GpuSampler`` also how to ask the action server.
        step_buffer_np: for that as well.

    Attributes:
        max_wait_s: how long an answer of the action server may take.
        unfinished_infos: records of the episodes that were going on when the last evaluation ended. They are not
            delivered, and so what is delivered favours short episodes.
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
        self._evaluation: EvaluationRun | None = None
        check_actor(self, self._acts)

    @abstractmethod
    def collect_evaluation(self, itr: int = 0) -> Any:
        """Run the environments for at most ``max_T`` time steps each."""

    def _evaluate(self, itr: int, deliver: Callable[[Any], None], enough: Callable[[], Any]) -> None:
        if self._evaluation is None:
            self._evaluation = EvaluationRun(self, self._acts)
        self.unfinished_infos = self._evaluation.run(itr, deliver, enough)
        lost = len(self.unfinished_infos)
        log.info("evaluation %s, worker %s: %s episodes were not finished, and do not count", itr, self.rank, lost)

    def _evaluate_into_queue(self, itr: int) -> None:
        if getattr(self.sync, "stop_eval", None) is None:
            raise BadOption(f"{type(self).__name__} got no sync.stop_eval, by which its sampler ends an evaluation")
        served = self._acts == "server"  # which looks at it before the step, as the server expects it
        self._evaluate(itr, self.traj_infos_queue.put, lambda: not served and self.sync.stop_eval.value)
        self.traj_infos_queue.put(None)


class CpuEvalCollector(BaseEvalCollector):
    """The agent acts here: ``CpuSampler``. ``sync.stop_eval`` is looked at after every time step."""

    _acts = "agent"

    def collect_evaluation(self, itr: int = 0) -> None:
        self._evaluate_into_queue(itr)


class GpuEvalCollector(BaseEvalCollector):
    """An action server acts: ``GpuSampler``, ``AlternatingSampler``. It also says when to stop, with an answer."""

    _acts = "server"

    def collect_evaluation(self, itr: int = 0) -> None:
        self._evaluate_into_queue(itr)


class SerialEvalCollector(BaseEvalCollector):
    """The agent acts here: ``SerialSampler``.

    Args:
        max_trajectories: end with the time step at which so many episodes have ended; more may end in that step.
    """

    _acts = "agent"

    def __init__(
        self, envs: Sequence[Any], agent: Any, TrajInfoCls: Any, max_T: int, max_trajectories: int | None = None
    ) -> None:
        super().__init__(0, envs, TrajInfoCls, None, max_T, agent)
        self.max_trajectories = max_trajectories

    def collect_evaluation(self, itr: int = 0) -> list[Any]:
        """The records of episodes, in the order of their ends."""
        completed: list[Any] = []
        most = self.max_trajectories
        self._evaluate(itr, completed.append, lambda: most is not None and len(completed) >= most)
        return completed


class EvaluationRun:
    """The environments of an evaluation collector, and who acts in them.

    Args:
        collector: where there is no step buffer to say what environments observe, one of them is reset to see it; the
            first ``run`` begins with that.
    """

    def __init__(self, collector: BaseEvalCollector, acts: str) -> None:
        envs, buffer, self._collector = collector.envs, collector.step_buffer_np, collector
        self._resets = {} if acts == "server" else {0: envs[0].reset()}
        observation, action = (
            (BufferPart(buffer.observation, OBSERVATION, 1), BufferPart(buffer.action, ACTION, 1))
            if acts == "server"
            else (BufferPart(self._resets[0], OBSERVATION, 0), BufferPart(envs[0].action_space.null_value(), ACTION, 0))
        )
        self._envs = RlpytEnvs(envs, collector.TrajInfoCls, observation=observation, action=action)
        self._envs.resets_made = self._resets
        self._actor = actor_of(collector, acts, self._envs, stops=True)
        self._envs.after_done = self._actor.begin_episode
        self._runner = RlpytRunner(self._envs, options(interruptor=self), rank=collector.rank)
        self._lane = self._runner.lane(self._actor, ROWS)
        self._left = 0
        self._enough: Callable[[], Any] = lambda: False

    def run(self, itr: int, deliver: Callable[[Any], None], enough: Callable[[], Any]) -> list[Any]:
        """One evaluation.

        Args:
            deliver: gets the records.
            enough: asked after every time step.

        Returns:
            the records of episodes that go on.
        """
        envs, group = self._envs, self._runner.group
        envs.traj_infos = [self._collector.TrajInfoCls() for _ in envs.envs]
        envs.deliver, self._enough, self._left = deliver, enough, self._collector.max_T
        envs.done[:] = envs.begun[:] = False
        group.reset()
        self._actor.begin_evaluation(itr)
        try:
            while self._left > 0:
                self._runner.run(self._actor, self._lane)
        except EvaluationStopped:
            pass
        self._actor.finish(self._lane)
        return [info for info, begun in zip(envs.traj_infos, envs.begun, strict=True) if begun]

    def collection_stopped(self) -> bool:
        self._left = 0 if self._enough() else self._left - 1
        return self._left <= 0
