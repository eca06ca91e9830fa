"""The public name of ``torchrl.collectors.distributed.ray_eval_worker``: TorchRL's own class, in
which there is no collector.
"""

from __future__ import annotations

from torchrl.collectors.distributed.ray_eval_worker import RayEvalWorker

__all__ = ["RayEvalWorker"]
