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
        most: number of loans that are remembered, None: all. What an older one has lent is not free
            again: it is gone with the object, if that refers to it.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._loans: deque[tuple[Lent, weakref.ref[Any]]] = deque()

    def __len__(self) -> int:
        return len(self._loans)

    def lend(self, thing: Lent, to: Any) -> Lent | None:
        """Lend a thing to an object; return the oldest one if it is not remembered any more."""
        loans = self._loans
        loans.append((thing, weakref.ref(to)))
        if self._most is None or len(loans) <= self._most:
            return None
        return self.forget_oldest()

    def ended(
        self,
        fits: Callable[[Lent], bool] | None = None,
        most: int | None = None,
    ) -> list[Lent]:
        """Return the things that are free and fit, oldest first; ``most``: so many, None: all."""
        loans = self._loans
        found = []
        others = []
        for _ in range(len(loans)):
            try:
                loan = loans.popleft()  # no other thread looks at it meanwhile
            except IndexError:
                break
            thing, to = loan
            if to() is None and (fits is None or fits(thing)):
                found.append(thing)
                if len(found) == most:
                    break
            else:
                others.append(loan)
        loans.extendleft(reversed(others))
        return found

    def forget_oldest(self) -> Lent | None:
        """Forget the oldest loan, and return what was lent; None: there is no loan."""
        with contextlib.suppress(IndexError):
            return self._loans.popleft()[0]
        return None

    def all(self) -> list[Lent]:
        """Return all things that are lent, free or not."""
        return [thing for thing, _ in list(self._loans)]
