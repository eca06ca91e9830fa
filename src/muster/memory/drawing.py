"""Random values of specs."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from muster.memory.specs import Array, ArraySpec


def draw(spec: ArraySpec, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Draw uniform values of a bounded leaf, ``[*shape, *leaf shape]``; like ``Box.sample`` for
    infinite bounds.
    """
    size = (*shape, *spec.shape)
    if spec.dtype.kind not in "iub":
        values = _sample_box(spec, rng, size)
        return values.astype(spec.dtype)
    low, high, choices = _whole_numbers(spec)
    if choices is None:
        numbers = rng.integers(
            low,
            high,
            size,
            dtype=low.dtype.type,
            endpoint=True,
        )
        return numbers.astype(spec.dtype)
    # ``integers`` takes ten times as long for small sizes
    scaled = rng.random(size) * choices
    drawn = scaled.astype(low.dtype)
    drawn += low
    return drawn.astype(spec.dtype, copy=False)


@lru_cache(maxsize=64)
def _whole_numbers(spec: ArraySpec) -> tuple[Array, Array, Array | None]:
    """Return the bounds of integers, and their number; None: too many to draw them evenly from a
    float.
    """
    assert spec.low is not None
    assert spec.high is not None
    wide: Any = np.int64  # of narrower ones, there are several per word
    if spec.dtype == np.uint64:
        wide = np.uint64
    low = spec.low.astype(wide)
    high = spec.high.astype(wide)
    width = spec.high.astype(np.float64) - spec.low.astype(np.float64)
    choices = width + 1.0
    if np.any(choices > 1 << 31):
        return low, high, None
    return low, high, choices


def _sample_box(
    spec: ArraySpec,
    rng: np.random.Generator,
    size: tuple[int, ...],
) -> Array:
    """Draw like ``Box.sample``: uniform with two bounds, shifted exponential with one, normal
    without bounds.
    """
    low = np.asarray(spec.low, np.float64)
    high = np.asarray(spec.high, np.float64)
    below = np.isfinite(low)
    above = np.isfinite(high)
    if below.all() and above.all():
        half_width = 0.5 * high - 0.5 * low
        # high - low would overflow
        too_wide = half_width > 0.5 * np.finfo(np.float64).max
        scale = np.where(too_wide, 0.5, 1.0)
        scaled = rng.uniform(scale * low, scale * high, size)
        return np.asarray(scaled) / scale
    # two per entry of any kind: see GroupRng.stream
    pairs = rng.random((*size, 2))
    u, v = np.moveaxis(pairs, -1, 0)
    tail = -np.log1p(-u)
    normal = np.sqrt(2 * tail) * np.cos(2 * np.pi * v)  # Box and Muller
    low0 = np.where(below, low, 0.0)
    high0 = np.where(above, high, 0.0)
    width = np.where(below & above, high0 - low0, 0.0)
    both = low0 + u * width
    one_sided = np.where(below, low0 + tail, high0 - tail)
    unbounded = np.where(below | above, one_sided, normal)
    return np.asarray(np.where(below & above, both, unbounded))
