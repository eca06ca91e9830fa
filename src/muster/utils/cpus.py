"""The CPUs of this machine that this process may use."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from muster.errors import BadOption


def allowed_cpus() -> list[int]:
    """Return the numbers of the CPUs on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def usable_cores(root: Path = Path("/")) -> float:
    """Return the number of cores that this process may run on, limited by the CPU quota of its
    container.

    Args:
        root: parent folder of ``proc`` and ``sys``.
    """
    quotas = [_quota(folder) for folder in _cpu_cgroups(root)]
    limits = [quota for quota in quotas if quota > 0]
    return min([float(len(allowed_cpus())), *limits])


def pinned(
    cpu_affinity: str | Sequence[Sequence[int]], workers: Sequence[int]
) -> list[tuple[int, ...]]:
    """Return the CPUs of each of these workers of this machine.

    Args:
        cpu_affinity: "auto": the CPUs of this process are divided among the workers, or shared one
            by one if there are more workers. Else the CPUs of every worker.
        workers: numbers of the workers.

    Raises:
        BadOption: the system cannot pin workers, or this process may not use one of the CPUs.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise BadOption(
            "cpu_affinity needs Linux: other systems do not let a program choose its CPUs. Leave it"
            " out."
        )
    allowed = allowed_cpus()
    if isinstance(cpu_affinity, str):
        if len(workers) > len(allowed):
            return [(allowed[n % len(allowed)],) for n in range(len(workers))]
        shares = []
        for n in range(len(workers)):
            begin = n * len(allowed) // len(workers)
            end = (n + 1) * len(allowed) // len(workers)
            shares.append(tuple(allowed[begin:end]))
        return shares
    found = [tuple(cpu_affinity[number]) for number in workers]
    for number, cpus in zip(workers, found, strict=True):
        if missing := set(cpus) - set(allowed):
            raise BadOption(
                f"cpu_affinity[{number}]={list(cpus)}: CPU {min(missing)} is not allowed, only"
                f" {allowed}"
            )
    return found


def _quota(folder: Path) -> float:
    """Return a cgroup's limit as a number of cores; 0: no limit."""
    text = read(
        folder / "cpu.max"
    ).split()  # version 2: "200000 100000", or "max 100000"
    if not text:
        text = [read(folder / "cpu.cfs_quota_us"), read(folder / "cpu.cfs_period_us")]
    if len(text) < 2 or not text[0].isdigit() or not text[1].isdigit():
        return 0.0
    quota = int(text[0])
    period = int(text[1])
    return quota / period if quota and period else 0.0


def _cpu_cgroups(root: Path) -> list[Path]:
    """Return the folders of this process's CPU cgroup and of its ancestors, for cgroups of both
    versions.
    """
    found: list[Path] = []
    for line in read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        inner = top / path.lstrip("/")
        for folder in (inner, *inner.parents):
            if folder == top or top in folder.parents:
                found.append(folder)
    return found


def read(path: Path) -> str:
    """Return the text of a file without its last newline; empty if it cannot be read."""
    try:
        return path.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
