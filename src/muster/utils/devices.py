"""Names of devices, and tensors that move to one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from muster.errors import BadOption, text_of

if TYPE_CHECKING:
    import torch
else:
    from muster.utils import lazy_torch as torch


def device_of(name: str, value: Any, *, here: bool = True) -> torch.device:
    """Return the device that an argument names, as tensors there name it.

    Args:
        name: of the argument, for the message.
        value: what the user has given.
        here: this machine must have it.

    Raises:
        BadOption: it is no device, or ``here`` and this machine lacks it.
    """
    try:
        device = torch.device(value)
    except (RuntimeError, TypeError) as error:
        reason = text_of(error).partition("\n")[0]
        raise BadOption(f"{name}={value!r}: not a torch device ({reason})") from None
    if not here:
        return device
    missing = _missing(device)
    if missing:
        raise BadOption(f"{name}={value!r}: {missing}")
    # tensors name the index, and the two are compared
    return with_index(device)


def _missing(device: torch.device) -> str:
    """Return why this machine has no such device; "" if it has it."""
    if device.type == "cuda":
        # without making a context, which takes memory on the device
        if not torch.cuda.is_available():
            return "this machine or this build of torch has no CUDA device"
        count = torch.cuda.device_count()
        if device.index is not None and device.index >= count:
            return f"this machine has {count} CUDA devices, numbered from 0"
        return ""
    try:
        torch.empty(0, device=device)
    except Exception as error:  # noqa: BLE001 (of whatever makes such tensors)
        return text_of(error).partition("\n")[0]
    return ""


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
