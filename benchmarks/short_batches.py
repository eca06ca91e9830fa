"""``python -m benchmarks.short_batches``: batches of few steps, as DQN, SAC and TD3 collect them.

As in ``python -m benchmarks``, the systems of a case take turns of a fraction of a second, and
every ratio is formed within a round. Muster, the bare loops and the loop written by hand share a
process.
"""

from __future__ import annotations

from benchmarks.case_runner import run_cases
from benchmarks.short_batches_systems import CASES, ENVS
from benchmarks.workers_targets import Speed


def _over(case: str, over: str, under: str, at_least: float) -> Speed:
    return Speed(case, f"{over} / {under}", at_least, (over,), (under,))


TARGETS = (
    *(_over(f"short-1-{B}", "short-plain", "loop-plain", 0.55) for B in ENVS),
    *(_over(f"short-1-{B}", "short-heads", "loop-plain", 0.55) for B in ENVS),
    *(_over(f"short-1-{B}", "short-plain-asked", "loop-plain", 0.55) for B in ENVS),
    *(_over(f"short-1-{B}", "short-plain-ring", "loop-plain", 0.55) for B in ENVS),
    *(_over(f"short-1-{B}", "short-plain", "short-sb3", 2.0) for B in ENVS),
    *(_over(f"short-1-{B}", "short-plain", "short-torchrl", 4.0) for B in ENVS),
    _over("short-32-64", "short-heads", "bare", 0.72),
    *(_over(f"short-32-{B}", "short-random", "bare", 0.90) for B in (8, 64)),
)


if __name__ == "__main__":
    run_cases(
        "short_batches",
        __doc__,
        CASES,
        TARGETS,
        lambda case: ("bare", "loop-plain"),
        seconds=0.2,
        clock="cpu",
    )
