"""A carrier: starts the nodes of a collector, and gives a link for each session.

One class for each engine.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import ClassVar

from muster.cluster.link import Link

JOIN_POLL_S = 0.02


class Carrier(ABC):
    """Connects the nodes of a collector.

    Attributes:
        engine: what carries messages and blocks, for ``stats()`` and messages to the user; see
            ``link.py``.
        name: the family of collectors whose ``weight_sync_schemes`` fit.
        gives_memory: batches of one node are to lie in the memory in which the engine has received
            them. Blocks that were not expected are in such memory.
    """

    engine: ClassVar[str]
    name: ClassVar[str]
    gives_memory: bool = False

    @property
    @abstractmethod
    def address(self) -> str:
        """Where nodes join, for messages to the user."""

    @abstractmethod
    def connect(
        self, node: int, epoch: int, within_s: float, given_up: threading.Event
    ) -> Link:
        """Start a node, and wait until it has joined.

        Each node is connected by a thread of its own.

        Args:
            node: its number, from 0.
            epoch: 0, and one more each time that the node has to be started again.
            within_s: seconds for the node to join (infinity: no deadline).
            given_up: set by the caller to end the waiting with LinkLost.

        Raises:
            NotJoined: the node did not join in time.
            LinkLost: the node exited, or was given up. The text says which, and what to do.
        """

    @abstractmethod
    def close(self) -> None:
        """End the nodes that were started, by force if necessary, and free everything else.

        All links are closed before. May be called again.
        """
