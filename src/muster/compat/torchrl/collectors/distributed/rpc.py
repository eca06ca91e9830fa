"""The public names of ``torchrl.collectors.distributed.rpc``."""

from __future__ import annotations

from muster.compat.torchrl.collectors.distributed import RPCCollector, RPCWeightUpdater

__all__ = ["RPCCollector", "RPCWeightUpdater"]
