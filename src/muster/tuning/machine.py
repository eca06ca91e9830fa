"""What this process may use of its machine."""

from __future__ import annotations

import math
import os
from pathlib import Path


def usable_cores(root: Path = Path("/")) -> float:
    """Cores that this process may run on, or the share of them that its container may use.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    return min([cores, *(quota for folder in _cgroups(root, "cpu") if (quota := _quota(folder)) > 0)])


def free_bytes(root: Path = Path("/")) -> float:
    """Memory that can still be had, infinite if the system does not say."""
    found = math.inf
    meminfo = _read(root / "proc/meminfo")
    for line in meminfo.splitlines():
        if line.startswith("MemAvailable:"):
            found = int(line.split()[1]) * 1024.0
    for folder in _cgroups(root, "memory"):
        for names in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            limit, used = (_read(folder / name) for name in names)
            if limit.isdigit() and used.isdigit():
                found = min(found, max(0.0, float(limit) - float(used)))
    return found


def own_bytes(pid: int | str = "self") -> float:
    """Memory that only this process has; 0 if the system does not say."""
    lines = _read(Path(f"/proc/{pid}/smaps_rollup")).splitlines()
    return sum(int(line.split()[1]) * 1024.0 for line in lines if line.startswith("Private_"))


class CoreQueue:
    """How long this thread has waited for a core that others had, which is nothing that its work takes by itself."""

    def __init__(self) -> None:
        try:
            self._fd = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        except OSError:  # not Linux, or not told
            self._fd = -1
        self._before_s = 0.0
        self._before_s = self.waited_s()

    def waited_s(self) -> float:
        """Seconds so far; 0 if the system does not say."""
        if self._fd < 0:
            return 0.0
        return int(os.pread(self._fd, 64, 0).split()[1]) * 1e-9 - self._before_s

    def close(self) -> None:
        """Called once."""
        if self._fd >= 0:
            os.close(self._fd)


def computed_s(pid: int) -> float | None:
    """CPU time of a process's main thread so far; None if the system does not say."""
    text = _read(Path(f"/proc/{pid}/schedstat")).split()
    return int(text[0]) * 1e-9 if text else None


def _quota(folder: Path) -> float:
    """Cores by a cgroup's limit; 0: no limit."""
    text = _read(folder / "cpu.max").split()  # version 2: "200000 100000", or "max 100000"
    if not text:
        text = [_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")]
    quota, period = [int(number) if number.isdigit() else 0 for number in (*text, "", "")[:2]]
    return quota / period if quota and period else 0.0


def _cgroups(root: Path, controller: str) -> list[Path]:
    """The folders of this process's cgroup and of those around it, of both versions."""
    found: list[Path] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if controllers else "")
        inner = top / path.lstrip("/")
        found += [folder for folder in (inner, *inner.parents) if folder == top or top in folder.parents]
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
