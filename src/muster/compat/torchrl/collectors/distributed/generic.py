"""The public names of ``torchrl.collectors.distributed.generic``."""

from __future__ import annotations

from muster.cluster.submitit import DEFAULT_SLURM_CONF
from muster.compat.torchrl.collectors.distributed import (
    DistributedCollector,
    DistributedWeightUpdater,
)

__all__ = ["DEFAULT_SLURM_CONF", "DistributedCollector", "DistributedWeightUpdater"]
