"""The names of ``torchrl.collectors.weight_update``: weight updaters, which TorchRL has deprecated."""

from __future__ import annotations

from torchrl.collectors import MultiProcessedWeightUpdater, RemoteModuleWeightUpdater

from muster.compat.torchrl.updaters import (
    RayWeightUpdater,
    VanillaWeightUpdater,
    WeightUpdaterBase,
)

__all__ = [
    "MultiProcessedWeightUpdater",
    "RayWeightUpdater",
    "RemoteModuleWeightUpdater",
    "VanillaWeightUpdater",
    "WeightUpdaterBase",
]
