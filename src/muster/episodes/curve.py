"""Sums over all episodes of a collection, from which means and intervals of any part of it are
computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from muster.episodes.record import Episodes
from muster.episodes.summary import successes
from muster.memory.specs import Array

MOST_POINTS = 1024
WINDOW = 100  # least number of episodes of a running mean
_Z = 1.96  # half width of a 95 % interval, in standard errors
Quantity = Literal["return", "length", "success"]


@dataclass(frozen=True)
class EpisodeTotals:
    """Sums over all episodes so far. Episodes whose return is not finite are left out.

    Attributes:
        episodes: number of episodes.
        origin: return of the first episode. It is subtracted from returns before they are summed,
            for exact squares.
        return_sum, return_squares: sums of (return - origin), and of its square.
        length_sum, length_squares: sums of lengths, and of their squares.
        judged, success_sum: number of episodes with a success in their ``info``, and sum of the
            successes.
    """

    episodes: int = 0
    origin: float = 0.0
    return_sum: float = 0.0
    return_squares: float = 0.0
    length_sum: float = 0.0
    length_squares: float = 0.0
    judged: int = 0
    success_sum: float = 0.0

    def plus(self, episodes: Episodes) -> EpisodeTotals:
        """Return the sums after further episodes."""
        if len(episodes) == 1:
            return self._plus_one(episodes)
        returns = episodes.episode_return
        lengths = episodes.length.astype(np.float64)
        finite = np.isfinite(returns)
        if not finite.all():
            returns = returns[finite]
            lengths = lengths[finite]
        origin = self.origin
        if not self.episodes and len(returns):
            origin = float(returns[0])
        found = successes(episodes)
        with np.errstate(over="ignore"):
            shifted = returns - origin
            return EpisodeTotals(
                self.episodes + len(returns),
                origin,
                self.return_sum + float(shifted.sum()),
                self.return_squares + float(shifted @ shifted),
                self.length_sum + float(lengths.sum()),
                self.length_squares + float(lengths @ lengths),
                self.judged + len(found),
                self.success_sum + sum(found),
            )

    def _plus_one(self, episodes: Episodes) -> EpisodeTotals:
        """``plus`` for one episode, without operations of arrays, which take ten times as long."""
        value = float(episodes.episode_return[0])
        length = float(episodes.length[0])
        found = successes(episodes)
        judged = self.judged + len(found)
        success_sum = self.success_sum + sum(found)
        if not math.isfinite(value):
            return replace(self, judged=judged, success_sum=success_sum)
        origin = self.origin if self.episodes else value
        shifted = value - origin
        return EpisodeTotals(
            self.episodes + 1,
            origin,
            self.return_sum + shifted,
            self.return_squares + shifted * shifted,
            self.length_sum + length,
            self.length_squares + length * length,
            judged,
            success_sum,
        )

    def mean(self, what: Quantity, since: EpisodeTotals) -> tuple[int, float, float]:
        """Return number, mean and half width of the 95 % interval of the mean, over the episodes
        after ``since``.
        """
        if what == "success":
            n = self.judged - since.judged
            total = self.success_sum - since.success_sum
            # of zeros and ones
            squares = total
            origin = 0.0
        elif what == "length":
            n = self.episodes - since.episodes
            total = self.length_sum - since.length_sum
            squares = self.length_squares - since.length_squares
            origin = 0.0
        else:
            n = self.episodes - since.episodes
            total = self.return_sum - since.return_sum
            squares = self.return_squares - since.return_squares
            origin = self.origin
        if n <= 0:
            return 0, math.nan, math.nan
        mean = total / n
        variance = math.nan
        if math.isfinite(squares):
            variance = max(0.0, squares / n - mean * mean)
        return n, origin + mean, _Z * math.sqrt(variance / n)


class EpisodeCurve:
    """``EpisodeTotals`` by number of frames, at most ``MOST_POINTS`` of them.

    Attributes:
        totals: the present totals.
        points: pairs of frames and totals, in order of frames.
    """

    def __init__(self) -> None:
        self.totals = EpisodeTotals()
        self.points: list[tuple[int, EpisodeTotals]] = []
        self._stride = 1  # least distance of two points in frames

    def add(self, frames: int, episodes: Episodes) -> None:
        """Add the episodes of a batch, after which ``frames`` were collected."""
        self.totals = self.totals.plus(episodes)
        points = self.points
        if len(points) > 1 and frames - points[-2][0] < self._stride:
            points.pop()  # the newest point is always kept
        points.append((frames, self.totals))
        if len(points) > MOST_POINTS:
            frames_in_all = points[-1][0] - points[0][0]
            self._stride = max(1, 2 * frames_in_all // MOST_POINTS)
            del points[1:-1:2]


def running_means(
    points: Sequence[tuple[float, EpisodeTotals]],
    what: Quantity,
) -> Array:
    """Return running means over at least ``WINDOW`` episodes, where there are as many.

    Args:
        points: pairs of frames and totals, in order.

    Returns:
        float64 ``[n, 3]``: frames, mean, half width of its 95 % interval. Points without a new
            episode are left out.
    """
    every = [(0.0, EpisodeTotals()), *points]
    rows = []
    first = 0
    newest = 0

    def count(index: int) -> int:
        totals = every[index][1]
        return totals.judged if what == "success" else totals.episodes

    for index in range(1, len(every)):
        if count(index) == newest:
            continue
        newest = count(index)
        while newest - count(first + 1) >= WINDOW:
            first += 1
        frames, totals = every[index]
        _, mean, half = totals.mean(what, every[first][1])
        rows.append((frames, mean, half))
    return np.array(rows, np.float64).reshape(-1, 3)
