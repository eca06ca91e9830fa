"""The names of ``torchrl.collectors``: see ``muster.compat.torchrl``."""

from __future__ import annotations

from muster.utils.private_names import require

require("torchrl", extra="torchrl")  # before imports of its private names

from torchrl.collectors import (  # noqa: E402
    AsyncBatchedCollector,
    BaseCollector,
    ProfileConfig,
    RandomPolicy,
)

from muster.compat.torchrl.collector import Collector  # noqa: E402
from muster.compat.torchrl.collectors.weight_update import (  # noqa: E402
    MultiProcessedWeightUpdater,
    RayWeightUpdater,
    RemoteModuleWeightUpdater,
    VanillaWeightUpdater,
    WeightUpdaterBase,
)
from muster.compat.torchrl.multi import (  # noqa: E402
    AsyncCollector,
    Evaluator,
    MultiAsyncCollector,
    MultiCollector,
    MultiSyncCollector,
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
