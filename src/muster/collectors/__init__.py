"""Collectors and their options."""

from muster.collectors.collector import Collector
from muster.collectors.multi import (
    AsyncCollector,
    MultiAsyncCollector,
    MultiSyncCollector,
)

__all__ = [
    "AsyncCollector",
    "Collector",
    "MultiAsyncCollector",
    "MultiSyncCollector",
]
