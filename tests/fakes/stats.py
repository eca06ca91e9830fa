"""Statistics of a collector and its workers, as if they had been measured."""

from __future__ import annotations

import dataclasses
from typing import Any

from muster.observing.stats import CollectorStats, WorkerStats


def stats(**changes: Any) -> CollectorStats:
    """500 frames in 10 s of rollouts, of which the environments took 6; with these changes."""
    plain = CollectorStats(
        frames=500,
        executed=500,
        discarded={},
        in_flight=0,
        batches=5,
        episodes=0,
        return_mean=None,
        length_mean=None,
        frames_per_s=38_200.0,
        env_s=6.0,
        policy_s=2.0,
        copy_s=1.0,
        rest_s=1.0,
        wait_s=0.0,
        policy_path="module",
        policy_version=0,
        policy_lag={},
        slots={},
    )
    return dataclasses.replace(plain, **changes)


def worker(index: int, **changes: Any) -> WorkerStats:
    """Worker ``index``, which has made half of the frames; with these changes."""
    plain = WorkerStats(
        index=index,
        pid=7,
        state="working",
        phase="step",
        env_ids=(index,),
        frames=250,
        share=0.5,
        frames_per_s=19_000.0,
        busy_s=5.0,
        restarts=0,
        policy_lag=0,
    )
    return dataclasses.replace(plain, **changes)
