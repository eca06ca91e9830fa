"""Names of devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
else:
    from muster.utils import lazy_torch as torch


def with_index(device: torch.device) -> torch.device:
    """Return a device with its number, as tensors name it: "cuda" is the current one."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())
