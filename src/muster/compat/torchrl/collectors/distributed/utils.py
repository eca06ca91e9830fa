"""The public name of ``torchrl.collectors.distributed.utils``."""

from __future__ import annotations

from muster.cluster.submitit_delayed import submitit_delayed_launcher

__all__ = ["submitit_delayed_launcher"]
