"""Environments whose data reveal every error of a collector."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

Info = dict[str, Any]
Array = NDArray[Any]
# what ``step`` returns: observation, reward, terminated, truncated, info
Stepped = tuple[Any, float, bool, bool, Info]


class CountingEnv(gymnasium.Env[Any, Any]):
    """Observation ``[length, t]`` (float32), reward ``t + 1``, so that every pairing can be checked
    by equality.

    Args:
        length: steps per episode.
        truncate: episodes end by truncation instead of termination.
        reuse: return the same array every time, changed in place.
        noise: observations have a third entry, a random number per step from the environment's
            generator.

    Attributes:
        seeds: seeds of all calls of ``reset``.
        executed: number of all steps.
        tally: ``(return, length)`` of every episode that ended by itself.
        closed: number of calls of ``close``.
    """

    def __init__(
        self,
        length: int = 3,
        *,
        truncate: bool = False,
        reuse: bool = False,
        noise: bool = False,
    ) -> None:
        self.length = length
        self.truncate = truncate
        self.noise = noise
        values = 3 if noise else 2
        shape = (values,)
        self.observation_space = spaces.Box(-np.inf, np.inf, shape, np.float32)
        self.action_space = spaces.Discrete(2)
        self.t = 0
        self.executed = 0
        self.closed = 0
        self.seeds: list[int | None] = []
        self.tally: list[tuple[float, int]] = []
        self._buffer: Array | None = None
        if reuse:
            self._buffer = np.zeros(shape, np.float32)

    def reset(
        self,
        *,
        seed: int | None = None,
        options: Info | None = None,
    ) -> tuple[Any, Info]:
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.t = 0
        return self._observe(), {}

    def step(self, action: int) -> Stepped:
        self.executed += 1
        self.t += 1
        done = self.t >= self.length
        if done:
            total = self.t * (self.t + 1) / 2
            self.tally.append((total, self.t))
        terminated = done and not self.truncate
        truncated = done and self.truncate
        obs = self._observe()
        return obs, float(self.t), terminated, truncated, {}

    def close(self) -> None:
        self.closed += 1

    def _observe(self) -> Any:
        values: list[float] = [self.length, self.t]
        if self.noise:
            values.append(self.np_random.random())
        if self._buffer is None:
            return np.array(values, np.float32)
        self._buffer[:] = values
        return self._buffer


class InfoEnv(CountingEnv):
    """A ``CountingEnv`` with infos of every kind.

    ``reset`` returns ``t`` (0) and the text ``stage``. Steps return both, ``half`` (``t / 2``),
    ``place`` (two floats) and ``goal`` (a dict with the bool ``near``), ``even`` where ``t`` is
    even, and ``success`` at the end.

    Attributes:
        SPACES: of those that one reset and one step do not show.
    """

    SPACES: Mapping[str, spaces.Space[Any]] = {
        "even": spaces.Discrete(2),
        "success": spaces.Discrete(2),
    }

    def reset(
        self,
        *,
        seed: int | None = None,
        options: Info | None = None,
    ) -> tuple[Any, Info]:
        obs, _ = super().reset(seed=seed, options=options)
        return obs, {"t": 0, "stage": "begin"}

    def step(self, action: int) -> Stepped:
        obs, reward, terminated, truncated, _ = super().step(action)
        info = self.info_of(self.t)
        return obs, reward, terminated, truncated, info

    def info_of(self, t: int) -> Info:
        """What step ``t`` of an episode gives."""
        place = np.array([self.length, t], np.float32)
        is_near = t + 1 >= self.length
        info: Info = {
            "t": t,
            "stage": "on",
            "half": t / 2,
            "place": place,
            "goal": {"near": is_near},
        }
        if t % 2 == 0:
            info["even"] = True
        if t == self.length:
            info["stage"] = "end"
            info["success"] = self.length % 2 == 0
        return info


class ChainEnv(gymnasium.Env[Any, Any]):
    """Observation ``[episode, t, state]`` (int64); every state is computed from the last state and
    the action.

    A row, action or environment in the wrong place breaks the chain: ``follow`` of a row's
    observation and action must be the rest of that row. Episodes end after 1, 2, 3, ... steps, by
    termination or truncation, depending on the state.

    Args:
        ends: average number of steps per episode.
    """

    def __init__(self, ends: int = 5) -> None:
        self.ends = ends
        self.observation_space = spaces.Box(0, 2**31, (3,), np.int64)
        self.action_space = spaces.Discrete(5)
        self.episode = -1
        self._obs: Array = np.zeros(3, np.int64)

    def reset(
        self,
        *,
        seed: int | None = None,
        options: Info | None = None,
    ) -> tuple[Array, Info]:
        super().reset(seed=seed)
        self.episode += 1
        state = self.np_random.integers(2**31)
        first = [self.episode, 0, state]
        self._obs = np.array(first, np.int64)
        return self._obs, {}

    def step(self, action: int) -> Stepped:
        results = self.follow(self._obs, np.asarray(action))
        self._obs, reward, terminated, truncated = results
        return (
            self._obs,
            float(reward),
            bool(terminated),
            bool(truncated),
            {},
        )

    def follow(self, obs: Array, action: Array) -> tuple[Array, Array, Array, Array]:
        """Compute the results of ``action`` (``[...]``) on ``obs`` (``[..., 3]``).

        Returns:
            the next observation, reward, terminated, truncated.
        """
        episode = obs[..., 0]
        t = obs[..., 1]
        before = obs[..., 2]
        state = (before * 1103515245 + 12345 + action) % 2**31
        after = np.stack([episode, t + 1, state], -1)
        reward = (state >> 4) % 1000
        ended = (state >> 8) % self.ends == 0
        kind = (state >> 5) % 4
        terminated = ended & (kind != 1)
        truncated = ended & (kind <= 1)
        return after, reward, terminated, truncated


class SpaceEnv(gymnasium.Env[Any, Any]):
    """Samples of given spaces; an episode lasts ``length`` steps.

    Attributes:
        actions: all actions passed to ``step``.
        observations: all observations returned from ``reset`` and ``step``.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        length: int = 3,
    ) -> None:
        self.observation_space = observation_space
        self.action_space = action_space
        self.length = length
        self.actions: list[Any] = []
        self.observations: list[Any] = []
        self.t = 0

    def reset(
        self,
        *,
        seed: int | None = None,
        options: Info | None = None,
    ) -> tuple[Any, Info]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.t = 0
        return self._observe(), {}

    def step(self, action: Any) -> Stepped:
        self.actions.append(action)
        self.t += 1
        terminated = self.t >= self.length
        obs = self._observe()
        return obs, 1.0, terminated, False, {}

    def _observe(self) -> Any:
        sample = self.observation_space.sample()
        self.observations.append(sample)
        return sample


class FaultyEnv(CountingEnv):
    """A ``CountingEnv`` that fails once.

    Args:
        at: number of the step that fails, counted over all episodes from 0.
        output: replacements in the return value of ``step``: any of "obs", "reward", "terminated",
            "truncated", "info", or "all" for the whole return value.
        error: makes the exception that is raised instead of stepping.
        on_reset: the reset of that number fails instead (with ``error``, or "obs", "info" or
            "all").
        length: steps per episode.
    """

    def __init__(
        self,
        at: int,
        *,
        output: Mapping[str, Any] | None = None,
        error: Callable[[], BaseException] | None = None,
        on_reset: bool = False,
        length: int = 3,
    ) -> None:
        super().__init__(length)
        self.at = at
        self.output = dict(output or {})
        self.error = error
        self.on_reset = on_reset
        self.steps = 0
        self.resets = 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> Any:
        faulty = self.on_reset and self.resets == self.at
        self.resets += 1
        if faulty and self.error is not None:
            raise self.error()
        returned = super().reset(seed=seed, options=options)
        return self._answer(("obs", "info"), returned, faulty=faulty)

    def step(self, action: int) -> Any:
        faulty = not self.on_reset and self.steps == self.at
        self.steps += 1
        if faulty and self.error is not None:
            raise self.error()
        names = ("obs", "reward", "terminated", "truncated", "info")
        returned = super().step(action)
        return self._answer(names, returned, faulty=faulty)

    def _answer(
        self,
        names: tuple[str, ...],
        values: tuple[Any, ...],
        *,
        faulty: bool,
    ) -> Any:
        """Return the correct ``values``, or their replacements in ``output``."""
        if not faulty:
            return values
        if "all" in self.output:
            return self.output["all"]
        named = zip(names, values, strict=True)
        replaced = [self.output.get(name, value) for name, value in named]
        return tuple(replaced)
