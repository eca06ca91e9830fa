"""Weights on their way from the learner to where they act.

``SharedMemory``, ``Pipe`` and ``NoSync`` say how they get to workers: ``weight_sync_schemes={"policy": Pipe()}``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {"NoSync": "no_sync", "Pipe": "pipe", "SharedMemory": "shared_memory"}

__all__ = ["NoSync", "Pipe", "SharedMemory"]

if TYPE_CHECKING:
    from muster.weights.no_sync import NoSync as NoSync
    from muster.weights.pipe import Pipe as Pipe
    from muster.weights.shared_memory import SharedMemory as SharedMemory


def __getattr__(name: str) -> Any:
    """Load what is asked for: a worker without weights loads no torch."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"muster.weights.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'muster.weights' has no attribute {name!r}")
