"""The name of ``torchrl.collectors.utils``: a function on TensorDicts, which is TorchRL's own."""

from __future__ import annotations

from torchrl.collectors.utils import split_trajectories

__all__ = ["split_trajectories"]
