"""What ``collect`` and the compat layers promise, and how it is judged."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.report import Results, ratio
from benchmarks.workers_targets import Figure, Speed

EACH = ("steps-1", "steps-8", "steps-32")


@dataclass(frozen=True)
class Asked(Speed):
    """``over`` against ``under``; ``limit``: the system that says what could be reached at best."""

    limit: str = ""

    def figure(self, results: Results) -> Figure:
        found, series = super().figure(results), results[self.workload]
        best = (
            ratio(series[self.limit], series[self.under[0]])
            if self.limit in series
            else None
        )
        if found.measured is None or best is None:
            return found
        return replace(found, note=f"at best {best[0]:.3g}")


def _asked(case: str, over: str, under: str, at_least: float, limit: str = "") -> Asked:
    return Asked(case, f"{over} / {under}", at_least, (over,), (under,), limit=limit)


def _compat(case: str, peer: str, kind: str, at_least: float) -> Asked:
    return _asked(
        case,
        f"{peer}-compat-{kind}",
        f"{peer}-{kind}",
        at_least,
        f"limit-{peer}-{kind}",
    )


TARGETS = (
    *(
        _compat(case, "tianshou", kind, 2.0)
        for case in EACH
        for kind in ("actor", "dqn")
    ),
    *(
        _compat(case, "prt", kind, 3.0)
        for case in EACH
        for kind in ("sampled", "greedy")
    ),
    *(_asked(case, "prt-compat-heads", "prt-sampled", 3.0) for case in EACH),
    *(
        _asked(case, "collect-heads", "tianshou-actor", 5.0, "limit-heads")
        for case in EACH
    ),
    *(
        _asked(case, "collect-plain", "tianshou-actor", 4.0, "limit-plain")
        for case in EACH
    ),
    *(
        _asked(case, "collect-greedy", "tianshou-dqn", 5.0, "limit-greedy")
        for case in EACH
    ),
    *(_asked(case, "collect-critic", "sb3-critic", 1.0) for case in EACH),
    *(
        _asked(case, f"collect-{kind}", f"muster-{kind}", 0.96)
        for case in EACH
        for kind in ("heads", "plain")
    ),
    _asked("episodes-8", "collect-last-even", "tianshou-actor", 5.0),
    _asked("episodes-8", "collect-even-plain", "tianshou-actor", 4.0),
    _asked("episodes-8", "tianshou-compat-actor", "tianshou-actor", 2.0),
    *(
        _asked("episodes-8", f"prt-compat-{kind}", "prt-sampled", 3.0)
        for kind in ("sampled", "heads")
    ),
    *(
        _asked(case, "collect-critic", "sb3-critic", 1.0)
        for case in ("busy-8", "a2c-8")
    ),
    *(
        _asked(case, over, under, 1.0)
        for case in ("call-1", "call-8")
        for over, under in (
            ("collect-heads", "tianshou-actor"),
            ("tianshou-compat-actor", "tianshou-actor"),
            ("prt-compat-sampled", "prt-sampled"),
        )
    ),
)
