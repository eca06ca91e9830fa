"""The names of ``torchrl.collectors.distributed.default_configs``."""

from __future__ import annotations

from torchrl.collectors.distributed.default_configs import (
    DEFAULT_SLURM_CONF_MAIN,
    DEFAULT_TENSORPIPE_OPTIONS,
    IDLE_TIMEOUT,
    MAX_TIME_TO_CONNECT,
    SLEEP_INTERVAL,
    TCP_PORT,
)

from muster.cluster.submitit import DEFAULT_SLURM_CONF

__all__ = [
    "DEFAULT_SLURM_CONF",
    "DEFAULT_SLURM_CONF_MAIN",
    "DEFAULT_TENSORPIPE_OPTIONS",
    "IDLE_TIMEOUT",
    "MAX_TIME_TO_CONNECT",
    "SLEEP_INTERVAL",
    "TCP_PORT",
]
