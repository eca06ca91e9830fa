"""Memory that is lent, and used again when nothing refers to it any more.

The end of a loan is not told, but looked for: a callback of a weak reference is Python code, and a
Ctrl-C that comes while it runs is lost (CPython prints the ``KeyboardInterrupt`` and goes on). The last
reference may go in any call, as in a backward pass that drops what it has saved of a batch.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

Lent = TypeVar("Lent")


class Loans(Generic[Lent]):
    """Things that are lent, each to an object: it is free again when that object is gone. Several
    threads may use it.

    Args:
        is_used: whether a thing is used although its object is gone; None: none is.
        most: number of loans that are remembered; None: all. An older one is never free again.
    """

    def __init__(
        self,
        is_used: Callable[[Lent], bool] | None = None,
        most: int | None = None,
    ) -> None:
        self._is_used = is_used
        self._loans: deque[tuple[Lent, weakref.ref[Any]]] = deque(maxlen=most)

    def __len__(self) -> int:
        return len(self._loans)

    def lend(self, thing: Lent, to: Any) -> None:
        """Lend a thing to an object."""
        self._loans.append((thing, weakref.ref(to)))

    def ended(self, most: int) -> list[Lent]:
        """Return the things that are free, among the ``most`` loans that were looked at least
        recently.
        """
        found = []
        for _ in range(min(most, len(self._loans))):
            found += self._next(None)
        return found

    def one_ended(self, fits: Callable[[Lent], bool] | None = None) -> Lent | None:
        """Return a thing that is free and fits; None: there is none."""
        for _ in range(len(self._loans)):
            for thing in self._next(fits):
                return thing
        return None

    def _next(self, fits: Callable[[Lent], bool] | None) -> list[Lent]:
        """Look at the next loan: return its thing if it is free and fits, or remember it."""
        try:
            loan = self._loans.popleft()  # no other thread looks at it meanwhile
        except IndexError:
            return []
        thing, to = loan
        is_free = to() is None
        if is_free and self._is_used is not None:
            is_free = not self._is_used(thing)
        if is_free and (fits is None or fits(thing)):
            return [thing]
        self._loans.append(loan)
        return []

    def forget_oldest(self) -> None:
        """Forget the loan that was looked at least recently, if there is one."""
        with contextlib.suppress(IndexError):
            self._loans.popleft()

    def all(self) -> list[Lent]:
        """Return all things that are lent, free or not."""
        return [thing for thing, _ in list(self._loans)]
