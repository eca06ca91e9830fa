"""``python -m benchmarks.pools``: EnvPool through Muster, and in a loop that stores nothing; both
modes of EnvPool.

EnvPool is not among the peers that ``make bench`` installs (885 MB): ``pip install envpool``, here
or in an environment that ``--python`` names.
"""

from __future__ import annotations

from benchmarks.case_runner import run_cases
from benchmarks.pools_systems import CASES
from benchmarks.workers_targets import Speed

# At most 1.2 and 1.1 times the CPU time of the loop.
LIMITS = {"pools-64": 1.2, "pools-256": 1.1}
TARGETS = [
    Speed(
        case,
        "pools-heads / pools-loop",
        round(1 / limit, 2),
        ("pools-heads",),
        ("pools-loop",),
    )
    for case, limit in LIMITS.items()
]


if __name__ == "__main__":
    run_cases(
        "pools",
        __doc__,
        CASES,
        TARGETS,
        lambda case: ("pools-bare", "pools-loop"),
        seconds=0.3,
        clock="cpu",
    )
