"""Environments whose data show every mistake in collecting them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class CountingEnv(gymnasium.Env[Any, Any]):
    """Observation ``[length, t]`` (float32), reward ``t + 1``; so that every pairing is decided by equality.

    Args:
        length: steps per episode.
        truncate: episodes end by truncation instead of termination.
        reuse: return the same array every time, changed in place.
        noise: add the seed-dependent third entry: a random number per step from the environment's generator.
    """

    def __init__(self, length: int = 3, *, truncate: bool = False, reuse: bool = False, noise: bool = False) -> None:
        self.length, self.truncate, self.noise = length, truncate, noise
        self.observation_space = spaces.Box(-np.inf, np.inf, (3 if noise else 2,), np.float32)
        self.action_space: spaces.Space[Any] = spaces.Discrete(2)
        self.t = 0
        self.seeds: list[int | None] = []
        self._buffer = np.zeros(self.observation_space.shape, np.float32) if reuse else None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.t = 0
        return self._observe(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        done = self.t >= self.length
        return self._observe(), float(self.t), done and not self.truncate, done and self.truncate, {}

    def _observe(self) -> Any:
        values = [self.length, self.t] + ([self.np_random.random()] if self.noise else [])
        if self._buffer is None:
            return np.array(values, np.float32)
        self._buffer[:] = values
        return self._buffer


class SpaceEnv(gymnasium.Env[Any, Any]):
    """Samples of given spaces; an episode lasts ``length`` steps. Keeps the actions it got in ``actions``."""

    def __init__(self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any], length: int = 3) -> None:
        self.observation_space, self.action_space, self.length = observation_space, action_space, length
        self.actions: list[Any] = []
        self.observations: list[Any] = []
        self.t = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.t = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.actions.append(action)
        self.t += 1
        return self._observe(), 1.0, self.t >= self.length, False, {}

    def _observe(self) -> Any:
        self.observations.append(self.observation_space.sample())
        return self.observations[-1]


class FaultyEnv(CountingEnv):
    """A ``CountingEnv`` that goes wrong at one step.

    Args:
        at: the step, counted over the environment's life, at which it goes wrong; 0 is the first.
        output: replacements of what ``step`` returns: any of "obs", "reward", "terminated", "truncated", "info",
            or "all" for the whole return value.
        error: made and raised instead of stepping.
        on_reset: go wrong in the reset of that number instead (with ``error``, or "obs" / "all").
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
        self.at, self.output, self.error, self.on_reset = at, dict(output or {}), error, on_reset
        self.steps = self.resets = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        faulty = self.on_reset and self.resets == self.at
        self.resets += 1
        if faulty and self.error is not None:
            raise self.error()
        obs, info = super().reset(seed=seed, options=options)
        if faulty:
            return self.output.get("all", (self.output.get("obs", obs), self.output.get("info", info)))  # type: ignore[no-any-return]
        return obs, info

    def step(self, action: int) -> Any:
        faulty = not self.on_reset and self.steps == self.at
        self.steps += 1
        if faulty and self.error is not None:
            raise self.error()
        names = ("obs", "reward", "terminated", "truncated", "info")
        values = dict(zip(names, super().step(action), strict=True))
        if faulty and "all" in self.output:
            return self.output["all"]
        return tuple({**values, **(self.output if faulty else {})}.values())
