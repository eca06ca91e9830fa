"""Plots of ``benchmarks/results``, written into ``docs/pictures`` before every build, for light and for dark pages."""

from __future__ import annotations

import functools
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt
import numpy as np
from docutils import nodes
from matplotlib.axes import Axes
from matplotlib.ticker import (
    EngFormatter,
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullLocator,
)
from sphinx.application import Sphinx

DOCS = Path(__file__).resolve().parents[1]
PICTURES = DOCS / "pictures"
RESULTS = DOCS.parent / "benchmarks" / "results"
COLOURS = {  # text, lines, Muster, others; behind them
    "": ("#24292f", "#d0d7de", "#1f5fbf", "#8a5a00", "#ffffff"),
    "-dark": ("#cfd0d0", "#3a3f45", "#79b0ff", "#e3a73f", "#131416"),
}


@dataclass(frozen=True)
class Picture:
    """Systems of some workloads of one file of results, relative to ``base``."""

    file: str
    base: str
    base_name: str
    panels: dict[str, str]
    systems: dict[str, str]


PEERS = {
    "torchrl": "TorchRL 0.14",
    "tianshou": "Tianshou 2.0",
    "rllib": "RLlib 2.60",
    "sb3": "Stable-Baselines3 2.9",
    "sync-vector": "SyncVectorEnv, CleanRL's loop",
    "pufferlib": "PufferLib 3.0, the same loop",
}
MADE = {
    "speed": Picture(
        "one_process",
        "bare",
        "a bare env.step loop",
        {
            "cartpole-1": "1 CartPole",
            "cartpole-8": "8 CartPoles",
            "cartpole-64": "64 CartPoles",
        },
        {
            "muster-heads": "Muster, a head",
            "muster-plain": "Muster, a plain module",
            **PEERS,
        },
    ),
    "environments": Picture(
        "one_process",
        "bare",
        "a bare env.step loop",
        {
            "pendulum-8": "8 Pendulums (continuous actions)",
            "frames-8": "8 environments with 84x84x4 pixels",
            "busy-8": "8 environments of 200 us per step",
        },
        {
            "muster-heads": "Muster, a head",
            "muster-plain": "Muster, a plain module",
            **PEERS,
        },
    ),
    "workers": Picture(
        "workers",
        "bare-2",
        "two bare loops in two processes",
        {
            "cartpole-64": "64 CartPoles",
            "busy-8": "8 environments of 200 us per step",
            "frames-8": "8 with pixels",
        },
        {
            "muster-sync-heads": "Muster MultiSync, a head",
            "muster-free-heads": "Muster MultiAsync, a head",
            "muster-sync-plain": "Muster MultiSync, a plain module",
            "torchrl-2": "TorchRL MultiSyncCollector",
            "tianshou-2": "Tianshou, SubprocVectorEnv",
            "sb3-2": "Stable-Baselines3, SubprocVecEnv",
            "pufferlib-2": "PufferLib Multiprocessing",
            "async-vector": "AsyncVectorEnv",
        },
    ),
    "short": Picture(
        "short_batches",
        "loop-plain",
        "a loop written by hand with a NumPy buffer",
        {
            "short-1-1": "1 CartPole, batches of 1 time step",
            "short-1-64": "64 CartPoles, batches of 1 time step",
            "short-32-8": "8 CartPoles, batches of 32 time steps",
        },
        {
            "short-plain": "Muster, a plain module",
            "short-heads": "Muster, a head",
            "short-torchrl": "TorchRL 0.14",
        },
    ),
    "slower": Picture(
        "on_demand",
        "sb3-critic",
        "Stable-Baselines3's collect_rollouts",
        {
            "call-1": "1 CartPole, one step per call",
            "a2c-8": "8 CartPoles, 5 steps per call (A2C)",
        },
        {
            "collect-critic": "Muster, a critic for every row",
            "collect-critic-alone": "Muster, a critic afterwards",
        },
    ),
}

SCALES = {  # curves of scale.json, with what is a unit of their size
    "envs-head": "environments in a process",
    "groups": "groups in a process",
    "T": "time steps in a batch",
    "leaves": "entries of an observation",
    "observation": "bytes of an observation",
    "workers": "worker processes",
    "threads": "threads that wait",
    "weights": "bytes of weights, two workers",
}


def rates(series: dict[str, Any], clock: str) -> list[float]:
    """Frames per second in each slice."""
    return [
        frames / max(wall if clock == "wall" else cpu, 1e-9)
        for frames, wall, cpu in series["slices"]
    ]


def ratios(workload: dict[str, Any], name: str, base: str, clock: str) -> list[float]:
    """First quartile, median and third quartile of the ratios within each round."""
    pairs = list(
        zip(rates(workload[name], clock), rates(workload[base], clock), strict=False)
    )
    return statistics.quantiles(
        [own / other for own, other in pairs], n=4, method="inclusive"
    )


def draw(picture: Picture, suffix: str) -> plt.Figure:
    """One panel below the other, so that a phone can show them."""
    results = json.loads((RESULTS / f"{picture.file}.json").read_text("utf-8"))
    text, line, ours, theirs, behind = COLOURS[suffix]
    heights = [
        sum(name in results["workloads"][w] for name in picture.systems)
        for w in picture.panels
    ]
    figure, panels = plt.subplots(
        len(heights),
        1,
        figsize=(5.6, 0.26 * sum(heights) + 0.55 * len(heights) + 0.5),
        height_ratios=heights,
        sharex=True,
    )
    figure.set_facecolor(behind)
    for axes, (workload, title) in zip(panels, picture.panels.items(), strict=True):
        found = results["workloads"][workload]
        shown = [name for name in picture.systems if found.get(name, {}).get("slices")]
        for y, name in enumerate(reversed(shown)):
            low, middle, high = ratios(
                found, name, picture.base, results["options"].get("clock", "wall")
            )
            colour = ours if picture.systems[name].startswith("Muster") else theirs
            marker = "o" if picture.systems[name].startswith("Muster") else "D"
            axes.plot([low, high], [y, y], color=colour, linewidth=2)
            axes.plot([middle], [y], marker=marker, color=colour, markersize=6)
            axes.text(
                1.01,
                y,
                f"{middle:.2g}",
                transform=axes.get_yaxis_transform(),
                va="center",
                color=text,
                fontsize=8,
            )
        axes.set_yticks(
            range(len(shown)), [picture.systems[name] for name in reversed(shown)]
        )
        _ratio_style(axes, title, text, line, behind)
    figure.supxlabel(
        f"frames per second, relative to {picture.base_name}", color=text, fontsize=9
    )
    figure.tight_layout()
    return figure


def draw_scales(suffix: str) -> plt.Figure:
    """CPU time per unit of size, relative to the least on the curve: a cliff would be a line that rises."""
    curves = json.loads((RESULTS / "scale.json").read_text("utf-8"))["curves"]
    text, line, ours, _, behind = COLOURS[suffix]
    figure, panels = plt.subplots(
        len(SCALES) // 2, 2, figsize=(5.6, 0.75 * len(SCALES))
    )
    figure.set_facecolor(behind)
    for axes, (name, title) in zip(panels.flat, SCALES.items(), strict=True):
        points = curves[name]["points"]
        costs = [point["cost_us"] / point["x"] for point in points]
        axes.plot(
            [p["x"] for p in points],
            [c / min(costs) for c in costs],
            color=ours,
            marker="o",
            markersize=3,
        )
        _style(axes, title, text, line, behind)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_ylim(0.8, 20)
        axes.yaxis.set_major_locator(LogLocator(10, (1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_title(title, loc="left", fontsize=8, color=text)
        axes.xaxis.set_major_locator(LogLocator(10, numticks=6))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.tick_params(colors=text, labelsize=7, length=0)
        axes.axhline(1, color=text, linewidth=1)
    figure.supylabel("CPU time per unit, relative to the least", color=text, fontsize=9)
    figure.tight_layout()
    return figure


def draw_curves(suffix: str) -> plt.Figure:
    """Learning curves: means of the seeds, and the range of all, two examples side by side."""
    results = json.loads((RESULTS / "curves.json").read_text("utf-8"))
    text, line, ours, theirs, behind = COLOURS[suffix]
    rows = -(-len(results) // 2)
    figure, panels = plt.subplots(rows, 2, figsize=(8.4, 1.9 * rows), squeeze=False)
    figure.set_facecolor(behind)
    for axes in panels.flat[len(results) :]:
        axes.set_axis_off()
    for axes, found in zip(panels.flat, results.values(), strict=False):
        for system, runs in found["runs"].items():
            curves = [np.array(run["rows"])[:, :2].T for run in runs]
            frames = np.unique(np.concatenate([curve[0] for curve in curves]))
            frames = frames[frames >= max(curve[0][0] for curve in curves)]
            returns = np.array([np.interp(frames, *curve) for curve in curves])
            colour, style = (ours, "-") if system == "Muster" else (theirs, "--")
            axes.plot(
                frames,
                returns.mean(0),
                style,
                color=colour,
                linewidth=1.6,
                label=system,
            )
            axes.fill_between(
                frames,
                returns.min(0),
                returns.max(0),
                color=colour,
                alpha=0.2,
                linewidth=0,
            )
        _style(axes, found["title"], text, line, behind)
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
        if len(found["runs"]) > 1:
            axes.legend(fontsize=8, frameon=False, labelcolor=text)
    figure.supxlabel("frames", color=text, fontsize=9)
    figure.tight_layout()
    return figure


def _ratio_style(axes: Axes, title: str, text: str, line: str, behind: str) -> None:
    axes.set_xscale("log")
    axes.set_ylim(-0.6, len(axes.get_yticks()) - 0.4)
    axes.xaxis.set_major_locator(LogLocator(10, (1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.axvline(1, color=text, linewidth=1)
    _style(axes, title, text, line, behind)


def _style(axes: Axes, title: str, text: str, line: str, behind: str) -> None:
    axes.set_facecolor(behind)
    axes.set_title(title, loc="left", fontsize=10, color=text)
    axes.grid(axis="x", color=line, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=text, labelsize=8.5, length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def write(app: Sphinx | None = None) -> None:
    """Write every picture twice."""
    PICTURES.mkdir(exist_ok=True)
    with plt.rc_context(
        {"svg.hashsalt": "muster", "svg.fonttype": "none", "font.family": "sans-serif"}
    ):
        drawn = {
            name: functools.partial(draw, picture) for name, picture in MADE.items()
        }
        for name, make in {
            **drawn,
            "scale": draw_scales,
            "curves": draw_curves,
        }.items():
            for suffix in COLOURS:
                figure = make(suffix)
                figure.savefig(
                    PICTURES / f"{name}{suffix}.svg", metadata={"Date": None}
                )
                plt.close(figure)


def for_dark_pages(app: Sphinx, doctree: nodes.document) -> None:
    """Show the dark variant of a picture on a dark page."""
    for image in list(doctree.findall(nodes.image)):
        dark = image["uri"].replace(".svg", "-dark.svg")
        if (
            dark != image["uri"]
            and "pictures/" in image["uri"]
            and (DOCS / app.env.docname).parent.joinpath(dark).exists()
        ):
            other = image.copy()
            other["uri"] = dark
            image["classes"] += ["only-light"]
            other["classes"] += ["only-dark"]
            image.parent.insert(image.parent.index(image) + 1, other)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.connect("builder-inited", write)
    # before Sphinx collects images, at priority 500
    app.connect("doctree-read", for_dark_pages, priority=100)
    return {"parallel_read_safe": True}


if __name__ == "__main__":
    write()
