"""What goes wrong with nodes, from within. Light to import, since workers import it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from tests.waits import wait_until

NAME = "muster-node-"  # of node processes, and of their fork servers


def status(pid: int) -> tuple[str, int]:
    """Name and parent of a process."""
    name, _, rest = (
        Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
    )
    return name, int(rest.split()[1])


def node_of(worker: int) -> int:
    """The pid of the node that a worker process was started by, through its keeper and the node's
    fork server.
    """
    _, keeper = status(worker)
    _, server = status(keeper)
    return status(server)[1]


class NodeSignalled:
    """In an environment: a signal for the node that its worker runs on.

    Args:
        once: a file; the signal waits until it exists.
    """

    def __init__(self, number: int, once: Path | None = None) -> None:
        self.number, self.once = number, once

    def __call__(self, honest: Any) -> Any:
        if self.once is not None:
            wait_until(self.once.exists)
        os.kill(node_of(os.getpid()), self.number)
        if self.number == signal.SIGKILL:
            signal.pause()  # ends with the node
        return honest
