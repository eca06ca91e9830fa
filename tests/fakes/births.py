"""For fork servers that import this: the next keeper or worker is killed at its birth, if the plan
says so.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

_server = os.getpid()


def _born() -> None:
    plan = Path(os.environ.get("MUSTER_TEST_BIRTHS", "/nowhere"))
    who = "keeper" if os.getppid() == _server else "worker"
    if plan.exists() and plan.read_text() == who:
        plan.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


if "MUSTER_TEST_BIRTHS" in os.environ:
    os.register_at_fork(after_in_child=_born)
