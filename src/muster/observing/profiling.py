"""``torch.profiler`` over a few rollouts."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster.errors import BadOption
from muster.utils.whole_files import written_elsewhere

if TYPE_CHECKING:
    import torch

ACTIVITIES = ("cpu", "cuda")


@dataclass(frozen=True)
class ProfileConfig:
    """What to profile; the same words as TorchRL's.

    Args:
        workers: numbers of the workers to profile; None for the first. A collector without workers is worker 0.
        num_rollouts: rollouts from the beginning to the end, the warm-up included.
        warmup_rollouts: of these, how many at the beginning are not shown.
        save_path: of the Chrome trace; ``{worker_idx}`` stands for the worker's number, and must be there if there are
            several. Default ``collector_profile_{worker_idx}.json``.
        activities: "cpu", "cuda"; by default, and where it is named, CUDA counts only if there is one.
        record_shapes, profile_memory, with_stack, with_flops: as in ``torch.profiler.profile``.
        on_trace_ready: called with the profiler instead of writing the trace.

    Raises:
        BadOption: an impossible value, or two that contradict each other.
    """

    workers: Sequence[int] | None = None
    num_rollouts: int = 3
    warmup_rollouts: int = 1
    save_path: str | os.PathLike[str] | None = None
    activities: Sequence[str] | None = None
    record_shapes: bool = True
    profile_memory: bool = False
    with_stack: bool = True
    with_flops: bool = False
    on_trace_ready: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        if not self.num_rollouts > self.warmup_rollouts >= 0:
            raise BadOption(
                f"num_rollouts={self.num_rollouts}, warmup_rollouts={self.warmup_rollouts}: "
                f"expected num_rollouts > warmup_rollouts >= 0"
            )
        wrong = [name for name in self.activities or () if name not in ACTIVITIES]
        if wrong or (self.activities is not None and not len(self.activities)):
            raise BadOption(f"activities={self.activities!r}: expected some of {ACTIVITIES}")
        if self.save_path is not None and self.on_trace_ready is not None:
            raise BadOption("on_trace_ready replaces writing the trace to save_path: give one of the two")
        if len(self.workers or ()) > 1 and self.save_path is not None and "{worker_idx}" not in str(self.save_path):
            raise BadOption(f"save_path={str(self.save_path)!r} is one file for several workers: add '{{worker_idx}}'")

    def includes(self, worker_idx: int) -> bool:
        """Whether this worker is profiled."""
        return worker_idx in (self.workers if self.workers is not None else (0,))

    def path(self, worker_idx: int) -> Path:
        """Where this worker's trace goes."""
        path = str(self.save_path or "collector_profile_{worker_idx}.json")
        return Path(path.replace("{worker_idx}", str(worker_idx)))


class RolloutProfiler:
    """Profiles ``config.num_rollouts`` rollouts, then writes the trace and is done.

    ::

        profiler.start()
        for ...:
            rollout()
            profiler.step()

    All of it in the thread that runs the rollouts: that is what ``torch.profiler`` watches.

    Raises:
        BadOption: none of the activities is available here.
    """

    def __init__(self, config: ProfileConfig, worker_idx: int = 0) -> None:
        self.config, self.worker_idx = config, worker_idx
        self._activities = _available(config.activities or ACTIVITIES)
        self._profile: torch.profiler.profile | None = None
        self._left = config.num_rollouts

    @property
    def running(self) -> bool:
        """Started, and not yet done."""
        return self._profile is not None

    def start(self) -> None:
        """Begin before the next rollout; without effect while running and when done."""
        from torch import profiler

        if self._profile is not None or not self._left:
            return
        config = self.config
        with warnings.catch_warnings():  # torch warns of a profile without warm-up; here that was asked for
            warnings.filterwarnings("ignore", message=".*warmup.*", category=UserWarning)
            schedule = profiler.schedule(
                wait=0, warmup=config.warmup_rollouts, active=config.num_rollouts - config.warmup_rollouts, repeat=1
            )
        profile = profiler.profile(
            activities=self._activities,
            schedule=schedule,
            on_trace_ready=config.on_trace_ready or partial(_export, config.path(self.worker_idx)),
            record_shapes=config.record_shapes,
            profile_memory=config.profile_memory,
            with_stack=config.with_stack,
            with_flops=config.with_flops,
        )
        profile.start()
        self._profile = profile
        self._at_exit = weakref.finalize(self, profile.stop)  # torch crashes if the process ends while it records

    def step(self) -> None:
        """A rollout has ended; without effect while not running."""
        if self._profile is None:
            return
        self._left -= 1
        if self._left:
            self._profile.step()
        else:
            self.stop()

    def stop(self) -> None:
        """End it; what was recorded so far is written, after a warm-up only nothing. May be called again."""
        profile, self._profile, self._left = self._profile, None, 0
        if profile is not None:
            self._at_exit.detach()
            profile.stop()


def _export(path: Path, profile: torch.profiler.profile) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_elsewhere(path) as made:
        profile.export_chrome_trace(str(made))


def _available(activities: Sequence[str]) -> list[torch.profiler.ProfilerActivity]:
    import torch
    from torch.profiler import ProfilerActivity

    known = {"cpu": ProfilerActivity.CPU, "cuda": ProfilerActivity.CUDA}
    usable = [known[name] for name in activities if name != "cuda" or torch.cuda.is_available()]
    if not usable:
        raise BadOption(f"activities={list(activities)!r}: there is no CUDA device here to profile")
    return usable
