"""The user's own metrics: numbers by name, and their means between two snapshots."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from typing import Any

from muster.errors import BadOption

MOST_METRICS = 64  # names on a page
MOST_NAME = 100  # characters of a name
_LARGEST = 1e100  # of a value that has a mean with others
Means = dict[str, list[Any]]
"""By name: the mean of the finite values (None: there are none), their number, and the number of
other values (NaN, infinite).
"""


def numbers_of(metrics: Any) -> dict[str, float]:
    """Return metrics as floats by name.

    Raises:
        BadOption: it is no mapping, a name is no text, or a value is no single number.
    """
    if not isinstance(metrics, Mapping):
        raise BadOption(
            f"log: expected metrics by name, such as {{'loss': 0.5}}, got {type(metrics).__name__}"
        )
    found = {}
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise BadOption(f"log: the name of a metric is {name!r}: expected a text")
        try:
            if isinstance(value, (str, bytes)):
                raise TypeError
            found[name] = float(value.detach() if hasattr(value, "detach") else value)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            shape = getattr(value, "shape", None)
            given = type(value).__name__ if shape is None else f"of shape {list(shape)}"
            raise BadOption(
                f"log: {name!r} is {given}: expected one number, for example its mean"
            ) from error
    return found


class MetricMeans:
    """Means of the metrics since the last snapshot. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: set[str] = set()
        self._means: Means = {}
        self._left_out: set[int] = set()
        self._frames = 0

    def add(self, metrics: Mapping[str, float], frames: int) -> None:
        """Take one value of each of these metrics, after so many delivered frames."""
        with self._lock:
            self._frames = frames
            for name, value in metrics.items():
                shown = name[:MOST_NAME]
                if shown not in self._names and len(self._names) >= MOST_METRICS:
                    self._left_out.add(hash(name))
                    continue
                self._names.add(shown)
                is_finite = math.isfinite(value) and abs(value) < _LARGEST
                new: list[Any] = [value, 1, 0] if is_finite else [None, 0, 1]
                self._means[shown] = joined(self._means.get(shown), new)

    def take(self) -> dict[str, Any]:
        """Return the entries of a snapshot: the means since the last call, the frames of the newest
        values, and the number of names that have no place.
        """
        with self._lock:
            means = self._means
            self._means = {}
            entries: dict[str, Any] = {}
            if means:
                entries |= {"metrics": means, "metrics_at": self._frames}
            if self._left_out:
                entries["metrics_left_out"] = len(self._left_out)
            return entries


def joined(one: list[Any] | None, other: list[Any] | None) -> list[Any]:
    """Return the means of the values of both."""
    if one is None or other is None:
        return one or other or [None, 0, 0]
    count = one[1] + other[1]
    mean = one[0] if other[0] is None else other[0]
    if one[0] is not None and other[0] is not None:
        mean = one[0] + (other[0] - one[0]) * (other[1] / count)
    return [mean, count, one[2] + other[2]]
