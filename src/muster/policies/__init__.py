"""Policies: heads that sample fast, running normalisation, and adapters for all other policies."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from muster.policies.heads import Head, categorical, deterministic, gaussian, tanh_gaussian
    from muster.policies.normalization import RewardScaler, RunningNorm

__all__ = ["Head", "RewardScaler", "RunningNorm", "categorical", "deterministic", "gaussian", "tanh_gaussian"]


def __getattr__(name: str) -> Any:
    """Import names on first use (PEP 562): they need torch, and workers with random actions do not."""
    if name in __all__:
        module = "normalization" if name.startswith("R") else "heads"
        return getattr(importlib.import_module(f"muster.policies.{module}"), name)
    raise AttributeError(f"module 'muster.policies' has no attribute {name!r}")
