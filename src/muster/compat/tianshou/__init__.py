"""Tianshou's collectors, based on Muster: change the import, keep policy, environments, buffer and trainer.

::

    from muster.compat.tianshou import Collector  # was: from tianshou.data import Collector

Names, arguments, and the contents of the buffer are those of Tianshou 2.0.1: the same seeds give the same bits.
docs/tianshou.md lists the differences.
"""

from __future__ import annotations

from muster.compat.tianshou.collector import AsyncCollector, Collector
from muster.compat.tianshou.steps import EpisodeRolloutHookMerged
from muster.episodes.summary import CollectStats, CollectStatsBase, SequenceSummaryStats

__all__ = [
    "Collector",
    "AsyncCollector",
    "EpisodeRolloutHookMerged",
    "CollectStats",
    "CollectStatsBase",
    "SequenceSummaryStats",
]
