"""What a point of a scale curve is, how it is measured, and what counts as a cliff."""

from __future__ import annotations

import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from torch.utils import _pytree as pytree

from benchmarks.workers_family import cpu_clocks, family, pss_mib

LIMIT = 2.2  # times the cost (or the slot) at the most, for twice the size
SMALL_KIB = 64.0  # slots whose size is decided by alignment

Clock = Callable[[], float]
Point = dict[str, Any]


@dataclass(frozen=True)
class Subject:
    """A collector at one point of a curve.

    Attributes:
        x: position on the curve.
        run: collects one batch, or publishes, and returns the batch.
        frames: frames per ``run``.
        bare: as many frames in a loop that does nothing but step the same environments; None: there
            is none.
        clock: CPU seconds of all processes that work for it.
        ahead: workers make batches before ``run`` asks for them, so a call may find its work done.
        found: what else was measured.
    """

    x: float
    run: Callable[[], Any]
    frames: int
    bare: Callable[[], object] | None = None
    clock: Clock = time.process_time
    ahead: bool = False
    found: Point | None = None


Make = Callable[[int], AbstractContextManager[Subject]]


def in_turns(
    make: Make, sizes: Sequence[int], *, rounds: int, seconds: float
) -> list[Point]:
    """All points of a curve in this process, whose subjects stand side by side and take turns."""
    with make(sizes[0]) as first:  # imports, and what is made once per process
        first.run()
    with ExitStack() as stack:
        subjects = []
        for size in sizes:
            before = _own_pss()
            subject = stack.enter_context(make(size))
            found = {"slot_kib": slot_kib(subject.run())}
            subjects.append(
                replace(subject, found=found | {"pss_mib": _own_pss() - before})
            )
        return measure(subjects, rounds=rounds, seconds=seconds)


def one_by_one(
    make: Make, sizes: Sequence[int], *, rounds: int, seconds: float
) -> list[Point]:
    """All points of a curve, for subjects that are too large to stand side by side."""
    points = []
    for size in sizes:
        with make(size) as subject:
            points += measure([subject], rounds=rounds, seconds=seconds)
    return points


def measure(subjects: Sequence[Subject], *, rounds: int, seconds: float) -> list[Point]:
    """The least CPU time of ``run`` over some rounds, in which all subjects take turns.

    Other processes can only add to a CPU time (by what they take from caches), so the least one is
    closest to the cost. Of subjects that work ahead it is the mean, of slices of ten times that
    duration: the least one would be of a round whose work was done before.

    Args:
        rounds: number of slices of each subject.
        seconds: duration of a slice, at least one call.
    """
    jobs = [
        (subject, kind, job) for subject in subjects for kind, job in _jobs(subject)
    ]
    calls: dict[tuple[float, str], int] = {}
    times: dict[tuple[float, str], list[float]] = {}
    for subject, kind, job in jobs:
        for _ in range(3):  # slots, caches, the first episodes
            began = time.perf_counter()
            once = max(
                _seconds_per_call(job, 1, subject.clock), time.perf_counter() - began
            )
        calls[subject.x, kind] = max(
            1, math.ceil(seconds * (10 if subject.ahead else 1) / once)
        )
    for _ in range(rounds):
        for subject, kind, job in jobs:
            key = subject.x, kind
            times.setdefault(key, []).append(
                _seconds_per_call(job, calls[key], subject.clock)
            )
    points = []
    for subject in subjects:
        cost = (
            statistics.fmean(times[subject.x, "run"])
            if subject.ahead
            else min(times[subject.x, "run"])
        )
        point: Point = {
            "x": subject.x,
            "cost_us": 1e6 * cost,
            "us_per_frame": 1e6 * cost / subject.frames,
        }
        if subject.bare is not None:
            point["of_bare"] = cost / min(times[subject.x, "bare"])
        points.append(point | (subject.found or {}))
    return points


def _jobs(subject: Subject) -> Iterator[tuple[str, Callable[[], object]]]:
    yield "run", subject.run
    if subject.bare is not None:
        yield "bare", subject.bare


def _seconds_per_call(job: Callable[[], object], calls: int, clock: Clock) -> float:
    begin = clock()
    for _ in range(calls):
        job()
    return (clock() - begin) / calls


def _own_pss() -> float:
    gc.collect()
    return pss_mib(os.getpid())


def family_clock() -> Clock:
    """CPU seconds of this process and of those that it has started by now."""
    pids = list(family(os.getpid()))
    return lambda: cpu_clocks(pids)


def slot_kib(batch: Any) -> float:
    """Memory below a batch: the union of its tensors' storages, each of which may reach to the
    slot's end.
    """
    storages = [
        tensor.untyped_storage() for tensor in pytree.tree_leaves(batch.to_dict())
    ]
    total = end = 0
    for first, last in sorted(
        (storage.data_ptr(), storage.data_ptr() + storage.nbytes())
        for storage in storages
    ):
        total += max(0, last - max(first, end))
        end = max(end, last)
    return total / 2**10


def growth(points: Sequence[Point], name: str) -> list[tuple[float, float, float]]:
    """Growth of ``name`` from each point to the next as that of one doubling, how much is allowed,
    and the next x.

    Where the cost of the bare loop more than doubles (caches, Python's threads), the limit grows as
    much.
    """
    grown = []
    for low, high in pairwise(points):
        if (
            name in low
            and name in high
            and not (name == "slot_kib" and low[name] < SMALL_KIB)
        ):
            power = 1 / math.log2(high["x"] / low["x"])
            times = (high[name] / low[name]) ** power
            allowed = LIMIT
            if name == "cost_us" and "of_bare" in low:
                bare = times * (low["of_bare"] / high["of_bare"]) ** power
                allowed *= max(1.0, bare / 2)
            grown.append((times, allowed, high["x"]))
    return grown


def least(first: Sequence[Point], second: Sequence[Point]) -> list[Point]:
    """The cheaper ones of the points of a curve that was measured twice."""
    return [
        min(pair, key=lambda point: point["cost_us"])
        for pair in zip(first, second, strict=True)
    ]
