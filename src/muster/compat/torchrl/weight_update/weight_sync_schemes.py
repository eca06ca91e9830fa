"""The public names of ``torchrl.weight_update.weight_sync_schemes``."""

from __future__ import annotations

from typing import Any

import muster.compat.torchrl.weight_update as weight_update
from muster.compat.torchrl.weight_update import WeightSyncScheme

__all__ = ["WeightSyncScheme"]
_OF_TORCHRL = (
    "InitialSyncTransport",
    "TransportBackend",
    "WeightStrategy",
    "WeightSyncBackend",
)


def __getattr__(name: str) -> Any:
    """Import TorchRL's own parts of schemes on first use, as the package does."""
    if name not in _OF_TORCHRL:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(weight_update, name)
