"""An environment that takes its time, so that whoever waits for nodes does not use a processor
meanwhile.
"""

from __future__ import annotations

import threading
from typing import Any

from muster.testing import CountingEnv

STEP_S = 0.005


class LeisurelyEnv(CountingEnv):
    def step(self, action: Any) -> Any:
        threading.Event().wait(STEP_S)
        return super().step(action)
