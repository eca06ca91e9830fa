"""How Muster's own cost grows with T, with B and with time; and what importing it costs."""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.runner import ROOT, environment

T_AT_B8 = (16, 64, 256, 1024)
B_AT_2048_FRAMES = (1, 2, 4, 8, 16, 32, 64, 128)


def overhead(T: int, B: int, *, slices: int = 7, seconds: float = 0.1) -> dict[str, float]:
    """Microseconds per time step that Muster adds to the bare loop of B CartPoles; random actions."""
    from benchmarks.systems.bare import Bare
    from benchmarks.systems.muster_ import Random
    from benchmarks.workloads import Workload

    workload = Workload("scaling", "CartPole-v1", B, T, "")
    systems = [Bare(workload), Random(workload)]
    per_step: list[list[float]] = [[], []]
    for system in systems:
        system.rollout()
    for _ in range(slices):
        for system, results in zip(systems, per_step, strict=True):
            steps, start = 0, time.perf_counter()
            while time.perf_counter() - start < seconds:
                steps += system.rollout() // B
            results.append((time.perf_counter() - start) / steps * 1e6)
    for system in systems:
        system.close()
    added = statistics.median(b - a for a, b in zip(*per_step, strict=True))
    bare = statistics.median(per_step[0])
    return {"T": T, "B": B, "bare_us": round(bare, 2), "added_us": round(added, 2), "fraction": bare / (bare + added)}


def growth(progress: Any = print) -> dict[str, Any]:
    """``overhead`` along T and along B."""
    along_T = [overhead(T, 8) for T in T_AT_B8]
    along_B = [overhead(max(16, 2048 // B), B) for B in B_AT_2048_FRAMES]
    for title, rows in (("Muster's own cost per time step, by T at B = 8", along_T), ("... by B", along_B)):
        progress(f"\n{title}")
        for row in rows:
            progress(
                f"  T={row['T']:<5} B={row['B']:<4} bare {row['bare_us']:8.1f} us   added {row['added_us']:7.2f} us   "
                f"fraction {row['fraction']:.3f}"
            )
    return {"along_T": along_T, "along_B": along_B}


def soak(frames: int, progress: Any = print) -> dict[str, float]:
    """Memory over many frames of a vectorised NumPy environment, as MiB per 10 million frames.

    The slope is fitted to the second half: the first fills caches and pools.
    """
    from benchmarks.envs import VectorCounting
    from muster import Collector

    B, T = 256, 64
    samples: list[tuple[int, float]] = []
    start = time.perf_counter()
    total = max(1, frames // (B * T))
    with Collector(VectorCounting(B), None, frames_per_batch=B * T, seed=0) as collector:
        for i, _ in enumerate(collector, 1):
            if i % max(1, total // 100) == 0:
                gc.collect()
                samples.append((i * B * T, rss_mib()))
            if i >= total:
                break
    half = samples[len(samples) // 2 :]
    slope = float(np.polyfit([f for f, _ in half], [m for _, m in half], 1)[0]) * 1e7 if len(half) > 2 else float("nan")
    result = {
        "frames": total * B * T,
        "seconds": time.perf_counter() - start,
        "rss_first_mib": samples[0][1],
        "rss_last_mib": samples[-1][1],
        "slope_mib_per_1e7_frames": slope,
    }
    progress(
        f"\nsoak: {result['frames']:,} frames in {result['seconds']:.0f} s, RSS {result['rss_first_mib']:.1f} -> "
        f"{result['rss_last_mib']:.1f} MiB, slope {slope:+.2f} MiB per 10^7 frames"
    )
    return result


def rss_mib() -> float:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def import_cost(repeats: int = 5, progress: Any = print) -> dict[str, float]:
    """CPU seconds of ``import muster``, and of ``from muster import Collector`` beyond torch; target < 0.3 s."""
    scripts = {
        "torch": "import torch",
        "muster": "import muster",
        "collector_beyond_torch": "import torch; s = t(); from muster import Collector",
        "muster_beyond_torch": "import torch; s = t(); import muster",
    }
    found: dict[str, list[float]] = {name: [] for name in scripts}
    for _ in range(repeats):
        for name, script in scripts.items():
            code = f"import time, json; t = time.process_time; s = t(); {script}; print(json.dumps(t() - s))"
            run = subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, env=environment()
            )
            found[name].append(json.loads(run.stdout))
    result = {name: round(statistics.median(values), 3) for name, values in found.items()}
    progress("\nCPU seconds to import: " + ", ".join(f"{name} {value:.3f}" for name, value in result.items()))
    return result
