"""The public names of ``torchrl.collectors.collectors``, from which older programs import."""

from __future__ import annotations

from torchrl.collectors import BaseCollector
from torchrl.collectors.collectors import (
    DEFAULT_EXPLORATION_TYPE,
    INSTANTIATE_TIMEOUT,
    WEIGHT_SYNC_TIMEOUT,
    cudagraph_mark_step_begin,
)

from muster.compat.torchrl.collector import Collector
from muster.compat.torchrl.multi import (
    AsyncCollector,
    MultiAsyncCollector,
    MultiCollector,
    MultiSyncCollector,
)

__all__ = [
    "DEFAULT_EXPLORATION_TYPE",
    "INSTANTIATE_TIMEOUT",
    "WEIGHT_SYNC_TIMEOUT",
    "AsyncCollector",
    "BaseCollector",
    "Collector",
    "MultiAsyncCollector",
    "MultiCollector",
    "MultiSyncCollector",
    "cudagraph_mark_step_begin",
]
