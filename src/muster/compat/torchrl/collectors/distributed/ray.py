"""The public names of ``torchrl.collectors.distributed.ray``."""

from __future__ import annotations

from torchrl.collectors.distributed.ray import (
    DEFAULT_RAY_INIT_CONFIG,
    DEFAULT_REMOTE_CLASS_CONFIG,
)

from muster.compat.torchrl.collectors.distributed import RayCollector

__all__ = ["DEFAULT_RAY_INIT_CONFIG", "DEFAULT_REMOTE_CLASS_CONFIG", "RayCollector"]
