"""An environment that shows the seed of its episode."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class SeededEnv(gymnasium.Env[Any, Any]):
    """Observation ``[seed, t]``, with -1 after a reset without a seed; episodes of
    ``1 + seed % 4`` steps.
    """

    observation_space = spaces.Box(-1, 1e6, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.seeds: list[int | None] = []

    def reset(
        self, *, seed: int | None = None, options: Any = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.shown = -1 if seed is None else seed
        self.t = 0
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return self._seen(), float(self.shown), self.t > self.shown % 4, False, {}

    def _seen(self) -> Any:
        return np.array([self.shown, self.t], np.float32)
