"""An environment whose observations are no plain arrays."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Words(gymnasium.Env[Any, Any]):
    """Observes time as a number and as a text; with ``ragged`` also as so many rows."""

    def __init__(self, length: int = 3, *, ragged: bool = False) -> None:
        parts: dict[str, spaces.Space[Any]] = {
            "t": spaces.Box(0, 99, (1,), np.float32),
            "word": spaces.Text(9),
        }
        if ragged:
            parts["rows"] = spaces.Sequence(
                spaces.Box(0, 99, (2,), np.float32), stack=True
            )
        self.observation_space, self.action_space = (
            spaces.Dict(parts),
            spaces.Discrete(2),
        )
        self.length, self.ragged, self.t = length, ragged, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self._observe(), {}

    def step(self, action: int) -> Any:
        self.t += 1
        return self._observe(), float(self.t), self.t == self.length, False, {}

    def _observe(self) -> Any:
        rows = (
            {"rows": np.full((self.t + 1, 2), self.t, np.float32)}
            if self.ragged
            else {}
        )
        return {"t": np.array([self.t], np.float32), "word": f"at {self.t}", **rows}
