"""Tianshou's collectors, based on Muster: change the import, keep policy, environments, buffer and
trainer.

::

    from muster.compat.tianshou import Collector  # was: from tianshou.data import Collector

Names, arguments, and the contents of the buffer are those of Tianshou 2.0.1: the same seeds give
the same bits. docs/tianshou.md lists the differences.

Three classes are Muster's: ``Collector``, ``AsyncCollector`` and ``EpisodeRolloutHookMerged``. The
others are Tianshou's own, so that the import of everything around a collector can be changed at
once.
"""

from __future__ import annotations

from muster.compat.tianshou.collector import AsyncCollector, Collector
from muster.compat.tianshou.names import (
    BaseCollector,
    CollectActionBatchProtocol,
    CollectStats,
    CollectStatsBase,
    CollectStepBatchProtocol,
    EpisodeBatchProtocol,
    EpisodeRolloutHook,
    EpisodeRolloutHookMCReturn,
    EpisodeRolloutHookProtocol,
    SequenceSummaryStats,
    StepHook,
    StepHookAddActionDistribution,
    StepHookProtocol,
    get_stddev_from_dist,
)
from muster.compat.tianshou.steps import EpisodeRolloutHookMerged

__all__ = [
    "AsyncCollector",
    "BaseCollector",
    "CollectActionBatchProtocol",
    "CollectStats",
    "CollectStatsBase",
    "CollectStepBatchProtocol",
    "Collector",
    "EpisodeBatchProtocol",
    "EpisodeRolloutHook",
    "EpisodeRolloutHookMCReturn",
    "EpisodeRolloutHookMerged",
    "EpisodeRolloutHookProtocol",
    "SequenceSummaryStats",
    "StepHook",
    "StepHookAddActionDistribution",
    "StepHookProtocol",
    "get_stddev_from_dist",
]
