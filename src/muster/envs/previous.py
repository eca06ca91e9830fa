"""The action and the reward of the previous step as observations: ``prev_action_reward=True``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from muster.envs.wrapped import WrappedEnvs
from muster.errors import BadOption
from muster.keys import REWARD, Key, dotted
from muster.memory.slots import Lane
from muster.memory.specs import ArraySpec, Specs
from muster.protocols import EnvBatch

PREV_ACTION = "prev_action"
PREV_REWARD = ("prev_reward",)


def with_previous(env: EnvBatch, dtype: np.dtype[Any] | None = None) -> EnvBatch:
    """Add the observations ``prev_action`` (shaped as the action; parts have keys like
    ``("prev_action", "left")``) and ``prev_reward`` (``[B]``) to ``env``. Both are zero at the
    start of an agent's episode.

    ``dtype`` is the dtype for floats. Raises ``BadOption`` for environments that do not support
    these observations.
    """
    problem = _problem(env)
    if problem:
        raise BadOption(f"prev_action_reward: {env.name} {problem}")
    return cast(EnvBatch, _WithPrevious(env, dtype))


class _WithPrevious(WrappedEnvs):
    observation_specs: Specs
    repeats: Mapping[Key, Key]

    def __init__(self, inner: EnvBatch, dtype: np.dtype[Any] | None) -> None:
        super().__init__(inner)
        own = self.__dict__
        own["repeats"] = {_previous(key): key for key in inner.action_specs} | {PREV_REWARD: REWARD}
        added = {
            _previous(key): ArraySpec(spec.shape, spec.dtype)
            for key, spec in inner.action_specs.items()
        }
        added[PREV_REWARD] = ArraySpec((), inner.reward_dtype)
        if dtype is not None:
            added = {key: spec.stored_as(dtype) for key, spec in added.items()}
        own["observation_specs"] = {**inner.observation_specs, **added}

    def reset(
        self, arrays: Mapping[Key, Any], row: int, which: Sequence[int], seeds: Sequence[int] | None
    ) -> None:
        self.inner.reset(arrays, row, which, seeds)
        self.restart_agent(arrays, row, which)

    def restart_agent(self, arrays: Mapping[Key, Any], row: int, which: Sequence[int]) -> None:
        for key in self.repeats:
            arrays[key][row, which] = 0

    def after_step(self, lane: Lane) -> Callable[[int], None]:
        data = lane.data
        pairs = [(data[key], data[source]) for key, source in self.repeats.items()]

        def note(t: int) -> None:
            for after, before in pairs:
                after[t + 1] = before[t]
            if self.bypassed:
                self.restart_agent(data, t + 1, self.bypassed)

        return note


def _previous(key: Key) -> Key:
    """Return ``("prev_action", "left")`` for ``("action", "left")``; keeps the name of an agent
    before ``action``.
    """
    if "action" not in key:
        return (PREV_ACTION, *key)
    return tuple(PREV_ACTION if part == "action" else part for part in key)


def _problem(env: EnvBatch) -> str:
    taken = [dotted(key) for key in env.observation_specs if key[0] in (PREV_ACTION, *PREV_REWARD)]
    if taken:
        return f"has the observations {taken} already: leave it out, or rename them"
    if env.reward_key != REWARD:
        return "has a reward for each agent, and no one that could be shown: leave it out"
    if env.writes_next:
        return (
            "resets itself on a device, where Muster does not see in time what begins: leave it out"
        )
    objects = [
        dotted(key) for key, spec in env.action_specs.items() if not spec.is_tensor or spec.ragged
    ]
    return f"has actions that are no arrays ({', '.join(objects)}): leave it out" if objects else ""
