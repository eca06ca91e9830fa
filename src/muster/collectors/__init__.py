"""Collectors and their options."""

from muster.collectors.collector import Collector
from muster.collectors.multi import AsyncCollector, MultiAsyncCollector, MultiSyncCollector
from muster.collectors.multi_options import MultiOptions
from muster.collectors.options import CollectorOptions

__all__ = [
    "AsyncCollector",
    "Collector",
    "CollectorOptions",
    "MultiAsyncCollector",
    "MultiOptions",
    "MultiSyncCollector",
]
