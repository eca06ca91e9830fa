"""What workers run that only ask a server; light to import, as they are."""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path

import numpy as np

from muster.errors import PolicyError
from muster.memory.shared import Arena
from muster.testing import OracleEnv
from muster.workers.mailbox import MailboxClient


class Known(OracleEnv):
    """Says in a file which process it lives in."""

    def __init__(self, path, *args):
        super().__init__(path, *args)
        Path(f"{path}.{self.number}").write_text(str(os.getpid()))


def pid_of(path, number):
    return int(Path(f"{path}.{number}").read_text())


def rows_of(arena, worker):
    """Observations and actions of a worker, ``int64 [64]`` each."""
    return arena.view(mmap.PAGESIZE * worker, 2 * 64 * 8).view(np.int64).reshape(2, -1)


def asks(channel):
    """Ask ``count`` questions, after ``late_s`` each; say at the end which were refused.

    Each has the number of its row in all of the observations, and minus that in all of the actions
    of its answer.
    """
    (number, workers, count, late_s), fds = channel.receive()
    client = MailboxClient(number, workers, fds[:-1], lambda: False)
    observations, actions = rows_of(Arena.attach(fds[-1]), number)
    late, refused = threading.Event(), []
    for row in range(count):
        if late_s:
            late.wait(late_s)
        observations[:] = row
        try:
            client.ask(number + 1, row)
            assert (actions == -row).all(), (
                f"question {row} was answered before its actions were there: {actions}"
            )
        except PolicyError:
            refused.append(row)
    client.finished(number + 1)
    channel.send(refused)
    client.close()
