"""The public name of ``torchrl.collectors.distributed.sync``."""

from __future__ import annotations

from muster.compat.torchrl.collectors.distributed import DistributedSyncCollector

__all__ = ["DistributedSyncCollector"]
