"""``python -m benchmarks.on_demand``: ``collect`` and the compat layers, beside the collectors that
they stand in for.

As in ``python -m benchmarks``, the systems of a case take turns of a fraction of a second, and
every ratio is formed within a round. A compat layer and its peer share a process, and so do
Muster's collector and the bare loops.
"""

from __future__ import annotations

from benchmarks import on_demand_systems
from benchmarks.case_runner import run_cases
from benchmarks.on_demand_cases import CASES, Case
from benchmarks.on_demand_targets import TARGETS

__all__ = ["on_demand_systems"]


def bases(case: Case) -> list[str]:
    """What others are compared to."""
    known = ("bare", "collect-heads", "collect-per-env", "collect-critic-alone")
    return [name for name in known if name in case.systems][:2]


if __name__ == "__main__":
    run_cases("on_demand", __doc__, CASES, TARGETS, bases, seconds=0.3, clock="wall")
