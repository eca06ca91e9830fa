"""The progress of a collection, for people: a bar in terminals and notebooks, elsewhere a line
every few seconds.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol, TextIO, cast

from muster.utils.streams import Unfailing
from muster.utils.texts import clock, short

if TYPE_CHECKING:
    from muster.observing.stats import CollectorStats, WorkerStats

LINE_EVERY_S = 5.0
CELL_EVERY_S = 0.2
CELL_WIDTH = 120
MOST_LINES = 16  # of workers


class Show(Protocol):
    """Shows the progress: what is done, a text, and per second how much; without it, as on average
    so far.
    """

    def __call__(
        self, done: int, text: str, rate: float | None = None, /
    ) -> object: ...


class CollectionProgress:
    """Shows the progress of a collector on standard error, from its first batch until ``close`` or
    ``total`` frames.

    ``total`` is negative for endless ones. ``workers`` returns the statistics that are lines below
    the bar.
    """

    def __init__(
        self, total: int, workers: Callable[[], Sequence[WorkerStats]]
    ) -> None:
        self._total = total
        self._workers = workers
        self._made = ExitStack()
        self._show: Show | None = None

    def wrote(self, stats: CollectorStats) -> None:
        """Show a batch, which ``stats`` include."""
        if self._show is None:
            shown = progress(
                "collect",
                self._total,
                lines=lambda: worker_lines(self._workers()),
                stream=cast("TextIO", Unfailing(sys.stderr)),
            )
            self._show = self._made.enter_context(shown)
        self._show(stats.frames, in_one_line(stats, self._total), stats.frames_per_s)
        if 0 <= self._total <= stats.frames:
            self.close()

    def close(self) -> None:
        """End the display. May be called again; the next batch begins a new one."""
        self._show = None
        self._made.close()


@contextmanager
def progress(
    name: str,
    total: int,
    *,
    quiet: bool = False,
    lines: Callable[[], list[str]] = list,
    every_s: float = LINE_EVERY_S,
    stream: TextIO | None = None,
) -> Iterator[Show]:
    """Yield a function of the progress towards ``total`` and a text: shows a bar; in files and
    pipes, lines.

    Args:
        total: negative: unknown.
        lines: returns what is shown below the bar; a thread of the display calls it a few times per
            second.
    """
    if quiet:
        yield lambda done, text, rate=None: None
        return
    stream = sys.stdout if stream is None else stream
    notebook = in_notebook()
    if not (stream.isatty() or notebook):
        yield _lines(name, total, every_s, stream)
        return
    from rich.console import Console
    from rich.live import Live
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    texts = [
        TextColumn(f"{{task.fields[{field}]}}", markup=False)
        for field in ("text", "eta")
    ]
    bar = Progress(
        TextColumn(name), BarColumn(bar_width=24), TaskProgressColumn(), *texts
    )
    task = bar.add_task(name, total=None if total < 0 else total, text="", eta="")
    began = time.monotonic()
    cell = _Cell(below(bar, lines)) if notebook else None

    def show(done: int, text: str, rate: float | None = None) -> None:
        bar.update(
            task,
            completed=done,
            text=text,
            eta=_eta(done, total, rate, time.monotonic() - began),
        )
        if cell is not None:
            cell.refresh()

    if cell is not None:
        yield show
        cell.draw()
        return
    with Live(
        get_renderable=below(bar, lines),
        refresh_per_second=10,
        console=Console(file=stream),
    ):
        yield show


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    return getattr(ipython and ipython.get_ipython(), "kernel", None) is not None


class _Cell:
    """Draws below the cell of a notebook, always in the same place.

    rich's own display needs ipywidgets there, and shows nothing without.
    """

    def __init__(self, render: Callable[[], Any]) -> None:
        from IPython import display as shown

        display: Any = shown.display
        self._render = render
        self._next = 0.0
        self._place = display(self._text(), raw=True, display_id=True)

    def refresh(self) -> None:
        """Draw, unless that was just now."""
        if time.monotonic() >= self._next:
            self.draw()

    def draw(self) -> None:
        """Draw what is there now."""
        self._next = time.monotonic() + CELL_EVERY_S
        self._place.update(self._text(), raw=True)

    def _text(self) -> dict[str, str]:
        from rich.console import Console

        page = io.StringIO()
        Console(file=page, width=CELL_WIDTH, force_jupyter=False).print(self._render())
        return {"text/plain": page.getvalue().rstrip()}


def _lines(name: str, total: int, every_s: float, stream: TextIO) -> Show:
    began = last = time.monotonic()

    def show(done: int, text: str, rate: float | None = None) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < every_s:
            return
        if total < 0:
            print(f"{name}  {text}", file=stream, flush=True)
        elif 0 < done < total:
            eta = _eta(done, total, rate, now - began)
            print(f"{name} {done / total:4.0%}  {text}  {eta}", file=stream, flush=True)
        else:
            return
        last = now

    return show


def _eta(done: int, total: int, rate: float | None, elapsed_s: float) -> str:
    """The time that the rest takes at ``rate``, the one of the text before it; None: at the average
    so far.
    """
    if not 0 < done < total:
        return ""
    per_s = done / elapsed_s if rate is None and elapsed_s > 0 else rate
    return f"eta {clock((total - done) / per_s)}" if per_s else ""


def below(bar: Any, lines: Callable[[], list[str]]) -> Callable[[], Any]:
    """Return a function that renders a bar and the lines below it."""
    from rich.console import Group
    from rich.text import Text

    shown: list[str] = []

    def render() -> Any:
        with suppress(
            RuntimeError
        ):  # the counters may change meanwhile: show the last lines
            shown[:] = lines()
        return Group(
            bar, *(Text(line, no_wrap=True, overflow="ellipsis") for line in shown)
        )

    return render


def in_one_line(stats: CollectorStats, total: int) -> str:
    """The line of ``muster collect`` for a batch."""
    mean = "" if stats.return_mean is None else f"  return {stats.return_mean:,.1f}"
    return (
        f"{short(stats.frames)}{f'/{short(total)}' * (total >= 0)} frames "
        f" {short(stats.frames_per_s)} frames/s  episodes {stats.episodes:,}{mean}{troubles(stats)}"
    )


def worker_lines(workers: Sequence[WorkerStats]) -> list[str]:
    """One line per worker, at most ``MOST_LINES``."""
    lines = [
        f"  worker {w.index:<3} {w.phase:<9} {short(w.frames_per_s):>6} frames/s  {w.share:4.0%} of"
        f" frames  restarts {w.restarts}  lag {w.policy_lag}{f'  node {w.node}' if w.node else ''}"
        for w in workers[:MOST_LINES]
    ]
    more = len(workers) - len(lines)
    return [*lines, f"  and {more} more"] if more else lines


def troubles(stats: CollectorStats) -> str:
    """Restarted and dropped workers."""
    restarted = ", ".join(
        f"worker {w.index}: {w.restarts}" for w in stats.workers if w.restarts
    )
    dropped = ", ".join(str(w.index) for w in stats.workers if w.state == "dropped")
    told = [
        (f"restarts {stats.restarts} ({restarted})", restarted),
        (f"dropped {dropped}", dropped),
    ]
    told.append((f"unseen at most {stats.unseen:,} frames", str(stats.unseen or "")))
    return "".join(f"  {text}" for text, happened in told if happened)
