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
        return _sample_box(spec, rng, size).astype(spec.dtype)
    low, high, choices = _whole_numbers(spec)
    if choices is None:
        return rng.integers(
            low, high, size, dtype=low.dtype.type, endpoint=True
        ).astype(spec.dtype)
    # ``integers`` takes ten times as long for small sizes
    drawn = (rng.random(size) * choices).astype(low.dtype)
    drawn += low
    return drawn.astype(spec.dtype, copy=False)


@lru_cache(maxsize=64)
def _whole_numbers(spec: ArraySpec) -> tuple[Array, Array, Array | None]:
    """Return the bounds of integers, and their number; None: too many to draw them evenly from a
    float.
    """
    assert spec.low is not None and spec.high is not None
    wide: Any = (
        np.uint64 if spec.dtype == np.uint64 else np.int64
    )  # narrower: several per word
    choices = spec.high.astype(np.float64) - spec.low.astype(np.float64) + 1.0
    return (
        spec.low.astype(wide),
        spec.high.astype(wide),
        choices if np.all(choices <= 1 << 31) else None,
    )


def _sample_box(
    spec: ArraySpec, rng: np.random.Generator, size: tuple[int, ...]
) -> Array:
    """Draw like ``Box.sample``: uniform with two bounds, shifted exponential with one, normal
    without bounds.
    """
    low, high = np.asarray(spec.low, np.float64), np.asarray(spec.high, np.float64)
    below, above = np.isfinite(low), np.isfinite(high)
    if below.all() and above.all():
        # high - low would overflow
        too_wide = 0.5 * high - 0.5 * low > 0.5 * np.finfo(np.float64).max
        scale = np.where(too_wide, 0.5, 1.0)
        return np.asarray(rng.uniform(scale * low, scale * high, size)) / scale
    # two per entry of any kind: see GroupRng.stream
    u, v = np.moveaxis(rng.random((*size, 2)), -1, 0)
    tail = -np.log1p(-u)
    normal = np.sqrt(2 * tail) * np.cos(2 * np.pi * v)  # Box and Muller
    low0, high0 = np.where(below, low, 0.0), np.where(above, high, 0.0)
    both = low0 + u * np.where(below & above, high0 - low0, 0.0)
    one_sided = np.where(below, low0 + tail, high0 - tail)
    return np.asarray(
        np.where(below & above, both, np.where(below | above, one_sided, normal))
    )
