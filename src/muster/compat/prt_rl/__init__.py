"""prt_rl's collector, based on Muster: change one import, keep environments, policies, loggers and
agents.

::

    from muster.compat.prt_rl import Collector  # was: from prt_rl.common.collectors import Collector

This package does not import prt_rl: it uses environments, policies and loggers by their methods.
Names, arguments, keys, shapes and values are those of prt_rl 0.6.3; docs/prt_rl.md lists the
differences.
"""

from __future__ import annotations

from muster.compat.prt_rl.collector import Collector
from muster.observing.metrics import MetricsTracker

__all__ = ["Collector", "MetricsTracker"]
