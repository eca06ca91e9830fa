"""TorchRL's names for the ways to send weights; see ``WeightSyncScheme``."""

from __future__ import annotations

from typing import Any, ClassVar

from muster.errors import BadOption
from muster.weights.no_sync import NoSync
from muster.weights.pipe import Pipe
from muster.weights.shared_memory import SharedMemory
from muster.weights.sync_base import WeightSyncScheme as WeightSyncScheme


class SharedMemoryWeightSyncScheme(WeightSyncScheme):
    """Through memory that processes share."""

    backend = "shared"
    transport = SharedMemory()


class MultiProcessWeightSyncScheme(WeightSyncScheme):
    """As messages from process to process."""

    backend = "process"
    transport = Pipe()


class NoWeightSyncScheme(WeightSyncScheme):
    """Sends nothing: receivers keep what they have."""

    backend = "none"
    transport = NoSync()

    def init_on_sender(self, *, model_id: str = "policy", **_: Any) -> None:
        self._reset()
        self.model_id, self._sending = model_id, True

    def init_on_receiver(self, *, model_id: str = "policy", **_: Any) -> None:
        self._reset()
        self.model_id, self.initialized_on_receiver = model_id, True

    def connect(self, **_: Any) -> None:
        """Nothing to wait for."""
        self.synchronized_on_receiver = self.initialized_on_receiver
        self.synchronized_on_sender = self.initialized_on_sender

    def send(self, weights: Any = None, worker_ids: Any = None) -> None:
        """Nothing is sent."""

    def receive(self, timeout: float | None = 0.0) -> None:
        """There is never anything new."""

    @property
    def initialized_on_sender(self) -> bool:
        return self._sending

    def _reset(self) -> None:
        super()._reset()
        self._sending = False


class _OfNodes(WeightSyncScheme):
    """What the links of a collector's nodes do anyway: one copy per version, which every node gets as it is.

    Args:
        strategy: see ``WeightSyncScheme``.
        backend: TorchRL's, for the weights; here they go the way of the collector's data, see its own ``backend``.
        sync: TorchRL's; here nobody waits. What was published is what a worker's next rollout begins with.
    """

    collector: ClassVar[str] = ""

    def __init__(self, strategy: str = "tensordict", backend: str = "gloo", sync: bool = True) -> None:
        super().__init__(strategy, sync=sync)
        del backend

    def init_on_sender(self, **_: Any) -> None:
        raise self._not_by_hand()

    def init_on_receiver(self, **_: Any) -> None:
        raise self._not_by_hand()

    def _not_by_hand(self) -> BadOption:
        return BadOption(
            f"{type(self).__name__} is an option of {self.collector}, whose own links to its nodes carry the weights: "
            f"{self.collector}(..., weight_sync_schemes={{{self.model_id!r}: {self}}}). Without a collector, "
            f"SharedMemoryWeightSyncScheme and MultiProcessWeightSyncScheme send to processes of one machine."
        )


class DistributedWeightSyncScheme(_OfNodes):
    """What ``DistributedCollector`` does by default: weights through its links to the nodes."""

    backend, collector = "distributed", "DistributedCollector"

    def __init__(self, backend: str = "gloo", sync: bool = True) -> None:
        super().__init__(backend=backend, sync=sync)


class RPCWeightSyncScheme(_OfNodes):
    """What ``RPCCollector`` does by default: weights through its links to the nodes."""

    backend, collector = "rpc", "RPCCollector"


class RayWeightSyncScheme(_OfNodes):
    """What ``RayCollector`` does by default: weights through Ray's object store, put there once per version."""

    backend, collector = "ray", "RayCollector"


SharedMemWeightSyncScheme = SharedMemoryWeightSyncScheme
