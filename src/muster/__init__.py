"""Muster: reinforcement-learning experience, collected correctly and at the speed of the environments.

Layers, each importing only from those before it::

    words         errors, keys, protocols, rng
    memory/       specs of arrays, slots, the user's view of them
    envs/ policies/   adapters, one file per third party
    rollout       the loop; trajectories
    weights/      publishing weights
    sources/      who fills slots
    stats, recording
    collectors/   what the user holds
    cli/          the muster command
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "Collector": "muster.collectors",
    "CollectorOptions": "muster.collectors",
    "CollectorStats": "muster.stats",
    "EpisodeRecord": "muster.trajectories",
    "Recorder": "muster.recording",
    "Recording": "muster.recording",
    "load": "muster.recording",
}
_MODULES = ("errors", "policies", "testing")

__all__ = ["__version__", *_HOMES, *_MODULES]

if TYPE_CHECKING:
    from muster import errors as errors
    from muster import policies as policies
    from muster import testing as testing
    from muster.collectors import Collector as Collector
    from muster.collectors import CollectorOptions as CollectorOptions
    from muster.recording import Recorder as Recorder
    from muster.recording import Recording as Recording
    from muster.recording import load as load
    from muster.stats import CollectorStats as CollectorStats
    from muster.trajectories import EpisodeRecord as EpisodeRecord


def __getattr__(name: str) -> Any:
    """Load what is asked for: `import muster` alone loads neither torch nor gymnasium (PEP 562)."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"muster.{name}")
    raise AttributeError(f"module 'muster' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
