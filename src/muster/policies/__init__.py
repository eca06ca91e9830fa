"""Policies: heads that sample fast, running normalisation, and adapters for all other policies."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from muster.policies.agents import per_agent
    from muster.policies.heads import (
        Head,
        categorical,
        deterministic,
        epsilon_greedy,
        gaussian,
        tanh_gaussian,
    )
    from muster.policies.normalization import RewardScaler, RunningNorm
    from muster.policies.states import recurrent

__all__ = [
    "Head",
    "RewardScaler",
    "RunningNorm",
    "categorical",
    "deterministic",
    "epsilon_greedy",
    "gaussian",
    "per_agent",
    "recurrent",
    "tanh_gaussian",
]


def __getattr__(name: str) -> Any:
    """Import names on first use (PEP 562): they need torch, and workers with random actions do not."""
    if name in __all__:
        elsewhere = {"per_agent": "agents", "recurrent": "states"}
        elsewhere |= dict.fromkeys(("RewardScaler", "RunningNorm"), "normalization")
        module = importlib.import_module(
            f"muster.policies.{elsewhere.get(name, 'heads')}"
        )
        return getattr(module, name)
    raise AttributeError(f"module 'muster.policies' has no attribute {name!r}")
