"""For tests that import torch and have an inference server: its workers import what they need from
here, and no torch.

Importing torch and tensordict takes each worker some 3 seconds of CPU time.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from muster.testing import CountingEnv


class WideCounting(CountingEnv):
    def _observe(self) -> Any:
        return super()._observe().astype(np.float64)


class Hundredfold:
    """Writes rewards and actions that no environment and no policy would give; raises at some
    calls.
    """

    def __init__(self, *fails: int) -> None:
        self.fails, self.calls = fails, 0

    def __call__(self, step: Any) -> None:
        step["next", "reward"] *= 100
        step["action"][...] = 1 - step["action"]
        self.calls += 1
        if self.calls in self.fails:
            raise RuntimeError("as asked")
