"""What collectors of several workers promise, and how it is judged."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.report import Results, aligned, median_iqr

_VERDICTS = {True: "met", False: "MISSED", None: "not measured:"}


@dataclass(frozen=True)
class Figure:
    """One line of the table: what was asked for and what came out.

    Args:
        at_least: else ``asked`` is an upper bound.
        measured: None if it was not; ``note`` says why.
    """

    name: str
    asked: float
    measured: float | None
    at_least: bool = True
    unit: str = "x"
    spread: float = 0.0
    note: str = ""

    @property
    def met(self) -> bool | None:
        if self.measured is None:
            return None
        return (
            self.measured >= self.asked
            if self.at_least
            else self.measured <= self.asked
        )

    def summary(self) -> dict[str, Any]:
        """For the JSON file."""
        return {**asdict(self), "met": self.met}


@dataclass(frozen=True)
class Speed:
    """``scale`` times the rates of ``over``, divided by those of ``under``, within each round; then
    the median.
    """

    workload: str
    name: str
    at_least: float
    over: tuple[str, ...]
    under: tuple[str, ...]
    scale: float = 1.0

    def figure(self, results: Results) -> Figure:
        series, name = results[self.workload], f"{self.workload}: {self.name}"
        got = combined(results, self.workload, self.over, self.under, self.scale)
        if got is None:
            missing = [
                one
                for one in (*self.over, *self.under)
                if one not in series or not series[one].slices
            ]
            why = "; ".join(
                f"{one}: {series[one].note if one in series else 'not run'}"
                for one in missing
            )
            return Figure(name, self.at_least, None, note=why)
        return Figure(name, self.at_least, got[0], spread=got[1])


def combined(
    results: Results,
    workload: str,
    over: tuple[str, ...],
    under: tuple[str, ...],
    scale: float = 1.0,
) -> tuple[float, float] | None:
    """Median and IQR over the rounds; None if a system has no slices."""
    series = results[workload]
    if not all(name in series and series[name].slices for name in (*over, *under)):
        return None
    up, down = ([series[name].fps for name in names] for names in (over, under))
    rounds = min(map(len, up + down))
    values = [
        scale * math.prod(r[i] for r in up) / math.prod(r[i] for r in down)
        for i in range(rounds)
    ]
    return median_iqr(values)


def _scaling(workload: str, kind: str, at_least: float) -> Speed:
    name = f"{kind} over one process, relative to the bare loop's scaling"
    return Speed(
        workload,
        name,
        at_least,
        (f"muster-sync-{kind}", "bare"),
        (f"muster-{kind}", "bare-2"),
    )


def _limit(workload: str, at_least: float) -> Speed:
    return Speed(
        workload, "heads, of 2 x bare", at_least, ("muster-sync-heads",), ("bare",), 0.5
    )


def _peer(peer: str, **at_least: float) -> list[Speed]:
    """Both of Muster's forms of the same policy: the peers' plain module, and heads."""
    return [
        Speed(
            workload.replace("_", "-"),
            f"{kind} / {peer}",
            asked,
            (f"muster-sync-{kind}",),
            (peer,),
        )
        for workload, asked in at_least.items()
        for kind in ("plain", "heads")
    ]


def _sleeping(name: str, system: str, at_least: float) -> Speed:
    return Speed(
        "sleep-16",
        f"{name}, of 16 x one env",
        at_least,
        (system,),
        ("bare-one",),
        1 / 16,
    )


SPEEDS = (
    *(_scaling("busy-8", kind, 0.93) for kind in ("heads", "plain")),
    *(_scaling("cartpole-64", kind, 0.88) for kind in ("heads", "plain")),
    _limit("busy-8", 0.85),
    _limit("cartpole-64", 0.60),
    _limit("cartpole-8", 0.32),
    _limit("frames-8", 0.27),
    _limit("pendulum-8", 0.52),
    *_peer("torchrl-2", cartpole_8=8, cartpole_64=12, busy_8=3.5, frames_8=7),
    *_peer("async-vector", cartpole_8=7, cartpole_64=7, busy_8=2.8, frames_8=7),
    *_peer("tianshou-2", cartpole_8=3, cartpole_64=3, busy_8=3, frames_8=3),
    *_peer("sb3-2", cartpole_8=3, cartpole_64=3, busy_8=3, frames_8=3),
    *_peer("pufferlib-2", cartpole_8=1.1, cartpole_64=1.1, busy_8=1.1, frames_8=1.1),
    *(
        _sleeping(f"first-ready, {w}", f"sleep-free-{w}", 0.88)
        for w in ("threads", "processes")
    ),
    *(
        _sleeping(f"sync, {w}", f"sleep-sync-{w}", 0.70)
        for w in ("threads", "processes")
    ),
)


def table(figures: list[Figure]) -> str:
    """Asked, measured, met."""
    rows, verdicts = [["figure", "asked", "measured", "IQR"]], [""]
    for one in figures:
        asked = f"{'>=' if one.at_least else '<='} {one.asked:g} {one.unit}"
        measured, spread = (
            ("-", "")
            if one.measured is None
            else (f"{one.measured:.3g}", f"{one.spread:.2g}")
        )
        rows.append([one.name, asked, measured, spread])
        verdicts.append(f"  {_VERDICTS[one.met]}  {one.note[:80]}")
    return "\n".join(
        (line + end).rstrip()
        for line, end in zip(aligned(rows).splitlines(), verdicts, strict=True)
    )
