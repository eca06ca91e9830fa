"""Collections in which something goes wrong in worker 0, and what has to hold for all of them."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
import warnings
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from muster import MultiAsyncCollector, MultiSyncCollector
from muster.errors import text_of
from muster.testing import Fault, OracleEnv, check_stream
from tests.tools import assert_balanced

LEFT_OUT = object()  # the value of an option that is not given
T = 20  # rows per rollout of each of the two environments
FRAMES = 200
PHASES = ("construct", "reset", "step", "policy", "weights", "call", "close")


@dataclass
class Outcome:
    """Of a collection until ``FRAMES``, errors or not, and its shutdown."""

    batches: list[Any]
    errors: list[BaseException]
    stats: Any
    counts: Any  # see ``OracleEnv.read``

    @property
    def error(self) -> Any:
        (error,) = self.errors
        return error

    @property
    def in_lockstep(self) -> bool:
        """Batches have rows of both environments; else the share of each may be any."""
        return len(self.batches[0]) == 2

    def check(
        self,
        *,
        gaps: int = 0,
        undisturbed: Outcome | None = None,
        frames: int | None = FRAMES,
        unseen: int = 0,
    ) -> Counter[tuple[int, int]]:
        """Nothing is lost, doubled or made up, and the other environment has noticed nothing.

        Args:
            frames: None: any number.
            unseen: the most steps that only nodes knew that are lost.
        """
        stats, truth = self.stats, self.counts[:, 2].sum()
        rows = check_stream(self.batches, gaps=gaps)
        assert stats.frames == sum(rows.values())
        assert frames in (None, stats.frames)
        assert_balanced(stats, in_flight=0)
        assert stats.unseen <= unseen
        assert stats.executed <= truth <= stats.executed + stats.unseen, (
            "as the environments themselves have counted"
        )
        if undisturbed is not None:
            self.check_same(undisturbed)
        return rows

    def check_same(self, undisturbed: Outcome) -> None:
        """The other environment has noticed nothing."""
        self.check_rows(undisturbed, 1, FRAMES // 2 - T if self.in_lockstep else T)

    def check_rows(self, other: Outcome, env: int, least: int) -> None:
        """An environment's rows are the same as far as both go, which is for so many at least."""
        for mine, theirs in zip(self.rows_of(env), other.rows_of(env), strict=True):
            both = min(len(mine), len(theirs))
            assert both >= least
            assert torch.equal(mine[:both], theirs[:both])

    def rows_of(self, env: int) -> list[torch.Tensor]:
        """All columns of an environment, joined in time; ids but for their common factor."""
        lanes = [
            lane
            for batch in self.batches
            for lane in batch.reshape(-1, batch.shape[-1])
        ]
        mine = [
            lane
            for lane in lanes
            if lane["observation"][0, 0] == env and lane["collector", "traj_ids"].any()
        ]
        keys = sorted(map(str, mine[0].keys(True, True)))
        named = {str(key): key for key in mine[0].keys(True, True)}
        return [
            torch.cat([lane[named[key]] for lane in mine])
            for key in keys
            if "valid" not in key
        ]


def run(
    folder: Path,
    fault: Fault | None,
    kind: Any = MultiSyncCollector,
    counts: Path | None = None,
    **options: Any,
) -> Outcome:
    """Two environments in two workers, of which number 0 goes wrong; ``counts``: the file of other
    environments.
    """
    path = counts or folder / f"counts-{time.monotonic_ns()}"
    factories = [partial(OracleEnv, path, 0, 1, fault), partial(OracleEnv, path, 1)]
    frames = 2 * T if kind is MultiSyncCollector else T
    given = {
        "policy": None,
        "frames_per_batch": frames,
        "total_frames": FRAMES,
        "seed": 1,
        "crash_dir": folder,
    }
    given["timeouts"] = deadlines(30.0)
    given |= {"create_env_fn": factories, **options}
    given = {key: value for key, value in given.items() if value is not LEFT_OUT}
    batches: list[Any] = []
    errors: list[BaseException] = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "a worker is dropped")
        collector = kind(**given)
        try:
            while collector.stats().frames < FRAMES:
                try:
                    batches.extend(batch.clone() for batch in collector)
                except BaseException as error:  # noqa: BLE001 (as a user's own loop sees it)
                    errors.append(error)
                    assert len(errors) < 5
                    if ALL_DROPPED in text_of(error):
                        break
        finally:
            try:
                collector.shutdown()
            except Exception as error:  # noqa: BLE001
                errors.append(error)
            collector.shutdown()  # again is nothing
    return Outcome(batches, errors, collector.stats(), OracleEnv.read(path))


def deadlines(seconds: float) -> dict[str, float]:
    return dict.fromkeys(PHASES, seconds)


KINDS = [MultiSyncCollector, MultiAsyncCollector]
MODES = ["raise", "restart", "drop"]
ALL_DROPPED = "all workers have been dropped"  # after which nothing comes


# --- processes ------------------------------------------------------------------------------------


def alive(pid: int) -> bool:
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            not in "ZX"
        )
    except OSError:
        return False


def all_gone(pids: Any, within_s: float = 60.0) -> bool:
    """Whether they have ended by themselves; those that have not are killed."""
    deadline = time.monotonic() + within_s
    while left := [pid for pid in pids if alive(pid)]:
        if time.monotonic() > deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return False
        select.select([], [], [], 0.01)
    return True


def family(mark: str) -> list[int]:
    """All living processes that were started with ``mark`` in their environment, and what they have
    forked.
    """
    found = []
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            if mark.encode() in Path(f"/proc/{pid}/environ").read_bytes() and alive(
                pid
            ):
                found.append(pid)
    return found
