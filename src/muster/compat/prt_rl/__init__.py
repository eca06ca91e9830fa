"""prt_rl's collector, collecting with Muster: change one import, keep environments, policies, loggers and agents.

::

    from muster.compat.prt_rl import Collector  # was: from prt_rl.common.collectors import Collector

Nothing here imports prt_rl: environments, policies and loggers are known by what they do. Names, arguments, keys,
shapes and values are those of prt_rl 0.6.3; docs/prt_rl.md lists what differs.
"""

from __future__ import annotations

from muster.compat.prt_rl.collector import Collector
from muster.observing.metrics import MetricsTracker

__all__ = ["Collector", "MetricsTracker"]
