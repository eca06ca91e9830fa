"""An environment that kills its process once."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from muster.testing import CountingEnv
from tests.fakes.faults import first_time, wait_for_the_end
from tests.waits import wait_until


class Mortal(CountingEnv):
    """Dies at a step of its life, if the file ``mark`` is not there yet."""

    def __init__(self, length: int, mark: Any, at: int) -> None:
        super().__init__(length)
        self.mark, self.at = str(mark), at

    def step(self, action: Any) -> Any:
        if self.executed == self.at and first_time(self.mark):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


class KilledByANeighbour(CountingEnv):
    """Environment 1 kills the process of environment 0, which has made 40 steps then, in its own
    step 30.
    """

    def __init__(self, folder: Path, number: int) -> None:
        super().__init__(1000)
        self._file, self._number = folder / "steps", number

    def step(self, action: Any) -> Any:
        got = super().step(action)
        if self._number == 0:
            self._file.write_text(f"{os.getpid()} {self.executed}")
        elif self.executed == 30:
            wait_until(lambda: self._file.read_text().endswith(" 40"))
            pid = self._file.read_text().split()[0]
            os.kill(int(pid), signal.SIGKILL)
            wait_for_the_end(pid)
        return got
