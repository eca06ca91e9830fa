"""Policy weights: publishing them in the learner, and taking them in workers.

``SharedMemory`` and ``NoSync`` are the transports: ``weight_sync_schemes={"policy": NoSync()}``.
TorchRL's weight sync schemes, which also work without a collector, are defined in
``muster.compat.torchrl``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_SCHEMES = "muster.compat.torchrl.weight_update"
_UPDATERS = "muster.compat.torchrl.updaters"
_HOMES = {
    "DistributedWeightSyncScheme": _SCHEMES,
    "MultiProcessWeightSyncScheme": _SCHEMES,
    "NoSync": "muster.weights.transport",
    "NoWeightSyncScheme": _SCHEMES,
    "RPCWeightSyncScheme": _SCHEMES,
    "RayWeightSyncScheme": _SCHEMES,
    "RayWeightUpdater": _UPDATERS,
    "SharedMemWeightSyncScheme": _SCHEMES,
    "SharedMemory": "muster.weights.shared_memory",
    "SharedMemoryWeightSyncScheme": _SCHEMES,
    "VanillaWeightUpdater": _UPDATERS,
    "WeightSyncScheme": _SCHEMES,
    "WeightUpdaterBase": _UPDATERS,
}

__all__ = list(_HOMES)

if TYPE_CHECKING:
    from muster.compat.torchrl.updaters import *  # noqa: F403
    from muster.compat.torchrl.weight_update import *  # noqa: F403
    from muster.weights.shared_memory import SharedMemory as SharedMemory
    from muster.weights.transport import NoSync as NoSync


def __getattr__(name: str) -> Any:
    """Import a public name on first use: a worker without weights loads no torch."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'muster.weights' has no attribute {name!r}")
