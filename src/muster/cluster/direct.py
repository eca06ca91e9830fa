"""The engine "direct": starts the nodes of a collector, and waits until each has joined at the
rendezvous.

The connection through which a node has joined is the link of its session.
"""

from __future__ import annotations

import threading
import time

from muster.cluster.admissions import Terms
from muster.cluster.carrier import JOIN_POLL_S, Carrier
from muster.cluster.launchers import Launcher, StartedNodes
from muster.cluster.link import Link, LinkLost, NotJoined
from muster.cluster.rendezvous import Rendezvous
from muster.cluster.socket_link import SocketLink
from muster.errors import BadOption


class DirectCarrier(Carrier):
    """Nodes that join over a TCP connection each, however they are started.

    Args:
        launcher: starts the nodes; closed by ``close``.
        rendezvous: where they join; closed by ``close``.
        deadline_s: seconds without a message after which a link is lost.
    """

    engine = "direct"
    name = "torch.distributed"

    def __init__(
        self, launcher: Launcher, rendezvous: Rendezvous, deadline_s: float = 15.0
    ) -> None:
        self._launcher = launcher
        self.rendezvous = rendezvous
        self._started = StartedNodes()
        self._deadline_s = deadline_s

    @property
    def address(self) -> str:
        return self.rendezvous.address

    @property
    def terms(self) -> Terms:
        """What nodes are told of their sessions."""
        return Terms(self.engine, self._deadline_s)

    def connect(
        self, node: int, epoch: int, within_s: float, given_up: threading.Event
    ) -> Link:
        return self._joined(node, epoch, within_s, given_up)

    def _joined(
        self, node: int, epoch: int, within_s: float, given_up: threading.Event
    ) -> SocketLink:
        """Start a node, and wait until it has joined; see ``connect``."""
        if self._started.is_closed:
            raise LinkLost(f"Node {node} is not started: the collector is closed.")
        deadline = time.monotonic() + within_s
        self._end(node)
        self.rendezvous.admit(node, epoch, self.terms)
        try:
            self._started.add(node, self._launcher.start(node, epoch, self.rendezvous))
            return self._wait(node, epoch, deadline, within_s, given_up)
        except BaseException:
            self.rendezvous.withdraw(node)
            self._end(node)
            raise

    def close(self) -> None:
        for node in self._started.close():
            self._end(node)
        self._launcher.close()
        self.rendezvous.close()

    def _end(self, node: int) -> None:
        self._started.end(node)

    def _wait(
        self,
        node: int,
        epoch: int,
        deadline: float,
        within_s: float,
        given_up: threading.Event,
    ) -> SocketLink:
        started = self._started.get(node)
        while (link := self.rendezvous.joined(node, epoch, JOIN_POLL_S)) is None:
            if given_up.is_set():
                raise LinkLost(f"Node {node} was given up before it had joined.")
            if started is not None and (reason := started.ended()):
                raise LinkLost(
                    f"Node {node} has not joined: {reason}. {self._launcher.advice}".rstrip()
                )
            if reason := self.rendezvous.stuck():
                raise LinkLost(f"Node {node} has not joined: {reason}.")
            if time.monotonic() > deadline:
                state = "" if started is None else f" Its {started} is {started.state}."
                raise NotJoined(
                    f"Node {node} has not joined at {self.address} within {within_s:g} s.{state} "
                    f"{self._launcher.advice}{self.rendezvous.refused()}".rstrip()
                )
        return link


def check_backend(backend: str) -> None:
    """Raise BadOption unless the backend is supported."""
    if backend in ("nccl", "ucc", "mpi"):
        raise BadOption(
            f"backend={backend!r} has not run with Muster on devices yet, so it is refused: use"
            " backend='gloo', which carries data through the hosts' memory"
        )
    if backend != "gloo":
        raise BadOption(f"backend={backend!r} is unknown: expected 'gloo'")
