"""Launchers start the process of a node; or the node is started from outside (torchrun, SLURM, by
hand).
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Protocol

from muster.cluster.link import AGENT, LinkLost
from muster.cluster.rendezvous import Rendezvous
from muster.workers.channel import Channel
from muster.workers.launch import launch

END_S = 5.0


class Started(Protocol):
    """The process of a node that a launcher has started, or its job. ``str`` of it names it."""

    @property
    def state(self) -> str:
        """For the user: "running", or what the job waits for."""

    def ended(self) -> str | None:
        """Why it has ended, for the user; None while it runs or waits to run. Does not block."""

    def end(self) -> None:
        """End it and all its child processes, by force if necessary. May be called again."""


class StartedNodes:
    """What a carrier has started, by number of the node.

    Threads of several nodes use it at the same time.
    """

    def __init__(self) -> None:
        self._started: dict[int, Started] = {}
        self._lock = threading.Lock()
        self.is_closed = False

    def get(self, node: int) -> Started | None:
        with self._lock:
            return self._started.get(node)

    def add(self, node: int, started: Started | None) -> None:
        """Keep what was started for a node; None: it is started elsewhere.

        Raises:
            LinkLost: the carrier was closed meanwhile. What was started is ended.
        """
        with self._lock:
            if not self.is_closed:
                if started is not None:
                    self._started[node] = started
                return
        if started is not None:
            started.end()
        raise LinkLost(f"Node {node} was given up: the collector is closed.")

    def end(self, node: int) -> None:
        """End what was started for a node. Does nothing if there is nothing."""
        with self._lock:
            started = self._started.pop(node, None)
        if started is not None:
            started.end()

    def close(self) -> list[int]:
        """Take nothing more; return the numbers of the nodes that are left, which the caller ends."""
        with self._lock:
            self.is_closed = True
            return list(self._started)


class Launcher:
    """Starts nodes. Threads of several nodes call it at the same time.

    This class starts nothing: the user calls ``run_node`` on the machines of the nodes.

    Attributes:
        name: the value of the option ``launcher=``.
        advice: what to do when a node does not join; a sentence.
    """

    name = "manual"
    advice = (
        "Nodes are not started by this launcher: call muster.cluster.joining.run_node(address) on"
        " their machines, with the same token."
    )

    def start(self, node: int, epoch: int, rendezvous: Rendezvous) -> Started | None:
        """Start the process of a node, which then calls ``run_node``.

        The process of an earlier epoch has been ended.

        Args:
            node: number of the node.
            epoch: of the session. The node need not know it: the rendezvous tells it.
            rendezvous: has the address, and the token, which must not become visible to other users
                of the machine: hand it over through a pipe or a file that only this user can read
                (``rendezvous.write_token``), not as an argument or in the environment.

        Returns:
            None: nothing was started; the node is started elsewhere.
        """
        return None

    def close(self) -> None:
        """Free the launcher's resources. All nodes have been ended before. May be called again."""


class MpLauncher(Launcher):
    """Starts nodes as processes of this machine, which end with this process.

    Args:
        target: the function that a node runs, ``"module:function"``.
        entry: the main function of the process; it takes a channel.
    """

    name = "mp"
    advice = "See its standard error."

    def __init__(
        self, target: str = AGENT, entry: str = "muster.cluster.joining:node_main"
    ) -> None:
        self._target = target
        self._entry = entry

    def start(self, node: int, epoch: int, rendezvous: Rendezvous) -> Started:
        told = (rendezvous.address, node, rendezvous.token, self._target)
        return Process(self._entry, f"muster-node-{node}", told)


class Process:
    """A process of this machine that ends with this process; implements ``Started``.

    Args:
        entry: its main function, ``"module:function"``; it takes a channel.
        name: shown by ``ps``.
        told: the first message that it receives.
    """

    def __init__(self, entry: str, name: str, told: Any) -> None:
        self._channel, theirs = Channel.pair()
        try:
            self._child = launch(entry, theirs, name=name)
            self._channel.send(told)
        except BaseException:
            self._channel.close()
            theirs.close()
            raise

    def __str__(self) -> str:
        return f"process {self._child.pid}"

    @property
    def state(self) -> str:
        return self.ended() or "running"

    def ended(self) -> str | None:
        code = self._child.exit_code()
        return None if code is None else f"its {self} ended with exit code {code}"

    def end(self) -> None:
        self._child.kill()
        self._child.join(END_S)
        self._child.close()
        with contextlib.suppress(OSError):
            self._channel.close()
