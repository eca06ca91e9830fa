"""Tianshou's own classes around a collector, so that the import of everything can be changed at
once.
"""

from __future__ import annotations

from tianshou.data import (
    BaseCollector,
    CollectStats,
    CollectStatsBase,
    SequenceSummaryStats,
)
from tianshou.data.collector import (
    CollectActionBatchProtocol,
    CollectStepBatchProtocol,
    EpisodeBatchProtocol,
    EpisodeRolloutHook,
    EpisodeRolloutHookMCReturn,
    EpisodeRolloutHookProtocol,
    StepHook,
    StepHookAddActionDistribution,
    StepHookProtocol,
    get_stddev_from_dist,
)

__all__ = [
    "BaseCollector",
    "CollectActionBatchProtocol",
    "CollectStats",
    "CollectStatsBase",
    "CollectStepBatchProtocol",
    "EpisodeBatchProtocol",
    "EpisodeRolloutHook",
    "EpisodeRolloutHookMCReturn",
    "EpisodeRolloutHookProtocol",
    "SequenceSummaryStats",
    "StepHook",
    "StepHookAddActionDistribution",
    "StepHookProtocol",
    "get_stddev_from_dist",
]
