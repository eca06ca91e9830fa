"""What notebooks show: the pictures of ``plot()``, made without pyplot."""

from __future__ import annotations

import pickle
import struct
import sys
from collections.abc import Callable
from typing import Any

import matplotlib as mpl
import pytest
from matplotlib import pyplot as plt

from muster import Collector, Evaluation, Evaluator, Timeline
from muster.errors import BadOption
from muster.observing.plot import plot_run
from muster.observing.snapshots import RunHistory
from muster.testing import CountingEnv


def collected() -> Collector:
    collector = Collector(
        CountingEnv, None, num_envs=2, frames_per_batch=24, total_frames=48
    )
    collector.timeline.start()
    with collector:
        list(collector)
    return collector


def evaluated() -> Evaluation:
    with Evaluator(CountingEnv, None, episodes=4, num_envs=2) as evaluator:
        return evaluator.evaluate()


def spans(n: int = 3) -> Timeline:
    timeline = Timeline()
    timeline.tracks[1] = "group 1"
    timeline.start()
    for i in range(n):
        begin = 10_000_000 * i
        timeline.add("env", begin + 1_000_000, begin + 3_000_000, 1)
        timeline.add("rollout", begin, begin + 8_000_000, 1)
        timeline.add("wait", begin + 8_000_000, begin + 9_000_000, -1)
    return timeline


FIGURES: dict[str, Callable[[], Any]] = {
    "collector": lambda: collected().plot(),
    "before the first batch": lambda: Collector(
        CountingEnv, None, frames_per_batch=24
    ).plot(),
    "evaluation": lambda: evaluated().plot(),
    "timeline": lambda: spans().plot(),
    "run": lambda: plot_run(RunHistory()),
}
OBJECTS: dict[str, Callable[[], Any]] = {"evaluation": evaluated, "timeline": spans}


def size_of(png: bytes) -> tuple[int, int]:
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", png[16:24])
    return width, height


@pytest.mark.parametrize("name", FIGURES)
def test_a_notebook_shows_a_figure_without_pyplot(name):
    backend, open_figures = mpl.get_backend(), plt.get_fignums()
    figure = FIGURES[name]()
    width, height = size_of(figure._repr_png_())  # IPython's protocol
    assert (width, height) == tuple(
        round(inches * figure.dpi) for inches in figure.get_size_inches()
    )
    assert plt.get_fignums() == open_figures, (
        "it was made with pyplot, which may open a window"
    )
    assert mpl.get_backend() == backend
    assert size_of(pickle.loads(pickle.dumps(figure))._repr_png_()) == (width, height)


@pytest.mark.parametrize("name", OBJECTS)
def test_a_notebook_shows_the_picture_of_an_object(name):
    thing = OBJECTS[name]()
    assert thing._repr_png_() == thing.plot()._repr_png_()


@pytest.mark.parametrize("name", OBJECTS)
def test_without_matplotlib_a_notebook_shows_the_text(name, monkeypatch):
    thing = OBJECTS[name]()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.delitem(sys.modules, "muster.observing.figure", raising=False)
    assert thing._repr_png_() is None
    with pytest.raises(BadOption, match=r"pip install 'muster-rl\[plot\]'"):
        thing.plot()


def test_the_picture_of_an_evaluation_has_its_returns_their_mean_and_its_interval():
    evaluation = evaluated()
    figure = evaluation.plot()
    histogram, scatter = figure.axes
    assert sum(bar.get_height() for bar in histogram.patches[:-1]) == 4
    [mean] = histogram.lines
    assert set(mean.get_xdata()) == {evaluation.mean}
    [points] = scatter.collections
    expected = [[record.length, record.episode_return] for record in evaluation.records]
    assert points.get_offsets().tolist() == expected
    assert figure.get_suptitle() == str(evaluation)


def test_the_picture_of_an_evaluation_without_episodes_says_so():
    with Evaluator(CountingEnv, None, episodes=4, num_envs=2, max_T=1) as evaluator:
        figure = evaluator.evaluate().plot()
    assert [axis.texts[0].get_text() for axis in figure.axes] == [
        "no complete episode"
    ] * 2


def test_the_picture_of_a_timeline_has_a_row_for_each_track_with_outer_spans_below_inner_ones():
    [axis] = spans().plot().axes
    assert [label.get_text() for label in axis.get_yticklabels()] == [
        "track -1",
        "group 1",
    ]
    bars = {
        bar.get_label(): [path.get_extents() for path in bar.get_paths()]
        for bar in axis.collections
    }
    assert list(bars) == ["wait", "rollout", "env"]
    assert [(box.x0, box.x1, box.y0, box.y1) for box in bars["env"]] == [
        (1 + n, 3 + n, 0.6, 1.4) for n in (0, 10, 20)
    ]
    assert [(box.x0, box.x1, box.y0, box.y1) for box in bars["wait"]] == [
        (8 + n, 9 + n, -0.4, 0.4) for n in (0, 10, 20)
    ]


def test_the_picture_of_a_long_timeline_has_its_newest_spans():
    [axis] = spans(2000).plot().axes
    bars = [path.get_extents() for bar in axis.collections for path in bar.get_paths()]
    assert len(bars) == 5000
    assert max(box.x1 for box in bars) == 9 + 10 * (1999 - 333), (
        "the first of them begins at 0"
    )
    assert (
        Timeline().plot().axes[0].texts[0].get_text() == "no spans: call start() first"
    )
