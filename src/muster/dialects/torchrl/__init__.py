"""TorchRL 0.14's collectors, collecting with Muster: change the import, keep the program.

::

    from muster.dialects.torchrl import Collector  # was: from torchrl.collectors import Collector
    from muster.dialects.torchrl.weight_update import WeightSyncScheme  # was: from torchrl.weight_update import ...

What is equal and what differs: docs/torchrl.md.
"""

from __future__ import annotations

from muster.dialects.torchrl.collector import Collector

__all__ = ["Collector"]
