"""A process and everything it has started, as Linux's /proc shows them."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def family(root: int) -> dict[int, float]:
    """CPU seconds of ``root``, its descendants, and whatever else belongs to the session it leads,
    by process id.
    """
    cpu: dict[int, float] = {}
    under: dict[int, set[int]] = defaultdict(set)
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        state, parent, session, user, system = (fields[i] for i in (0, 1, 3, 11, 12))
        if state != "Z":
            pid = int(entry.name)
            cpu[pid] = (int(user) + int(system)) * TICK_S
            under[int(parent)].add(pid)
            under[int(session)].add(pid)
    found: set[int] = set()
    ahead = {root}
    while ahead:
        found |= ahead
        ahead = {child for pid in ahead for child in under[pid]} - found
    return {pid: cpu[pid] for pid in found if pid in cpu}


def cpu_seconds(root: int, *, without_root: bool = False) -> float:
    """Of the whole family so far, those who have ended left out."""
    return sum(
        seconds
        for pid, seconds in family(root).items()
        if pid != root or not without_root
    )


def settle(root: int, *, still_s: float = 0.06, at_most_s: float = 3.0) -> None:
    """Wait until nobody in the family uses the CPU: who works ahead must not do it in another
    system's turn.
    """
    end = time.perf_counter() + at_most_s
    before = family(root)
    while time.perf_counter() < end:
        time.sleep(still_s)  # noqa: TID251 (there is nothing to wait for but the absence of work)
        now = family(root)
        if now == before:
            return
        before = now


def cpu_clocks(pids: Iterable[int]) -> float:
    """CPU seconds of living processes by their CPU clocks: nanoseconds, where /proc counts in units
    of 10 ms.
    """
    # the number is that of clock_getcpuclockid(3), which Python has for threads only
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)


def pss_mib(root: int) -> float:
    """Memory of the whole family: its proportional set size, in which a page shared by n processes
    counts 1/n.
    """
    total = 0
    for pid in family(root):
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += sum(
                int(line.split()[1]) for line in lines if line.startswith("Pss:")
            )
    return total / 2**10


def rss_mib() -> float:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20
