"""Masks of environments, for tensors with further dimensions."""

from __future__ import annotations

import torch


def like(mask: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    """Reshape a mask so that it broadcasts over ``leaf``, which has further dimensions."""
    return mask.reshape(*mask.shape, *[1] * (leaf.ndim - mask.ndim))


def where(mask: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return ``a`` where the mask is, and ``b`` elsewhere."""
    return torch.where(like(mask, a), a, b)


def choose(
    mask: torch.Tensor, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor
) -> None:
    """Write ``a`` into ``out`` where the mask is, and ``b`` elsewhere."""
    if a.dtype == b.dtype == out.dtype and a.device == out.device:
        torch.where(like(mask, a), a, b, out=out)
    else:
        out.copy_(where(mask, a, b.to(a.device)))
