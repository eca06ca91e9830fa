"""The action and the reward of the previous step as observations: ``prev_action_reward=True``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from muster.capabilities import RestartsAgents, WritesNext, capability
from muster.envs.wrapped import WrappedEnvs
from muster.errors import BadOption
from muster.keys import REWARD, Key, dotted
from muster.memory.slots import Lane
from muster.memory.specs import ArraySpec
from muster.protocols import EnvBatch

PREV_ACTION = "prev_action"
PREV_REWARD = ("prev_reward",)


def with_previous(env: EnvBatch) -> EnvBatch:
    """Add the observations ``prev_action`` (shaped as the action; parts have keys like
    ``("prev_action", "left")``) and ``prev_reward`` (``[B]``) to ``env``. Both are zero at the
    start of an agent's episode.

    Raises ``BadOption`` for environments that do not support
    these observations.
    """
    problem = _problem(env)
    if problem:
        raise BadOption(f"prev_action_reward: {env.spec.name} {problem}")
    return _WithPrevious(env)


class _WithPrevious(WrappedEnvs, RestartsAgents):
    def __init__(self, inner: EnvBatch) -> None:
        own = inner.spec
        repeats: dict[Key, Key] = {}
        observed = dict(own.observation_specs)
        for key, spec in own.action_specs.items():
            previous = _previous(key)
            repeats[previous] = key
            observed[previous] = ArraySpec(spec.shape, spec.dtype)
        repeats[PREV_REWARD] = REWARD
        observed[PREV_REWARD] = ArraySpec((), own.reward_dtype)
        super().__init__(
            inner, replace(own, observation_specs=observed, repeats=repeats)
        )

    def reset(
        self,
        arrays: Mapping[Key, Any],
        row: int,
        which: Sequence[int],
        seeds: Sequence[int] | None,
    ) -> None:
        self.inner.reset(arrays, row, which, seeds)
        self.restart_agent(arrays, row, which)

    def restart_agent(
        self,
        arrays: Mapping[Key, Any],
        row: int,
        which: Sequence[int],
    ) -> None:
        for key in self.spec.repeats:
            arrays[key][row, which] = 0

    def after_step(self, lane: Lane) -> Callable[[int], None]:
        data = lane.data
        pairs = [(data[key], data[source]) for key, source in self.spec.repeats.items()]

        def note(t: int) -> None:
            for after, before in pairs:
                after[t + 1] = before[t]
            if self.bypassed:
                self.restart_agent(data, t + 1, [*self.bypassed])

        return note


def _previous(key: Key) -> Key:
    """Return ``("prev_action", "left")`` for ``("action", "left")``; keeps the name of an agent
    before ``action``.
    """
    if "action" not in key:
        return (PREV_ACTION, *key)
    return tuple(PREV_ACTION if part == "action" else part for part in key)


def _problem(env: EnvBatch) -> str:
    own = (PREV_ACTION, *PREV_REWARD)
    taken = [dotted(key) for key in env.spec.observation_specs if key[0] in own]
    if taken:
        return f"has the observations {taken} already: leave it out, or rename them"
    if env.spec.reward_key != REWARD:
        return (
            "has a reward for each agent, and no one that could be shown: leave it out"
        )
    if capability(env, WritesNext) is not None:
        return "resets itself on a device, where Muster does not see in time what begins: leave it out"
    objects = [
        dotted(key)
        for key, spec in env.spec.action_specs.items()
        if not spec.is_tensor or spec.ragged
    ]
    if not objects:
        return ""
    return f"has actions that are not arrays ({', '.join(objects)}): leave it out"
