"""Policies: heads that sample fast, and adapters for all other policies."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from muster.policies.agents import per_agent
    from muster.policies.heads import Head, categorical, deterministic, gaussian, tanh_gaussian

__all__ = ["Head", "categorical", "deterministic", "gaussian", "per_agent", "tanh_gaussian"]


def __getattr__(name: str) -> Any:
    """Import heads on first use (PEP 562): they need torch, and workers with random actions do not."""
    if name in __all__:
        home = "agents" if name == "per_agent" else "heads"
        return getattr(importlib.import_module(f"muster.policies.{home}"), name)
    raise AttributeError(f"module 'muster.policies' has no attribute {name!r}")
