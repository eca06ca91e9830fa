"""Names of devices, and tensors that move to one."""

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


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on a device. The host goes on meanwhile, unless the device is the host's
    memory: what is in it before the end of the copy is anything.
    """
    return tensor.to(device, non_blocking=device.type != "cpu")
