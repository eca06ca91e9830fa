"""Muster: reinforcement-learning experience, collected correctly and at the speed of the
environments.

Layers, each importing only from those before it::

    errors, keys, protocols, rng; utils/   what everybody uses
    memory/       specs of arrays, slots, the user's view of them
    envs/ policies/ episodes/   adapters, one file per third party; the one model of an episode
    rollout/      the loop, groups, resets, hooks
    observing/    stats, loggers, snapshots and their page, timeline, profiling
    weights/      publishing weights
    recording/    experience as files
    restore/      states of environments, checkpoints, crash reports and their replay
    workers/      who fills slots: here, in threads, in processes; schedules, supervision, central inference
    cluster/ vector/   workers on other machines; vector environments that workers step
    collectors/   what the user holds
    serving/ evaluation/ tuning/   programs that ask for actions; how good a policy is; which setup is fastest
    compat/       other systems' names and semantics
    cli/          the muster command
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from muster import weights

__version__ = "0.1.0"

_NAMES = {  # by module
    "muster.cluster.ray_buffer": ("RayBuffer",),
    "muster.collectors": (
        "AsyncCollector",
        "Collector",
        "MultiAsyncCollector",
        "MultiSyncCollector",
    ),
    "muster.collectors.clusters": (
        "DistributedCollector",
        "RPCCollector",
        "RayCollector",
    ),
    "muster.collectors.collect_arguments": ("Collected",),
    "muster.collectors.batch_options": ("Trajectories",),
    "muster.collectors.multi_options": ("CentralInference",),
    "muster.collectors.options": ("Autosave", "Watch"),
    "muster.collectors.resume": ("ResumeReport",),
    "muster.serving.server": ("serve",),
    "muster.episodes.record": ("EpisodeRecord",),
    "muster.episodes.segment": ("split_trajectories",),
    "muster.episodes.summary": ("CollectStats",),
    "muster.evaluation": ("Evaluation", "Evaluator", "EvaluatorStats"),
    "muster.memory.replay": ("ReplayMemory",),
    "muster.observing.loggers": ("JsonlLogger", "TensorBoardLogger"),
    "muster.observing.stats": ("CollectorStats",),
    "muster.observing.timeline": ("Timeline",),
    "muster.recording": ("Recorder", "Recording", "load"),
    "muster.restore.checkpoint": ("load_state", "save_state"),
    "muster.rollout.options": ("Execution",),
    "muster.tuning": ("Tuning", "tune"),
    "muster.utils.interrupts": ("delayed_interrupt",),
    "muster.workers.options": ("Restart",),
}
# TorchRL's names for weights, which ``muster.weights`` shows, too
_UPDATERS = "muster.compat.torchrl.updaters"
_SCHEMES = "muster.compat.torchrl.weight_update"
weights.add_schemes(
    "muster.compat.torchrl.scheme_names",
    {
        "DistributedWeightSyncScheme": _SCHEMES,
        "MultiProcessWeightSyncScheme": _SCHEMES,
        "NoWeightSyncScheme": _SCHEMES,
        "RPCWeightSyncScheme": _SCHEMES,
        "RayWeightSyncScheme": _SCHEMES,
        "RayWeightUpdater": _UPDATERS,
        "SharedMemWeightSyncScheme": _SCHEMES,
        "SharedMemoryWeightSyncScheme": _SCHEMES,
        "VanillaWeightUpdater": _UPDATERS,
        "WeightSyncScheme": _SCHEMES,
        "WeightUpdaterBase": _UPDATERS,
    },
)

_OWN_NAMES = {"load_state": "load", "save_state": "save"}  # in their modules
_HOMES = {name: module for module, names in _NAMES.items() for name in names}
_MODULES = ("errors", "policies", "testing", "weights")

__all__ = ["__version__", *_HOMES, *_MODULES]

if TYPE_CHECKING:
    from muster import errors as errors
    from muster import policies as policies
    from muster import testing as testing
    from muster.cluster.ray_buffer import RayBuffer as RayBuffer
    from muster.collectors import AsyncCollector as AsyncCollector
    from muster.collectors import Collector as Collector
    from muster.collectors import MultiAsyncCollector as MultiAsyncCollector
    from muster.collectors import MultiSyncCollector as MultiSyncCollector
    from muster.collectors.batch_options import Trajectories as Trajectories
    from muster.collectors.clusters import DistributedCollector as DistributedCollector
    from muster.collectors.clusters import RayCollector as RayCollector
    from muster.collectors.clusters import RPCCollector as RPCCollector
    from muster.collectors.collect_arguments import Collected as Collected
    from muster.collectors.multi_options import CentralInference as CentralInference
    from muster.collectors.options import Autosave as Autosave
    from muster.collectors.options import Watch as Watch
    from muster.collectors.resume import ResumeReport as ResumeReport
    from muster.episodes.record import EpisodeRecord as EpisodeRecord
    from muster.episodes.segment import split_trajectories as split_trajectories
    from muster.episodes.summary import CollectStats as CollectStats
    from muster.evaluation import Evaluation as Evaluation
    from muster.evaluation import Evaluator as Evaluator
    from muster.evaluation import EvaluatorStats as EvaluatorStats
    from muster.memory.replay import ReplayMemory as ReplayMemory
    from muster.observing.loggers import JsonlLogger as JsonlLogger
    from muster.observing.loggers import TensorBoardLogger as TensorBoardLogger
    from muster.observing.stats import CollectorStats as CollectorStats
    from muster.observing.timeline import Timeline as Timeline
    from muster.recording import Recorder as Recorder
    from muster.recording import Recording as Recording
    from muster.recording import load as load
    from muster.restore.checkpoint import load as load_state  # noqa: F401 (named by _HOMES)
    from muster.restore.checkpoint import save as save_state  # noqa: F401
    from muster.rollout.options import Execution as Execution
    from muster.serving.server import serve as serve
    from muster.tuning import Tuning as Tuning
    from muster.tuning import tune as tune
    from muster.utils.interrupts import delayed_interrupt as delayed_interrupt
    from muster.workers.options import Restart as Restart


def __getattr__(name: str) -> Any:
    """Import a public name on first use: `import muster` alone loads neither torch nor gymnasium
    (PEP 562).
    """
    if name in _HOMES:
        return getattr(
            importlib.import_module(_HOMES[name]), _OWN_NAMES.get(name, name)
        )
    if name in _MODULES:
        return importlib.import_module(f"muster.{name}")
    raise AttributeError(f"module 'muster' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
