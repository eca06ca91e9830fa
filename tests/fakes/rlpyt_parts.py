"""What rlpyt's collectors are given, as small as it can be: arrays with names, environments, an
agent, buffers.
"""

from __future__ import annotations

import mmap
from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def _at(self: Any, index: Any) -> Any:
    return type(self)(*(None if part is None else part[index] for part in self))


def _put(self: Any, index: Any, value: Any) -> None:
    values = (
        value
        if getattr(value, "_fields", None) == self._fields
        else [value] * len(self._fields)
    )
    for part, new in zip(self, values, strict=True):
        if part is not None:
            part[index] = new


def named_arrays(name: str, fields: str) -> Any:
    """A namedtuple of arrays, which is indexed as they are."""
    base = namedtuple(name, fields)
    methods = {
        "__getitem__": _at,
        "__setitem__": _put,
        "__contains__": lambda self, key: key in self._fields,
    }
    return type(name, (base,), {**methods, "__slots__": (), "__module__": __name__})


AgentStep = named_arrays("AgentStep", "action agent_info")
AgentInfo = named_arrays("AgentInfo", "value memory")
Memory = named_arrays("Memory", "calls")
Samples = named_arrays("Samples", "agent env")
AgentSamples = named_arrays("AgentSamples", "action prev_action agent_info")
AgentSamplesBsv = named_arrays(
    "AgentSamplesBsv", "action prev_action agent_info bootstrap_value"
)
EnvSamples = named_arrays("EnvSamples", "observation reward prev_reward done env_info")
StepBuffer = named_arrays("StepBuffer", "observation action reward done agent_info")
EnvStep = namedtuple("EnvStep", "observation reward done env_info")
EnvInfo = named_arrays("EnvInfo", "traj_done t")
LateInfo = named_arrays("LateInfo", "traj_done t bonus")
Sight = named_arrays("Sight", "count extra")
Move = named_arrays("Move", "step force")


class Actions:
    """The numbers below ``n``."""

    def __init__(self, n: int = 5) -> None:
        self.n, self.sampled = n, 0

    def sample(self) -> Any:
        self.sampled += 1
        return np.int64(np.random.randint(self.n))

    def null_value(self) -> Any:
        return np.zeros((), np.int64)


class Counting:
    """Observation ``[length, t]``, reward ``t`` (from 1); ``done`` every ``life`` steps,
    ``traj_done`` at the end.

    Attributes:
        resets: how many there were.
        actions: all it was given.
    """

    def __init__(
        self, length: int, life: int | None = None, *, infos: bool = True
    ) -> None:
        self.length, self.life, self.infos = length, life or length, infos
        self.action_space = Actions()
        self.t = self.resets = 0
        self.actions: list[int] = []
        self.closed = False

    def reset(self) -> Any:
        self.resets += 1
        self.t = 0
        return self.observe()

    def step(self, action: Any) -> Any:
        assert self.t < self.length, "stepped after its end"
        self.actions.append(int(action))
        self.t += 1
        over = self.t == self.length
        return EnvStep(
            self.observe(),
            float(self.t),
            over or self.t % self.life == 0,
            self.info(over),
        )

    def observe(self) -> Any:
        return np.array([self.length, self.t], np.float32)

    def info(self, over: bool) -> Any:
        return EnvInfo(over, self.t) if self.infos else ()

    def close(self) -> None:
        self.closed = True


class LateCounting(Counting):
    """Has something new to say at its second step."""

    def info(self, over: bool) -> Any:
        return LateInfo(over, self.t, 1.0) if self.t == 2 else EnvInfo(over, self.t)


class Agent:
    """Acts on what it sees and remembers how often it acted since its last reset, in every
    environment.

    Attributes:
        inputs: observation, previous action, previous reward of every call, as lists.
        log: all other calls.
    """

    def __init__(self, B: int) -> None:
        self.calls = torch.zeros(B, dtype=torch.int64)
        self.inputs: list[tuple[Any, Any, Any]] = []
        self.log: list[Any] = []

    def collector_initialize(self, global_B: int = 1, env_ranks: Any = None) -> None:
        self.log.append(("collector_initialize", global_B, env_ranks))

    def reset(self) -> None:
        self.calls[:] = 0
        self.log.append("reset")

    def reset_one(self, idx: int) -> None:
        self.calls[idx] = 0
        self.log.append(("reset_one", idx))

    def sample_mode(self, itr: int) -> None:
        self.log.append(("sample_mode", itr))

    def eval_mode(self, itr: int) -> None:
        self.log.append(("eval_mode", itr))

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> Any:
        assert torch.is_tensor(observation)
        self.inputs.append(
            (observation.tolist(), prev_action.tolist(), prev_reward.tolist())
        )
        self.calls += 1
        action = (
            observation[:, 1].long() + self.calls + prev_action + prev_reward.long()
        ) % 5
        value = self.value(observation, prev_action, prev_reward)
        return AgentStep(action, AgentInfo(value, Memory(self.calls.clone())))

    def value(self, observation: Any, prev_action: Any, prev_reward: Any) -> Any:
        """Of what is seen; does not count as acting."""
        return observation[:, 1] + 10 * prev_action + 100 * prev_reward

    @property
    def resets(self) -> list[int]:
        """The environments it was reset in, one by one."""
        return [entry[1] for entry in self.log if entry[0] == "reset_one"]


def shared_zeros(shape: Sequence[int], dtype: Any) -> Any:
    """An array that processes made later see as well."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return (
        np.frombuffer(mmap.mmap(-1, max(size, 1)), np.uint8, size)
        .view(dtype)
        .reshape(shape)
    )


def make_samples(
    T: int,
    B: int,
    *,
    bootstrap: bool = False,
    one_memory: bool = True,
    zeros: Any = np.zeros,
) -> Any:
    """Buffers for ``Counting`` and ``Agent``.

    Args:
        one_memory: what is before and after a step are rows of the same arrays, as rlpyt makes
            them.
    """
    after, before = (
        [slice(1, None), slice(None, -1)]
        if one_memory
        else [slice(1, None), slice(1, None)]
    )
    actions = [zeros((T + 1, B), np.int64) for _ in range(1 if one_memory else 2)]
    rewards = [zeros((T + 1, B), np.float32) for _ in range(1 if one_memory else 2)]
    agent = (
        actions[0][after],
        actions[-1][before],
        AgentInfo(zeros((T, B), np.float32), Memory(zeros((T, B), np.int64))),
    )
    env = EnvSamples(
        zeros((T, B, 2), np.float32),
        rewards[0][after],
        rewards[-1][before],
        zeros((T, B), bool),
        EnvInfo(zeros((T, B), bool), zeros((T, B), np.int64)),
    )
    return Samples(
        AgentSamplesBsv(*agent, zeros((1, B), np.float32))
        if bootstrap
        else AgentSamples(*agent),
        env,
    )


def make_step_buffer(B: int, zeros: Any = np.zeros) -> Any:
    """What workers and the action server share, for ``Counting`` and ``Agent``."""
    info = AgentInfo(zeros((B,), np.float32), Memory(zeros((B,), np.int64)))
    return StepBuffer(
        zeros((B, 2), np.float32),
        zeros((B,), np.int64),
        zeros((B,), np.float32),
        zeros((B,), bool),
        info,
    )


def part_of(tree: Any, where: Any) -> Any:
    """``tree[where]``, leaf by leaf: a view."""
    return (
        type(tree)(*(part_of(x, where) for x in tree))
        if hasattr(tree, "_fields")
        else tree[where]
    )
