"""Weights on their way from the learner to where they act.

``SharedMemory``, ``Pipe`` and ``NoSync`` say how they get to workers: ``weight_sync_schemes={"policy": Pipe()}``.
``WeightSyncScheme`` and its kinds say the same by TorchRL's names, and also work without a collector.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "DistributedWeightSyncScheme": "muster.weights.sync_schemes",
    "MultiProcessWeightSyncScheme": "muster.weights.sync_schemes",
    "NoSync": "muster.weights.no_sync",
    "NoWeightSyncScheme": "muster.weights.sync_schemes",
    "Pipe": "muster.weights.pipe",
    "RPCWeightSyncScheme": "muster.weights.sync_schemes",
    "RayWeightSyncScheme": "muster.weights.sync_schemes",
    "RayWeightUpdater": "muster.cluster.ray_updater",
    "SharedMemWeightSyncScheme": "muster.weights.sync_schemes",
    "SharedMemory": "muster.weights.shared_memory",
    "SharedMemoryWeightSyncScheme": "muster.weights.sync_schemes",
    "VanillaWeightUpdater": "muster.weights.updaters",
    "WeightSyncScheme": "muster.weights.sync_schemes",
    "WeightUpdaterBase": "muster.weights.updaters",
}

__all__ = list(_HOMES)

if TYPE_CHECKING:
    from muster.cluster.ray_updater import RayWeightUpdater as RayWeightUpdater
    from muster.weights.no_sync import NoSync as NoSync
    from muster.weights.pipe import Pipe as Pipe
    from muster.weights.shared_memory import SharedMemory as SharedMemory
    from muster.weights.sync_schemes import DistributedWeightSyncScheme as DistributedWeightSyncScheme
    from muster.weights.sync_schemes import MultiProcessWeightSyncScheme as MultiProcessWeightSyncScheme
    from muster.weights.sync_schemes import NoWeightSyncScheme as NoWeightSyncScheme
    from muster.weights.sync_schemes import RayWeightSyncScheme as RayWeightSyncScheme
    from muster.weights.sync_schemes import RPCWeightSyncScheme as RPCWeightSyncScheme
    from muster.weights.sync_schemes import SharedMemoryWeightSyncScheme as SharedMemoryWeightSyncScheme
    from muster.weights.sync_schemes import SharedMemWeightSyncScheme as SharedMemWeightSyncScheme
    from muster.weights.sync_schemes import WeightSyncScheme as WeightSyncScheme
    from muster.weights.updaters import VanillaWeightUpdater as VanillaWeightUpdater
    from muster.weights.updaters import WeightUpdaterBase as WeightUpdaterBase


def __getattr__(name: str) -> Any:
    """Load what is asked for: a worker without weights loads no torch."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'muster.weights' has no attribute {name!r}")
