"""An environment that kills its process once."""

from __future__ import annotations

import os
import signal
from typing import Any

from muster.testing import CountingEnv
from tests.fakes.faults import first_time


class Mortal(CountingEnv):
    """Dies at a step of its life, if the file ``mark`` is not there yet."""

    def __init__(self, length: int, mark: Any, at: int) -> None:
        super().__init__(length)
        self.mark, self.at = str(mark), at

    def step(self, action: Any) -> Any:
        if self.executed == self.at and first_time(self.mark):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)
