"""An environment that says which action it was given, and a recurrent policy whose actions say what
it has seen.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class EchoEnv(gymnasium.Env[Any, Any]):
    """Observation ``[length, t, *last action]``, reward ``t + 1``. The length is by the seed."""

    observation_space = spaces.Box(-np.inf, np.inf, (6,), np.float32)
    action_space = spaces.Box(-1000, 1000, (2, 2), np.float32)

    def reset(
        self, *, seed: int | None = None, options: Any = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.length = 2 + seed % 4 if seed is not None else self.length
        self.t, self.last = 0, np.zeros(4, np.float32)
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        self.t, self.last = self.t + 1, np.asarray(action, np.float32).reshape(-1)
        return self._observe(), float(self.t), self.t == self.length, False, {}

    def _observe(self) -> Any:
        return np.array([self.length, self.t, *self.last], np.float32)


def remembering(obs: Any, state: Any) -> Any:
    """Actions ``[[length, t], [steps since the state was zero, t of the observation before]]``."""
    import torch  # here, because workers of a server need none

    before = torch.zeros(*obs.shape[:-1], 2) if state is None else state
    action = torch.stack([obs[..., :2], before], dim=-2)
    return action, torch.stack([before[..., 0] + 1, obs[..., 1]], dim=-1)
