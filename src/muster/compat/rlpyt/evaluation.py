"""rlpyt's evaluation collectors: records of episodes, and nothing else."""

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

ROWS = 32  # of memory; an evaluation goes through it as often as it needs

log = logging.getLogger(__name__)


class BaseEvalCollector(ABC):
    """Evaluates the agent in environments of its own, which are reset every time.

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
        self._parts: tuple[RlpytRunner, RlpytActor, Lane] | None = None
        check_actor(self, self._acts)

    @abstractmethod
    def collect_evaluation(self, itr: int = 0) -> Any:
        """Run the environments for at most ``max_T`` time steps each."""

    def _evaluate(self, itr: int, deliver: Callable[[Any], None], enough: Callable[[], Any]) -> None:
        """One evaluation; ``deliver`` gets the records, ``enough`` is asked after every time step."""
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
        """The environments, and who acts. Without a step buffer one is reset to see what environments observe."""
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
        """Asked by the loop after every time step: whether the evaluation is over."""
        self._left = 0 if self._enough() else self._left - 1
        return self._left <= 0

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
