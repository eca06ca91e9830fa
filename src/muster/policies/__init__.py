"""Policies: heads that sample fast, and adapters for all other policies."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from muster.policies.heads import Head, categorical, deterministic, gaussian, tanh_gaussian

__all__ = ["Head", "categorical", "deterministic", "gaussian", "tanh_gaussian"]


def __getattr__(name: str) -> Any:
    """Import heads on first use (PEP 562): they need torch, and workers with random actions do not."""
    if name in __all__:
        return getattr(importlib.import_module("muster.policies.heads"), name)
    raise AttributeError(f"module 'muster.policies' has no attribute {name!r}")
