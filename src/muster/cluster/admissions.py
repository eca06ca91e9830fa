"""Which nodes may join a main process, and which of them have joined.

One admission of a node passes through these states:

1. admitted (``admit``): any connection that asks for this node may be offered it.
2. offered (``claim``): to one connection, until that accepts it or ends (``release``). Then it can
   be offered again.
   Or it is refused (``refuse``): the node that asked for it has another Muster.
3. joined (``accept``): its link waits for the carrier, which takes it (``joined``).

``withdraw`` ends an admission in any state, and closes its link. A node has one admission at a time:
one with a later epoch replaces the earlier one. Threads of carriers and of connections use this at
the same time.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from muster.cluster.link import OtherMuster
from muster.cluster.socket_link import SocketLink

ANSWER_S = 5.0  # for an answer of the other end
PAUSE_S = 1.0  # after which a node without an offer is told so


@dataclass(frozen=True)
class Terms:
    """What holds for a session, at both ends.

    Attributes:
        engine: carries messages and blocks.
        deadline_s: seconds without a message after which the link is lost.
        groups: of the process groups, see ``distributed_link.Groups``; None: there are none.
    """

    engine: str = "direct"
    deadline_s: float = ANSWER_S
    groups: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Admission:
    """A node that may join in one session."""

    node: int
    epoch: int
    terms: Terms = field(default_factory=Terms)


class Admissions:
    """All admissions of a main process."""

    def __init__(self) -> None:
        self._admitted: dict[int, Admission] = {}  # by node, until it has joined
        self._offered: set[int] = (
            set()
        )  # identities of those that a connection was offered
        self._joined: dict[tuple[int, int], SocketLink] = {}  # by node and epoch
        # why a node with another Muster was refused, by number
        self._refused: dict[int, str] = {}
        self._changed = threading.Condition()
        self._closed = False

    def admit(self, admission: Admission) -> None:
        """Let a node join with this epoch, and with no other one."""
        with self._changed:
            self._admitted[admission.node] = admission
            self._refused.pop(admission.node, None)
            self._changed.notify_all()

    def withdraw(self, node: int) -> None:
        """Refuse this node until it is admitted again."""
        with self._changed:
            self._admitted.pop(node, None)
            joined = [key for key in self._joined if key[0] == node]
            unused = [self._joined.pop(key) for key in joined]
        for channel in unused:
            channel.close()

    def claim(self, wanted: int | None) -> Admission | None:
        """Wait until a node may join that no connection was offered, and return it.

        Args:
            wanted: its number; None: any node.

        Returns:
            None: there was none for ``PAUSE_S``.
        """

        def find() -> Admission | None:
            for node, admission in sorted(self._admitted.items()):
                if id(admission) not in self._offered and wanted in (None, node):
                    return admission
            return None

        with self._changed:
            self._changed.wait_for(lambda: find() or self._closed, PAUSE_S)
            found = find()
            if found is not None:
                self._offered.add(id(found))
            return found

    def refuse(self, admission: Admission, why: str) -> None:
        """End an admission: the node that asked for it has another Muster."""
        with self._changed:
            if self._admitted.get(admission.node) is admission:
                del self._admitted[admission.node]
                self._refused[admission.node] = why
            self._changed.notify_all()

    def release(self, admission: Admission) -> None:
        """End an offer."""
        with self._changed:
            self._offered.discard(id(admission))
            self._changed.notify_all()

    def accept(self, admission: Admission, channel: SocketLink) -> bool:
        """Note that a connection has accepted its offer: it is the link of the session.

        Returns:
            False: the admission was withdrawn or replaced meanwhile.
        """
        with self._changed:
            if self._closed or self._admitted.get(admission.node) is not admission:
                return False
            del self._admitted[admission.node]
            self._joined[admission.node, admission.epoch] = channel
            return True

    def joined(self, node: int, epoch: int, within_s: float) -> SocketLink | None:
        """Wait for the link to a node, which the caller closes.

        Returns:
            None: the node has not joined in this time.

        Raises:
            OtherMuster: it has another Muster.
        """

        def is_settled() -> bool:
            return (node, epoch) in self._joined or node in self._refused

        with self._changed:
            self._changed.wait_for(lambda: is_settled() or self._closed, within_s)
            if node in self._refused:
                raise OtherMuster(self._refused[node])
            return self._joined.pop((node, epoch), None)

    def close(self) -> None:
        """End all admissions. May be called again."""
        with self._changed:
            self._closed = True
            links = list(self._joined.values())
            self._joined.clear()
            self._changed.notify_all()
        for link in links:
            link.close()
