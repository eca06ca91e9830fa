"""What placements of the policy are worth: limits, from parts that were measured in the same round,
and targets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.inference_cases import CASES, CORES, PARTS, Case
from benchmarks.report import Results, aligned, median_iqr
from benchmarks.systems import SYSTEMS
from benchmarks.workers_targets import Figure

Rates = dict[str, float]  # frames per second of all systems, in one round
Formula = Callable[[Case, Rates], float]


def rounds(results: Results, case: str, systems: tuple[str, ...]) -> list[Rates]:
    """Rates by round; none if a system has none."""
    series = results.get(case, {})
    if not all(name in series and series[name].slices for name in systems):
        return []
    rates = zip(*(series[name].fps for name in systems), strict=False)
    return [dict(zip(systems, row, strict=True)) for row in rates]


def in_turns(case: Case, rates: Rates) -> float:
    """The limit of a server: all environments step, in a process per worker, then one call is made
    for all of them.
    """
    return 1 / (1 / rates["bare-all"] + 1 / rates["calls-all"])


def overlapped(case: Case, rates: Rates) -> float:
    """The limit of two halves that take turns.

    Nobody is quicker than the two calls of the policy, than a half that steps and is acted for, or,
    where all of that is computing, than the cores.
    """
    half = case.B / 2
    call, step = half / rates["calls-half"], half / rates["bare-half"]
    seconds = max(2 * call, step + call)
    if case.spends_cores:
        seconds = max(
            seconds,
            (2 * call + case.B * min(case.workers, CORES) / rates["bare-all"]) / CORES,
        )
    return case.B / seconds


def ratio(over: str, under: str) -> Formula:
    """Of two systems."""
    return lambda case, rates: rates[over] / rates[under]


def of_limit(system: str, limit: Formula) -> Formula:
    """What a system has of it."""
    return lambda case, rates: rates[system] / limit(case, rates)


def more_us(system: str, than: str) -> Formula:
    """Microseconds per frame that one takes more than another."""
    return lambda case, rates: 1e6 / rates[system] - 1e6 / rates[than]


@dataclass(frozen=True)
class Asked:
    """A target.

    Args:
        systems: that the formulas are of.
        bound: the best that could be.
    """

    case: str
    name: str
    asked: float
    formula: Formula
    systems: tuple[str, ...]
    at_least: bool = True
    unit: str = "x"
    bound: Formula | None = None

    def figure(self, results: Results) -> Figure:
        name, found = (
            f"{self.case}: {self.name}",
            rounds(results, self.case, self.systems),
        )
        if not found:
            why = {one.note for one in results.get(self.case, {}).values() if one.note}
            return Figure(
                name,
                self.asked,
                None,
                self.at_least,
                self.unit,
                note="; ".join(why) or "not run",
            )
        case = CASES[self.case]
        middle, spread = median_iqr([self.formula(case, one) for one in found])
        note = (
            f"at best {median_iqr([self.bound(case, one) for one in found])[0]:.3g}"
            if self.bound
            else ""
        )
        return Figure(name, self.asked, middle, self.at_least, self.unit, spread, note)


def _wake(case: str, *, lines: bool = False) -> Asked:
    formula: Formula = (
        (lambda _, rates: 1e6 / rates["lines"])
        if lines
        else more_us("server", "worker")
    )
    name = (
        "question and answer, lines alone"
        if lines
        else "server over worker, per group and step"
    )
    return Asked(
        case,
        name,
        30,
        formula,
        ("lines",) if lines else ("server", "worker"),
        False,
        "us",
    )


def _limits(case: str) -> list[Asked]:
    return [
        Asked(
            case,
            "server, of its limit",
            0.8,
            of_limit("server", in_turns),
            (*PARTS, "server"),
        ),
        Asked(
            case,
            "alternating, of its limit",
            0.8,
            of_limit("alternating", overlapped),
            (*PARTS, "alternating"),
        ),
    ]


def _over_worker(case: str) -> Asked:
    # a worker's processes are to be as quick as its steps and calls
    bound: Formula = lambda case, rates: in_turns(case, rates) / rates["worker"]  # noqa: E731
    return Asked(
        case,
        "server / worker",
        1.5,
        ratio("server", "worker"),
        (*PARTS, "server", "worker"),
        bound=bound,
    )


def _alternating(case: str) -> Asked:
    bound: Formula = lambda case, rates: overlapped(case, rates) / in_turns(case, rates)  # noqa: E731
    systems = (*PARTS, "alternating", "server")
    return Asked(
        case,
        "alternating / server",
        1.3,
        ratio("alternating", "server"),
        systems,
        bound=bound,
    )


TARGETS = (
    *(_wake(f"nothing-{n}", lines=lines) for n in (1, 2, 8) for lines in (True, False)),
    *(
        one
        for shape in ("8x2", "4x4", "8x4")
        for one in (*_limits(f"2ms-{shape}"), _over_worker(f"2ms-{shape}"))
    ),
    *(_alternating(f"equal-{name}") for name in ("whole", "half", "busy")),
    *(
        Asked(
            "resets-aligned",
            f"{place}: wait / immediate",
            1.3,
            ratio(f"{place}-wait", place),
            (f"{place}-wait", place),
        )
        for place in ("worker", "server")
    ),
)


def table(results: Results, case: Case, told: dict[str, dict[str, float]]) -> str:
    """All systems of one case."""
    served, parts = {"calls-all", "bare-all"}, set(PARTS)
    columns = [
        "system",
        "frames/s",
        "IQR",
        "ms/step",
        "us/frame",
        "of limit",
        "x worker",
        "envs/call",
        "ms/call",
    ]
    rows = [[f"{case.name}: {case.describe}, T={case.T}"], columns]
    ran = {name for name, one in results[case.name].items() if one.slices}
    limits: dict[str, tuple[Formula, set[str]]] = {
        **dict.fromkeys(
            ("server", "worker", "cuda-server", "cuda-graph", "cuda-worker"),
            (in_turns, served),
        ),
        **dict.fromkeys(("alternating",), (overlapped, parts)),
        **dict.fromkeys(("cuda-alternating",), (in_turns, served)),
        **dict.fromkeys(
            CASES["first-ready-heads"].systems,
            (lambda case, rates: case.B * rates["bare-one"], {"bare-one"}),
        ),
    }
    first = next(
        (name for name in ("worker", "free-worker", "cuda-worker") if name in ran), ""
    )
    for name, one in results[case.name].items():
        if name not in ran:
            rows.append(
                [SYSTEMS[name].label, one.note.partition("\n")[0][:90] or "no slices"]
            )
            continue
        fps, spread = median_iqr(one.fps)
        cells = [
            f"{fps:,.0f}",
            f"{spread / fps:.0%}",
            f"{1e3 * case.B / fps:.3g}",
            f"{1e6 / fps:.3g}",
        ]
        limit, needs = limits.get(name, (None, set()))
        cells.append(
            _median(results, case, of_limit(name, limit), needs | {name})
            if limit and needs <= ran
            else ""
        )
        cells.append(
            _median(results, case, ratio(name, first), {name, first}) if first else ""
        )
        cells += [f"{value:.3g}" for value in told.get(name, {}).values()]
        rows.append([SYSTEMS[name].label, *cells])
    return aligned(rows)


def _median(results: Results, case: Case, formula: Formula, systems: set[str]) -> str:
    return f"{median_iqr([formula(case, one) for one in rounds(results, case.name, tuple(systems))])[0]:.3g}"
