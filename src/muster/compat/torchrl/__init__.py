"""TorchRL 0.14's collectors, collecting with Muster: change the import, keep the program.

::

    from muster.compat.torchrl import Collector  # was: from torchrl.collectors import Collector
    from muster.compat.torchrl.weight_update import WeightSyncScheme  # was: from torchrl.weight_update import ...

What is equal and what differs: docs/torchrl.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from muster.compat.torchrl.updaters import VanillaWeightUpdater, WeightUpdaterBase
from muster.utils.private_names import require

__all__ = ["Collector", "VanillaWeightUpdater", "WeightUpdaterBase"]

if TYPE_CHECKING:
    from muster.compat.torchrl.collector import Collector as Collector


def __getattr__(name: str) -> Any:
    """Load what needs TorchRL when it is used: weight sync schemes and updaters do not."""
    if name != "Collector":
        raise AttributeError(f"module 'muster.compat.torchrl' has no attribute {name!r}")
    require("torchrl", extra="torchrl")  # before the modules that look for its private names
    from muster.compat.torchrl.collector import Collector

    return Collector
