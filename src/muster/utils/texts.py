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
