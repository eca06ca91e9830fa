"""Policy weights: publishing them in the learner, and taking them in workers.

``SharedMemory`` and ``NoSync`` are the transports: ``weight_sync_schemes={"policy": NoSync()}``.
``muster`` adds the weight sync schemes of TorchRL, which also work without a collector.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

_HOMES = {
    "NoSync": "muster.weights.transport",
    "SharedMemory": "muster.weights.shared_memory",
}
_scheme_tables: list[str] = []

__all__ = list(_HOMES)

if TYPE_CHECKING:
    from muster.weights.shared_memory import SharedMemory as SharedMemory
    from muster.weights.transport import NoSync as NoSync


def __getattr__(name: str) -> Any:
    """Import a public name on first use: a worker without weights loads no torch."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'muster.weights' has no attribute {name!r}")


def add_schemes(table: str, homes: Mapping[str, str]) -> None:
    """Add the weight sync schemes of another system, which a higher layer defines.

    Args:
        table: module whose ``SCHEMES`` says by class name what a scheme means to a collector; see
            ``muster.weights.choice``. It is imported when a collector gets a scheme.
        homes: by public name that is added to this module, the module that defines it.
    """
    _scheme_tables.append(table)
    _HOMES.update(homes)
    __all__.extend(homes)


def added_schemes() -> dict[str, Any]:
    """Return what the added schemes mean, by their class names."""
    meanings: dict[str, Any] = {}
    for table in _scheme_tables:
        meanings.update(importlib.import_module(table).SCHEMES)
    return meanings
