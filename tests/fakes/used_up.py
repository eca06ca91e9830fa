"""A program without the rights of root, whose limits are real: ``python -m tests.fakes.used_up
NAME``.

Prints a JSON object: the errors of the calls while the system allows no more processes and threads,
and the number of batches afterwards.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import nn

from muster import DistributedCollector, MultiSyncCollector
from muster.errors import MusterError
from muster.policies import categorical
from muster.testing import CountingEnv
from tests.fakes.fault_runs import all_gone
from tests.fakes.stages import fork_server, parent
from tests.tools import is_balanced
from tests.waits import wait_until

CALLS, MOST_CALLS = 4, 200


class FailsAt(CountingEnv):
    """Fails in a step of its first life in this process."""

    lives = 0

    def __init__(self) -> None:
        super().__init__()
        self.first = FailsAt.lives == 0
        FailsAt.lives += 1

    def step(self, action: Any) -> Any:
        if self.first and self.executed == 25:
            raise ValueError("as asked")
        return super().step(action)


@contextmanager
def limited_to(tasks: int, pid: int) -> Iterator[None]:
    """The process ``pid`` may start another process or thread while its user has fewer than so
    many.
    """
    before = resource.prlimit(pid, resource.RLIMIT_NPROC)
    resource.prlimit(pid, resource.RLIMIT_NPROC, (tasks, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NPROC, before)


def tasks() -> int:
    """The number of processes and threads of this user."""
    found = 0
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):
            if os.stat(f"/proc/{pid}").st_uid == os.getuid():
                found += len(os.listdir(f"/proc/{pid}/task"))
    return found


def errors_of(collector: Any) -> dict[str, Any]:
    """The errors of some calls, and the longest time that one of them has taken."""
    errors, longest = [], 0.0
    for _ in range(MOST_CALLS):
        if len(errors) == CALLS:
            break
        began = time.monotonic()
        try:
            collector.next()
        except MusterError as error:
            errors.append((type(error).__name__, str(error)))
        longest = max(longest, time.monotonic() - began)
    return {"errors": errors, "longest": longest}


def afterwards(collector: Any) -> dict[str, Any]:
    batches = 0
    while batches < 4:
        batches += collector.next() is not None
    collector.shutdown()
    stats = collector.stats()
    return {"batches": batches, "exact": is_balanced(stats)}


def lose_first(collector: Any) -> None:
    pid = collector.stats().workers[0].pid
    keeper = parent(pid)
    os.kill(pid, signal.SIGKILL)
    wait_until(
        lambda: not (Path(f"/proc/{pid}").exists() or Path(f"/proc/{keeper}").exists())
    )


def processes(on_failure: Any) -> dict[str, Any]:
    policy = categorical(nn.Linear(2, 2))
    options = {"frames_per_batch": 20, "on_failure": on_failure, "inference": "server"}
    collector = MultiSyncCollector([CountingEnv] * 2, policy, **options)
    collector.next()
    lose_first(collector)
    server = fork_server(light=True)
    assert server is not None
    with limited_to(1, server):
        found = errors_of(collector)
    collector.next()
    lose_first(collector)
    with limited_to(tasks() + 1, server):  # for a keeper, but not for its worker
        again = errors_of(collector)
    found["errors"] += again["errors"][1:]
    return found | afterwards(collector)


def threads(on_failure: Any) -> dict[str, Any]:
    options = {"frames_per_batch": 40, "on_failure": on_failure, "backend": "threads"}
    collector = MultiSyncCollector([FailsAt, CountingEnv], None, **options)
    collector.next()
    with limited_to(1, os.getpid()):
        found = errors_of(collector)
    return found | afterwards(collector)


def nodes(on_failure: Any) -> dict[str, Any]:
    """The threads of their sessions cannot be started."""
    from tests.fakes.node_runs import node_pids

    options = {
        "frames_per_batch": 20,
        "on_failure": on_failure,
        "launcher": "mp",
        "sync": True,
    }
    collector = DistributedCollector([CountingEnv] * 2, None, **options)
    collector.next()
    pid = node_pids()[0]
    os.kill(pid, signal.SIGKILL)
    assert all_gone([pid])
    with limited_to(1, os.getpid()):
        found = errors_of(collector)
    return found | afterwards(collector)


if __name__ == "__main__":
    kind, _, mode = sys.argv[1].partition("/")
    print(json.dumps(globals()[kind](mode)), flush=True)
