"""Texts for people."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Format ``1, "batch"`` as ``1 batch``, and ``2000, "batch"`` as ``2,000 batches``."""
    if number == 1:
        return f"1 {noun}"
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{plural}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, without what libraries of C++ write below; its type
    if it has none.
    """
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]


def short(number: float) -> str:
    """Format ``38200`` as ``38.2k``."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}".removesuffix(".0") + unit
    return f"{number:.0f}"


def clock(seconds: float) -> str:
    """Format ``3725`` as ``1:02:05``."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"
