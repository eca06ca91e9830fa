"""Modes of torch that change what the same operations compute: a graph has those of its recording."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def modes(device: torch.device) -> dict[str, Any]:
    """Return the present modes for operations on a device, by what they are about."""
    kind = device.type
    matmul = torch.backends.cuda.matmul
    cudnn = torch.backends.cudnn
    return {
        "autocast": torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
        "the default dtype": torch.get_default_dtype(),
        "the precision of matrix products": (
            _of_legacy(torch.get_float32_matmul_precision),
            getattr(matmul, "fp32_precision", None),  # since torch 2.9
            matmul.allow_fp16_reduced_precision_reduction,
            matmul.allow_bf16_reduced_precision_reduction,
        ),
        "cudnn": (
            cudnn.enabled,
            _of_legacy(lambda: cudnn.allow_tf32),
            getattr(getattr(cudnn, "conv", None), "fp32_precision", None),
            getattr(getattr(cudnn, "rnn", None), "fp32_precision", None),
            cudnn.benchmark,
            cudnn.deterministic,
        ),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
    }


def _of_legacy(mode: Callable[[], Any]) -> Any:
    """Return a mode; None: the user has set ``fp32_precision``, after which torch raises here."""
    try:
        return mode()
    except RuntimeError:
        return None


def difference(one: dict[str, Any], other: dict[str, Any]) -> str:
    """Return what of some modes is another in others; "" if they are the same."""
    for about, mode in one.items():
        if other[about] != mode:
            return f"torch's modes: {about}: {mode} -> {other[about]}"
    return ""
