"""Pictures with matplotlib: of collections (``collector.plot()``, ``muster watch --png``),
evaluations, timelines.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from muster.episodes.curve import EpisodeTotals, Quantity, running_means
from muster.errors import BadOption
from muster.memory.specs import Array
from muster.observing.snapshots import RunHistory, snapshot
from muster.observing.spans import TimeSpan
from muster.observing.stats import CollectorStats
from muster.utils.attributes import optional
from muster.utils.texts import clock, short

# Okabe and Ito's palette
BLUE = "#0072b2"
ORANGE = "#e69f00"
GREEN = "#009e73"
RED = "#d55e00"
GREY = "#8a8f98"
PARTS = {"env": GREEN, "policy": BLUE, "copy": ORANGE, "rest": GREY}
"""Parts of the time of rollouts."""
OTHERS = (GREY, "#56b4e9", "#cc79a7", "#f0e442")
"""Colours of other spans of a timeline."""
_LEAST_S = 0.5  # between two snapshots, for a rate
MOST_BARS = 12  # of policy lags, and rows of workers
MOST_BINS = 30  # of the histogram of returns
Points = Sequence[tuple[float, EpisodeTotals]]


def plot_stats(stats: CollectorStats, points: Points) -> Any:
    """Return the picture of ``collector.plot()``."""
    newest = snapshot(stats, EpisodeTotals())
    figure, axes = _figure(1, 3)
    _draw_means(axes[0], points, "return")
    _draw_time(axes[1], newest)
    _draw_lag(axes[2], newest)
    return figure


def plot_run(history: RunHistory) -> Any:
    """Return the picture of ``muster watch --png``: what the page shows, at the end of a history."""
    figure, axes = _figure(3, 3)
    about = [
        str(history.about[name])
        for name in ("env", "collector")
        if name in history.about
    ]
    if not history.snapshots:
        figure.suptitle("  ".join([*about, "no snapshots"]), parse_math=False)
        return figure
    newest, points = history.snapshots[-1], history.points()
    state = _state(history.end)
    progress = f"{newest['frames']:,} frames in {clock(newest['time'] - history.snapshots[0]['time'])}"
    figure.suptitle("   ".join([*about, state, progress]), parse_math=False)
    _draw_rate(axes[0], history)
    _draw_means(axes[1], points, "return")
    _draw_means(axes[2], points, "length")
    _draw_time(axes[3], newest)
    _draw_frames(axes[4], newest)
    _draw_lag(axes[5], newest)
    _draw_workers(axes[6], newest)
    memory = _series(history, "memory") / 2**20
    unknown = "" if np.isfinite(memory).any() else "unknown"
    _draw_line(
        axes[7], "Memory of the main process", _series(history, "time"), memory, unknown
    )
    axes[7].set_ylabel("MiB")
    _draw_means(axes[8], points, "success")
    return figure


def _state(end: Mapping[str, Any] | None) -> str:
    """Return what the last line of a run says."""
    if end is None:
        return "running"
    if end.get("error"):
        return "failed"
    if signal := end.get("signal"):
        return f"ended by {signal}"
    if (code := end.get("code")) is not None:
        return f"exited with code {code}"
    return "ended"


def plot_returns(
    returns: Array,
    lengths: Array,
    truncated: Array,
    interval: tuple[float, float],
    title: str,
) -> Any:
    """Return the picture of an evaluation.

    Args:
        returns, lengths, truncated: of its episodes, ``[n]``.
        interval: ends of a confidence interval of the mean return; not drawn if they are not
            finite.
    """
    figure, (histogram, scatter) = _figure(1, 2)
    figure.suptitle(
        "\n".join(textwrap.wrap(title, 110)), fontsize="medium", parse_math=False
    )
    histogram.set_title("Returns")
    scatter.set_title("Return and length")
    if not len(returns):
        _empty(histogram, "no complete episode")
        _empty(scatter, "no complete episode")
        return figure
    histogram.hist(
        returns, bins=min(MOST_BINS, max(1, len(returns) // 2)), color=BLUE, alpha=0.6
    )
    histogram.axvline(returns.mean(), color=RED, label="mean")
    if np.isfinite(interval).all():
        histogram.axvspan(
            *interval, color=RED, alpha=0.15, linewidth=0, label="95 % interval"
        )
    histogram.set_xlabel("return")
    histogram.set_ylabel("episodes")
    histogram.legend()
    for label, chosen, colour in (
        ("terminated", ~truncated, BLUE),
        ("truncated", truncated, ORANGE),
    ):
        if chosen.any():
            scatter.scatter(
                lengths[chosen], returns[chosen], s=14, color=colour, label=label
            )
    scatter.set_xlabel("steps")
    scatter.set_ylabel("return")
    scatter.legend()
    return figure


def plot_spans(spans: Sequence[TimeSpan], tracks: Mapping[int, str]) -> Any:
    """Return the picture of a timeline: a row for each track, over milliseconds.

    Args:
        spans: spans, outer ones before those inside them.
        tracks: names of tracks; "track 0" and so on by default.
    """
    figure, (axis,) = _figure(1, 1)
    axis.set_title("Timeline")
    if not spans:
        _empty(axis, "no spans: call start() first")
        return figure
    first = min(span.begin_ns for span in spans)
    rows = {
        track: row for row, track in enumerate(sorted({span.track for span in spans}))
    }
    bars: dict[str, dict[int, list[tuple[float, float]]]] = {}
    for name, begin, end, track in spans:
        of_row = bars.setdefault(name, {}).setdefault(rows[track], [])
        of_row.append(((begin - first) / 1e6, (end - begin) / 1e6))
    for number, (name, by_row) in enumerate(bars.items()):
        colour = PARTS.get(name, OTHERS[number % len(OTHERS)])
        for row, drawn in by_row.items():
            label = name if row == min(by_row) else "_"  # one entry in the legend
            axis.broken_barh(drawn, (row - 0.4, 0.8), color=colour, label=label)
    figure.set_size_inches(12, 1.6 + 0.35 * len(rows))
    axis.set_yticks(
        range(len(rows)),
        [tracks.get(track, f"track {track}") for track in rows],
        parse_math=False,
    )
    axis.invert_yaxis()
    axis.set_xlabel("ms")
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def png_of(plot: Callable[[], Any]) -> bytes | None:
    """Return the picture that ``plot`` draws, for IPython; None without matplotlib: notebooks show
    the text.
    """
    try:
        figure = plot()
    except BadOption:
        return None
    picture: bytes = figure._repr_png_()
    return picture


def _figure(rows: int, columns: int) -> tuple[Any, list[Any]]:
    with optional("plot", "matplotlib", "plot"):
        from muster.observing.figure import NotebookFigure
    figure = NotebookFigure(figsize=(4.6 * columns, 3.1 * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    return figure, axes


def _number(value: float, _: Any = None) -> str:
    return (
        f"-{short(-value)}"
        if value < 0
        else short(value)
        if value >= 10
        else f"{value:g}"
    )


def _empty(axis: Any, text: str) -> None:
    axis.set_axis_off()
    axis.text(
        0.5, 0.5, text, ha="center", va="center", color=GREY, transform=axis.transAxes
    )


def _draw_means(axis: Any, points: Points, what: Quantity) -> None:
    axis.set_title(f"Episode {what}" if what != "success" else "Success rate")
    found = running_means(points, what)
    if not len(found):
        _empty(
            axis, "no episode has ended" if what != "success" else "no success in info"
        )
        return
    frames, mean, half = found.T
    axis.fill_between(
        frames, mean - half, mean + half, color=BLUE, alpha=0.25, linewidth=0
    )
    axis.plot(frames, mean, color=BLUE, marker="." if len(frames) == 1 else "")
    axis.set_xlabel("frames")
    axis.xaxis.set_major_formatter(_number)
    if what == "success":
        axis.set_ylim(-0.02, 1.02)


def _draw_bars(
    axis: Any,
    title: str,
    values: dict[str, float],
    colours: Sequence[str],
    texts: Sequence[str],
    empty: str = "",
) -> None:
    """Draw a bar for each value; if there is none, the text ``empty``."""
    axis.set_title(title)
    if not values:
        _empty(axis, empty)
        return
    bars = axis.barh(range(len(values)), list(values.values()), color=list(colours))
    axis.set_yticks(range(len(values)), list(values), parse_math=False)
    axis.bar_label(bars, texts, padding=3)
    axis.margins(x=0.25)
    axis.invert_yaxis()
    axis.grid(visible=False)
    axis.xaxis.set_visible(False)
    axis.spines["bottom"].set_visible(False)


def _draw_time(axis: Any, newest: dict[str, Any]) -> None:
    seconds = {name: newest[f"{name}_s"] for name in PARTS}
    total = sum(seconds.values())
    shares = {name: part / total for name, part in seconds.items()} if total else {}
    texts = [f"{share:.0%}" for share in shares.values()]
    _draw_bars(
        axis,
        "Time of rollouts",
        shares,
        list(PARTS.values()),
        texts,
        "nothing was measured",
    )


def _draw_lag(axis: Any, newest: dict[str, Any]) -> None:
    lags = sorted((int(lag), n) for lag, n in newest["policy_lag"].items())
    shown = {str(lag): n for lag, n in lags[: MOST_BARS - 1]}
    if more := sum(n for _, n in lags[MOST_BARS - 1 :]):
        shown["more"] = more
    texts = [f"{n:,}" for n in shown.values()]
    _draw_bars(
        axis, "Batches by policy lag", shown, [BLUE] * len(shown), texts, "no batches"
    )


def _draw_frames(axis: Any, newest: dict[str, Any]) -> None:
    discarded = {f"discarded: {why}": n for why, n in newest["discarded"].items() if n}
    counts = {
        "executed": newest["executed"],
        "delivered": newest["frames"],
        **discarded,
    }
    counts["in flight"] = newest["in_flight"]
    colours = [GREY, GREEN, *([RED] * len(discarded)), ORANGE]
    _draw_bars(axis, "Frames", counts, colours, [f"{n:,}" for n in counts.values()])


def _draw_workers(axis: Any, newest: dict[str, Any]) -> None:
    workers = newest["workers"][:MOST_BARS]
    rates = {f"{w['index']:g}": w["frames_per_s"] for w in workers}
    colours = [GREEN if w["state"] == "working" else RED for w in workers]
    texts = [
        f"{short(w['frames_per_s'])}  {w['state']}  restarts {w['restarts']:g}"
        for w in workers
    ]
    _draw_bars(
        axis,
        "Workers: frames per second",
        rates,
        colours,
        texts,
        "none: environments in the main process",
    )
    axis.margins(x=0.8)


def _draw_line(axis: Any, title: str, time: Any, values: Any, empty: str) -> None:
    """Draw the last values over the seconds since the first time; or the text ``empty``."""
    axis.set_title(title)
    if empty:
        _empty(axis, empty)
        return
    axis.plot(time[-len(values) :] - time[0], values, color=BLUE)
    axis.set_xlabel("seconds")
    axis.set_ylim(bottom=0)


def _draw_rate(axis: Any, history: RunHistory) -> None:
    time, frames = _series(history, "time"), _series(history, "frames")
    kept = [0]  # the last snapshot follows the one before at once
    for index in range(1, len(time)):
        if time[index] - time[kept[-1]] >= _LEAST_S:
            kept.append(index)
    rate = np.maximum(0.0, np.diff(frames[kept])) / np.diff(time[kept])
    _draw_line(
        axis, "Frames per second", time[kept], rate, "" if len(rate) else "one snapshot"
    )
    axis.yaxis.set_major_formatter(_number)


def _series(history: RunHistory, name: str) -> Any:
    """Return an entry of all snapshots as float64; NaN where it is not a number."""
    values = [s.get(name) for s in history.snapshots]
    return np.array(
        [v if isinstance(v, (int, float)) else np.nan for v in values], np.float64
    )
