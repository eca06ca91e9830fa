"""TorchRL 0.14's collectors, implemented with Muster. Only the imports of a program change.

::

    from muster.compat.torchrl.collectors import Collector  # was: from torchrl.collectors import Collector
    from muster.compat.torchrl.weight_update import WeightSyncScheme  # was: from torchrl.weight_update import ...

docs/torchrl.md describes the differences.
"""

# ruff: noqa: F405 (names that need TorchRL are imported on first use)
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from muster.compat.torchrl.updaters import (
    RayWeightUpdater,
    VanillaWeightUpdater,
    WeightUpdaterBase,
)

__all__ = [
    "AsyncBatchedCollector",
    "AsyncCollector",
    "BaseCollector",
    "Collector",
    "Evaluator",
    "MultiAsyncCollector",
    "MultiCollector",
    "MultiProcessedWeightUpdater",
    "MultiSyncCollector",
    "ProfileConfig",
    "RandomPolicy",
    "RayWeightUpdater",
    "RemoteModuleWeightUpdater",
    "VanillaWeightUpdater",
    "WeightUpdaterBase",
]

if TYPE_CHECKING:
    from muster.compat.torchrl.collectors import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """Import names that need TorchRL on first use; weight sync schemes and updaters do not need it."""
    if name not in __all__:
        raise AttributeError(
            f"module 'muster.compat.torchrl' has no attribute {name!r}"
        )
    return getattr(importlib.import_module("muster.compat.torchrl.collectors"), name)
