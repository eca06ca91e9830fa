"""Adapters that choose actions: an agent in this process, or an action server in another one; both
as policies.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from operator import methodcaller
from typing import Any, ClassVar, Literal

import numpy as np

from muster.compat.rlpyt.envs import RlpytEnvs
from muster.compat.rlpyt.trees import BufferPart, as_array, mapped, overwrite
from muster.envs.checks import NUMBERS, described_value
from muster.envs.previous import PREV_ACTION, PREV_REWARD
from muster.errors import (
    BadOption,
    BadPolicyOutput,
    CollectorTimeout,
    MusterError,
    PolicyError,
    WorkerDied,
    described,
)
from muster.keys import Key
from muster.memory.slots import Lane
from muster.memory.specs import Column
from muster.policies.inputs import InputRows
from muster.protocols import Act, Outputs
from muster.rng import GroupRng
from muster.rollout.acting import call_policy

AGENT_INFO: Key = ("agent_info",)
# a leaf
COPY: dict[str, Callable[[Any], Any]] = {
    "tensors": methodcaller("clone"),
    "arrays": np.copy,
}
LOOK_EVERY_S = 1.0  # interval of checks that the action server's process is alive


class EvaluationStopped(MusterError):
    """The action server has stopped the evaluation: the requested step is not executed."""


class RlpytActor(ABC):
    """Implements ``Policy`` for a collector.

    Attributes:
        agent_info: buffer for the agent's information; None: it is not recorded.
        stops: raise ``EvaluationStopped`` when the action server stops the evaluation; set by
            ``begin``.
        memory: attribute of lanes with the columns in the form that the actor uses.
    """

    path = "rlpyt agent"
    draws_globally = True
    stops = False
    name: str
    memory: ClassVar[Literal["tensors", "arrays"]]

    def __init__(
        self, collector: Any, envs: RlpytEnvs, agent_info: BufferPart | None
    ) -> None:
        self.envs = envs
        self.agent_info = agent_info

    @staticmethod
    @abstractmethod
    def check(collector: Any) -> None:
        """Raise ``BadOption`` if a collector lacks the arguments for this actor."""

    def check_values(self, value: Any) -> None:
        """Raise ``BadOption`` if there is a buffer for values, which the actor cannot compute."""
        return

    def first(self, obs: Mapping[Key, Any], rng: GroupRng) -> Outputs:
        raise NotImplementedError(f"{self.name} acts into rlpyt's buffers only")

    def columns(self) -> Sequence[Column]:
        specs = self.agent_info.specs if self.agent_info is not None else {}
        return [Column(key, spec.shape, spec.dtype) for key, spec in specs.items()]

    def start(self, lane: Lane, rng: GroupRng) -> Act:
        return self.acting(lane, self.inputs(getattr(lane, self.memory)))

    def acting(self, lane: Lane, inputs: tuple[Any, Any, Any]) -> Act:
        """Return ``act`` for a lane, with these ``inputs``."""

        def act(t: int) -> None:
            action, agent_info = self.ask([part[t] for part in inputs], t)
            for part, value in (
                (self.envs.action, action),
                (self.agent_info, agent_info),
            ):
                problem = (
                    None
                    if part is None
                    else part.write(lane.arrays, t, value, lead=(lane.B,))
                )
                if problem:
                    raise BadPolicyOutput(
                        f"what {self.name} returned {problem} (row {t} of the batch)."
                    )
            self.envs.acted(agent_info, self.name)

        return act

    def ask(self, inputs: Sequence[Any], t: int) -> tuple[Any, Any]:
        """Return actions and agent info for row ``t``.

        Raises:
            PolicyError: the agent has raised an error. The caller says what follows from it.
        """
        return call_policy(self, lambda: self.step(*inputs), t)

    def inputs(self, columns: Mapping[Key, Any]) -> tuple[Any, Any, Any]:
        """Observations, previous actions and rewards of the rows of a lane, ``[T + 1, B, ...]``,
        from its columns.
        """
        return (
            self.envs.observation.over(columns),
            self.envs.action.over(columns, (PREV_ACTION,)),
            columns[PREV_REWARD],
        )

    @abstractmethod
    def step(
        self, observation: Any, prev_action: Any, prev_reward: Any
    ) -> tuple[Any, Any]:
        """Return actions and agent info for one row, ``[B, ...]`` each."""

    def begin(self, itr: int, *, evaluates: bool = False) -> None:
        """Start a batch or an evaluation, which an action server may stop."""
        self.stops = evaluates

    def begin_episode(self, env: int) -> None:
        """Start a new episode of the agent in an environment."""
        return

    def last_inputs(self, lane: Lane) -> list[Any]:
        """Copies of observations, previous actions and rewards after the last row."""
        columns = getattr(lane, self.memory)
        return [
            mapped(COPY[self.memory], part[lane.done_steps])
            for part in self.inputs(columns)
        ]

    @abstractmethod
    def conclude(self, last: Sequence[Any], value: Any = None) -> None:
        """Finish after the last row, with the ``last_inputs``.

        Args:
            value: buffer for the values of the last observations; None: there is none.
        """


class LocalAgent(RlpytActor):
    """An agent in this process; its inputs are tensors over the lane's rows."""

    memory = "tensors"

    def __init__(
        self, collector: Any, envs: RlpytEnvs, agent_info: BufferPart | None
    ) -> None:
        super().__init__(collector, envs, agent_info)
        self.agent, self.name = collector.agent, type(collector.agent).__name__

    def start(self, lane: Lane, rng: GroupRng) -> Act:
        previous = [(PREV_ACTION, *key[1:]) for key in self.envs.action.specs]
        read = InputRows(
            lane, [*self.envs.observation.specs, *previous, PREV_REWARD], self.name
        )
        return read.watched(self.acting(lane, self.inputs(read.columns)))

    @staticmethod
    def check(collector: Any) -> None:
        name = type(collector).__name__
        agent = collector.agent
        if agent is None:
            raise BadOption(
                f"{name} got no agent, which acts in its own process. It"
                " belongs to SerialSampler and CpuSampler; under GpuSampler and AlternatingSampler"
                " the collectors that begin with Gpu do the same."
            )
        if isinstance(agent, type) or not callable(getattr(agent, "step", None)):
            raise BadOption(
                f"{name}(agent={described_value(agent)}): expected an agent, an object with the"
                " methods of rlpyt's BaseAgent (step, reset, reset_one, ...)"
            )

    def check_values(self, value: Any) -> None:
        if value is not None and not callable(getattr(self.agent, "value", None)):
            raise BadOption(
                f"samples_np has agent.bootstrap_value, and {self.name} has no method value that"
                " computes it: leave the buffer out, or add the method"
            )

    def step(
        self, observation: Any, prev_action: Any, prev_reward: Any
    ) -> tuple[Any, Any]:
        returned = self.agent.step(observation, prev_action, prev_reward)
        try:
            action, agent_info = returned
        except (TypeError, ValueError):
            raise BadPolicyOutput(
                f"{self.name}.step returned {described_value(returned)}, expected (action,"
                " agent_info)."
            ) from None
        return action, agent_info

    def begin(self, itr: int, *, evaluates: bool = False) -> None:
        if evaluates:
            self.agent.reset()
            self.agent.eval_mode(itr)
        else:
            self.agent.sample_mode(itr)

    def begin_episode(self, env: int) -> None:
        try:
            self.agent.reset_one(idx=env)
        except Exception as error:
            raise MusterError(
                f"{self.name}.reset_one(idx={env}) raised {described(error)}"
            ) from error

    def conclude(self, last: Sequence[Any], value: Any = None) -> None:
        if value is None:
            return
        B = self.envs.spec.num_envs
        try:
            array = as_array(self.agent.value(*last))
        except Exception as error:
            raise PolicyError(
                f"policy {self.name}: value raised {described(error, ' after the last row')}."
            ) from error
        if array.shape not in ((B,), (1, B)) or array.dtype.kind not in NUMBERS:
            raise BadPolicyOutput(
                f"{self.name}.value returned {described_value(array)}, expected an array of shape"
                f" ({B},): a value for each environment."
            )
        value[...] = array


class Server(RlpytActor):
    """An action server in another process; rows are exchanged through a shared buffer ``[B]``.

    It uses rlpyt's ``step_buffer_np`` and ``sync``. The collector's ``max_wait_s`` limits the wait
    for one answer, which needs the steps of all workers. If it ``stops``, it checks
    ``sync.stop_eval`` after every answer.
    """

    raises = (MusterError,)  # the user's agent is in the other process
    name = "the action server"
    memory = "arrays"

    def __init__(
        self, collector: Any, envs: RlpytEnvs, agent_info: BufferPart | None
    ) -> None:
        super().__init__(collector, envs, agent_info)
        self.step_buffer = collector.step_buffer_np
        self.sync = collector.sync
        self.max_wait_s = collector.max_wait_s
        self._is_asked = False  # it was shown a row, and has not answered
        self._parent = os.getppid()

    @staticmethod
    def check(collector: Any) -> None:
        missing = [
            name
            for name in ("obs_ready", "act_ready")
            if getattr(collector.sync, name, None) is None
        ]
        missing = [f"sync.{name}" for name in missing] + ["step_buffer_np"] * (
            collector.step_buffer_np is None
        )
        if missing:
            raise BadOption(
                f"{type(collector).__name__} got no {', '.join(missing)}, through which it asks an"
                " action server. It belongs to GpuSampler and AlternatingSampler; under"
                " SerialSampler and CpuSampler the collectors that begin with Cpu do the same."
            )

    def step(
        self, observation: Any, prev_action: Any, prev_reward: Any
    ) -> tuple[Any, Any]:
        if not self._is_asked:  # else the wait for its answer was interrupted
            self.conclude((observation, prev_action, prev_reward))
            self._is_asked = True
        self._wait()
        self._is_asked = False
        if self.stops and self.sync.stop_eval.value:
            raise EvaluationStopped("the action server has stopped the evaluation")
        return self.step_buffer.action, getattr(self.step_buffer, "agent_info", None)

    def begin(self, itr: int, *, evaluates: bool = False) -> None:
        super().begin(itr, evaluates=evaluates)
        if evaluates:  # from its first row on
            self._is_asked = False

    def conclude(self, last: Sequence[Any], value: Any = None) -> None:
        """Show a row to the server, which also computes values."""
        step = self.step_buffer
        for place, part in zip(
            (step.observation, step.action, step.reward), last, strict=True
        ):
            overwrite(place, part)
        step.done[...] = self.envs.done  # the server resets its agent there
        self.sync.obs_ready.release()

    def _wait(self) -> None:
        deadline = time.monotonic() + self.max_wait_s
        while not self.sync.act_ready.acquire(True, min(LOOK_EVERY_S, self.max_wait_s)):
            if os.getppid() != self._parent:
                raise WorkerDied(
                    f"the process {self._parent} that started this worker is gone, and the actions"
                    " with it"
                )
            if time.monotonic() > deadline:
                raise CollectorTimeout(
                    f"no actions from the action server within {self.max_wait_s:g} s: it or another"
                    " worker has died or hangs, or steps take that long (then raise max_wait_s of"
                    " the collector's class)"
                )
