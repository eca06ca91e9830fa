"""The engine "torch_distributed": nodes that join as with "direct", whose large blocks go through
process groups.
"""

from __future__ import annotations

import threading
from dataclasses import asdict

from muster.cluster.admissions import Terms
from muster.cluster.direct import DirectCarrier
from muster.cluster.distributed_link import LARGE, DistributedLink, Groups
from muster.cluster.launchers import Launcher
from muster.cluster.link import Link
from muster.cluster.rendezvous import Rendezvous


class TorchCarrier(DirectCarrier):
    """Nodes that join over a TCP connection each, and get process groups of torch.distributed for
    their session.

    Args:
        launcher, rendezvous, deadline_s: see ``DirectCarrier``.
        backend: of the process groups; see ``process_groups.check_backend``.
        large: bytes of a block from which on it goes through a group.
    """

    engine = "torch_distributed"

    def __init__(
        self,
        launcher: Launcher,
        rendezvous: Rendezvous,
        deadline_s: float = 15.0,
        *,
        backend: str = "gloo",
        large: int = LARGE,
    ) -> None:
        super().__init__(launcher, rendezvous, deadline_s)
        self._groups = Groups(backend, large)

    @property
    def terms(self) -> Terms:
        return Terms(self.engine, self._deadline_s, asdict(self._groups))

    def connect(
        self, node: int, epoch: int, within_s: float, given_up: threading.Event
    ) -> Link:
        channel = self._joined(node, epoch, within_s, given_up)
        try:
            return DistributedLink(channel, self._groups, main=True)
        except BaseException:
            self._end(node)
            raise
