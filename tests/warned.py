"""Warnings of what a test does, without those of garbage that other tests have left.

The garbage collector may find an open file or socket of any earlier test between two lines of this
one, and says so with a ``ResourceWarning``. A program does not see these unless it is started with
``-W``; pytest shows them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage() -> Iterator[None]:
    """Nobody is warned of garbage, as in a program without ``-W``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield


@contextmanager
def warnings_are_errors() -> Iterator[None]:
    """Each warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", ResourceWarning)
        yield


@contextmanager
def noted_warnings() -> Iterator[list[warnings.WarningMessage]]:
    """Each warning is noted, as often as it is given."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", ResourceWarning)
        yield caught
