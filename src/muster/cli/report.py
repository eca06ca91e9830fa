"""The output of ``muster collect`` while it runs, and at the end."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from muster.observing.progress import MOST_LINES, troubles
from muster.utils.texts import counted, short

if TYPE_CHECKING:
    from muster.episodes.curve import EpisodeTotals
    from muster.observing.stats import CollectorStats


def summary(
    stats: CollectorStats,
    totals: EpisodeTotals,
    recording_s: float | None,
    elapsed_s: float = 0.0,
) -> str:
    """The last lines: episodes, speed, and shares of the time.

    ``recording_s`` is the time spent writing (None: no recording), ``elapsed_s`` the time of the
    whole collection.
    """
    plus_minus, _ = symbols()
    lines = [f"frames    {stats.frames:,} in {counted(stats.batches, 'batch')}"]
    if stats.discarded:
        lines[0] += "; discarded " + ", ".join(
            f"{n:,} ({reason})" for reason, n in stats.discarded.items()
        )
    if n := totals.episodes:
        mean = totals.return_sum / n
        std = math.sqrt(max(0.0, totals.return_squares / n - mean**2))
        lines.append(
            f"episodes  {n:,}  return {totals.origin + mean:,.1f} {plus_minus} {std:,.1f}  "
            f"length {totals.length_sum / n:,.1f}"
        )
    else:
        lines.append("episodes  none ended")
    lines.append(
        f"speed     {short(stats.frames_per_s)} frames/s  (policy: {stats.policy_path})"
    )
    parts = {
        "env": stats.env_s,
        "policy": stats.policy_s,
        "copy": stats.copy_s,
        "rest": stats.rest_s,
    }
    here = {} if recording_s is None else {"record": recording_s}
    if stats.workers:
        # time of lost workers counts as idle
        idle_s = elapsed_s * len(stats.workers) - sum(parts.values())
        here = {"waiting": stats.wait_s, **here}
        lines.append(f"workers   {len(stats.workers)}{_nodes(stats)}{troubles(stats)}")
        if stats.engine:
            lines.append(f"engine    {stats.engine}")
        lines.append("in them   " + _shares({**parts, "idle": max(0.0, idle_s)}))
        lines.append(
            "here      "
            + _shares({**here, "rest": max(0.0, elapsed_s - sum(here.values()))})
        )
    else:
        lines.append("time      " + _shares({**parts, **here}))
    return "\n".join(lines)


def _shares(parts: Mapping[str, float]) -> str:
    _, block = symbols()
    total = sum(parts.values()) or 1.0
    return "  ".join(
        f"{name} {s / total:.0%} {block * round(10 * s / total)}".rstrip()
        for name, s in parts.items()
    )


def _nodes(stats: CollectorStats) -> str:
    """The share of the frames of each node."""
    shares: dict[str, float] = {}
    for worker in stats.workers:
        shares[worker.node] = shares.get(worker.node, 0.0) + worker.share
    if set(shares) == {""}:
        return ""
    told = [f"{node} {share:.0%}" for node, share in list(shares.items())[:MOST_LINES]]
    more = [f"and {len(shares) - len(told)} more"] if len(shares) > len(told) else []
    missing = len(shares) - stats.nodes
    there = f" ({missing} not there)" if missing else ""
    return f" on {len(shares)} node{'s' * (len(shares) > 1)}{there}: " + ", ".join(
        told + more
    )


def symbols() -> tuple[str, str]:
    """Plus-minus and a block, or ASCII characters if the output cannot encode them."""
    try:
        "±▇".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return "+-", "#"
    return "±", "▇"


class StopSignals:
    """Context in which Ctrl-C, SIGTERM or the end of the terminal (SIGHUP, unless it is ignored, as
    by nohup) sets ``received`` and, unless ``quiet``, prints ``say``, and ends nothing.

    The second signal raises KeyboardInterrupt. The third has its default effect, for code that does
    not return to the interpreter.
    """

    def __init__(
        self,
        say: str = "stopping after this batch; again to stop at once.",
        *,
        quiet: bool = False,
    ) -> None:
        self.received: int | None = None
        self._say = say
        self._quiet = quiet
        self._old: dict[int, Any] = {}

    @property
    def exit_code(self) -> int:
        """The exit code by the convention of shells: 128 + the number of the signal; 0 without a
        signal.
        """
        return 0 if self.received is None else 128 + self.received

    def __enter__(self) -> StopSignals:
        # other threads cannot set handlers
        if threading.current_thread() is threading.main_thread():
            numbers = [signal.SIGINT, signal.SIGTERM]
            hang_up = getattr(signal, "SIGHUP", None)  # not on Windows
            if hang_up is not None and signal.getsignal(hang_up) != signal.SIG_IGN:
                numbers.append(hang_up)
            for number in numbers:
                self._old[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _: TracebackType | None,
    ) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.received is not None:
            for each in self._old:
                signal.signal(each, signal.SIG_DFL)
            raise KeyboardInterrupt
        self.received = number
        if not self._quiet:  # not print: the signal may have interrupted one
            with suppress(OSError):  # the terminal is gone
                os.write(2, f"\nmuster: {self._say}\n".encode())
