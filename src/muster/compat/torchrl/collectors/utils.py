"""The public name of ``torchrl.collectors.utils``: TorchRL's own function on TensorDicts."""

from __future__ import annotations

from torchrl.collectors.utils import split_trajectories

__all__ = ["split_trajectories"]
