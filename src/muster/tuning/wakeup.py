"""What it costs to wake up another process and to be woken up by it, with the bells of central inference."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time

from muster.sources.lines import Bell

ROUNDS = 200  # in a measurement
START_S = 20.0  # that the other process may need to come to life
_ECHO = """
import sys
from muster.sources.lines import Bell
half = len(sys.argv) // 2 + 1
there, back = Bell(*map(int, sys.argv[1:half])), Bell(*map(int, sys.argv[half:]))
back.ring()
for _ in range({rounds}):
    there.wait(1.0)
    back.ring()
"""


def wake_up_s(seconds: float = 0.3) -> float:
    """Seconds for a round trip between this process and another: the median of many.

    Args:
        seconds: after which to stop, from when the other process is there.
    """
    there, back = Bell(), Bell()
    fds = [*there.fds, *back.fds]
    command = [sys.executable, "-c", _ECHO.format(rounds=ROUNDS), *map(str, fds)]
    known = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds, env=known)
    try:
        back.wait(START_S)
        took: list[float] = []
        deadline = time.perf_counter() + seconds
        while len(took) < ROUNDS and (not took or time.perf_counter() < deadline):
            began = time.perf_counter()
            there.ring()
            back.wait(1.0)
            took.append(time.perf_counter() - began)
        return statistics.median(took)
    finally:
        child.kill()
        child.wait()
        there.close()
        back.close()
