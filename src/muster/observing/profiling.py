"""Profiling of some rollouts with ``torch.profiler``."""

from __future__ import annotations

import logging
import os
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster.errors import BadOption
from muster.utils.whole_files import file_errors, make_folder, written_elsewhere

if TYPE_CHECKING:
    import torch

_log = logging.getLogger("muster.profiling")

ACTIVITIES = ("cpu", "cuda")
PASSED_ON = ("record_shapes", "profile_memory", "with_stack", "with_flops")


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Options of a profile, with the names of TorchRL.

    Attributes:
        workers: numbers of the workers to profile. None: the first. A collector without workers is
            worker 0.
        num_rollouts: number of rollouts, including the warm-up.
        warmup_rollouts: number of rollouts at the start that are not recorded.
        save_path: path of the Chrome trace. ``{worker_idx}`` is replaced by the worker's number,
            and required for several workers. None: ``collector_profile_{worker_idx}.json``.
        activities: any of "cpu" and "cuda"; "cuda" is ignored without a CUDA device. None: both.
        record_shapes, profile_memory, with_stack, with_flops: see ``torch.profiler.profile``.
        on_trace_ready: function of the profiler that is called instead of writing the trace.

    Raises:
        BadOption: a value is impossible, or contradicts another one.
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
                "expected num_rollouts > warmup_rollouts >= 0"
            )
        wrong = [name for name in self.activities or () if name not in ACTIVITIES]
        if wrong or (self.activities is not None and not len(self.activities)):
            raise BadOption(
                f"activities={self.activities!r}: expected some of {ACTIVITIES}"
            )
        if self.save_path is not None and self.on_trace_ready is not None:
            raise BadOption(
                "on_trace_ready replaces writing the trace to save_path: give one of the two"
            )
        if (
            len(self.workers or ()) > 1
            and self.save_path is not None
            and "{worker_idx}" not in str(self.save_path)
        ):
            raise BadOption(
                f"save_path={str(self.save_path)!r} is one file for several workers: add"
                " '{worker_idx}'"
            )

    def includes(self, worker_idx: int) -> bool:
        """Return whether this worker is profiled."""
        return worker_idx in (self.workers if self.workers is not None else (0,))

    def path(self, worker_idx: int) -> Path:
        """Return the path of this worker's trace."""
        path = str(self.save_path or "collector_profile_{worker_idx}.json")
        return Path(path.replace("{worker_idx}", str(worker_idx)))


class RolloutProfiler:
    """Profiles ``config.num_rollouts`` rollouts, writes the trace, and stops.

    ::

        profiler.start()
        for ...:
            rollout()
            profiler.step()

    All calls must come from the thread that runs the rollouts: ``torch.profiler`` records this
    thread.

    Raises:
        BadOption: none of the activities is available on this machine.
    """

    def __init__(self, config: ProfileConfig, worker_idx: int = 0) -> None:
        self.config = config
        self.worker_idx = worker_idx
        self._activities = _available(config.activities or ACTIVITIES)
        self._profile: torch.profiler.profile | None = None
        self._left = config.num_rollouts

    @property
    def running(self) -> bool:
        """Whether profiling was started and has not ended."""
        return self._profile is not None

    def start(self) -> None:
        """Start before the next rollout. Does nothing while running, or after the end."""
        from torch import profiler

        if self._profile is not None or not self._left:
            return
        config = self.config
        # torch warns about a profile without warm-up, which the user has asked for
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message=".*warmup.*", category=UserWarning
            )
            schedule = profiler.schedule(
                wait=0,
                warmup=config.warmup_rollouts,
                active=config.num_rollouts - config.warmup_rollouts,
                repeat=1,
            )
        profile = profiler.profile(
            activities=self._activities,
            schedule=schedule,
            on_trace_ready=config.on_trace_ready
            or partial(_export, config.path(self.worker_idx)),
            # there is one cycle; without it, torch warns on a GPU that others are lost
            acc_events=True,
            **{name: getattr(config, name) for name in PASSED_ON},
        )
        profile.start()
        self._profile = profile
        # torch crashes if the process exits during recording
        self._at_exit = weakref.finalize(self, _stop, profile)

    def step(self) -> None:
        """Record the end of a rollout. Does nothing while not running."""
        if self._profile is None:
            return
        self._left -= 1
        if self._left:
            self._profile.step()
        else:
            self.stop()

    def stop(self) -> None:
        """End profiling and write the trace, unless only warm-up rollouts were made.

        May be called again.
        """
        profile, self._profile, self._left = self._profile, None, 0
        if profile is not None:
            self._at_exit.detach()
            _stop(profile)


def _export(path: Path, profile: torch.profiler.profile) -> None:
    make_folder(path.parent)
    with written_elsewhere(path) as made, file_errors(made, "written"):
        profile.export_chrome_trace(str(made))


def _available(activities: Sequence[str]) -> list[torch.profiler.ProfilerActivity]:
    import torch
    from torch.profiler import ProfilerActivity

    known = {"cpu": ProfilerActivity.CPU, "cuda": ProfilerActivity.CUDA}
    usable = [
        known[name]
        for name in activities
        if name != "cuda" or torch.cuda.is_available()
    ]
    if not usable:
        raise BadOption(
            f"activities={list(activities)!r}: there is no CUDA device here to profile"
        )
    return usable


def _stop(profile: torch.profiler.profile) -> None:
    """Stop a profile, and write its trace.

    torch keeps addresses of the names in its stacks. What they belong to may be gone: code that
    was freed meanwhile, and the main module when the process ends. The run goes on without the trace.
    """
    try:
        profile.stop()
    except UnicodeDecodeError:
        _log.warning(
            "torch cannot read the stacks of this profile, since code that they name is gone: no"
            " trace is written. Set with_stack=False; where the program ended while it was"
            " profiled, call disable_profile() before."
        )
