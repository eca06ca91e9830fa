"""What ``muster collect`` says while it runs, and at the end."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from muster.observing.stats import CollectorStats, WorkerStats

LINE_EVERY_S = 5.0
MOST_LINES = 16  # about workers


class Returns:
    """Mean and spread over all episodes, without keeping them (Welford's recurrence)."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = self.length_mean = self._squares = 0.0

    def add(self, episodes: Iterable[Any]) -> None:
        for episode in episodes:
            self.count += 1
            step = episode.episode_return - self.mean
            self.mean += step / self.count
            self._squares += step * (episode.episode_return - self.mean)
            self.length_mean += (episode.length - self.length_mean) / self.count

    @property
    def std(self) -> float:
        return math.sqrt(self._squares / self.count) if self.count else 0.0


class NowAndThen:
    """So that logs and pipes get a line every ``every_s`` seconds, not one per batch."""

    def __init__(self, every_s: float) -> None:
        self.began = self._last = time.monotonic()
        self._every_s = every_s

    def is_due(self) -> bool:
        now = time.monotonic()
        due = now - self._last >= self._every_s
        self._last = now if due else self._last
        return due


class PlainProgress:
    """For logs and pipes: a line every ``every_s`` seconds, not one per batch."""

    def __init__(self, total: int, every_s: float = LINE_EVERY_S) -> None:
        self._total, self._lines = total, NowAndThen(every_s)

    def update(self, stats: CollectorStats) -> None:
        if stats.frames < self._total and self._lines.is_due():
            left_s = (time.monotonic() - self._lines.began) * (self._total / stats.frames - 1)
            print(
                f"collect {stats.frames / self._total:4.0%}  {stats.frames:,}/{self._total:,} frames  "
                f"{short(stats.frames_per_s)} frames/s  {_episodes(stats)}{_troubles(stats)}  eta {clock(left_s)}",
                flush=True,
            )


class Bar:
    """For terminals; ``look`` is called a few times per second, for a line about each worker."""

    def __init__(self, total: int, look: Callable[[], CollectorStats]) -> None:
        from rich.live import Live
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("collect"),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TextColumn("{task.fields[frames]}"),
            TextColumn("[bold]{task.fields[rate]}"),
            TextColumn("{task.fields[episodes]}"),
            TextColumn("eta"),
            TimeRemainingColumn(compact=True),
        )
        self._total, self._look = total, look
        self._lines: list[str] = []
        self._live = Live(get_renderable=self._render, refresh_per_second=10)
        self._task = self._progress.add_task("collect", total=total, frames="", rate="", episodes="")

    def __enter__(self) -> Bar:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._live.stop()

    def update(self, stats: CollectorStats) -> None:
        self._progress.update(
            self._task,
            completed=stats.frames,
            frames=f"{short(stats.frames)}/{short(self._total)}",
            rate=f"{short(stats.frames_per_s)} frames/s",
            episodes=_episodes(stats),
        )

    def _render(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        with suppress(RuntimeError):  # the collector's books may be written at this moment; the last look will do
            self._lines = worker_lines(self._look().workers)
        return Group(self._progress, *(Text(line, no_wrap=True, overflow="ellipsis") for line in self._lines))


@contextmanager
def reporting(
    total: int, look: Callable[[], CollectorStats], *, quiet: bool
) -> Iterator[Callable[[CollectorStats], None]]:
    """A function to call with the stats of every batch; it prints in the way that fits where stdout goes."""
    if quiet:
        yield lambda stats: None
    elif sys.stdout.isatty():
        with Bar(total, look) as bar:
            yield bar.update
    else:
        yield PlainProgress(total).update


def worker_lines(workers: Sequence[WorkerStats]) -> list[str]:
    """One for each, as many as fit."""
    lines = [
        f"  worker {w.index:<3} {w.phase:<9} {short(w.frames_per_s):>6} frames/s  {w.share:4.0%} of frames  "
        f"restarts {w.restarts}  lag {w.policy_lag}{f'  node {w.node}' if w.node else ''}"
        for w in workers[:MOST_LINES]
    ]
    more = len(workers) - len(lines)
    return [*lines, f"  and {more} more"] if more else lines


def summary(stats: CollectorStats, returns: Returns, recording_s: float | None, elapsed_s: float = 0.0) -> str:
    """The last lines: episodes, speed, and where the time went.

    ``recording_s`` is the time spent writing (None: nothing was recorded), ``elapsed_s`` from the first batch to the
    last.
    """
    plus_minus, _ = symbols()
    lines = [f"frames    {stats.frames:,} in {stats.batches:,} batches"]
    if stats.discarded:
        lines[0] += "; discarded " + ", ".join(f"{n:,} ({reason})" for reason, n in stats.discarded.items())
    if returns.count:
        lines.append(
            f"episodes  {returns.count:,}  return {returns.mean:,.1f} {plus_minus} {returns.std:,.1f}  "
            f"length {returns.length_mean:,.1f}"
        )
    else:
        lines.append("episodes  none ended")
    lines.append(f"speed     {short(stats.frames_per_s)} frames/s  (policy: {stats.policy_path})")
    parts = {"env": stats.env_s, "policy": stats.policy_s, "copy": stats.copy_s, "rest": stats.rest_s}
    here = {} if recording_s is None else {"record": recording_s}
    if not stats.workers:
        return "\n".join([*lines, "time      " + _shares({**parts, **here})])
    idle_s = elapsed_s * len(stats.workers) - sum(parts.values())  # a worker that was lost has worked for nothing
    here = {"waiting": stats.wait_s, **here}
    return "\n".join(
        [
            *lines,
            f"workers   {len(stats.workers)}{_nodes(stats)}{_troubles(stats)}",
            "in them   " + _shares({**parts, "idle": max(0.0, idle_s)}),
            "here      " + _shares({**here, "rest": max(0.0, elapsed_s - sum(here.values()))}),
        ]
    )


def _shares(parts: Mapping[str, float]) -> str:
    _, block = symbols()
    total = sum(parts.values()) or 1.0
    return "  ".join(f"{name} {s / total:.0%} {block * round(10 * s / total)}".rstrip() for name, s in parts.items())


def _nodes(stats: CollectorStats) -> str:
    """Which share of the frames is whose."""
    shares: dict[str, float] = {}
    for worker in stats.workers:
        shares[worker.node] = shares.get(worker.node, 0.0) + worker.share
    if set(shares) == {""}:
        return ""
    told = [f"{node} {share:.0%}" for node, share in list(shares.items())[:MOST_LINES]]
    more = [f"and {len(shares) - len(told)} more"] if len(shares) > len(told) else []
    missing = len(shares) - stats.nodes
    there = f" ({missing} not there)" if missing else ""
    return f" on {len(shares)} node{'s' * (len(shares) > 1)}{there}: " + ", ".join(told + more)


def _troubles(stats: CollectorStats) -> str:
    """Restarted and dropped workers."""
    restarted = ", ".join(f"worker {w.index}: {w.restarts}" for w in stats.workers if w.restarts)
    dropped = ", ".join(str(w.index) for w in stats.workers if w.state == "dropped")
    told = [(f"restarts {stats.restarts} ({restarted})", restarted), (f"dropped {dropped}", dropped)]
    told.append((f"unseen at most {stats.unseen:,} frames", str(stats.unseen or "")))
    return "".join(f"  {text}" for text, happened in told if happened)


def short(number: float) -> str:
    """``38200`` as ``38.2k``."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}".removesuffix(".0") + unit
    return f"{number:.0f}"


def clock(seconds: float) -> str:
    """``3725`` as ``1:02:05``."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"


def _episodes(stats: CollectorStats) -> str:
    mean = "" if stats.return_mean is None else f"  return {stats.return_mean:,.1f}"
    return f"episodes {stats.episodes:,}{mean}"


def symbols() -> tuple[str, str]:
    """Plus-minus and a block, as far as the terminal has them."""
    try:
        "±▇".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return "+-", "#"
    return "±", "▇"


class StopSignals:
    """While entered, Ctrl-C and SIGTERM set ``received`` and print ``say`` instead of ending the process.

    The next one of either raises KeyboardInterrupt. The one after that has its default effect, for code that does not
    return to the interpreter.
    """

    def __init__(self, say: str = "stopping after this batch; again to stop at once.") -> None:
        self.received: int | None = None
        self._say = say
        self._old: dict[int, Any] = {}

    @property
    def exit_code(self) -> int:
        """As shells count: 128 + the number of the signal."""
        return 0 if self.received is None else 128 + self.received

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # others may not set handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                self._old[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.received is not None:
            for each in self._old:
                signal.signal(each, signal.SIG_DFL)
            raise KeyboardInterrupt
        self.received = number
        # Not print: the signal may have come in the middle of one.
        os.write(2, f"\nmuster: {self._say}\n".encode())
