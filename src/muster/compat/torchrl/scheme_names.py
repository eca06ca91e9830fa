"""What TorchRL's weight sync schemes mean to a collector: Muster's classes and TorchRL's own have
the same names.
"""

from __future__ import annotations

from muster.weights.choice import NodeScheme
from muster.weights.shared_memory import SharedMemory
from muster.weights.transport import NoSync

SCHEMES: dict[str, SharedMemory | NoSync | NodeScheme] = {
    "SharedMemoryWeightSyncScheme": SharedMemory(),
    "SharedMemWeightSyncScheme": SharedMemory(),
    "MultiProcessWeightSyncScheme": SharedMemory(),
    "NoWeightSyncScheme": NoSync(),
    "DistributedWeightSyncScheme": NodeScheme(
        "DistributedWeightSyncScheme", "DistributedCollector", "torch.distributed"
    ),
    "RPCWeightSyncScheme": NodeScheme(
        "RPCWeightSyncScheme", "RPCCollector", "torch.distributed"
    ),
    "RayWeightSyncScheme": NodeScheme("RayWeightSyncScheme", "RayCollector", "ray"),
}
