"""TorchRL 0.14's collectors, collecting with Muster: change the import, keep the program.

::

    from muster.compat.torchrl import Collector  # was: from torchrl.collectors import Collector
    from muster.compat.torchrl.weight_update import WeightSyncScheme  # was: from torchrl.weight_update import ...

What is equal and what differs: docs/torchrl.md.
"""

from __future__ import annotations

from muster.utils.private_names import require

require("torchrl", extra="torchrl")  # before the modules that look for its private names

from muster.compat.torchrl.collector import Collector  # noqa: E402

__all__ = ["Collector"]
