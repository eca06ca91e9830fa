"""The public names, spelled out: adding or removing one is a decision, not an accident."""

from __future__ import annotations

import pytest

import muster

PUBLIC = [
    "__version__",
    "AsyncCollector",
    "ClusterOptions",
    "CollectStats",
    "CollectStatsBase",
    "Collected",
    "Collector",
    "CollectorOptions",
    "CollectorStats",
    "DistributedCollector",
    "EpisodeRecord",
    "EvaluatedEpisode",
    "Evaluation",
    "Evaluator",
    "EvaluatorStats",
    "JsonlLogger",
    "MetricsTracker",
    "MultiAsyncCollector",
    "MultiOptions",
    "MultiSyncCollector",
    "ProfileConfig",
    "RPCCollector",
    "RayCollector",
    "Recorder",
    "Recording",
    "ResumeReport",
    "SequenceSummaryStats",
    "TensorBoardLogger",
    "Timeline",
    "Tuning",
    "UnfinishedEpisode",
    "VanillaWeightUpdater",
    "WeightUpdaterBase",
    "WorkerStats",
    "load",
    "load_state",
    "save_state",
    "split_trajectories",
    "tune",
    "errors",
    "policies",
    "testing",
    "weights",
]


def test_public_names() -> None:
    assert sorted(muster.__all__) == sorted(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_name_resolves(name: str) -> None:
    assert getattr(muster, name) is not None


def test_dir_shows_the_public_names() -> None:
    assert set(PUBLIC) <= set(dir(muster))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = muster.no_such_name
